"""How entries lie in an LMDB environment.

Key: the table's number, 2 bytes big-endian, then the packed key. A key longer than LMDB takes is replaced by a mark
and its BLAKE2b digest. Value: the entry's key group, 2 bytes little-endian, then the packed value, with the packed
key before it where that was replaced. The group is not part of the key, since to compute that of a single key takes
many times as long as to look the key up; it is needed only when state is moved.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

import msgpack

FORMAT = "lmdb"
"""Of a `StatePiece` that is a copy of an environment."""

DATA = "data.mdb"
"""The file of an environment, in its directory."""

TABLE = struct.Struct(">H")
GROUP = struct.Struct("<H")

MAX_KEY = 500
"""Bytes of a key in LMDB, which takes 511."""

_REPLACED = b"\xc1"
"""The one byte that nothing packed begins with."""


class StoredEntry(NamedTuple):
    """An entry as it lies there, not unpacked."""

    table: int
    group: int
    key: bytes
    value: bytes


def stored_key(table: bytes, packed: bytes) -> bytes:
    """Return the LMDB key; ``table`` is the packed number."""
    if len(packed) + len(table) <= MAX_KEY:
        return table + packed
    return table + _REPLACED + blake2b(packed, digest_size=32).digest()


def is_replaced(stored: bytes) -> bool:
    """Whether an LMDB key has a digest in place of the packed key."""
    return stored[TABLE.size : TABLE.size + 1] == _REPLACED


def stored_value(group: int, packed_key: bytes, packed_value: bytes) -> bytes:
    """Return the LMDB value. ``packed_key`` is of no use where it is in the LMDB key."""
    if len(packed_key) + TABLE.size <= MAX_KEY:
        return GROUP.pack(group) + packed_value
    return GROUP.pack(group) + packed_key + packed_value


def value_of(key: bytes, value: memoryview) -> memoryview:
    """Return the packed value of an LMDB key and value."""
    body = value[GROUP.size :]
    return body[_first_length(body) :] if is_replaced(key) else body


def entry_of(key: bytes, value: bytes) -> StoredEntry:
    """Return what an LMDB key and value say."""
    (table,) = TABLE.unpack_from(key)
    (group,) = GROUP.unpack_from(value)
    if not is_replaced(key):
        return StoredEntry(table, group, key[TABLE.size :], value[GROUP.size :])
    end = GROUP.size + _first_length(value[GROUP.size :])
    return StoredEntry(table, group, value[GROUP.size : end], value[end:])


def _first_length(packed: bytes | memoryview) -> int:
    reader = msgpack.Unpacker(max_buffer_size=0)
    reader.feed(packed)
    reader.skip()
    length: int = reader.tell()
    return length
