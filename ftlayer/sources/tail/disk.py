"""The file system as the rules of a follower see it, and that of this machine."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ftlayer.errors import SourceError
from ftlayer.sources.files.listing import as_pattern

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".Z")

ROTATED = ("{name}.*", "{name}-*")
"""How a log is called once it is rotated: ``app.log.1``, ``app.log-20261123``."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A file as a listing has it.

    Attributes:
        log: path of the log that it belongs to.
        path: its own.
        inode: which file it is, as long as it is there.
        modified_ns: when it was written to.
    """

    log: str
    path: str
    inode: int
    modified_ns: int

    @property
    def is_rotated(self) -> bool:
        """Whether writers that come later write to another file."""
        return self.path != self.log


class Stat(NamedTuple):
    """Size in bytes, time of the last write, and whether the file has a name still."""

    size: int
    modified_ns: int
    is_there: bool


class OpenedFile(Protocol):
    """A file that stays readable, whatever it is called, and when it is removed."""

    inode: int

    def stat(self) -> Stat:
        """Return how it is now."""

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes; fewer at the end."""

    def close(self) -> None:
        """Close."""


class Disk(Protocol):
    def files(self, wanted: Collection[int]) -> list[Seen]:
        """Return the logs, what they were rotated to, and files beside them with the inodes that are ``wanted``.

        A file that gets another name meanwhile may be there twice, or not at all.
        """

    def open(self, path: str) -> OpenedFile | None:
        """Open a file; None: there is none now. It may be another one than that which was listed."""


class LocalFile:
    """`OpenedFile` of this machine."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.inode = os.fstat(descriptor).st_ino

    def stat(self) -> Stat:
        found = os.fstat(self._descriptor)
        return Stat(found.st_size, found.st_mtime_ns, found.st_nlink > 0)

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._descriptor, length, offset)

    def close(self) -> None:
        os.close(self._descriptor)


class LocalDisk:
    """`Disk` of this machine."""

    def __init__(self, paths: Sequence[str], rotated: Sequence[str]) -> None:
        """``paths``: of logs, or patterns; ``rotated``: see `ROTATED`, with ``{stem}`` and ``{suffix}`` too."""
        self._paths = paths
        self._rotated = rotated

    def files(self, wanted: Collection[int]) -> list[Seen]:
        for given in self._paths:
            if os.path.isdir(given):
                raise SourceError(
                    f"{given} is a directory; name its logs, {os.path.join(given, '*.log')}, say"
                )
        # What is there by the very name is no pattern.
        patterns_of = {given: as_pattern(given, os.path.lexists) for given in self._paths}
        found_logs = ([given] if of is None else glob.glob(of) for given, of in patterns_of.items())
        # A log that has gone, and not come again yet, has rotated files still.
        logs = sorted({path for each in found_logs for path in each})
        patterns = {log: self._patterns(log) for log in logs}
        siblings = {
            other
            for log, names in patterns.items()
            for other in logs
            if other != log and os.path.dirname(other) == os.path.dirname(log) and _matches(other, names)
        }
        found: list[Seen] = []
        for directory in sorted({os.path.dirname(log) for log in logs}):
            mine = [log for log in logs if os.path.dirname(log) == directory and log not in siblings]
            found += self._in_directory(directory, mine, patterns, wanted)
        return found

    def open(self, path: str) -> LocalFile | None:
        try:
            return LocalFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceError(f"{path} cannot be read: {error}") from error

    def _in_directory(
        self, directory: str, logs: Sequence[str], patterns: dict[str, list[str]], wanted: Collection[int]
    ) -> list[Seen]:
        try:
            with os.scandir(directory) as entries:
                names = [(entry.path, entry.inode()) for entry in entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise SourceError(f"{directory} cannot be listed: {error}") from error
        found: list[Seen] = []
        for path, inode in names:
            log = _log_of(path, logs, patterns)
            if log is None and inode not in wanted:
                continue
            # It may be gone since it was listed.
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                if os.path.isfile(path):
                    # One of another name is that of the log whose file has this inode: the rules know which.
                    found.append(Seen(log or "", path, stat.st_ino, stat.st_mtime_ns))
        return found

    def _patterns(self, log: str) -> list[str]:
        stem, suffix = os.path.splitext(os.path.basename(log))
        parts = {"name": stem + suffix, "stem": stem, "suffix": suffix}
        escaped = {part: glob.escape(text) for part, text in parts.items()}
        return [pattern.format(**escaped) for pattern in self._rotated]


def _log_of(path: str, logs: Sequence[str], patterns: dict[str, list[str]]) -> str | None:
    if path in logs:
        return path
    return next((log for log in logs if _matches(path, patterns[log])), None)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = os.path.basename(path)
    return not name.endswith(_COMPRESSED) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
