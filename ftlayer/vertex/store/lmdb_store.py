from __future__ import annotations

import errno
import mmap
import os
import resource
import struct
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import lmdb
import numpy as np
import numpy.typing as npt

from ftlayer import __version__
from ftlayer.errors import (
    ConfigError,
    MachineError,
    StoreDamagedError,
    StoreError,
    StoreFullError,
    StorePathError,
    StoreVersionError,
    other_format,
)
from ftlayer.vertex.store import lmdb_transaction
from ftlayer.vertex.store.directory import DATA_FILE, DirectoryLock, check_directory, holder_of, prepare
from ftlayer.vertex.store.key_value import INTAKE_SHARE, MAX_KEY_BYTES, TABLES, alone_in_thread

# Reading LMDB's data file without LMDB: what it claims to hold, and whether its trees can be trusted.
#
# LMDB maps its file and follows what it finds there, so that a truncated or overwritten file ends the
# process (SIGBUS, SIGSEGV, an assertion) or frees the wrong pages. Hence the check before it is opened:
# of each tree page, of the first bytes of each value's page, and of the free list. What a page of values
# holds is covered by checksums. The layout is that of LMDB 0.9, data version 1, 64 bit (``struct MDB_meta``,
# ``MDB_page``, ``MDB_node`` in its mdb.c).


_MAGIC_of_lmdb_file = 0xBEEFC0DE
_DATA_VERSION = 1
_NO_PAGE = 2**64 - 1
_PAGE_HEADER = 16
_BRANCH, _LEAF, _OVERFLOW, _META = 0x01, 0x02, 0x04, 0x08
_BIG_DATA, _SUB_TREE, _DUPLICATES = 0x01, 0x02, 0x04
_MAX_DEPTH = 32  # CURSOR_STACK in LMDB

_NODE_HEADER = 8
_TRANSACTION_BYTES = 8  # the size of a key of the free list
_PAGES_AT_ONCE = 512

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

# pgno, pad, flags, lower, upper | magic, version, address, map size
_META_HEAD = struct.Struct("=QHHHHIIQQ")
# pad, flags, depth, branch, leaf and overflow pages, entries, root: twice; last page, transaction
_TREE = struct.Struct("=IHHQQQQQ")
_META_TAIL = struct.Struct("=QQ")
_META_BYTES = _META_HEAD.size + 2 * _TREE.size + _META_TAIL.size


@dataclass(frozen=True, slots=True)
class Tree:
    depth: int
    pages: int
    entries: int
    root: int


@dataclass(frozen=True, slots=True)
class Meta:
    """The newest of the two meta pages."""

    page_size: int
    free: Tree
    main: Tree
    last_page: int
    transaction: int

    @property
    def end(self) -> int:
        """Bytes of the file that may hold data."""
        return (self.last_page + 1) * self.page_size


def read_meta(file: int, path: Path) -> Meta:
    """Return the newest meta page of an open data file. Raises `StoreDamagedError`."""
    first, page_size = _parse_meta(os.pread(file, _META_BYTES, 0), 0, path)
    second, _ = _parse_meta(os.pread(file, _META_BYTES, page_size), page_size, path)
    return max(first, second, key=lambda meta: meta.transaction)


def check_file(path: Path) -> Meta:
    """Walk all B-tree pages and the free list of a file; `StoreDamagedError` names the first fault."""
    with path.open("rb") as file:
        meta = read_meta(file.fileno(), path)
        # Pages taken and given back within one transaction are counted though they were never written.
        size = min(meta.end, os.fstat(file.fileno()).st_size)
        mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    # Unmapped when the last array that looks at it is gone; an error's traceback may keep one for a while.
    _Walk(path, np.frombuffer(mapped, dtype=np.uint8), meta).run()
    return meta


class _Walk:
    """A walk over all trees of one file, level by level, marking each page it comes to."""

    def __init__(self, path: Path, data: U8, meta: Meta) -> None:
        self.path = path
        self._meta = meta
        self._size = meta.page_size
        count = len(data) // meta.page_size
        self._pages = data[: count * meta.page_size].reshape(count, meta.page_size)
        self._used = np.zeros(count, dtype=bool)
        self._used[:2] = True

    def run(self) -> None:
        subtrees: list[Tree] = []
        for leaf in self._leaves(self._meta.main, MAX_KEY_BYTES):
            subtrees.extend(_parse_tree(value, 0) for value in leaf.subtrees())
        for tree in subtrees:
            for leaf in self._leaves(tree, MAX_KEY_BYTES):
                if leaf.is_subtree.any():
                    raise self._fault("a table has another one inside")
        free = [np.empty(0, dtype=np.uint64)]
        for leaf in self._leaves(self._meta.free, _TRANSACTION_BYTES):
            free.extend(self._free_lists(leaf))
        self._check_free(np.concatenate(free))

    def _leaves(self, tree: Tree, longest_key: int) -> Iterator[_Leaves]:
        """Go down a tree, and iterate over its checked leaves some hundred pages at a time."""
        if tree.root == _NO_PAGE:
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise self._fault(f"a tree claims a depth of {tree.depth}")
        level = np.array([tree.root], dtype=np.uint64)
        for _ in range(tree.depth - 1):
            parts = [self._nodes(part, _BRANCH).children() for part in _pieces(level)]
            level = np.concatenate(parts)
        for part in _pieces(level):
            leaves = _Leaves(self._nodes(part, _LEAF))
            if leaves.key_sizes.min() < 1 or leaves.key_sizes.max() > longest_key:
                raise self._fault("a key has an impossible size")
            if leaves.has_duplicates.any() or leaves.ends.max() > self._size:
                raise self._fault("a value ends outside of its page")
            if leaves.is_big.any():
                self._check_big_values(*leaves.big_values(self._size))
            yield leaves

    def _nodes(self, numbers: U64, kind: int) -> _Nodes:
        """Return the nodes of some tree pages, after checking that they lie inside of them."""
        self._mark(numbers, np.ones(len(numbers), dtype=np.int64))
        pages = self._pages[numbers.astype(np.int64)]
        words = pages.view(np.uint16)
        flags, lower, upper = (words[:, at].astype(np.int64) for at in (5, 6, 7))
        fewest = 2 if kind == _BRANCH else 1
        if (pages[:, :8].copy().view(np.uint64)[:, 0] != numbers).any() or (flags != kind).any():
            raise self._fault("a page of a tree is not what it should be")
        if ((lower < _PAGE_HEADER + 2 * fewest) | (lower > upper) | (upper > self._size) | lower % 2).any():
            raise self._fault("a page of a tree has impossible bounds")
        counts = (lower - _PAGE_HEADER) // 2
        rows, columns = _ranges(np.zeros_like(counts), counts)
        offsets = words[rows, columns + _PAGE_HEADER // 2].astype(np.int64)
        if ((offsets < upper[rows]) | (offsets > self._size - _NODE_HEADER) | offsets % 2).any():
            raise self._fault("a page of a tree points outside of itself")
        nodes = _Nodes(pages, rows, offsets)
        if (nodes.data_starts > self._size).any():
            raise self._fault("a key ends outside of its page")
        return nodes

    def _check_big_values(self, firsts: U64, counts: I64) -> None:
        """Check the pages of values that do not fit into their leaf: LMDB frees what their headers say."""
        self._mark(firsts, counts)
        heads = self._pages[firsts.astype(np.int64), :_PAGE_HEADER]
        wrong = heads[:, :8].copy().view(np.uint64)[:, 0] != firsts
        wrong |= heads[:, 10:12].copy().view(np.uint16)[:, 0] != _OVERFLOW
        wrong |= heads[:, 12:16].copy().view(np.uint32)[:, 0] != counts
        if wrong.any():
            raise self._fault(f"page {int(firsts[wrong][0])} is not the value's page it should be")

    def _free_lists(self, leaves: _Leaves) -> Iterator[U64]:
        flat = self._pages.reshape(-1)
        for value, length, is_big in leaves.values():
            if is_big:
                start = int(value[:8].view(np.uint64)[0]) * self._size + _PAGE_HEADER
                value = flat[start : start + length]
            numbers = value[:length].copy().view(np.uint64) if length % 8 == 0 else np.empty(0, np.uint64)
            if not numbers.size or int(numbers[0]) >= numbers.size:
                raise self._fault("its free list is malformed")
            yield numbers[1 : 1 + int(numbers[0])]

    def _check_free(self, free: U64) -> None:
        if int(free.max(initial=0)) > self._meta.last_page:
            raise self._fault("its free list names pages beyond its end")
        inside = free[free < len(self._used)].astype(np.int64)
        if np.unique(free).size != free.size or self._used[inside].any():
            raise self._fault("its free list names pages that are in use")

    def _mark(self, firsts: U64, counts: I64) -> None:
        """Note that these runs of pages are in use; each page may be once."""
        end = len(self._used)
        if (firsts >= end).any() or (firsts.astype(np.int64) + counts > end).any():
            raise self._fault(f"a tree points to page {int(firsts.max())}, beyond its end: it was truncated")
        if counts.sum() > end:
            raise self._fault("its values claim more pages than it has")
        _, pages = _ranges(firsts.astype(np.int64), counts)
        if self._used[pages].any() or np.unique(pages).size != pages.size:
            raise self._fault("a page is used in two places")
        self._used[pages] = True

    def _fault(self, what: str) -> StoreDamagedError:
        return _damaged(self.path, what)


class _Nodes:
    def __init__(self, pages: U8, rows: I64, offsets: I64) -> None:
        self.pages = pages
        self.rows = rows
        self.offsets = offsets
        words = pages.view(np.uint16)
        at = offsets // 2
        self.low, self.high, self.flags, self.key_sizes = (
            words[rows, at + word].astype(np.int64) for word in range(4)
        )
        self.data_starts = offsets + _NODE_HEADER + self.key_sizes

    def children(self) -> U64:
        return (self.low | self.high << 16 | self.flags << 32).astype(np.uint64)


class _Leaves:
    def __init__(self, nodes: _Nodes) -> None:
        self._nodes = nodes
        self._lengths = nodes.low | nodes.high << 16
        self.key_sizes = nodes.key_sizes
        self.is_big = (nodes.flags & _BIG_DATA) != 0
        self.is_subtree = (nodes.flags & _SUB_TREE) != 0
        self.has_duplicates = (nodes.flags & _DUPLICATES) != 0
        self.ends = nodes.data_starts + np.where(self.is_big, 8, self._lengths)

    def big_values(self, page_size: int) -> tuple[U64, I64]:
        """Return the first page and the number of pages of each value that is not in its leaf."""
        rows, starts = self._nodes.rows[self.is_big], self._nodes.data_starts[self.is_big]
        firsts = self._nodes.pages[rows[:, None], starts[:, None] + np.arange(8)].view(np.uint64)[:, 0]
        return firsts, -(-(self._lengths[self.is_big] + _PAGE_HEADER) // page_size)

    def subtrees(self) -> Iterator[bytes]:
        for value, is_subtree in zip(self.values(), self.is_subtree.tolist(), strict=True):
            if is_subtree:
                yield value[0][: _TREE.size].tobytes().ljust(_TREE.size, b"\0")

    def values(self) -> Iterator[tuple[U8, int, bool]]:
        """Iterate over (page from the value on, its length, whether it is a page number instead)."""
        columns = (self._nodes.rows, self._nodes.data_starts, self._lengths, self.is_big)
        for row, start, length, is_big in zip(*(column.tolist() for column in columns), strict=True):
            yield self._nodes.pages[row, start:], length, is_big


def _pieces(numbers: U64) -> Iterator[U64]:
    for start in range(0, len(numbers), _PAGES_AT_ONCE):
        yield numbers[start : start + _PAGES_AT_ONCE]


def _ranges(starts: I64, counts: I64) -> tuple[I64, I64]:
    """Return for each number of all ranges [start, start + count) the index of its range, and itself."""
    rows = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return rows, np.arange(len(rows)) - before[rows] + starts[rows]


def _parse_meta(data: bytes, offset: int, path: Path) -> tuple[Meta, int]:
    if len(data) < _META_BYTES:
        raise _damaged(path, f"it ends in its header, at byte {offset + len(data)}")
    number, _, flags, _, _, magic, version, _, map_size = _META_HEAD.unpack_from(data)
    free = _parse_tree(data, _META_HEAD.size)
    main = _parse_tree(data, _META_HEAD.size + _TREE.size)
    last_page, transaction = _META_TAIL.unpack_from(data, _META_BYTES - _META_TAIL.size)
    (page_size,) = struct.unpack_from("=I", data, _META_HEAD.size)
    if (
        magic != _MAGIC_of_lmdb_file
        or version != _DATA_VERSION
        or not flags & _META
        or number != (offset > 0)
    ):
        raise _damaged(path, f"there is no LMDB header (data version 1) at byte {offset}")
    sane_size = 512 <= page_size <= 65_536 and page_size & (page_size - 1) == 0
    if not sane_size or (offset and page_size != offset) or not 1 <= last_page <= map_size // page_size:
        raise _damaged(path, f"the header at byte {offset} makes no sense")
    return Meta(page_size, free, main, last_page, transaction), page_size


def _parse_tree(data: bytes, offset: int) -> Tree:
    _, _, depth, branch, leaf, overflow, entries, root = _TREE.unpack_from(data, offset)
    return Tree(depth, branch + leaf + overflow, entries, root)


def _damaged(path: Path, what: str) -> StoreDamagedError:
    return StoreDamagedError(
        f"{path} is damaged: {what}. Restore the directory from a copy, or move it away to start empty"
    )


assert struct.calcsize("P") == 8, f"LMDB's 64-bit layout is needed, not that of {sys.platform}"


FORMAT_VERSION = 3

# The last 10 % of a smaller store would be too few pages for deletes to work in.
MIN_STORE_BYTES = 8 << 20

_HEADER_TABLE = "header"
# The header's is made first: with any other table and without it, the file would be taken for another program's.
_DATABASES = (_HEADER_TABLE, *TABLES, lmdb_transaction.PARTS)
_HEADER_KEY = b"header"
# The ftlayer that opened the store for writing last, as text.
_WRITER_KEY = b"writer"
_MAGIC = b"ftlayer\n"
_HEADER_START = struct.Struct("<8sI")  # magic and format version: the same in every version
_HEADER_REST = struct.Struct("<QQ")  # incarnation, max bytes; a CRC-32 of all follows

# What the process needs beside the map: threads' stacks, Arrow's pools, allocations in between.
_ADDRESS_SPACE_BESIDE = 256 << 20

_MAX_READERS = 256


@dataclass(frozen=True, slots=True)
class StoreHeader:
    format_version: int
    incarnation: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """An open environment and what belongs to it; ``lock`` is None when it is for reading only."""

    path: Path
    environment: lmdb.Environment
    databases: dict[str, lmdb._Database]
    header: StoreHeader
    data_file: int
    lock: DirectoryLock | None


def open_for_writing(path: Path, max_bytes: int, *, sync: bool) -> Opened:
    """Open or create the store at ``path``, hold it, begin a new incarnation. Raises as `LmdbStore.open`."""
    prepare(path)
    with ExitStack() as undo:
        lock = DirectoryLock.take(path)
        undo.callback(lock.release)
        meta = _check_data_file(path)
        map_bytes = max(max_bytes, 0 if meta is None else meta.end)
        _check_address_space(map_bytes)
        try:
            environment = _open_environment(path, map_bytes=map_bytes, sync=sync)
            undo.callback(environment.close)
            old = _read_header(environment, path)
            databases = _make_databases(environment)
            header = _begin_incarnation(environment, databases[_HEADER_TABLE], old, max_bytes)
            environment.sync(True)
        except lmdb.Error as error:
            raise lmdb_transaction.translate(error, path) from error
        data_file = os.open(path / DATA_FILE, os.O_RDWR)
        undo.pop_all()
    return Opened(path, environment, databases, header, data_file, lock)


def open_for_reading(path: Path) -> Opened:
    """Open the store at ``path`` without changing it, beside a live vertex too."""
    check_directory(path)
    if not (path / DATA_FILE).exists():
        raise StorePathError(f"{path} holds no store: there is no {DATA_FILE} in it")
    live = holder_of(path) is not None
    if not live:
        _check_data_file(path)
    try:
        data_file = os.open(path / DATA_FILE, os.O_RDONLY)
    except OSError as error:
        raise StorePathError(f"{path} cannot be read: {error.strerror}") from error
    with ExitStack() as undo:
        undo.callback(os.close, data_file)
        try:
            # A live writer must know of this reader; without one, a directory that cannot be written will do.
            environment = _open_environment(path, readonly=True, lock=live)
            undo.callback(environment.close)
            header = _read_header(environment, path)
            if header is None:
                raise StorePathError(f"{path} holds an LMDB file that no ftlayer has written")
            databases = _find_databases(environment, path)
        except lmdb.Error as error:
            raise lmdb_transaction.translate(error, path) from error
        undo.pop_all()
    return Opened(path, environment, databases, header, data_file, None)


def _check_data_file(path: Path) -> Meta | None:
    try:
        # LMDB makes the file and then writes its first pages: killed in between, it left it empty.
        if not (path / DATA_FILE).exists() or not (path / DATA_FILE).stat().st_size:
            return None
        return check_file(path / DATA_FILE)
    except OSError as error:
        raise StorePathError(f"{path / DATA_FILE} cannot be read: {error.strerror}") from error


def _check_address_space(map_bytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":  # Other systems do not say what is in use.
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    if in_use + map_bytes + _ADDRESS_SPACE_BESIDE > limit:
        raise MachineError(
            f"this process may use {limit} bytes of address space and uses {in_use}: too few for a store of "
            f"{map_bytes}. Raise the limit (ulimit -v; spark.executor.pyspark.memory sets one too) or lower "
            "max_store_bytes"
        )


def _open_environment(
    path: Path, *, map_bytes: int = 0, sync: bool = True, readonly: bool = False, lock: bool = True
) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(path),
        map_size=map_bytes,
        readonly=readonly,
        metasync=sync,
        sync=sync,
        mode=0o600,
        create=False,
        max_readers=_MAX_READERS,
        max_dbs=len(_DATABASES),
        max_spare_txns=8,
        lock=lock,
    )


def _begin_incarnation(
    environment: lmdb.Environment, database: lmdb._Database, old: StoreHeader | None, max_bytes: int
) -> StoreHeader:
    header = StoreHeader(FORMAT_VERSION, 1, max_bytes)
    if old is not None:
        header = replace(header, incarnation=old.incarnation + 1)
    with environment.begin(write=True) as transaction:
        transaction.put(_HEADER_KEY, _encode_header(header), db=database)
        transaction.put(_WRITER_KEY, __version__.encode(), db=database)
    return header


def _make_databases(environment: lmdb.Environment) -> dict[str, lmdb._Database]:
    # Without a transaction of ours each would begin its own, with Python's lock held while it waits.
    with environment.begin(write=True) as transaction:
        return {name: environment.open_db(name.encode(), txn=transaction) for name in _DATABASES}


def _find_databases(environment: lmdb.Environment, path: Path) -> dict[str, lmdb._Database]:
    databases = {}
    for name in _DATABASES:
        try:
            databases[name] = environment.open_db(name.encode(), create=False)
        except lmdb.NotFoundError as error:
            raise StoreDamagedError(f"{path} is damaged: its table {name!r} is missing") from error
    return databases


def _read_header(environment: lmdb.Environment, path: Path) -> StoreHeader | None:
    if not environment.stat()["entries"]:
        return None
    try:
        with environment.begin() as transaction:
            database = environment.open_db(_HEADER_TABLE.encode(), txn=transaction, create=False)
            data = transaction.get(_HEADER_KEY, db=database)
            writer = transaction.get(_WRITER_KEY, db=database)
    except lmdb.NotFoundError as error:
        raise StorePathError(
            f"{path} holds an LMDB file that no ftlayer has written: name another directory"
        ) from error
    # Killed between making the table and writing to it: a new store.
    return None if data is None else _decode_header(data, writer, path)


def _encode_header(header: StoreHeader) -> bytes:
    data = _HEADER_START.pack(_MAGIC, header.format_version)
    data += _HEADER_REST.pack(header.incarnation, header.max_bytes)
    return data + zlib.crc32(data).to_bytes(4, "little")


def _decode_header(data: bytes, writer: bytes | None, path: Path) -> StoreHeader:
    damaged = StoreDamagedError(f"{path} is damaged: its header fails its checksum")
    if len(data) < _HEADER_START.size:
        raise damaged
    magic, version = _HEADER_START.unpack_from(data)
    if magic == _MAGIC and version > FORMAT_VERSION:
        raise StoreVersionError(other_format(path, version, FORMAT_VERSION, writer))
    if magic != _MAGIC or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
        raise damaged
    if version != FORMAT_VERSION:
        raise StoreVersionError(other_format(path, version, FORMAT_VERSION, writer))
    if len(data) != _HEADER_START.size + _HEADER_REST.size + 4:
        raise damaged
    return StoreHeader(version, *_HEADER_REST.unpack_from(data, _HEADER_START.size))


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
        self.path = opened.path
        self._environment = opened.environment
        self._databases = opened.databases
        self._lock = opened.lock
        self.format_version = opened.header.format_version
        self.max_bytes = opened.header.max_bytes
        self.incarnation = opened.header.incarnation  # opened for reading: the last writer's
        self._data_file = opened.data_file
        self._data_path = opened.path / DATA_FILE
        self.durability = durability
        self._pid = os.getpid()
        self._page_size = opened.environment.stat()["psize"]
        self._closed = False
        self._writer = threading.Lock()
        self._readers = 0
        self._readers_changed = threading.Condition()
        self._local = threading.local()
        with self._environment.begin() as transaction:
            self._tree_pages = lmdb_transaction.tree_pages(transaction, self._databases)
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

        ``read_only`` takes no lock, changes nothing, works beside a live vertex, and takes ``max_store_bytes`` from the
        store. One that has more in it opens too, refuses intake until enough has completed, and stays as large.

        Raises `ConfigError` for an option out of range, `StorePathError` for a missing parent, a path that is no
        directory or cannot be written, `StoreLockedError` naming the holder, `StoreVersionError`, `StoreDamagedError`,
        `StoreFullError` for a full disk, and `MachineError` when an address-space limit leaves no room for the map.
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
    def write(self, *, intake: bool) -> Iterator[lmdb_transaction.LmdbWriteTransaction]:
        with alone_in_thread(self._local), self._writer:
            self._check_usable()
            if self._lock is None:
                raise StoreError(f"{self.path} was opened for reading only")
            if intake and self._used_pages >= self._pages(INTAKE_SHARE):
                raise self._full(self._used_pages)
            try:
                raw = self._environment.begin(write=True)
            except lmdb.Error as error:
                raise lmdb_transaction.translate(error, self.path) from error
            transaction = lmdb_transaction.LmdbWriteTransaction(
                raw, self._databases, self.path, self._page_size
            )
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
                raise lmdb_transaction.translate(error, self.path) from error
            self._note_pages(trees)

    @contextmanager
    def read(self) -> Iterator[lmdb_transaction.LmdbReadTransaction]:
        with alone_in_thread(self._local):
            with self._readers_changed:
                self._check_usable()
                self._readers += 1
            try:
                raw = self._environment.begin(buffers=True)
                transaction = lmdb_transaction.LmdbReadTransaction(
                    raw, self._databases, self.path, self._page_size
                )
                try:
                    yield transaction
                finally:
                    transaction.end()
                    raw.abort()
            except lmdb.Error as error:
                raise lmdb_transaction.translate(error, self.path) from error
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
        with alone_in_thread(self._local), self._writer:
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
    def used_bytes(self) -> int:
        """Bytes of the pages in use as of the last commit of this store; free pages are not counted."""
        return self._used_pages * self._page_size

    @property
    def used_share(self) -> float:
        return self.used_bytes / self.max_bytes

    @property
    def file_bytes(self) -> int:
        """The size of the data file: the most that was ever in use, and some pages ahead."""
        return os.fstat(self._data_file).st_size

    def _pages(self, share: float) -> int:
        return int(self.max_bytes * share) // self._page_size

    def _note_pages(self, trees: dict[str, int]) -> None:
        """Take note of the pages in use as of the last commit: the tables', of both headers, of the free list."""
        self._tree_pages = trees
        self._pages_beside_trees = 2 + read_meta(self._data_file, self._data_path).free.pages
        self._used_pages = sum(trees.values()) + self._pages_beside_trees

    def _check_room(self, transaction: lmdb_transaction.LmdbWriteTransaction, intake: bool) -> dict[str, int]:
        if transaction.failed:
            raise StoreError(f"{self.path}: this change failed before and cannot be kept")
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
        reserve = min(_EXTEND_BYTES, self.max_bytes // 16)
        size = self.file_bytes
        if size >= min(used + reserve, self.max_bytes):
            return
        target = min(used + reserve + _EXTEND_BYTES, self.max_bytes)
        try:
            _allocate(self._data_file, size, target)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise lmdb_transaction.disk_full(self.path) from error
            raise StoreError(f"{self.path}: its file cannot be extended: {error.strerror}") from error

    def _full(self, used: int) -> StoreFullError:
        share = used * self._page_size / self.max_bytes
        return StoreFullError(
            f"{self.path} is full: {share:.1%} of max_store_bytes={self.max_bytes} would be in use, "
            f"and intake stops at {INTAKE_SHARE:.0%}; wait until records complete, or open it with more"
        )

    def _sync(self) -> None:
        try:
            self._environment.sync(True)
        except lmdb.Error as error:
            raise lmdb_transaction.translate(error, self.path) from error

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise StoreError(f"{self.path} was opened by process {self._pid}: a forked child cannot use it")
        if self._closed:
            raise StoreError(f"{self.path} is closed")
