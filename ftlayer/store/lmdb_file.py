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

# pgno, pad, flags, lower, upper | magic, version, address, map size
_PAGE_HEAD = struct.Struct("=QHHHH")
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
    """What the newest of the two meta pages says."""

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
    """Walk every B-tree page and the free list of the data file at ``path``; nobody may be writing it.

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
    """A walk over all trees of one file, marking each page it comes to."""

    def __init__(self, path: Path, data: npt.NDArray[np.uint8], meta: Meta) -> None:
        self._path = path
        self._data = data
        self._meta = meta
        self._pages = len(data) // meta.page_size
        self._used = np.zeros(meta.last_page + 1, dtype=bool)
        self._used[:2] = True

    def run(self) -> None:
        subtrees: list[Tree] = []
        self._tree(self._meta.main, subtrees=subtrees)
        for tree in subtrees:
            self._tree(tree)
        free_lists: list[npt.NDArray[np.uint64]] = []
        self._tree(self._meta.free, free_lists=free_lists)
        if free_lists:
            free = np.concatenate(free_lists)
            if int(free.max(initial=0)) > self._meta.last_page:
                raise self._fault("its free list names pages beyond its end")
            if np.unique(free).size != free.size or self._used[free.astype(np.int64)].any():
                raise self._fault("its free list names pages that are in use")

    def _tree(
        self,
        tree: Tree,
        *,
        subtrees: list[Tree] | None = None,
        free_lists: list[npt.NDArray[np.uint64]] | None = None,
    ) -> None:
        if tree.root == _NO_PAGE:
            return
        if not 1 <= tree.depth <= _MAX_DEPTH:
            raise self._fault(f"a tree claims a depth of {tree.depth}")
        level = [tree.root]
        for depth in range(tree.depth, 0, -1):
            below: list[int] = []
            for page_number in level:
                page, offsets = self._page(page_number, _LEAF if depth == 1 else _BRANCH)
                if depth > 1:
                    below.extend(_children(page, offsets))
                else:
                    self._leaf(page_number, page, offsets, subtrees, free_lists)
            level = below

    def _page(self, number: int, kind: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
        """Return a B-tree page and the offsets of its nodes, after checking both."""
        self._mark(number, 1)
        size = self._meta.page_size
        page = self._data[number * size : (number + 1) * size]
        stored, _, flags, lower, upper = _PAGE_HEAD.unpack(page[:_PAGE_HEADER].tobytes())
        if stored != number or flags != kind:
            raise self._fault(f"page {number} is not the tree page it should be")
        count = (lower - _PAGE_HEADER) // 2
        if not (_PAGE_HEADER < lower <= upper <= size) or lower % 2 or (kind == _BRANCH and count < 2):
            raise self._fault(f"page {number} has impossible bounds")
        offsets = page[_PAGE_HEADER:lower].view(np.uint16).astype(np.int64)
        if offsets.min() < upper or offsets.max() > size - 8 or (offsets % 2).any():
            raise self._fault(f"page {number} points outside of itself")
        key_sizes = page.view(np.uint16)[offsets // 2 + 3]
        if (offsets + 8 + key_sizes > size).any():
            raise self._fault(f"page {number} has a key that ends outside of it")
        return page, offsets

    def _leaf(
        self,
        number: int,
        page: npt.NDArray[np.uint8],
        offsets: npt.NDArray[np.int64],
        subtrees: list[Tree] | None,
        free_lists: list[npt.NDArray[np.uint64]] | None,
    ) -> None:
        size = self._meta.page_size
        words = page.view(np.uint16).astype(np.int64)
        at = offsets // 2
        data_sizes = words[at] | words[at + 1] << 16
        flags = words[at + 2]
        key_sizes = words[at + 3]
        starts = offsets + 8 + key_sizes
        longest = MAX_KEY_BYTES if free_lists is None else 8  # the free list's are transaction ids
        if key_sizes.min() < 1 or key_sizes.max() > longest:
            raise self._fault(f"page {number} has a key of an impossible size")
        big = (flags & _BIG_DATA) != 0
        if (starts + np.where(big, 8, data_sizes) > size).any() or (flags & _DUPLICATES).any():
            raise self._fault(f"page {number} has a value that ends outside of it")
        if (((flags & _SUB_TREE) != 0) & (subtrees is None)).any():
            raise self._fault(f"page {number} has a tree where a value should be")
        if big.any():
            self._big_values(_numbers_at(page, starts[big]), -(-(data_sizes[big] + _PAGE_HEADER) // size))
        if subtrees is not None:
            for start in starts[(flags & _SUB_TREE) != 0].tolist():
                subtrees.append(_parse_tree(page[start : start + _TREE.size].tobytes(), 0))
        if free_lists is not None:
            columns = (starts.tolist(), data_sizes.tolist(), big.tolist())
            for start, length, is_big in zip(*columns, strict=True):
                origin = page[start:]
                if is_big:
                    origin = self._data[
                        int(page[start : start + 8].view(np.uint64)[0]) * size + _PAGE_HEADER :
                    ]
                numbers = np.frombuffer(origin[:length].tobytes(), dtype=np.uint64)
                if not numbers.size or int(numbers[0]) >= numbers.size:
                    raise self._fault(f"page {number} has a malformed piece of the free list")
                free_lists.append(numbers[1 : 1 + int(numbers[0])])

    def _big_values(self, firsts: npt.NDArray[np.uint64], counts: npt.NDArray[np.int64]) -> None:
        """Check the pages of values that do not fit into their leaf: LMDB frees what their headers say."""
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            self._mark(first, count)
        heads = self._data[: self._pages * self._meta.page_size].reshape(self._pages, -1)[
            firsts.astype(np.int64), :_PAGE_HEADER
        ]
        flags, claimed = heads[:, 10:12].copy().view(np.uint16), heads[:, 12:16].copy().view(np.uint32)
        stored = heads[:, :8].copy().view(np.uint64)
        wrong = (stored[:, 0] != firsts) | (flags[:, 0] != _OVERFLOW) | (claimed[:, 0] != counts)
        if wrong.any():
            raise self._fault(f"page {int(firsts[wrong][0])} is not the value's page it should be")

    def _mark(self, first: int, count: int) -> None:
        """Note that these pages are in use; each may be once."""
        if first + count > self._pages:
            raise self._fault(f"page {first + count - 1} is beyond its end; it was truncated")
        if self._used[first : first + count].any():
            raise self._fault(f"two places use page {first}")
        self._used[first : first + count] = True

    def _fault(self, what: str) -> StoreDamagedError:
        return _damaged(self._path, what)


def _numbers_at(page: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    numbers: npt.NDArray[np.uint64] = page[starts[:, None] + np.arange(8)].view(np.uint64)[:, 0]
    return numbers


def _children(page: npt.NDArray[np.uint8], offsets: npt.NDArray[np.int64]) -> list[int]:
    words = page.view(np.uint16).astype(np.int64)
    at = offsets // 2
    children: list[int] = (words[at] | words[at + 1] << 16 | words[at + 2] << 32).tolist()
    return children


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
