"""The rows of tracked segments that are not done: marked at array speed, written down later.

A tracker's *location* is ``segment << 20 | row``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ftlayer.common.clock import Now
from ftlayer.vertex.rules.source_ranges import SourceRange
from ftlayer.vertex.store.key_value import WriteTransaction
from ftlayer.vertex.store.rows import I64, U64
from ftlayer.vertex.store.streams import Mask, Segments

if TYPE_CHECKING:
    from ftlayer.vertex.rules.streams import Stream

ROW_BITS = 20
"""A segment has the rows of one call: at most `ftlayer.vertex.calls.MAX_ROWS`, which is 2 to the power of this."""

_ROW_MASK = np.uint64((1 << ROW_BITS) - 1)
_SHIFT = np.uint64(ROW_BITS)

_RUN_ROWS = 64
"""Runs of so many rows on average are grouped as runs: sorting each row takes 30 ns, ten times as long."""


@dataclass(slots=True)
class LiveSegment:
    """A segment with rows that are not done.

    ``fresh``, uint64[n], has the root id under which each row was handed out last in this incarnation; 0: its root
    is the stored one. None: none was.

    ``registered`` is when its rows were, None for those of an earlier incarnation that were not handed out since.
    ``oldest_ms`` (Unix) is when its first record was, or failed first: a replay's segment is younger than its records
    are; 0: not known.

    ``source`` is there for rows that are not stored: where they are in their source.
    """

    stream: Stream
    done: Mask
    left: int
    registered: Now | None = None
    oldest_ms: int = 0
    fresh: U64 | None = None
    source: SourceRange | None = None

    def hand_out(self, rows: I64, roots: U64) -> None:
        if self.fresh is None:
            self.fresh = np.zeros(len(self.done), np.uint64)
        self.fresh[rows] = roots

    def roots(self, rows: I64, stored: U64) -> U64:
        """Return the roots of ``rows`` now, whose stored ones are ``stored``."""
        if self.fresh is None:
            return stored
        return np.where(self.fresh[rows] != 0, self.fresh[rows], stored)


class LiveSegments:
    """All tracked segments in memory. What changes here is written by `write_segment` and `flush`."""

    def __init__(self, segments: Segments) -> None:
        self._segments = segments
        self._live: dict[int, LiveSegment] = {}
        self._is_sorted = True  # nearly always: a batch's rows become pending behind later ones
        self._last = -1
        self._dirty: set[int] = set()
        self._finished: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def add(
        self,
        sequence: int,
        stream: Stream,
        done: Mask,
        registered: Now | None = None,
        oldest_ms: int = 0,
        source: SourceRange | None = None,
    ) -> None:
        """Follow a segment's rows, those of ``done`` (bool[n]) left out. ``source``: they are not in the store."""
        left = len(done) - int(np.count_nonzero(done))
        if left:
            self._is_sorted = self._is_sorted and sequence > self._last
            self._last = max(self._last, sequence)
            self._live[sequence] = LiveSegment(stream, done, left, registered, oldest_ms, source=source)
        elif source is not None:
            source.changed()
        else:
            self._finished.add(sequence)

    def get(self, sequence: int) -> LiveSegment | None:
        return self._live.get(sequence)

    def oldest_ms(self) -> dict[int, int]:
        """Return since when (Unix, ms) the oldest row that is left of each stream has been there, as far as known."""
        found: dict[int, int] = {}
        for live in self._live.values():
            number, since_ms = live.stream.number, live.oldest_ms
            if since_ms and since_ms < found.get(number, since_ms + 1):
                found[number] = since_ms
        return found

    def sequences(self, first: int) -> list[int]:
        """Return the numbers of segments that have rows left, from ``first`` on, in order."""
        if not self._is_sorted:
            self._live = dict(sorted(self._live.items()))
            self._is_sorted = True
        sequences = list(self._live)
        return sequences[bisect_left(sequences, first) :]

    def finish(self, sequence: int, rows: I64) -> Mask:
        """Mark ``rows`` (int64[m], distinct) of a segment as done; return which were not before, bool[m]."""
        live = self._live.get(sequence)
        if live is None:
            return np.zeros(len(rows), np.bool_)
        new: Mask = ~live.done[rows]
        live.done[rows] = True
        live.left -= int(np.count_nonzero(new))
        if not live.left:
            del self._live[sequence]
        if live.source is not None:
            live.source.changed()
        elif live.left:
            self._dirty.add(sequence)
        else:
            self._dirty.discard(sequence)
            self._finished.add(sequence)
        return new

    def forget(self, sequence: int) -> None:
        """Follow a segment no more whose rows are not in the store."""
        self._live.pop(sequence, None)

    def write_segment(self, txn: WriteTransaction, sequence: int) -> None:
        """Write down what is done of one segment: rows that moved must leave in the transaction they move
        in.
        """
        if sequence in self._finished:
            self._finished.discard(sequence)
            self._segments.delete(txn, sequence)
        elif sequence in self._dirty:
            self._dirty.discard(sequence)
            self._segments.put_done(txn, sequence, self._live[sequence].done)

    def flush(self, txn: WriteTransaction) -> None:
        for sequence in sorted(self._finished | self._dirty):
            self.write_segment(txn, sequence)

    @property
    def unwritten(self) -> bool:
        return bool(self._finished or self._dirty)


def locations_of(sequence: int, rows: int) -> U64:
    """Return the locations of all rows of a segment, uint64[rows]."""
    first = sequence << ROW_BITS
    return np.arange(first, first + rows, dtype=np.uint64)


def locate(sequence: int, rows: I64) -> U64:
    """Return the locations of some rows (int64[m]) of a segment."""
    return rows.astype(np.uint64) | np.uint64(sequence << ROW_BITS)


def by_segment(locations: U64) -> Iterator[tuple[int, I64, I64]]:
    """Group locations: yield (segment, rows int64[m], positions int64[m] in ``locations``) for each segment.

    Segments ascend, and so do the positions of each.
    """
    if not len(locations):
        return
    segments = locations >> _SHIFT
    rows = (locations & _ROW_MASK).astype(np.int64)
    starts = np.concatenate([[0], np.flatnonzero(segments[1:] != segments[:-1]) + 1])
    if len(starts) * _RUN_ROWS <= len(rows) or len(starts) == 1:
        yield from _by_run(segments[starts].tolist(), [*starts.tolist(), len(rows)], rows)
        return
    first = segments.min()
    # NumPy sorts 16-bit numbers by radix, ten times as fast as the 64-bit ones.
    keys = (segments - first).astype(np.uint16) if int(segments.max() - first) < 1 << 16 else segments
    order = np.argsort(keys, kind="stable")
    sorted_keys = keys[order]
    cuts = [0, *(np.flatnonzero(sorted_keys[1:] != sorted_keys[:-1]) + 1).tolist(), len(order)]
    for start, stop in pairwise(cuts):
        positions = order[start:stop]
        yield int(segments[positions[0]]), rows[positions], positions


def _by_run(segments: list[int], bounds: list[int], rows: I64) -> Iterator[tuple[int, I64, I64]]:
    """Do the same for runs of rows of one segment each: run i ends where run i + 1 begins, at ``bounds[i + 1]``."""
    runs: dict[int, list[tuple[int, int]]] = {}
    for segment, run in zip(segments, pairwise(bounds), strict=True):
        runs.setdefault(segment, []).append(run)
    for segment in sorted(runs):
        of_it = runs[segment]
        if len(of_it) == 1:
            ((start, stop),) = of_it
            yield segment, rows[start:stop], np.arange(start, stop)
            continue
        positions = np.concatenate([np.arange(start, stop) for start, stop in of_it])
        yield segment, rows[positions], positions
