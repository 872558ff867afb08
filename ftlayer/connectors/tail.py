"""`TailSource` as a Python Data Source."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import hashlib
import logging
import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from stat import S_ISREG
from typing import NamedTuple, Protocol

import pyarrow as pa

from ftlayer.checkpoint.storage.layout import is_local, normal
from ftlayer.common.checks import (
    Duration,
    check_choice,
    check_int,
    check_text,
    check_texts,
    duration_ms,
    known_options,
)
from ftlayer.config import MIB
from ftlayer.connectors.files.listing import as_pattern
from ftlayer.connectors.from_json import line_starts, texts_of
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records.beside import valid
from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader

logger = logging.getLogger(__name__)


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
    skipped: dict[str, str]
    """What could not be read since `files` was asked last, and why."""

    def skip(self, path: str, why: str) -> None:
        """Leave this out for now; warns of it once."""

    def files(self, wanted: Collection[int]) -> list[Seen]:
        """Return the logs, what they were rotated to, and files beside them with the inodes that are ``wanted``.

        A file that gets another name meanwhile may be there twice, or not at all.
        """

    def open(self, path: str) -> OpenedFile | None:
        """Open a file; None: there is none now, or it is skipped. It may be another one than that which was listed."""


class LocalFile:
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
    def __init__(self, paths: Sequence[str], rotated: Sequence[str]) -> None:
        """``paths``: of logs, or patterns; ``rotated``: see `ROTATED`, with ``{stem}`` and ``{suffix}`` too."""
        self._paths = paths
        self._rotated = rotated
        self._before: dict[str, str] = {}
        self.skipped: dict[str, str] = {}

    def skip(self, path: str, why: str) -> None:
        if path not in self._before and path not in self.skipped:
            logger.warning("%s %s; it is left out until that changes, and other files are read on", path, why)
        self.skipped[path] = why

    def check_any(self) -> None:
        """Raise `SourceError` where all that was named is skipped. A pattern may match something later."""
        why = [(path, self.skipped.get(path)) for path in self._paths]
        why = [(path, of) if of else (at := os.path.dirname(path), self.skipped.get(at)) for path, of in why]
        if all(of for _, of in why):
            raise SourceError("; ".join(f"{path} {of}" for path, of in dict.fromkeys(why)))

    def files(self, wanted: Collection[int]) -> list[Seen]:
        self._before, self.skipped = self.skipped, {}
        for given in filter(os.path.isdir, self._paths):
            self.skip(given, f"is a directory; name its logs, {os.path.join(given, '*.log')}, say")
        # What is there by the very name is no pattern.
        paths = [given for given in self._paths if given not in self.skipped]
        patterns_of = {given: as_pattern(given, os.path.lexists) for given in paths}
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
            # A pipe that has taken its name would be waited for.
            return LocalFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
        except FileNotFoundError:
            return None
        except OSError as error:
            self.skip(path, f"cannot be read: {error.strerror}")
            return None

    def _in_directory(
        self, directory: str, logs: Sequence[str], patterns: dict[str, list[str]], wanted: Collection[int]
    ) -> list[Seen]:
        try:
            with os.scandir(directory) as entries:
                names = [(entry.path, entry.inode()) for entry in entries]
        except FileNotFoundError:
            return []
        except OSError as error:
            self.skip(directory, f"cannot be listed: {error.strerror}")
            return []
        found: list[Seen] = []
        for path, inode in names:
            log = _log_of(path, logs, patterns)
            if log is None and inode not in wanted:
                continue
            try:
                status = os.stat(path)
            except FileNotFoundError:
                continue  # since it was listed, or it is a link that leads nowhere
            except OSError as error:
                self.skip(path, f"cannot be looked at: {error.strerror}")
                continue
            if path == log and not S_ISREG(status.st_mode):
                self.skip(path, "is no file")
            if S_ISREG(status.st_mode):
                # One of another name is that of the log whose file has this inode: the rules know which.
                found.append(Seen(log or "", path, status.st_ino, status.st_mtime_ns))
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


TAIL_BYTES = 1 << 10
"""A file is the one that was read if so many bytes before the place are the same."""

_NAME = ("tail",)


@dataclass(frozen=True, slots=True)
class TailPlace:
    """A place in a file.

    Attributes:
        log: path of its log.
        inode: of the file.
        offset: all before it was read.
        tail: `tail_of` the bytes before it.
        is_ended: whether it was rotated, and read to its end, which has not moved for some time.
    """

    log: str
    inode: int
    offset: int
    tail: bytes
    is_ended: bool


def tail_of(before: bytes) -> bytes:
    return hashlib.blake2b(before[-TAIL_BYTES:], digest_size=12).digest()


def tail_length(offset: int) -> int:
    return min(offset, TAIL_BYTES)


def pack(number: int, places: Sequence[TailPlace]) -> bytes:
    """Return a source's position. ``number`` makes it another one than all others."""
    each = [[one.log, one.inode, one.offset, one.tail, one.is_ended] for one in places]
    return pack_position(_NAME, number, each)


def unpack(position: bytes) -> tuple[int, list[TailPlace]]:
    number, places = unpack_position(position, _NAME, "a growing file", (int, list))
    return number, [TailPlace(*each) for each in places]


# What is read next of files that grow, and are rotated: the rules.
#
# A file is known by its inode, and by the bytes before the place to which it was read: inodes are used again, and files
# are truncated. Files that were opened stay open until they have no name any more, so that they keep their inodes, and
# can be read to their ends when they are removed.


CHUNK_BYTES = 1 << 18

_NOTHING = tail_of(b"")
_NEVER = Stat(-1, -1, is_there=True)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines of one file, from a place on; the last one may be without a newline. ``at``: where they begin."""

    log: str
    inode: int
    at: int
    data: bytes


@dataclass(slots=True, eq=False)
class _File:
    """A file that is open. ``idle``: how it was when there was nothing to read in it, behind this place."""

    seen: Seen
    opened: OpenedFile
    offset: int = 0
    tail: bytes = _NOTHING
    idle: Stat = _NEVER
    is_ended: bool = False

    @property
    def place(self) -> TailPlace:
        return TailPlace(self.seen.log, self.seen.inode, self.offset, self.tail, self.is_ended)

    def go_to(self, offset: int, before: bytes) -> None:
        self.offset, self.tail = offset, tail_of(before)
        self.idle = _NEVER

    def matches(self, other: OpenedFile) -> bool:
        length = tail_length(self.offset)
        before = other.read(self.offset - length, length)
        return len(before) == length and tail_of(before) == self.tail


class Follower:
    """Reads all files of some logs. What it gives is in the order of each log, as far as its files tell it."""

    def __init__(
        self,
        disk: Disk,
        places: Iterable[TailPlace] = (),
        *,
        from_end: bool = False,
        is_copied: bool = False,
        quiet_ns: int,
        max_line: int,
    ) -> None:
        """Go on at these places.

        Args:
            disk: where the files are.
            places: what `places` returned.
            from_end: where there are no places, the first `look` begins at the ends of the files that are there.
            is_copied: logs are rotated by copying and truncating them, not by renaming.
            quiet_ns: when nothing was written to a rotated file for so long, its last line is complete without a
                newline; and a place whose file is not there is forgotten.
            max_line: bytes of a line; a longer one is cut.
        """
        self._disk = disk
        self._missing = {(place.log, place.inode): place for place in places}
        self._missing_since_ns: int | None = None
        self._from_end = from_end and not self._missing
        self._is_copied = is_copied
        self._quiet_ns = quiet_ns
        self._max_line = max_line
        self._files: dict[tuple[str, int], _File] = {}
        self._turn = 0
        self._is_begun_anew = False

    @property
    def is_reading(self) -> bool:
        return bool(self._files)

    def places(self) -> list[TailPlace]:
        return [*self._missing.values(), *(file.place for file in self._files.values())]

    def close(self) -> None:
        for file in self._files.values():
            file.opened.close()
        self._files.clear()

    def look(self, now_ns: int) -> None:
        inodes = {inode for _, inode in (*self._files, *self._missing)}
        listed = {
            (seen.log, seen.inode): seen for seen in map(self._named, self._disk.files(inodes)) if seen.log
        }
        for key, seen in listed.items():
            if key in self._files:
                self._files[key].seen = seen
        # Those written first first, and of the same time those that were read of; the log's own last, but copies are
        # compared with it.
        new = [seen for key, seen in listed.items() if key not in self._files]
        for seen in sorted(new, key=self._rank):
            self._open(seen)
        self._from_end = False
        self._forget_missing(now_ns, is_sure=bool(listed) and not self._disk.skipped)

    def _rank(self, seen: Seen) -> tuple[bool, int, bool]:
        is_late = seen.is_rotated == self._is_copied
        return is_late, seen.modified_ns, (seen.log, seen.inode) not in self._missing

    def _named(self, seen: Seen) -> Seen:
        """Return a file beside a log, which has no name that a log has, as that of the log."""
        if seen.log:
            return seen
        known = (log for log, inode in (*self._files, *self._missing) if inode == seen.inode)
        log = next((log for log in known if _directory(log) == _directory(seen.path)), "")
        return Seen(log, seen.path, seen.inode, seen.modified_ns)

    def _open(self, seen: Seen) -> None:
        opened = self._disk.open(seen.path)
        if opened is None:
            return
        file = None
        try:
            file = self._begun(seen, opened)
        except OSError as error:
            self._disk.skip(seen.path, f"cannot be read: {error.strerror}")
        if file is None:
            opened.close()
            return
        self._missing.pop((seen.log, opened.inode), None)
        self._files[seen.log, opened.inode] = file

    def _begun(self, seen: Seen, opened: OpenedFile) -> _File | None:
        """Return a file at the place where it is read on; None: that is not to be said yet."""
        key = (seen.log, opened.inode)
        if key in self._files or opened.inode != seen.inode:
            # It has got another name since it was listed: the next look tells which file is which.
            return None
        file = _File(Seen(seen.log, seen.path, opened.inode, seen.modified_ns), opened)
        place = self._missing.get(key)
        is_copy = self._is_copied and seen.is_rotated
        if place is not None:
            file.offset, file.tail = place.offset, place.tail
        if place is not None and (not is_copy or file.matches(opened)):
            # A file that is not a copy is compared with its place when it is read.
            return file
        file.go_to(0, b"")
        if self._from_end:
            self._go_to_end(file)
        elif is_copy and not self._place_copy(file):
            return None
        return file

    def _go_to_end(self, file: _File) -> None:
        size = file.opened.stat().size
        begin = max(0, size - self._max_line)
        before = file.opened.read(begin, size - begin)
        whole = before.rfind(b"\n") + 1
        if whole or not begin:
            file.go_to(begin + whole, before[:whole])
        else:
            before = whole_characters(before)
            file.go_to(begin + len(before), before)

    def _forget_missing(self, now_ns: int, *, is_sure: bool) -> None:
        """Forget places whose files do not come again. One that is renamed while it is listed may be left out."""
        if not self._missing or not is_sure:
            self._missing_since_ns = None
            return
        if self._missing_since_ns is None:
            self._missing_since_ns = now_ns
        if now_ns - self._missing_since_ns < self._quiet_ns:
            return
        for place in self._missing.values():
            if not place.is_ended:
                logger.warning(
                    "%s: a file of it that was read up to byte %d is not there any more: what was written behind "
                    "that is lost, if anything was",
                    place.log,
                    place.offset,
                )
        self._missing.clear()

    def _place_copy(self, copy: _File) -> bool:
        """Find the place at which to go on in a copy of a log; False: that is not to be said yet."""
        logs = (file for file in self._files.values() if file.seen.log == copy.seen.log)
        log = next((file for file in logs if not file.seen.is_rotated), None)
        if log is None:
            return True
        size = copy.opened.stat().size
        if _begins_alike(copy.opened, log.opened, size):
            # The log is not truncated yet: it may be in the middle of being copied.
            return False
        if log.offset and log.matches(copy.opened):
            copy.offset, copy.tail = log.offset, log.tail
            log.go_to(0, b"")
        return True

    def read(self, now_ns: int) -> Chunk | None:
        """Return lines that were not read yet; None: there are none now. Logs take turns."""
        self._is_begun_anew = True
        while self._is_begun_anew:
            self._is_begun_anew = False
            chunk = self._next(now_ns)
        return chunk

    def _next(self, now_ns: int) -> Chunk | None:
        logs = sorted({log for log, _ in self._files})
        for place in range(len(logs)):
            log = logs[(self._turn + place) % len(logs)]
            for file in self._in_order(log):
                try:
                    chunk = self._read(file, now_ns)
                except OSError as error:
                    # Of its disk, or of the machine that has it: the next look opens it anew, if it is there.
                    self._disk.skip(file.seen.path, f"cannot be read: {error.strerror}")
                    self._missing[log, file.opened.inode] = file.place
                    file.opened.close()
                    del self._files[log, file.opened.inode]
                    continue
                if chunk is not None:
                    self._turn += place + 1
                if chunk is not None or self._is_begun_anew:
                    # One that is begun anew may be read behind another one now.
                    return chunk
        return None

    def take(self, chunk: Chunk, length: int) -> None:
        """So many bytes of what `read` returned last are read."""
        file = self._files[chunk.log, chunk.inode]
        taken = chunk.data[:length]
        missing = tail_length(chunk.at + length) - length
        before = file.opened.read(chunk.at - missing, missing) if missing > 0 else b""
        file.go_to(chunk.at + length, before + taken)

    def _in_order(self, log: str) -> Iterator[_File]:
        files = [file for (of, _), file in self._files.items() if of == log]
        yield from sorted(files, key=lambda file: (not file.seen.is_rotated, file.seen.modified_ns))

    def _read(self, file: _File, now_ns: int) -> Chunk | None:
        stat = file.opened.stat()
        is_quiet = file.seen.is_rotated and now_ns - stat.modified_ns >= self._quiet_ns
        is_complete = is_quiet or not stat.is_there
        if stat != file.idle or (file.offset < stat.size and is_complete):
            data = self._lines(file, is_complete=is_complete)
            # Behind the reading: what is read behind a truncation is not what was to be read.
            if not self._is_as_read(file, stat, now_ns):
                self._is_begun_anew = True
                return None
            if data:
                return Chunk(file.seen.log, file.opened.inode, file.offset, data)
        file.idle = stat
        file.is_ended = file.offset >= stat.size and is_complete
        if not stat.is_there:
            # It has no name any more. A program that has it open may write to it still, and that is lost.
            file.opened.close()
            del self._files[file.seen.log, file.opened.inode]
        return None

    def _lines(self, file: _File, *, is_complete: bool) -> bytes:
        data = file.opened.read(file.offset, CHUNK_BYTES)
        whole = data.rfind(b"\n") + 1
        if not whole and len(data) == CHUNK_BYTES < self._max_line:
            data = file.opened.read(file.offset, self._max_line)
            whole = data.rfind(b"\n") + 1
        if whole:
            return data[:whole]
        if len(data) >= self._max_line:
            return whole_characters(data[: self._max_line])
        return data if is_complete else b""

    def _is_as_read(self, file: _File, stat: Stat, now_ns: int) -> bool:
        """Whether what was read of a file is there still; if not, it is read from its beginning."""
        if file.offset <= stat.size and file.matches(file.opened):
            return True
        if self._is_copied and not file.seen.is_rotated:
            self.look(now_ns)
            if not file.offset:
                return False
        logger.warning(
            "%s has %d bytes, and was read up to byte %d: it was truncated, or is another file. What was written "
            "behind that is lost, if anything was, and it is read from its beginning: what is left of lines that were "
            "read comes again",
            file.seen.path,
            stat.size,
            file.offset,
        )
        file.go_to(0, b"")
        return False


def whole_characters(data: bytes) -> bytes:
    """Return text in UTF-8 without the character that is cut by its end."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-3:])
    return data[: len(data) - len(decoder.getstate()[0])]


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def _begins_alike(copy: OpenedFile, log: OpenedFile, size: int) -> bool:
    """Whether a log begins with the bytes of its copy: compared at the copy's two ends."""
    length = tail_length(size)
    return all(
        copy.read(at, length) == log.read(at, length) and len(log.read(at, length)) == length
        for at in (0, size - length)
    )


STARTS = ("earliest", "latest")
ROTATIONS = ("rename", "copytruncate")

POLL_S = 0.1
"""Files are looked at so often for something new, while there is nothing …"""

LOOK_S = 0.5
"""… and their directories so often."""


@known_options
class TailSource(Queue):
    """Follows text files that grow, lines in order, over their rotation: as ``tail -F`` does, from where it was.

    A place in a file is kept with who reads: in the vertex, in a checkpoint, or in a query's spool. A file is known by
    its inode and by the bytes before the place, whatever it is called: one that is renamed is read to its end, and then
    the one that has taken its name.

    It reads files of the machine on which its one subtask runs.
    """

    most_subtasks = 1
    schema: pa.Schema = pa.schema(
        [("path", pa.string()), ("file", pa.int64()), ("offset", pa.int64()), ("value", pa.string())]
    )

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        rotated: Sequence[str] = ROTATED,
        rotation: str = "rename",
        start: str = "earliest",
        quiet: Duration = "1m",
        max_line: int = MIB,
    ) -> None:
        """Nothing is touched before it is read.

        Args:
            path: of a log, which need not be there yet, or a pattern (``/var/log/app/*.log``), or several.
            rotated: how a log is called once it is rotated: patterns with ``{name}`` (``app.log``), ``{stem}``
                (``app``) and ``{suffix}`` (``.log``). Compressed files are left out, whatever they are called.
            rotation: ``"rename"``, or ``"copytruncate"`` where logs are copied and truncated.
            start: where a source begins that has read nothing: with the first line of each file that there is, rotated
                ones too (``"earliest"``), or behind their last ones (``"latest"``).
            quiet: when nothing was written to a rotated file for so long, its last line is complete though it has no
                newline.
            max_line: bytes; a line that is longer may be cut into several.

        Raises `ConfigError` for an option that will not do.
        """
        given = [path] if isinstance(path, str | os.PathLike) else path
        if not isinstance(given, Sequence) or not given:
            raise ConfigError(f"path: expected a path, or several, got {path!r}")
        paths = [os.fspath(one) if isinstance(one, os.PathLike) else one for one in given]
        check_texts(paths, "path", "a path of this machine")
        far = next((one for one in paths if not is_local(one)), None)
        if far is not None:
            raise ConfigError(f"path: expected files of this machine, got {far!r}")
        if isinstance(rotated, str) or not isinstance(rotated, Sequence):
            raise ConfigError(f"rotated: expected a list of patterns, got {rotated!r}")
        for pattern in rotated:
            _check_pattern(pattern)
        check_choice(rotation, "rotation", ROTATIONS)
        check_choice(start, "start", STARTS)
        check_int(max_line, "max_line", least=1_024, most=256 * MIB)
        self.paths = tuple(normal(one) for one in paths)
        self.rotated, self.rotation, self.start = tuple(rotated), rotation, start
        self.quiet_ns = duration_ms(quiet, "quiet") * 1_000_000
        self.max_line = max_line

    def __repr__(self) -> str:
        return f"TailSource({list(self.paths)!r})"

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> TailReader:
        position = positions.get(0)
        if member.subtask:
            return TailReader(self, None, None)
        return TailReader(self, LocalDisk(self.paths, self.rotated), position)


class TailReader(QueueReader):
    """Of the subtask that reads (``disk``), or of another one. Files need not know what is durable."""

    def __init__(self, source: TailSource, disk: LocalDisk | None, position: bytes | None) -> None:
        self._schema = source.schema
        self._number, places = (0, []) if position is None else unpack(position)
        self._disk = disk
        self._follower: Follower | None = None
        if disk is not None:
            self._follower = Follower(
                disk,
                places,
                from_end=position is None and source.start == "latest",
                is_copied=source.rotation == "copytruncate",
                quiet_ns=source.quiet_ns,
                max_line=source.max_line,
            )
        self._look_at_s = 0.0
        self._woken = threading.Event()

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        give_up_s = time.monotonic() + wait_s
        while True:
            chunk = self._read()
            if chunk is not None:
                return self._fetched(chunk, max_rows)
            left_s = give_up_s - time.monotonic()
            if left_s <= 0 or self._woken.wait(min(left_s, POLL_S)):
                self._woken.clear()
                return None

    def wake_up(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def _read(self) -> Chunk | None:
        if self._follower is None or self._disk is None:
            return None
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._follower.look(time.time_ns())
            self._look_at_s = now_s + LOOK_S
            if not self._follower.is_reading:
                self._disk.check_any()
        return self._follower.read(time.time_ns())

    def _fetched(self, chunk: Chunk, max_rows: int) -> Fetched:
        assert self._follower is not None
        starts = line_starts(chunk.data)
        length = len(chunk.data) if len(starts) <= max_rows else int(starts[max_rows])
        self._follower.take(chunk, length)
        starts = starts[:max_rows]
        signed = chunk.inode - (1 << 64) if chunk.inode >= 1 << 63 else chunk.inode
        columns = [
            pa.repeat(pa.scalar(valid(chunk.log)), len(starts)),
            pa.repeat(pa.scalar(signed, pa.int64()), len(starts)),
            pa.array(starts + chunk.at),
            texts_of(chunk.data[:length]),
        ]
        rows = pa.RecordBatch.from_arrays(columns, schema=self._schema)
        self._number += 1
        return Fetched(rows, 0, pack(self._number, self._follower.places()), None)


def _check_pattern(pattern: object) -> None:
    check_text(pattern, "rotated", "a pattern like '{name}.*'")
    assert isinstance(pattern, str)
    try:
        pattern.format(name="", stem="", suffix="")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"rotated: expected a pattern with {{name}}, {{stem}} and {{suffix}} alone, got {pattern!r}"
        ) from error
    if "/" in pattern:
        raise ConfigError(f"rotated: expected the name of files beside their log, got {pattern!r}")


class TailDataSource(QueueDataSource):
    """``readStream.format("ftlayer-tail")``, options as of `RedisDataSource`. The driver follows the files."""

    format = "ftlayer-tail"

    def source(self, options: DataSourceOptions) -> TailSource:
        check_text(options.get("path"), "path", "paths of this machine with commas between them")
        return options.made(TailSource, path=options.names("path"))
