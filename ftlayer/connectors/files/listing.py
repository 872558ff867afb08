"""Which files there are: on any file system of fsspec's."""

from __future__ import annotations

import glob
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

from ftlayer.checkpoint.storage.files import file_system_of, modified_ms
from ftlayer.checkpoint.storage.layout import is_local, last_name, normal
from ftlayer.common.printable import described, raise_from, secrets_in, secrets_of, shown_url
from ftlayer.errors import ConfigError, SourceError

logger = logging.getLogger(__name__)


SPLITS = 16
"""A range that is small has about so many splits, so that several subtasks have something to read."""


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A file as a listing has it.

    Attributes:
        path: as the file system calls it.
        size: bytes, at least 1.
        modified_ms: when it was written, by the file system's clock.
        version: differs once the file is another one: its ETag, or the time.
    """

    path: str
    size: int
    modified_ms: int
    version: str


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a file that begins in the bytes [start, end): lines, or row groups."""

    path: str
    size: int
    version: str
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the journal. Its pieces have the numbers [first, end).

    Attributes:
        first: number of its first piece.
        path, size, version: see `FoundFile`.
        found_ms: when it was found.
        step: bytes of a piece; 0: the file is one piece.
    """

    first: int
    path: str
    size: int
    version: str
    found_ms: int
    step: int

    @property
    def end(self) -> int:
        return self.first + (-(-self.size // self.step) if self.step else 1)

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        for number in range(max(start, self.first), min(end, self.end)):
            begin = (number - self.first) * self.step
            upto = min(self.size, begin + self.step) if self.step else self.size
            yield Piece(self.path, self.size, self.version, begin, upto)

    def pack(self) -> list[Any]:
        return [self.first, self.path, self.size, self.version, self.found_ms, self.step]


def unpacked(packed: Iterable[Sequence[Any]]) -> list[Entry]:
    return [Entry(*each) for each in packed]


@dataclass(frozen=True)
class FilePieces(InputPartition):
    pieces: tuple[Piece, ...]


def limited(entries: Iterable[Entry], start: int, max_files: int | None, max_bytes: int | None) -> int:
    """Return the number behind the pieces of a range: of these files, one piece at least from ``start`` on."""
    size, end = 0, start
    for files, entry in enumerate(entries):
        if files == max_files:
            break
        for piece in entry.pieces(start, entry.end):
            size += piece.bytes
            if max_bytes is not None and size > max_bytes and end > start:
                return end
            end += 1
    return end


def packed_splits(pieces: Sequence[Piece], split_bytes: int) -> list[FilePieces]:
    """Return pieces as splits of up to ``split_bytes``, or of one piece."""
    most = min(split_bytes, -(-sum(piece.bytes for piece in pieces) // SPLITS))
    splits: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not splits or size + piece.bytes > most:
            splits.append([])
            size = 0
        splits[-1].append(piece)
        size += piece.bytes
    return [FilePieces(tuple(split)) for split in splits]


_WILD = frozenset("*?[")
_ETAGS = ("ETag", "etag", "md5Hash", "content_md5")


class Listing:
    """The files below a directory, or that match a pattern. A copy connects by itself."""

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """``url``: a directory (with all below it), a file or a pattern; a path, or any URL of fsspec's."""
        self.url = normal(url)
        self._options = dict(storage_options)
        self._fs: Any = None
        self._root = ""
        self._is_missing = False

    @property
    def file_system(self) -> Any:
        """The file system. Raises `ConfigError` if fsspec has none for the URL, and `SourceError`."""
        if self._fs is None:
            place = shown_url(self.url)
            local = is_local(self.url)
            try:
                self._fs, root = file_system_of("file:///" if local else self.url, **self._options)
                self._root = self.url if local else root
            except (ImportError, ValueError, TypeError) as error:
                failed = (
                    f"path: {place} cannot be reached: {error}. The scheme has to be one of fsspec's, and the "
                    "package that it names has to be installed for driver and slots"
                )
                raise_from(ConfigError(failed), error, self.secrets)
            except (OSError, EOFError) as error:
                failed = f"path: {place} cannot be reached: {described(error)}"
                raise_from(SourceError(failed), error, self.secrets)
        return self._fs

    @property
    def secrets(self) -> list[str]:
        return [*secrets_in(self._options), *secrets_of(self.url)]

    def files(self) -> list[FoundFile]:
        """Return the files that there are now, those written first first; none if the directory is missing.

        Left out are those without content, and hidden ones: with a name, or below the given directory in one with a
        name, that begins with ``_`` or ``.``. Raises `SourceError`.
        """
        fs = self.file_system
        try:
            fs.invalidate_cache()
            pattern = as_pattern(self._root, fs.exists)
            found = fs.find(self._root, detail=True) if pattern is None else fs.glob(pattern, detail=True)
            self._note_missing(not found and (pattern is not None or not fs.exists(self._root)))
        except FileNotFoundError:
            self._note_missing(True)
            return []
        except Exception as error:  # noqa: BLE001
            failed = f"{shown_url(self.url)} cannot be listed: {described(error)}"
            raise_from(SourceError(failed), error, self.secrets)
        files = [
            _found(path, info)
            for path, info in found.items()
            if info.get("type") == "file" and info.get("size") and not self._is_hidden(path, pattern)
        ]
        return sorted(files, key=lambda file: (file.modified_ms, file.path))

    def _note_missing(self, is_missing: bool) -> None:
        if is_missing and not self._is_missing:
            logger.warning("%s is not there; its files are read when it is", shown_url(self.url))
        self._is_missing = is_missing

    def version(self, path: str) -> tuple[int, str]:
        fs = self.file_system
        fs.invalidate_cache()
        found = _found(path, fs.info(path))
        return found.size, found.version

    def _is_hidden(self, path: str, pattern: str | None) -> bool:
        if pattern is not None:
            return last_name(path).startswith(("_", "."))
        below = path.removeprefix(self._root).strip("/")
        return any(part.startswith(("_", ".")) for part in below.split("/"))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fs": None}


def as_pattern(path: str, exists: Callable[[str], bool]) -> str | None:
    """Return a path as a pattern, in which what is there by the very name stands for itself; None: all of it does."""
    if not _WILD & set(path):
        return None
    parts = path.split("/")
    for count in range(len(parts), 0, -1):
        literal = "/".join(parts[:count])
        if literal and exists(literal):
            return None if count == len(parts) else "/".join([glob.escape(literal), *parts[count:]])
    return path


def _found(path: str, info: Mapping[str, Any]) -> FoundFile:
    modified = modified_ms(dict(info))
    tag = next((info[name] for name in _ETAGS if info.get(name)), None)
    return FoundFile(path, int(info.get("size") or 0), modified, str(modified if tag is None else tag))
