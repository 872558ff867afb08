"""Reading LMDB's data file without LMDB: what it claims to hold, and whether its trees can be trusted.

LMDB maps its file and follows what it finds there, so that a truncated or overwritten file ends the
process (SIGBUS, SIGSEGV, an assertion) or frees the wrong pages. Hence the check before it is opened:
of each tree page, of the first bytes of each value's page, and of the free list. What a page of values
holds is covered by checksums. The layout is that of LMDB 0.9, data version 1, 64 bit (``struct MDB_meta``,
``MDB_page``, ``MDB_node`` in its mdb.c).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kv import MAX_KEY_BYTES

_MAGIC = 0xBEEFC0DE
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
    """One B-tree as its owner describes it."""

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
    """Return the newest meta page of an open data file.

    Raises `StoreDamagedError`.
    """
    first, page_size = _parse_meta(os.pread(file, _META_BYTES, 0), 0, path)
    second, _ = _parse_meta(os.pread(file, _META_BYTES, page_size), page_size, path)
    return max(first, second, key=lambda meta: meta.transaction)


def check_file(path: Path) -> Meta:
    """Walk every B-tree page and the free list of the data file at ``path``, which must not be written meanwhile.

    Raises `StoreDamagedError` that names the first fault.
    """
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
        self._path = path
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
        return _damaged(self._path, what)


class _Nodes:
    """The nodes of some pages: node i is in row ``rows[i]`` of ``pages`` at byte ``offsets[i]``."""

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
        """Return the pages that the nodes of branches point to."""
        return (self.low | self.high << 16 | self.flags << 32).astype(np.uint64)


class _Leaves:
    """The nodes of some leaves: keys with values."""

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
        """Iterate over the descriptions of trees among the values."""
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
    if magic != _MAGIC or version != _DATA_VERSION or not flags & _META or number != (offset > 0):
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
