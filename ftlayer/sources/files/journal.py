"""Which files a source has found, in a directory beside its checkpoints.

```
<url>/<id>/00000000000000000000-00000000000000004711.msgpack    many entries, put together
<url>/<id>/00000000000000004711.msgpack                         the files that one listing found
```

A source's offset is a number: of pieces of files, in the order of the journal. So an offset stays small however many
files there are, and the same files are read again behind one that is gone back to.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import Any

import msgpack

from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.files import FileStatus
from ftlayer.checkpoint.storage.layout import join, normal
from ftlayer.errors import SourceError
from ftlayer.sources.files.pieces import Entry, FoundFile, unpacked

COMPACT_AT = 50
"""So many listings are put together, once they are committed."""

_SUFFIX = ".msgpack"


def new_journal_id() -> str:
    """Return the name of a new journal."""
    return secrets.token_hex(8)


class Journal:
    """The journal of one source. It lasts when a method has returned."""

    def __init__(
        self, url: str, journal_id: str, remember_ms: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Read what is there.

        Args:
            url: of the directory.
            journal_id: which one there.
            remember_ms: how long a file's name is remembered at least that is there no more.
            clock: seconds since 1970.

        Raises `SourceError` if a part of it is missing, and `CheckpointStorageError`.
        """
        self.url, self.id = join(normal(url), journal_id), journal_id
        self._files = open_files(self.url)
        self._remember_ms = remember_ms
        self._clock = clock
        self._entries: list[Entry] = []
        self._versions: dict[str, str] = {}
        self._end = 0
        # Parts: what was put together, and listings with the number behind each.
        self._merged: list[str] = []
        self._listings: list[tuple[str, int]] = []
        self._load()

    @property
    def end(self) -> int:
        """The number behind the last piece."""
        return self._end

    def behind(self, start: int) -> Sequence[Entry]:
        """Return the files with pieces from this number on, in order."""
        return self._entries[bisect_right(self._entries, start, key=attrgetter("end")) :]

    def version(self, path: str) -> str | None:
        """Return the version in which a file was found; None: it was not."""
        return self._versions.get(path)

    def between(self, start: int, end: int) -> list[Entry]:
        """Return the files with pieces of these numbers. Raises `SourceError` if they are not remembered."""
        found = list(takewhile(lambda entry: entry.first < end, self.behind(start)))
        known = sum(min(entry.end, end) - max(entry.first, start) for entry in found)
        if known < end - start:
            raise SourceError(
                f"journal {self.url}: it does not reach back to what was read from {start} to {end}: those files were "
                "removed, and forgotten since"
            )
        return found

    def append(self, found: Sequence[FoundFile], step_of: Callable[[FoundFile], int]) -> None:
        """Add files. Raises `SourceError` if another one writes to this journal, and `CheckpointStorageError`."""
        now_ms, first = int(self._clock() * 1_000), self._end
        entries: list[Entry] = []
        for file in found:
            entry = Entry(first, file.path, file.size, file.version, now_ms, step_of(file))
            entries.append(entry)
            first = entry.end
        name = f"{self._end:020}{_SUFFIX}"
        if not self._files.publish_new(name, _packed(first, entries)):
            raise SourceError(
                f"journal {self.url}: {name} is there already: another source writes to this journal; each has one of "
                "its own"
            )
        self._listings.append((name, first))
        self._take(entries, first)

    def committed(self, end: int, there: Collection[str]) -> None:
        """All before ``end`` is durable: put listings together, and forget files that are no more ``there``."""
        done = [(name, upto) for name, upto in self._listings if upto <= end]
        if len(done) < COMPACT_AT:
            return
        upto = done[-1][1]
        oldest_ms = int(self._clock() * 1_000) - self._remember_ms
        kept = [entry for entry in self._entries if entry.path in there or entry.found_ms > oldest_ms]
        entries = [entry for entry in self._entries if entry.end > upto]
        merged = [entry for entry in kept if entry.end <= upto]
        name = f"{0:020}-{upto:020}{_SUFFIX}"
        self._files.publish(name, _packed(upto, merged))
        for old in (*self._merged, *(each for each, _ in done)):
            self._files.delete(old)
        self._merged, self._listings = [name], self._listings[len(done) :]
        self._entries, self._versions = [], {}
        self._take([*merged, *entries], self._end)

    def _take(self, entries: Sequence[Entry], end: int) -> None:
        self._entries += entries
        self._versions |= {entry.path: entry.version for entry in entries}
        self._end = end

    def _load(self) -> None:
        names = sorted(status.path for status in self._files.walk() if _is_part(status))
        self._merged = [name for name in names if "-" in name]
        if self._merged:
            # The last one has all that the others have: these were to be removed.
            end, entries = self._read(self._merged[-1])
            self._take(entries, end)
        for name in names:
            if "-" in name:
                continue
            if int(name.removesuffix(_SUFFIX)) < self._end:
                self._files.delete(name)  # It is put together with others, and was to be removed.
                continue
            if int(name.removesuffix(_SUFFIX)) > self._end:
                raise SourceError(f"journal {self.url}: the part before {name} is missing")
            end, entries = self._read(name)
            self._listings.append((name, end))
            self._take(entries, end)

    def _read(self, name: str) -> tuple[int, list[Entry]]:
        end, packed = msgpack.unpackb(self._files.read(name), unicode_errors="surrogateescape")
        return end, unpacked(packed)


def _is_part(status: FileStatus) -> bool:
    name = status.path.removesuffix(_SUFFIX)
    return name != status.path and name.replace("-", "").isdecimal()


def _packed(end: int, entries: Sequence[Entry]) -> bytes:
    packed: Any = msgpack.packb([end, [entry.pack() for entry in entries]], unicode_errors="surrogateescape")
    return bytes(packed)
