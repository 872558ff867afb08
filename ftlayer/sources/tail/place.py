"""How far a file was read, and how it is known again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from ftlayer.errors import ConfigError

TAIL_BYTES = 1 << 10
"""A file is the one that was read if so many bytes before the place are the same."""

_KIND = "tail"


@dataclass(frozen=True, slots=True)
class Place:
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
    """Return what tells the last bytes before a place from others."""
    return hashlib.blake2b(before[-TAIL_BYTES:], digest_size=12).digest()


def tail_length(offset: int) -> int:
    """Return how many bytes before a place tell it from others."""
    return min(offset, TAIL_BYTES)


def pack(number: int, places: Sequence[Place]) -> bytes:
    """Return a source's position. ``number`` makes it another one than all others."""
    each = [[one.log, one.inode, one.offset, one.tail, one.is_ended] for one in places]
    packed: bytes = msgpack.packb([_KIND, number, each], unicode_errors="surrogateescape")
    return packed


def unpack(position: bytes) -> tuple[int, list[Place]]:
    """Return what was packed; `ConfigError` for the position of another source."""
    found: Any
    try:
        found = msgpack.unpackb(position, unicode_errors="surrogateescape")
    except (ValueError, msgpack.UnpackException):
        found = None
    if not isinstance(found, list) or len(found) != 3 or found[0] != _KIND:
        raise ConfigError(
            "a growing file: the positions stored under this uid are of another source; give the new one a uid of "
            "its own"
        )
    return found[1], [Place(*each) for each in found[2]]
