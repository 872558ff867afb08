"""Files, and the parts that they are read in. Rules alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import InputPartition

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
    """What one task reads, in this order."""

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
