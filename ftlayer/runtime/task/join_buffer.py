"""One side of an interval join: the rows that later ones of the other side may still match.

Rows lie in *runs*, each sorted by (key's hash, time), so that one binary search for a whole batch finds the
rows that match it; neighbouring runs of similar size are merged (O'Neil et al., "The log-structured
merge-tree", 1996), which keeps them few at a logarithmic price a row. A run's rows are found again by time
for eviction, and by origin where a replay replaces them. Nothing here is Python work a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.records.keyhash import key_column
from ftlayer.runtime.handler import concat_record_ids, origins_of
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, MIN_TIME_MS, RecordIds
from ftlayer.runtime.task.contract import BoolArray, ids_mask

MAX_RUN_BYTES = 64 << 20
"""Runs are not merged beyond this: what a merge copies stays short, and no column nears Arrow's 2 GiB."""

I64 = I64Array


@dataclass(frozen=True, slots=True)
class JoinRows:
    """Rows of one side.

    Attributes:
        payload: n rows.
        hashes: int32[n], of their keys.
        times: int64[n], ms.
        keep_until: int64[n], the last event time that a row of the other side can have that matches (ms).
        hold_until: int64[n], the monotone time before which a row is not evicted (ms); None: no such time.
        lineage, owed: their RecordIds and, uint64[m], the XOR of what was emitted under each; None untracked.
    """

    payload: pa.RecordBatch
    hashes: I32Array
    times: I64
    keep_until: I64
    hold_until: I64 | None = None
    lineage: RecordIds | None = None
    owed: U64Array | None = None

    def __len__(self) -> int:
        return len(self.times)

    def take(self, rows: I64) -> JoinRows:
        owed = None
        if self.lineage is not None and self.owed is not None:
            owed = self.owed[self.lineage.entries(rows)[0]]
        return JoinRows(
            self.payload.take(pa.array(rows)),
            self.hashes[rows],
            self.times[rows],
            self.keep_until[rows],
            None if self.hold_until is None else self.hold_until[rows],
            None if self.lineage is None else self.lineage.take(rows),
            owed,
        )


def concat_rows(parts: Sequence[JoinRows]) -> JoinRows:
    """Return the rows of all parts, which are tracked or not and held or not alike."""
    holds = [part.hold_until for part in parts if part.hold_until is not None]
    lineages = [part.lineage for part in parts if part.lineage is not None]
    owed = [part.owed for part in parts if part.owed is not None]
    return JoinRows(
        pa.concat_batches([part.payload for part in parts]),
        np.concatenate([part.hashes for part in parts]),
        np.concatenate([part.times for part in parts]),
        np.concatenate([part.keep_until for part in parts]),
        np.concatenate(holds) if holds else None,
        concat_record_ids(lineages) if lineages else None,
        np.concatenate(owed) if owed else None,
    )


class Run:
    """Rows sorted by (hash, time). ``rows.owed`` and ``alive`` change in place, nothing else does."""

    def __init__(self, rows: JoinRows) -> None:
        self._stamps, ranks = np.unique(rows.times, return_inverse=True)
        places = _places(rows.hashes, ranks)
        order = np.argsort(places, kind="stable")
        self._places = places[order]
        self.rows = rows.take(order)
        self.alive: BoolArray = np.ones(len(rows), np.bool_)
        self.live = len(rows)
        self._by_expiry: I64 = np.argsort(self.rows.keep_until, kind="stable")
        self._expiries: I64 = self.rows.keep_until[self._by_expiry]
        self._expired = 0

    def find(self, hashes: I32Array, first: I64, last: I64) -> tuple[I64, I64]:
        """Return the range [start, end) of the rows with each hash and ``first`` <= time <= ``last``."""
        low = _places(hashes, np.searchsorted(self._stamps, first, "left"))
        high = _places(hashes, np.searchsorted(self._stamps, last, "right"))
        starts, ends = np.searchsorted(self._places, low), np.searchsorted(self._places, high)
        return starts, np.maximum(starts, ends)

    def kill(self, rows: I64) -> None:
        self.alive[rows] = False
        self.live = int(np.count_nonzero(self.alive))

    def expire(self, watermark: int, mono_ms: int) -> I64:
        """Take out the rows that nothing can match any more; return them."""
        if self.rows.hold_until is not None:
            over = self.alive & (self.rows.hold_until <= mono_ms)
            due: I64 = np.flatnonzero(over & is_past(self.rows.keep_until, watermark))
        else:
            side: Literal["left", "right"] = "right" if watermark == MAX_TIME_MS else "left"
            end = int(np.searchsorted(self._expiries, watermark, side))
            due = self._by_expiry[self._expired : end]
            self._expired = max(self._expired, end)
            due = due[self.alive[due]]
        self.alive[due] = False
        self.live -= len(due)
        return due

    def with_other_root(self, origins: U64Array, roots: U64Array) -> I64:
        """Return the rows with one of these ``origins`` (sorted) under another root than these ``roots``."""
        lineage = self.rows.lineage
        if lineage is None or not len(lineage.roots):
            return _NO_ROWS
        order, ordered = self._by_root
        starts = np.searchsorted(ordered, origins, "left")
        counts = np.searchsorted(ordered, origins, "right") - starts
        places = order[spread_ranges(starts, counts)]
        places = places[~np.isin(lineage.roots[places], roots)]
        return np.unique(lineage.record_of[places]) if len(places) else _NO_ROWS

    def keys(self, names: tuple[str, ...]) -> list[pa.Array]:
        return [key_column(self.rows.payload, name) for name in names]

    def compacted(self) -> Run:
        return Run(self.rows.take(np.flatnonzero(self.alive)))

    @property
    def next_hold(self) -> int | None:
        """The first monotone time (ms) at which a row that is held may go; None if none is held."""
        if self.rows.hold_until is None or not self.live:
            return None
        return int(self.rows.hold_until[self.alive].min())

    @property
    def roots(self) -> U64Array:
        """The roots of the rows that are in. Safe in another thread: a row that goes meanwhile may be in it."""
        lineage = self.rows.lineage
        if lineage is None:
            return np.zeros(0, np.uint64)
        # A copy first: indexing with a mask that changes meanwhile would count and copy different rows.
        return lineage.roots[ids_mask(lineage, self.alive.copy())]

    @cached_property
    def _by_root(self) -> tuple[I64, U64Array]:
        lineage = self.rows.lineage
        origins = np.zeros(0, np.uint64) if lineage is None else origins_of(lineage)
        order: I64 = np.argsort(origins, kind="stable")
        return order, origins[order]


class JoinBuffer:
    """One side of a join, with the rows of replays in runs of their own.

    ``runs`` is replaced with every change of the set of runs.
    """

    def __init__(self) -> None:
        self.runs: tuple[Run, ...] = ()

    def add(self, rows: JoinRows) -> None:
        """Put rows in; all of a call are held for some time, or none is."""
        if not len(rows):
            return
        others = [run for run in self.runs if (run.rows.hold_until is None) != (rows.hold_until is None)]
        alike = [run for run in self.runs if (run.rows.hold_until is None) == (rows.hold_until is None)]
        new = Run(rows)
        while alike and alike[-1].live <= 2 * new.live and _mergeable(alike[-1], new):
            older = alike.pop()
            new = Run(concat_rows([older.rows.take(np.flatnonzero(older.alive)), new.rows]))
        self.runs = (*others, *alike, new)

    def expire(self, watermark: int, mono_ms: int) -> Iterator[tuple[Run, I64]]:
        """Take out what nothing can match any more; yield it run by run."""
        for run in self.runs:
            due = run.expire(watermark, mono_ms)
            if len(due):
                yield run, due

    def matches(
        self, hashes: I32Array, first: I64, last: I64, block: int
    ) -> Iterator[list[tuple[Run, I64, I64]]]:
        """Find the rows with each hash and ``first`` <= time <= ``last``, about ``block`` pairs at a time.

        Yields for each run with any of them which probe, and which row of the run; probes in their order from one
        block to the next. Rows that are taken out between two blocks are not in the later one.
        """
        found = [(run, *run.find(hashes, first, last)) for run in self.runs]
        if not found:
            return
        before = np.cumsum(sum(ends - starts for _, starts, ends in found))
        if not len(before) or not before[-1]:
            return
        cuts = np.flatnonzero(np.diff(before // block)) + 1
        for start, end in pairwise([0, *cuts.tolist(), len(hashes)]):
            pairs = []
            for run, starts, ends in found:
                counts = ends[start:end] - starts[start:end]
                rows = spread_ranges(starts[start:end], counts)
                probes = np.repeat(np.arange(start, end, dtype=np.int64), counts)
                alive = run.alive[rows]
                if alive.any():
                    pairs.append((run, probes[alive], rows[alive]))
            if pairs:
                yield pairs

    def replace(self, origins: U64Array, roots: U64Array) -> int:
        """Take out the rows of these origins under other roots than these; return how many."""
        before = sum(run.live for run in self.runs)
        ordered = np.unique(origins)
        for run in self.runs:
            gone = run.with_other_root(ordered, roots)
            if len(gone):
                run.kill(gone)
        return before - sum(run.live for run in self.runs)

    @property
    def payload_bytes(self) -> int:
        return sum(run.rows.payload.nbytes for run in self.runs)

    def drop_oldest_run(self) -> None:
        """Take out the rows that have been here longest, as many as lie together."""
        self.runs = self.runs[1:]

    def clear(self) -> None:
        self.runs = ()

    def tidy(self) -> None:
        if any(run.live < (len(run.rows) + 1) // 2 or not run.live for run in self.runs):
            self.runs = tuple(
                run if 2 * run.live >= len(run.rows) else run.compacted() for run in self.runs if run.live
            )

    def next_hold(self) -> int | None:
        """The first monotone time (ms) at which a held row may go; None if none is held."""
        holds = [hold for run in self.runs if (hold := run.next_hold) is not None]
        return min(holds, default=None)

    def __len__(self) -> int:
        return sum(run.live for run in self.runs)


def spread_ranges(starts: I64, counts: I64) -> I64:
    """Return the numbers of all ranges ``starts[i]`` … ``starts[i] + counts[i] - 1``, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    numbers: I64 = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
    return numbers


def same_keys(
    ours: Sequence[pa.Array], our_rows: I64, theirs: Sequence[pa.Array], their_rows: I64
) -> BoolArray:
    """Return for each pair of rows whether their keys (a column each part) are equal; as in SQL, no null is."""
    same: BoolArray = np.ones(len(our_rows), np.bool_)
    for our_column, their_column in zip(ours, theirs, strict=True):
        a, b = our_column.take(pa.array(our_rows)), their_column.take(pa.array(their_rows))
        try:
            equal = pc.fill_null(pc.equal(a, b), False).to_numpy(zero_copy_only=False)
            if pa.types.is_floating(
                a.type
            ):  # as for Spark and for keyed state, one not-a-number is like the other
                both = pc.and_(pc.is_nan(a), pc.is_nan(b))
                equal = equal | pc.fill_null(both, False).to_numpy(zero_copy_only=False)
        except pa.ArrowNotImplementedError:  # nested types
            pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
            equal = np.array([x is not None and x == y for x, y in pairs], np.bool_)
        same &= equal
    return same


def rows_without_null(columns: Sequence[pa.Array]) -> BoolArray | None:
    """Return which rows have no null in any of the columns: bool[n], None for all of them."""
    whole: BoolArray | None = None
    for column in columns:
        if column.null_count:
            valid = column.is_valid().to_numpy(zero_copy_only=False)
            whole = valid if whole is None else whole & valid
    return whole


def shifted(times: I64, by_ms: int) -> I64:
    kept: I64 = (
        np.minimum(times, MAX_TIME_MS - by_ms) if by_ms >= 0 else np.maximum(times, MIN_TIME_MS - by_ms)
    )
    return kept + by_ms


def is_past(keep_until: I64, watermark: int) -> BoolArray:
    """Return which times the watermark has passed; its highest value has passed all of them."""
    return keep_until <= watermark if watermark == MAX_TIME_MS else keep_until < watermark


_NO_ROWS: I64 = np.zeros(0, np.int64)


def _places(hashes: I32Array, ranks: I64) -> U64Array:
    return (hashes.view(np.uint32).astype(np.uint64) << np.uint64(32)) | ranks.astype(np.uint64)


def _mergeable(older: Run, newer: Run) -> bool:
    return bool(older.rows.payload.nbytes + newer.rows.payload.nbytes <= MAX_RUN_BYTES)
