from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import lmdb

from ftlayer.errors import ConfigError, StoreError, StoreFullError
from ftlayer.store.directory import DATA_FILE
from ftlayer.store.kv import INTAKE_SHARE
from ftlayer.store.lmdb_environment import MIN_STORE_BYTES, Opened, open_for_reading, open_for_writing
from ftlayer.store.lmdb_errors import disk_full, translate
from ftlayer.store.lmdb_file import read_meta
from ftlayer.store.lmdb_transaction import LmdbReadTransaction, LmdbWriteTransaction, tree_pages

Durability = Literal["batch", "none"] | int

# Above this, only changes that delete may go on, so that there is always room for the pages that a
# delete copies and for the list of those that it frees. A delete may copy 6 pages in the worst case: a leaf, its
# parent and a neighbour in the table, and the same among the parts; and 6 that the transaction before freed are not
# to be had yet. So deletes in transactions of 17 for each 16 MiB of a store empty it, however full it is.
_DELETE_SHARE = 0.95

# The file is extended in steps, ahead of what is written: intake learns of a full disk in time and
# leaves enough of the file for deletes.
_EXTEND_BYTES = 4 << 20


def _allocate(file: int, size: int, target: int) -> None:
    """Extend a file from ``size`` to ``target`` bytes with space that is really there."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, size, target - size)
        return
    # macOS has no posix_fallocate: zeros take the space.
    for start in range(size, target, _EXTEND_BYTES):
        os.pwrite(file, bytes(min(_EXTEND_BYTES, target - start)), start)


class LmdbStore:
    """A `KeyValueStore` in an LMDB environment.

    ``durability`` says what outlives a crash of the *machine*; a killed process loses nothing in any mode:

    - ``"batch"``: each transaction is synced when its block ends.
    - an interval in milliseconds: the owner of the store calls `sync` that often. A crash of the machine
      may lose what came after the last one, **or damage the store**: without a sync between them, the
      disk may write pages in any order. Damage is noticed at the next opening or reading.
    - ``"none"``: the same, synced at `close` only.

    Not usable in a forked child (`StoreError`): open it where it is used.
    """

    def __init__(self, opened: Opened, durability: Durability) -> None:
        """Use `LmdbStore.open`."""
        self._path = opened.path
        self._environment = opened.environment
        self._databases = opened.databases
        self._lock = opened.lock
        self._header = opened.header
        self._data_file = opened.data_file
        self._data_path = opened.path / DATA_FILE
        self._durability = durability
        self._pid = os.getpid()
        self._page_size = opened.environment.stat()["psize"]
        self._closed = False
        self._writer = threading.Lock()
        self._readers = 0
        self._readers_changed = threading.Condition()
        self._local = threading.local()
        with self._environment.begin() as transaction:
            self._tree_pages = tree_pages(transaction, self._databases)
        self._note_pages(self._tree_pages)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        max_store_bytes: int = 1 << 30,
        durability: Durability = "batch",
        read_only: bool = False,
    ) -> LmdbStore:
        """Open the store in the directory ``path``; make it (not its parent) if it is not there.

        ``read_only`` takes no lock, changes nothing, works beside a live vertex, and takes
        ``max_store_bytes`` from the store. A store that has more in it than ``max_store_bytes`` opens too
        and refuses intake until enough has completed; its file stays as large as it is.

        Raises `ConfigError` for an option out of range, `StorePathError` for a missing parent, a path
        that is no directory or cannot be written, `StoreLockedError` naming the process that holds the
        store, `StoreVersionError` for one of a newer ftlayer, `StoreDamagedError`, `StoreFullError` for a
        full disk, and `MachineError` when an address-space limit leaves no room for the map.
        """
        if max_store_bytes < MIN_STORE_BYTES:
            raise ConfigError(
                f"max_store_bytes is {max_store_bytes}: a store needs {MIN_STORE_BYTES} bytes at least"
            )
        if durability not in ("batch", "none") and not (isinstance(durability, int) and durability > 0):
            raise ConfigError(
                f"durability is {durability!r}: say 'batch', 'none', or an interval in milliseconds above 0"
            )
        if read_only:
            return cls(open_for_reading(Path(path)), "none")
        opened = open_for_writing(Path(path), max_store_bytes, sync=durability == "batch")
        return cls(opened, durability)

    @contextmanager
    def write(self, *, intake: bool) -> Iterator[LmdbWriteTransaction]:
        with self._alone_in_thread(), self._writer:
            self._check_usable()
            if self._lock is None:
                raise StoreError(f"{self._path} was opened for reading only")
            if intake and self._used_pages >= self._pages(INTAKE_SHARE):
                raise self._full(self._used_pages)
            try:
                raw = self._environment.begin(write=True)
            except lmdb.Error as error:
                raise translate(error, self._path) from error
            transaction = LmdbWriteTransaction(raw, self._databases, self._path, self._page_size)
            try:
                yield transaction
                trees = self._check_room(transaction, intake)
            except BaseException:
                transaction.end()
                raw.abort()
                raise
            transaction.end()
            try:
                raw.commit()
            except lmdb.Error as error:
                raise translate(error, self._path) from error
            self._note_pages(trees)

    @contextmanager
    def read(self) -> Iterator[LmdbReadTransaction]:
        with self._alone_in_thread():
            with self._readers_changed:
                self._check_usable()
                self._readers += 1
            try:
                raw = self._environment.begin(buffers=True)
                transaction = LmdbReadTransaction(raw, self._databases, self._path, self._page_size)
                try:
                    yield transaction
                finally:
                    transaction.end()
                    raw.abort()
            except lmdb.Error as error:
                raise translate(error, self._path) from error
            finally:
                with self._readers_changed:
                    self._readers -= 1
                    self._readers_changed.notify_all()

    def sync(self) -> None:
        with self._writer:
            self._check_usable()
            self._sync()

    def close(self) -> None:
        """Sync, and give up the store when the transactions of other threads have ended."""
        with self._alone_in_thread(), self._writer:
            if self._closed:
                return
            self._check_usable()
            with self._readers_changed:
                self._closed = True
                self._readers_changed.wait_for(lambda: not self._readers)
            try:
                if self._lock is not None:
                    self._sync()
            finally:
                self._environment.close()
                os.close(self._data_file)
                if self._lock is not None:
                    self._lock.release()

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._path

    @property
    def durability(self) -> Durability:
        """As given to `open`."""
        return self._durability

    @property
    def format_version(self) -> int:
        """The version of the layout this store was written in."""
        return self._header.format_version

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages in use as of the last commit of this store; free pages are not counted."""
        return self._used_pages * self._page_size

    @property
    def used_share(self) -> float:
        return self.used_bytes / self._header.max_bytes

    @property
    def max_bytes(self) -> int:
        return self._header.max_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the data file: the most that was ever in use, and some pages ahead."""
        return os.fstat(self._data_file).st_size

    @property
    def incarnation(self) -> int:
        """See `KeyValueStore.incarnation`; of a store opened for reading, that of its last writer."""
        return self._header.incarnation

    def _pages(self, share: float) -> int:
        return int(self._header.max_bytes * share) // self._page_size

    def _note_pages(self, trees: dict[str, int]) -> None:
        """Take note of the pages in use as of the last commit: the tables', of both headers, of the free list."""
        self._tree_pages = trees
        self._pages_beside_trees = 2 + read_meta(self._data_file, self._data_path).free.pages
        self._used_pages = sum(trees.values()) + self._pages_beside_trees

    def _check_room(self, transaction: LmdbWriteTransaction, intake: bool) -> dict[str, int]:
        """Return the pages of each table after the change, or raise if they are too many."""
        if transaction.failed:
            raise StoreError(f"{self._path}: this change failed before and cannot be kept")
        trees = transaction.tree_pages(self._tree_pages)
        used = sum(trees.values()) + self._pages_beside_trees
        if intake:
            if used > self._pages(INTAKE_SHARE):
                raise self._full(used)
            self._extend_file(used * self._page_size)
        elif transaction.put_bytes and self._used_pages < used > self._pages(_DELETE_SHARE):
            raise self._full(used)
        return trees

    def _extend_file(self, used: int) -> None:
        """Make sure that beside the ``used`` bytes the disk has given the file room for deletes."""
        reserve = min(_EXTEND_BYTES, self._header.max_bytes // 16)
        size = self.file_bytes
        if size >= min(used + reserve, self._header.max_bytes):
            return
        target = min(used + reserve + _EXTEND_BYTES, self._header.max_bytes)
        try:
            _allocate(self._data_file, size, target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise disk_full(self._path) from error
            raise StoreError(f"{self._path}: its file cannot be extended: {error.strerror}") from error

    def _full(self, used: int) -> StoreFullError:
        share = used * self._page_size / self._header.max_bytes
        return StoreFullError(
            f"{self._path} is full: {share:.1%} of max_store_bytes={self._header.max_bytes} would be in use, "
            f"and intake stops at {INTAKE_SHARE:.0%}; wait until records complete, or open it with more"
        )

    def _sync(self) -> None:
        try:
            self._environment.sync(True)
        except lmdb.Error as error:
            raise translate(error, self._path) from error

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise StoreError(f"{self._path} was opened by process {self._pid}: a forked child cannot use it")
        if self._closed:
            raise StoreError(f"{self._path} is closed")

    @contextmanager
    def _alone_in_thread(self) -> Iterator[None]:
        if getattr(self._local, "busy", False):
            raise StoreError("this thread has a transaction open: transactions do not nest")
        self._local.busy = True
        try:
            yield
        finally:
            self._local.busy = False
