"""How a value is written: with a checksum over key and value, and large ones in parts of one page each.

LMDB puts a large value into a run of neighbouring pages. In a store that lives near its limit there is
soon no free run that is long enough, though free pages abound. Parts of one page fit wherever a page
is free, so that space which was given back can always be used again.

An entry of a table is either ``kind, checksum, value`` or ``kind, checksum, number, length`` with a checksum
of its own, and then the value is in the parts (number, 0), (number, 1), … of the table of parts.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

import numpy as np

_INLINE, _PARTED = 0, 1
_HEAD = struct.Struct("<BI")
_REFERENCE = struct.Struct("<BIQQ")
_REFERENCE_CHECK = struct.Struct("<I")
_PART_KEY = struct.Struct(">QI")

_BLOCK = 4_096  # of every machine, whatever its page size: it is part of the format
_SUMMED_FROM = 16 * _BLOCK

_OVERFLOW_HEADER = 16  # what LMDB puts before a value on a page of its own


class Reference(NamedTuple):
    """Where a large value is: ``length`` bytes in parts of ``number``."""

    checksum: int
    number: int
    length: int

    def encode(self, key: bytes) -> bytes:
        """Return the entry that stands for the value of ``key``."""
        entry = _REFERENCE.pack(_PARTED, self.checksum, self.number, self.length)
        return entry + _REFERENCE_CHECK.pack(checksum(key, entry))


class Inline(NamedTuple):
    """A value that is in its entry."""

    checksum: int
    value: bytes | memoryview


def checksum(key: bytes, value: bytes | memoryview) -> int:
    """Return 32 bits that change with key and value.

    A CRC-32, of large values after their blocks of 4 KiB have been added up word by word: that is nine
    times as fast (20 µs for 800 kB) and any damage within one block still changes the sum, zeroed pages
    included. It would not notice blocks that changed places; LMDB's own page numbers do.
    """
    check = zlib.crc32(key)
    whole = len(value) // _BLOCK * _BLOCK
    if whole >= _SUMMED_FROM:
        words = np.frombuffer(value, dtype=np.uint64, count=whole // 8).reshape(-1, _BLOCK // 8)
        check = zlib.crc32(words.sum(axis=0), check)
        value = memoryview(value)[whole:]
    return zlib.crc32(value, check)


def max_inline(page_size: int) -> int:
    """Return the size of the largest value whose entry takes one page at most."""
    return page_size - _OVERFLOW_HEADER - _HEAD.size


def part_size(page_size: int) -> int:
    """Return how many bytes of a value fit on one page."""
    return page_size - _OVERFLOW_HEADER


def encode_inline(check: int, value: bytes | memoryview) -> bytes:
    """Return the entry of a small value."""
    return b"".join((_HEAD.pack(_INLINE, check), value))


def decode(key: bytes, entry: bytes | memoryview) -> Inline | Reference | None:
    """Return what the entry of ``key`` holds, or None when it is not one.

    An inline value is not checked yet. A reference is: a wrong one would lead to another value's parts.
    """
    if len(entry) < _HEAD.size:
        return None
    kind, check = _HEAD.unpack_from(entry)
    if kind == _INLINE:
        return Inline(check, entry[_HEAD.size :])
    if kind != _PARTED or len(entry) != _REFERENCE.size + _REFERENCE_CHECK.size:
        return None
    if checksum(key, entry[: _REFERENCE.size]) != _REFERENCE_CHECK.unpack_from(entry, _REFERENCE.size)[0]:
        return None
    return Reference(*_REFERENCE.unpack_from(entry)[1:])


def part_key(number: int, index: int) -> bytes:
    return _PART_KEY.pack(number, index)


def parts_prefix(number: int) -> bytes:
    """Return what the keys of all parts of ``number`` begin with."""
    return part_key(number, 0)[:8]


def number_of(key: bytes | memoryview) -> int:
    """Return the number in a part's key."""
    number: int = _PART_KEY.unpack(key)[0]
    return number


def split(value: bytes | memoryview, number: int, page_size: int) -> list[tuple[bytes, memoryview]]:
    """Return the parts of a large value with their keys."""
    view, step = memoryview(value), part_size(page_size)
    key = _PART_KEY.pack
    return [
        (key(number, index), view[start : start + step])
        for index, start in enumerate(range(0, len(view), step))
    ]
