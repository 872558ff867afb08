"""State larger than memory: an LMDB environment below the tables, which is never written while a snapshot reads it.

What a reader of LMDB holds on to cannot be used again by writers, so that a snapshot that takes seconds would make
the file grow and updates slow. So entries are moved here only between snapshots, when memory holds too many. They are
moved in the order of their keys (`ftlayer.state.lmdb.stores`): a fifth of the work of moving them in the order of their
use, since what lies in one page is written together, and pages that are written together lie together.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, islice
from pathlib import Path
from threading import Lock
from typing import Any

import lmdb

from ftlayer.checkpoint.snapshots import Scope, StatePiece, TableInfo
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.common.secret_files import is_private, unused
from ftlayer.config import MIB
from ftlayer.errors import CheckpointStorageError, SnapshotCancelledError
from ftlayer.functions.keyed import Key
from ftlayer.state.lmdb.copies import (
    DATA,
    FORMAT,
    TABLE,
    copied,
    entry_of,
    grouped_blocks,
    is_replaced,
    stored_key,
    stored_value,
    value_of,
)
from ftlayer.state.snapshots.changelog import giving_way
from ftlayer.state.snapshots.entries import Block, TableView, packed_value
from ftlayer.state.snapshots.serializer import Serializer, unpack, unreadable
from ftlayer.state.tables.layers import DELETED, NOTHING, KeyGroups, LayeredTable, footprint

_PREFIX = "ftlayer-state-"
_LOCK = "lock"


class LocalDirectory:
    """A directory of its own, removed by `close`; what killed processes have left beside it is removed before."""

    def __init__(self, parent: str | None) -> None:
        """``parent`` None: the system's directory for temporary files. OSError if it cannot be written."""
        base = Path(parent or tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name, so that it is never there and not locked.
        new = self.path / "new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(base: Path) -> None:
    for directory in filter(is_private, base.glob(f"{_PREFIX}*")):
        with suppress(OSError), unused(directory / _LOCK, os.O_RDWR):
            shutil.rmtree(directory)


# The keys of a table's base in a store's order, bit by bit: an external sort (Knuth, TAOCP 3, 5.4).


MOST_KEYS = 64_000
"""Keys of one sweep, the oldest of the base: the more of them, the closer they lie together."""

SORTED = 1_000
"""Keys that are sorted in one call: about a millisecond."""


class Sweep:
    """Those keys that a base has now. None of them may leave it before `in_order` has given it."""

    def __init__(
        self, info: TableInfo, groups: KeyGroups, table: LayeredTable, pack: Callable[[KeyGroups, Key], bytes]
    ) -> None:
        self.info = info
        self.groups = groups
        self.table = table
        self._pack = pack
        self._unsorted = iter(list(islice(table.base, MOST_KEYS)))
        self._parts: list[list[tuple[bytes, Key]]] = []
        self.in_order: Iterator[tuple[bytes, Key]] = iter(())

    def sort(self) -> bool:
        """Sort a part of the keys; False: all are sorted, and `in_order` gives them with their stored keys."""
        number = TABLE.pack(self.info.number)
        pack, groups = self._pack, self.groups
        part = [(stored_key(number, pack(groups, key)), key) for key in islice(self._unsorted, SORTED)]
        if part:
            part.sort(key=_stored)
            self._parts.append(part)
            return True
        if self._parts:
            self.in_order = heapq.merge(*self._parts, key=_stored)
            self._parts = []
        return False


def _stored(pair: tuple[bytes, Key]) -> bytes:
    return pair[0]


FIRST_MAP_BYTES = 64 * MIB
"""Size of the map to begin with; doubled when it is full."""

SLICE = 200
SLICE_BYTES = MIB // 4
"""Entries that are moved in one go, and their bytes: a few milliseconds where pages have to be read for them."""

Spilled = tuple[TableInfo, KeyGroups, LayeredTable]
"""A table whose base is moved."""


class LmdbStores:
    """The stores below the tables of one backend, in an environment that is made on disk when it is first needed."""

    def __init__(self, directory: str | None) -> None:
        """``directory``: where its own directory is made; None: where temporary files are."""
        self._parent = directory
        self._directory: LocalDirectory | None = None
        self._env: Any = None
        self._map_bytes = FIRST_MAP_BYTES
        self._txn: Any = None
        self._serializer = Serializer()
        self._sweep: Sweep | None = None
        self._readers = 0
        self._closed = False
        self._lock = Lock()

    def local_path(self) -> Path:
        if self._directory is None:
            try:
                self._directory = LocalDirectory(self._parent)
            except OSError as error:
                raise CheckpointStorageError(
                    f"the LMDB backend cannot make its directory in {self._parent or 'the temporary directory'}: "
                    f"{error}; name another one as state_directory"
                ) from error
        return self._directory.path

    def adopt(self) -> None:
        """Go on with the file `DATA` that was put into `local_path`."""
        path = self.local_path() / DATA
        while self._map_bytes < 2 * path.stat().st_size:
            self._map_bytes *= 2
        self._open()

    def _open(self) -> Any:
        if self._env is None:
            with self._explained():
                # Locking and syncing are for others that open it, and for crashes: it has neither.
                self._env = lmdb.open(
                    str(self.local_path()),
                    map_size=self._map_bytes,
                    lock=False,
                    sync=False,
                    metasync=False,
                    readahead=False,
                    meminit=False,
                    mode=0o600,
                )
        return self._env

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            raise CheckpointStorageError(
                f"the state in {self.local_path()} cannot be read or written: {error}; is its disk full?"
            ) from error

    def is_empty(self) -> bool:
        return self._env is None or not self._env.stat()["entries"]

    def found(self, key: bytes) -> memoryview | None:
        """Return the packed value of an LMDB key, to be read before anything else is asked for; None without one."""
        if self._env is None:
            return None
        if self._txn is None:
            self._txn = self._env.begin(buffers=True)
        value = self._txn.get(key)
        return None if value is None else value_of(key, value)

    def _stop_reading(self) -> None:
        if self._txn is not None:
            self._txn.abort()
            self._txn = None

    def items(self, table: int | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Return LMDB keys and values, of one table or all; in any thread, while nothing is written."""
        if self._env is None:
            return
        prefix = b"" if table is None else TABLE.pack(table)
        with self._explained(), self._env.begin() as txn, txn.cursor() as cursor:
            if cursor.set_range(prefix):
                for key, value in cursor.iternext():
                    if not key.startswith(prefix):
                        break
                    yield key, value

    def store(self, info: TableInfo, groups: KeyGroups) -> LmdbStateStore:
        return LmdbStateStore(self, info, groups)

    def move(self, tables: Sequence[Spilled]) -> int:
        """Move a slice of the largest base (return its bytes), or sort a bit for that, while nothing is read."""
        if self._sweep is None:
            self._sweep = Sweep(*max(tables, key=lambda each: len(each[2].base)), self.packed_key)
        sweep = self._sweep
        if sweep.sort():
            return 0
        moved = self._next_slice(sweep)
        if not moved:
            self._sweep = None
        return moved

    def _next_slice(self, sweep: Sweep) -> int:
        base, info, groups = sweep.table.base, sweep.info, sweep.groups
        moved: list[Key] = []
        gone: list[bytes] = []
        kept: list[tuple[bytes, Key, bytes]] = []
        size = 0
        for stored, key in islice(sweep.in_order, SLICE):
            moved.append(key)
            value = base[key]
            if value is DELETED:
                gone.append(stored)
                continue
            kept.append((stored, key, packed_value(self._serializer, info, key, value)))
            size += len(kept[-1][2])
            if size >= SLICE_BYTES:
                break
        puts: list[tuple[bytes, bytes]] = []
        of = groups.of([key for _, key, _ in kept]).tolist()
        for (stored, key, value), group in zip(kept, of, strict=True):
            # Only a long key is written once more, beside the value.
            packed = self.packed_key(groups, key) if is_replaced(stored) else b""
            puts.append((stored, stored_value(group, packed, value)))
        self._write(puts, gone)
        return footprint(moved, [base.pop(key) for key in moved])

    def packed_key(self, groups: KeyGroups, key: Key) -> bytes:
        """Return a key's bytes, the same for keys that are equal."""
        return self._serializer.pack(groups.canonical(key))

    def _write(self, puts: list[tuple[bytes, bytes]], gone: list[bytes]) -> None:
        self._stop_reading()
        env = self._open()
        with self._explained():
            while True:
                try:
                    with env.begin(write=True) as txn:
                        with txn.cursor() as cursor:
                            cursor.putmulti(puts)
                        for key in gone:
                            txn.delete(key)
                    return
                except lmdb.MapFullError:
                    self._map_bytes *= 2
                    env.set_mapsize(self._map_bytes)

    def view(self, tables: Sequence[TableView]) -> LmdbView:
        return LmdbView(self, tables)

    @contextmanager
    def reading(self, pace: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Keep it open for a snapshot in another thread; gives what to call in place of ``pace``."""

        def checked() -> None:
            if self._closed:
                raise SnapshotCancelledError("the state was given up while its snapshot was written")
            pace()

        with self._lock:
            checked()
            self._readers += 1
        try:
            yield checked
        finally:
            with self._lock:
                self._readers -= 1
                if self._closed and not self._readers:
                    self._remove()

    def copy(self, writer: PieceWriter, scope: Scope, pace: Callable[[], None]) -> tuple[Any, int]:
        """Write a copy as one piece; returns the piece and the number of entries."""
        with self._explained(), self.reading(pace) as checked:
            chunks = copied(self._env, self.local_path(), checked)
            return giving_way(lambda: writer.write(chunks, scope)), self._env.stat()["entries"]

    def close(self) -> None:
        """Remove it; the last of the snapshots that still read it does so, which are given up."""
        self._stop_reading()
        with self._lock:
            self._closed = True
            if not self._readers:
                self._remove()

    def _remove(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None


class LmdbStateStore:
    """The part of one table that is in the environment: `ftlayer.state.tables.layers.Store`."""

    def __init__(self, stores: LmdbStores, info: TableInfo, groups: KeyGroups) -> None:
        self._stores = stores
        self._info = info
        self._number = info.number
        self._table = TABLE.pack(info.number)
        self._groups = groups

    def get(self, key: Key) -> Any:
        """Return the value, read anew at each call; NOTHING without one."""
        value = self._stores.found(stored_key(self._table, self._stores.packed_key(self._groups, key)))
        if value is None:
            return NOTHING
        try:
            return unpack(value)
        except Exception as error:
            # A restore that goes on with the copied file has not read it yet.
            raise unreadable(f"operator {self._info.operator!r}, table {self._info.name!r}", error) from error

    def all_keys(self) -> Iterator[Key]:
        keys = [unpack(entry_of(key, value).key) for key, value in self._stores.items(self._number)]
        return iter(self._groups.found_again(keys))


class LmdbView:
    """The environment as a snapshot reads it: `ftlayer.state.snapshots.changelog.StoreView`."""

    def __init__(self, stores: LmdbStores, tables: Sequence[TableView]) -> None:
        self._stores = stores
        self._tables = tables

    def blocks(self, pace: Callable[[], None]) -> Iterator[Block]:
        """Return the entries that memory does not know better."""
        with self._stores.reading(pace) as checked:
            serializer = Serializer()
            for table in self._tables:
                number = TABLE.pack(table.info.number)
                better = set()
                for part in table.parts():
                    known = chain(part.keys, part.deleted)
                    better |= {
                        stored_key(number, serializer.pack(table.groups.canonical(key))) for key in known
                    }
                    checked()
                items = self._stores.items(table.info.number)
                own = (entry_of(key, value) for key, value in items if key not in better)
                yield from grouped_blocks(own, table.groups.max_parallelism, checked)

    def copy(
        self, writer: PieceWriter, scope: Scope, checkpoint: int, pace: Callable[[], None]
    ) -> StatePiece:
        piece, entries = self._stores.copy(writer, scope, pace)
        return StatePiece(FORMAT, piece, entries, checkpoint)
