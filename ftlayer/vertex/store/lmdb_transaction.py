"""Transactions of the LMDB store: tables, checksums, and large values in parts."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import lmdb
import numpy as np

from ftlayer.errors import StoreDamagedError, StoreError, StoreFullError, StorePathError
from ftlayer.vertex.store.key_value import check_key, check_table

# A disk with less than this left is the cause of a failed write, whatever the error says: LMDB reports
# a write that was cut short as EIO.
_DISK_FULL_BYTES = 1 << 20


def translate(error: lmdb.Error, path: Path) -> StoreError:
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError(
            f"{path} is full: no page is free for this change; wait until records complete, or open it "
            "with more max_store_bytes"
        )
    if isinstance(error, lmdb.TxnFullError):
        return StoreError(f"{path}: one change is too large for a transaction; split it")
    damage = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)
    if isinstance(error, damage):
        return StoreDamagedError(
            f"{path} is damaged: {error}. Restore the directory from a copy, or move it away to start empty"
        )
    if isinstance(error, lmdb.ReadonlyError):
        return StorePathError(f"{path} cannot be written: {error}")
    if isinstance(error, lmdb.DiskError) or _disk_is_full(path):
        return disk_full(path)
    return StoreError(f"{path}: {error}")


def disk_full(path: Path) -> StoreFullError:
    return StoreFullError(
        f"{path}: its disk is full; nothing of this change was kept. Free some space on that disk"
    )


def _disk_is_full(path: Path) -> bool:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _DISK_FULL_BYTES


# How a value is written: with a checksum over key and value, and large ones in parts of one page each.
#
# LMDB puts a large value into a run of neighbouring pages. In a store that lives near its limit there is
# soon no free run that is long enough, though free pages abound. Parts of one page fit wherever a page
# is free, so that space which was given back can always be used again.
#
# An entry of a table is either ``kind, checksum, value`` or ``kind, checksum, number, length`` with a checksum
# of its own, and then the value is in the parts (number, 0), (number, 1), … of the table of parts.


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
    return page_size - _OVERFLOW_HEADER


def encode_inline(check: int, value: bytes | memoryview) -> bytes:
    return b"".join((_HEAD.pack(_INLINE, check), value))


def decode(key: bytes, entry: bytes | memoryview) -> Inline | Reference | None:
    """Return what an entry holds, None if it is none. An inline value is not checked yet, a reference is."""
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
    return part_key(number, 0)[:8]


def number_of(key: bytes | memoryview) -> int:
    number: int = _PART_KEY.unpack(key)[0]
    return number


def split(value: bytes | memoryview, number: int, page_size: int) -> list[tuple[bytes, memoryview]]:
    view, step = memoryview(value), part_size(page_size)
    key = _PART_KEY.pack
    return [
        (key(number, index), view[start : start + step])
        for index, start in enumerate(range(0, len(view), step))
    ]


PARTS = "parts"

_ENTRY_OVERHEAD = 24  # bytes LMDB and the checksum add to a small entry


class LmdbReadTransaction:
    """See `ReadTransaction`: values are ``memoryview`` into the map, but for large ones."""

    def __init__(
        self,
        transaction: lmdb.Transaction,
        databases: Mapping[str, lmdb._Database],
        path: Path,
        page_size: int,
    ) -> None:
        self._transaction = transaction
        self._databases = databases
        self._path = path
        self._page_size = page_size
        self._open = True

    def end(self) -> None:
        self._open = False

    def get(self, table: str, key: bytes) -> memoryview | bytes | None:
        check_key(key)
        database = self._database(table)
        try:
            entry = self._transaction.get(key, db=database)
            return None if entry is None else self._value(table, key, entry)
        except lmdb.Error as error:
            raise translate(error, self._path) from error

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, memoryview | bytes]]:
        for key, entry in self._entries(self._database(table), start, stop, reverse):
            yield key, self._value(table, key, entry)

    def keys(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        for key, _ in self._entries(self._database(table), start, stop, reverse):
            yield key

    def count(self, table: str) -> int:
        entries: int = self._transaction.stat(self._database(table))["entries"]
        return entries

    def sizes(self, table: str) -> Iterator[int]:
        """Iterate over the sizes of a table's values in key order, without reading the large ones."""
        for key, entry in self._entries(self._database(table), b"", None, False):
            stored = decode(key, entry)
            if stored is None:
                raise self._damage(table, key)
            yield stored.length if isinstance(stored, Reference) else len(stored.value)

    def _entries(
        self, database: lmdb._Database, start: bytes, stop: bytes | None, reverse: bool
    ) -> Iterator[tuple[bytes, memoryview | bytes]]:
        try:
            cursor = self._transaction.cursor(database)
            if not _find_end(cursor, start, stop, reverse):
                return
            for raw_key, entry in cursor.iterprev() if reverse else cursor.iternext():
                key = bytes(raw_key)
                if key < start if reverse else stop is not None and key >= stop:
                    return
                yield key, entry
                if not self._open:
                    raise _ended()
        except lmdb.Error as error:
            raise translate(error, self._path) from error

    def _database(self, table: str) -> lmdb._Database:
        check_table(table)
        if not self._open:
            raise _ended()
        return self._databases[table]

    def _value(self, table: str, key: bytes, entry: memoryview | bytes) -> memoryview | bytes:
        stored = decode(key, entry)
        if isinstance(stored, Reference):
            value: memoryview | bytes = self._join(stored)
        elif stored is not None:
            value = stored.value
        else:
            raise self._damage(table, key)
        if checksum(key, value) != stored.checksum:
            raise self._damage(table, key)
        return value

    def _join(self, reference: Reference) -> bytes:
        """Return what there is of a large value; the checksum tells whether it is all."""
        end = part_key(reference.number + 1, 0)
        start = part_key(reference.number, 0)
        return b"".join(part for _, part in self._entries(self._databases[PARTS], start, end, False))

    def _damage(self, table: str, key: bytes) -> StoreDamagedError:
        return StoreDamagedError(
            f"{self._path} is damaged: the entry {key.hex()} of table {table!r} fails its checksum. Restore "
            "the directory from a copy, or delete that entry to go on without it"
        )


class LmdbWriteTransaction(LmdbReadTransaction):
    """See `WriteTransaction`: values are ``bytes``, since a page in change may move."""

    def __init__(
        self,
        transaction: lmdb.Transaction,
        databases: Mapping[str, lmdb._Database],
        path: Path,
        page_size: int,
    ) -> None:
        super().__init__(transaction, databases, path, page_size)
        self._next_number: int | None = None
        self._changes = 0  # a scan has to find its place again after a change
        self._changed: set[str] = set()
        self.put_bytes = 0
        self.failed = False

    def put(self, table: str, key: bytes, value: bytes | memoryview, *, append: bool = False) -> None:
        database = self._database(table)
        check_key(key)
        if not isinstance(value, bytes):
            value = memoryview(value).cast("B")
        check = checksum(key, value)
        large = len(value) > max_inline(self._page_size)
        number = self._take_number() if large else 0
        entry = Reference(check, number, len(value)).encode(key) if large else encode_inline(check, value)
        self._note_change(table)
        self.put_bytes += len(key) + len(value) + _ENTRY_OVERHEAD
        try:
            if append:
                if not self._transaction.put(key, entry, db=database, append=True):
                    raise ValueError(f"append to {table!r} of a key that is not above its last one")
            else:
                self._delete_parts(key, self._transaction.replace(key, entry, db=database))
            if large:
                self._changed.add(PARTS)
                cursor = self._transaction.cursor(self._databases[PARTS])
                cursor.putmulti(split(value, number, self._page_size), append=True)
        except lmdb.Error as error:
            self.failed = True
            raise translate(error, self._path) from error

    def put_keys(self, table: str, keys: Sequence[bytes]) -> None:
        database = self._database(table)
        entries = []
        for key in keys:
            check_key(key)
            entries.append((key, encode_inline(checksum(key, b""), b"")))
            self.put_bytes += len(key) + _ENTRY_OVERHEAD
        self._note_change(table)
        try:
            self._transaction.cursor(database).putmulti(entries)
        except lmdb.Error as error:
            self.failed = True
            raise translate(error, self._path) from error

    def delete(self, table: str, key: bytes) -> bool:
        database = self._database(table)
        check_key(key)
        self._note_change(table)
        try:
            old = self._transaction.pop(key, db=database)
            self._delete_parts(key, old)
        except lmdb.Error as error:
            self.failed = True
            raise translate(error, self._path) from error
        return old is not None

    def _entries(
        self, database: lmdb._Database, start: bytes, stop: bytes | None, reverse: bool
    ) -> Iterator[tuple[bytes, memoryview | bytes]]:
        try:
            cursor = self._transaction.cursor(database)
            found = _find_end(cursor, start, stop, reverse)
            while found:
                key = bytes(cursor.key())
                if key < start if reverse else stop is not None and key >= stop:
                    return
                changes = self._changes
                yield key, cursor.value()
                if not self._open:
                    raise _ended()
                if self._changes == changes:
                    found = cursor.prev() if reverse else cursor.next()
                elif reverse:
                    found = cursor.prev() if cursor.set_range(key) else cursor.last()
                else:
                    found = cursor.set_range(key) and (bytes(cursor.key()) != key or cursor.next())
        except lmdb.Error as error:
            raise translate(error, self._path) from error

    def tree_pages(self, before: Mapping[str, int]) -> dict[str, int]:
        """Return the pages of each table as they are now; ``before`` are those at the transaction's start."""
        changed = {name: self._databases[name] for name in self._changed}
        return {**before, **tree_pages(self._transaction, changed)}

    def _note_change(self, table: str) -> None:
        self._changes += 1
        self._changed.add(table)

    def _take_number(self) -> int:
        if self._next_number is None:
            cursor = self._transaction.cursor(self._databases[PARTS])
            self._next_number = number_of(cursor.key()) + 1 if cursor.last() else 1
        number = self._next_number
        self._next_number += 1
        return number

    def _delete_parts(self, key: bytes, entry: bytes | memoryview | None) -> None:
        """Delete what ``entry`` refers to; where it is damaged its parts cannot be found and stay."""
        stored = None if entry is None else decode(key, entry)
        if isinstance(stored, Reference):
            self._changed.add(PARTS)
            cursor = self._transaction.cursor(self._databases[PARTS])
            prefix = parts_prefix(stored.number)
            cursor.set_range(prefix)
            # Deleting moves on to the next part; the key is empty behind the last one.
            while cursor.key()[: len(prefix)] == prefix:
                cursor.delete()


def tree_pages(transaction: lmdb.Transaction, databases: Mapping[str, lmdb._Database]) -> dict[str, int]:
    """Return the pages of each of these tables, and under "" of the one of names, as ``transaction`` sees them."""
    stats = {name: transaction.stat(database) for name, database in databases.items()}
    stats[""] = transaction.stat()
    return {
        name: stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        for name, stat in stats.items()
    }


def _find_end(cursor: lmdb.Cursor, start: bytes, stop: bytes | None, reverse: bool) -> bool:
    if not reverse:
        return cursor.set_range(start) if start else cursor.first()
    if stop and cursor.set_range(stop):
        return cursor.prev()
    return stop != b"" and cursor.last()


def _ended() -> StoreError:
    return StoreError("this transaction has ended: use it inside its with block only")
