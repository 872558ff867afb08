"""A store in memory: for tests, and for vertices whose records need not outlive them."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ftlayer.errors import StoreError, StoreFullError
from ftlayer.vertex.store.key_value import INTAKE_SHARE, TABLES, alone_in_thread, check_key, check_table

# Inserting moves at most one block's pointers. Blocks of this size keep both that and the search short.
BLOCK = 1_000


class SortedKeys:
    """Byte strings in lexical order, as a list of sorted blocks: a change moves one block at most."""

    def __init__(self) -> None:
        self._blocks: list[list[bytes]] = []
        self._lasts: list[bytes] = []  # the last key of each block, to find the block by bisection
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def copy(self) -> SortedKeys:
        other = SortedKeys()
        other._blocks = [block.copy() for block in self._blocks]
        other._lasts = self._lasts.copy()
        other._length = self._length
        return other

    def add(self, key: bytes) -> None:
        """Insert ``key``, which must not be there yet."""
        self._length += 1
        if not self._blocks:
            self._blocks.append([key])
            self._lasts.append(key)
            return
        at = min(bisect_left(self._lasts, key), len(self._blocks) - 1)
        block = self._blocks[at]
        block.insert(bisect_left(block, key), key)
        if len(block) > 2 * BLOCK:
            self._blocks[at : at + 1] = [block[:BLOCK], block[BLOCK:]]
            self._lasts[at : at + 1] = [block[BLOCK - 1], block[-1]]
        else:
            self._lasts[at] = block[-1]

    def remove(self, key: bytes) -> None:
        """Take out ``key``, which must be there."""
        at = bisect_left(self._lasts, key)
        block = self._blocks[at]
        del block[bisect_left(block, key)]
        self._length -= 1
        if block:
            self._lasts[at] = block[-1]
        else:
            del self._blocks[at]
            del self._lasts[at]

    def last(self) -> bytes | None:
        return self._lasts[-1] if self._lasts else None

    def above(self, key: bytes, *, inclusive: bool) -> bytes | None:
        """Return the lowest key above ``key`` (or at it, if ``inclusive``)."""
        search = bisect_left if inclusive else bisect_right
        at = search(self._lasts, key)
        if at == len(self._blocks):
            return None
        block = self._blocks[at]
        return block[search(block, key)]

    def below(self, key: bytes) -> bytes | None:
        at = bisect_left(self._lasts, key)
        if at < len(self._blocks):
            block = self._blocks[at]
            inside = bisect_left(block, key)
            if inside:
                return block[inside - 1]
        return self._lasts[at - 1] if at else None


_DEFAULT_MAX_BYTES = 1 << 30


class _MemoryTable:
    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.keys = SortedKeys()

    def copy(self) -> _MemoryTable:
        other = _MemoryTable()
        other.values = self.values.copy()
        other.keys = self.keys.copy()
        return other

    def set(self, key: bytes, value: bytes) -> None:
        if key not in self.values:
            self.keys.add(key)
        self.values[key] = value

    def unset(self, key: bytes) -> None:
        del self.values[key]
        self.keys.remove(key)


class _Changes:
    """The changes of a write transaction to one table so far: None marks a deleted key."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes | None] = {}
        self.keys = SortedKeys()
        self.added = 0

    def set(self, key: bytes, value: bytes | None) -> None:
        if key not in self.values:
            self.keys.add(key)
        self.values[key] = value


class _Read:
    def __init__(self, tables: dict[str, _MemoryTable]) -> None:
        self._tables = tables
        self._open = True

    def end(self) -> None:
        self._open = False

    def sees(self, name: str, table: _MemoryTable) -> bool:
        return self._tables[name] is table

    def get(self, table: str, key: bytes) -> bytes | None:
        return self._table(table).values.get(key)

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, bytes]]:
        self._table(table)
        return self._scan(table, start, stop, reverse)

    def keys(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        self._table(table)
        return self._keys(table, start, stop, reverse)

    def count(self, table: str) -> int:
        return len(self._table(table).values)

    def _table(self, table: str) -> _MemoryTable:
        check_table(table)
        if not self._open:
            raise StoreError("this transaction has ended: use it inside its with block only")
        return self._tables[table]

    def _scan(
        self, table: str, start: bytes, stop: bytes | None, reverse: bool
    ) -> Iterator[tuple[bytes, bytes]]:
        for key in self._keys(table, start, stop, reverse):
            value = self.get(table, key)
            assert value is not None
            yield key, value

    def _keys(self, table: str, start: bytes, stop: bytes | None, reverse: bool) -> Iterator[bytes]:
        key = self._before(table, stop) if reverse else self._after(table, start, inclusive=True)
        while key is not None and key >= start and (stop is None or key < stop):
            yield key
            key = self._before(table, key) if reverse else self._after(table, key, inclusive=False)

    def _after(self, table: str, key: bytes, *, inclusive: bool) -> bytes | None:
        return self._table(table).keys.above(key, inclusive=inclusive)

    def _before(self, table: str, key: bytes | None) -> bytes | None:
        keys = self._table(table).keys
        return keys.last() if key is None else keys.below(key)


class _Write(_Read):
    """Published tables with changes laid over them; applied at commit, dropped at abort."""

    def __init__(self, tables: dict[str, _MemoryTable], used_bytes: int, limit_bytes: int) -> None:
        super().__init__(tables)
        self.changes = {table: _Changes() for table in TABLES}
        self.used_bytes = used_bytes
        self._limit_bytes = limit_bytes

    def get(self, table: str, key: bytes) -> bytes | None:
        published = super().get(table, key)
        return self.changes[table].values.get(key, published)

    def count(self, table: str) -> int:
        return super().count(table) + self.changes[table].added

    def put(self, table: str, key: bytes, value: bytes | memoryview, *, append: bool = False) -> None:
        check_key(key)
        old = self.get(table, key)
        if append:
            last = self._before(table, None)
            if last is not None and key <= last:
                raise ValueError(f"append to {table!r} of a key that is not above its last one")
        changes = self.changes[table]
        changes.added += old is None
        changes.set(key, bytes(value))
        self.used_bytes += memoryview(value).nbytes + len(key)
        self.used_bytes -= 0 if old is None else len(old) + len(key)
        self.check_room()

    def put_keys(self, table: str, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.put(table, key, b"")

    def check_room(self) -> None:
        """Raise `StoreFullError` when the changes so far exceed what this transaction may use."""
        if self.used_bytes > self._limit_bytes:
            raise StoreFullError(
                f"the store in memory is full: {self.used_bytes} of {self._limit_bytes} bytes that this "
                "change may use; wait until records complete, or give it more max_bytes"
            )

    def delete(self, table: str, key: bytes) -> bool:
        old = self.get(table, key)
        if old is None:
            return False
        changes = self.changes[table]
        changes.added -= 1
        changes.set(key, None)
        self.used_bytes -= len(old) + len(key)
        return True

    def _after(self, table: str, key: bytes, *, inclusive: bool) -> bytes | None:
        published, changes = self._table(table), self.changes[table]
        old = published.keys.above(key, inclusive=inclusive)
        while old is not None and old in changes.values:
            old = published.keys.above(old, inclusive=False)
        new = changes.keys.above(key, inclusive=inclusive)
        while new is not None and changes.values[new] is None:
            new = changes.keys.above(new, inclusive=False)
        return min((k for k in (old, new) if k is not None), default=None)

    def _before(self, table: str, key: bytes | None) -> bytes | None:
        published, changes = self._table(table), self.changes[table]
        old = published.keys.last() if key is None else published.keys.below(key)
        while old is not None and old in changes.values:
            old = published.keys.below(old)
        new = changes.keys.last() if key is None else changes.keys.below(key)
        while new is not None and changes.values[new] is None:
            new = changes.keys.below(new)
        return max((k for k in (old, new) if k is not None), default=None)


class MemoryStore:
    """A `KeyValueStore` that dies with its process. Readers never wait: commits copy what snapshots hold."""

    def __init__(self, max_bytes: int = _DEFAULT_MAX_BYTES) -> None:
        """``max_bytes`` bounds keys and values; Python's own overhead (about 200 bytes an entry) is extra."""
        self.max_bytes = max_bytes
        self.incarnation = 1
        self._used_bytes = 0
        self._tables = {table: _MemoryTable() for table in TABLES}
        self._snapshots: list[_Read] = []
        self._closed = False
        self._writer = threading.Lock()
        self._guard = threading.Lock()  # of the published tables and the snapshots, held for moments
        self._local = threading.local()

    @contextmanager
    def write(self, *, intake: bool) -> Iterator[_Write]:
        with alone_in_thread(self._local), self._writer:
            self._check_open()
            limit = int(self.max_bytes * INTAKE_SHARE) if intake else self.max_bytes
            if intake and self._used_bytes >= limit:
                raise StoreFullError(
                    f"the store in memory is full: {self._used_bytes} of {self.max_bytes} bytes in use, "
                    f"intake stops at {INTAKE_SHARE:.0%}; wait until records complete"
                )
            transaction = _Write(self._tables, self._used_bytes, limit)
            try:
                yield transaction
                self._apply(transaction)
            finally:
                transaction.end()

    @contextmanager
    def read(self) -> Iterator[_Read]:
        with alone_in_thread(self._local):
            with self._guard:
                self._check_open()
                transaction = _Read(self._tables.copy())
                self._snapshots.append(transaction)
            try:
                yield transaction
            finally:
                transaction.end()
                with self._guard:
                    self._snapshots.remove(transaction)

    def sync(self) -> None:
        self._check_open()

    def close(self) -> None:
        with self._writer:
            self._closed = True

    @property
    def used_bytes(self) -> int:
        self._check_open()
        return self._used_bytes

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.max_bytes

    def _apply(self, transaction: _Write) -> None:
        transaction.check_room()
        with self._guard:
            for name, changes in transaction.changes.items():
                if not changes.values:
                    continue
                table = self._tables[name]
                if any(snapshot.sees(name, table) for snapshot in self._snapshots):
                    table = self._tables[name] = table.copy()
                for key, value in changes.values.items():
                    if value is not None:
                        table.set(key, value)
                    elif key in table.values:
                        table.unset(key)
            self._used_bytes = transaction.used_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store in memory is closed")
