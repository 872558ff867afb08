"""A sorted set of byte strings in plain Python.

A file of its own: it is a data structure with a contract of its own, which knows nothing of a store.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

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
        """Return the highest key below ``key``."""
        at = bisect_left(self._lasts, key)
        if at < len(self._blocks):
            block = self._blocks[at]
            inside = bisect_left(block, key)
            if inside:
                return block[inside - 1]
        return self._lasts[at - 1] if at else None
