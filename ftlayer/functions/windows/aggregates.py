"""Built-in aggregates of windows of fixed times over whole batches, in the C extension's memory.

A window of a key is numbered there as a key is that has its start as one column more, and its aggregates go from there
into the state that `FixedWindows` has: before timers read it, before a snapshot, and when much has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.functions.aggregates.table import I32, AggregateTable
from ftlayer.functions.aggregates.typed import AggregatePlan
from ftlayer.functions.keyed import Key, MapTable, Timers
from ftlayer.functions.outcome import I64
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.undo.log import UndoLog
from ftlayer.functions.windows.assigners import Fixed

FARTHEST_MS = 2**61
"""Times, and sizes of windows, up to which no sum of them is beyond 64 bits."""

MOST_ASSIGNED = 1 << 20
"""Rows and their windows that are worked out at a time: 8 MiB for each number of them."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Assigned:
    """The windows of a batch's rows.

    Attributes:
        rows: int64[m], ascending: which row; one for each window that it is in and that is not over.
        starts: int64[m], ms since 1970: which window.
        late: int64[k]: the rows all of whose windows are over.
    """

    rows: I64
    starts: I64
    late: I64


class WindowAggregates(AggregateTable):
    """The aggregates of an operator's windows: `ftlayer.functions.keyed.StateCache`."""

    def __init__(
        self, windows: Fixed, lateness_ms: int, plan: AggregatePlan, maps: MapTable, timers: Timers
    ) -> None:
        """``maps`` is the keyed state, start → aggregates; ``timers`` those of the operator."""
        super().__init__(plan, _Contents(maps))
        self._windows = windows
        self._lateness_ms = lateness_ms
        self._timers = timers

    def _begin(self) -> None:
        super()._begin()
        # By slot: whether the window has the timer of its end, as far as is known.
        self._timed: Bools = np.zeros(0, np.bool_)

    @property
    def rows_at_once(self) -> int:
        """So many rows may be assigned at once: each is in so many windows."""
        return max(1, MOST_ASSIGNED // self._most)

    @property
    def _most(self) -> int:
        return -(-self._windows.size_ms // self._windows.every_ms)

    def takes(self, times: I64) -> bool:
        """Whether times, and those of their windows, can be reckoned with in 64 bits."""
        farthest = FARTHEST_MS - self._windows.size_ms - self._lateness_ms
        return not len(times) or (int(times.min()) > -farthest and int(times.max()) < farthest)

    def assign(self, times: I64, watermark_ms: int) -> Assigned:
        """Return the windows of rows by their event times: int64[n], ms since 1970, which `takes` has taken."""
        size, every = self._windows.size_ms, self._windows.every_ms
        last = times - (times - self._windows.offset_ms) % every
        starts = last[:, None] - every * np.arange(self._most - 1, -1, -1, dtype=np.int64)
        inside = times[:, None] - starts < size
        over = np.minimum(starts + (size + self._lateness_ms), LAST_WATERMARK_MS)
        live = inside & ((starts + size > watermark_ms) | (over > watermark_ms))
        late = inside.any(axis=1) & ~live.any(axis=1)
        return Assigned(np.nonzero(live)[0], starts[live], np.flatnonzero(late))

    def add_to(
        self, rows: pa.RecordBatch, assigned: Assigned, watermark_ms: int, log: UndoLog | None
    ) -> list[tuple[int, int]]:
        """Add rows to their windows. A row that an aggregate of one of them cannot take changes none.

        Returns pairs of such a row, and that aggregate's number. With ``log``, what is changed is noted there.
        """
        refused: list[tuple[int, int]] = []
        windows, starts = assigned.rows, assigned.starts
        while len(windows):
            failed = self._add_all(rows, windows, starts, watermark_ms, log)
            refused += failed
            if not failed or self._most == 1:
                break
            # What lies before the row stands as it is added now; what lies behind may have failed for the row alone.
            row, _ = failed[0]
            before, behind = np.searchsorted(windows, [row, row + 1])
            if before:
                self._add_all(rows, windows[:before], starts[:before], watermark_ms, log)
            windows, starts = windows[behind:], starts[behind:]
        return refused

    def _add_all(
        self, rows: pa.RecordBatch, windows: I64, starts: I64, watermark_ms: int, log: UndoLog | None
    ) -> list[tuple[int, int]]:
        """Add rows to windows, and return those that cannot be added, and for which aggregate.

        Where a row may be in several windows, the first such row alone: nothing is changed then.
        """
        taken = rows if len(windows) == rows.num_rows and self._most == 1 else rows.take(pa.array(windows))
        slots, are_kept = self.number([*self.plan.key_columns(taken), pa.array(starts)])
        _, failed, kept = self._values.add(slots, taken, results=False, undo=True)
        assert kept is not None
        if failed and self._most > 1:
            self.restore(kept, None)
            place, number = failed[0]
            return [(int(windows[place]), number)]
        if log is not None:
            log.add((self.restore, kept, None))
        if failed:
            # What was refused sets no timer.
            added = np.ones(len(slots), np.bool_)
            added[[place for place, _ in failed]] = False
            slots, starts = slots[added], starts[added]
        self._set_timers(slots, starts, are_kept, watermark_ms, log)
        return [(int(windows[place]), number) for place, number in failed]

    def _set_timers(
        self, slots: I32, starts: I64, are_kept: Bools, watermark_ms: int, log: UndoLog | None
    ) -> None:
        """Set the timers of windows' ends; ``are_kept`` says of the last slots whether state had them."""
        known = len(self._keys)
        if known > len(self._timed):
            self._timed = np.concatenate([self._timed, np.zeros(max(known, 1024), np.bool_)])
        if not self._lateness_ms:
            self._timed[known - len(are_kept) : known] = are_kept
        without = ~self._timed[slots]
        if self._lateness_ms:
            # One that is kept for late records may have been emitted, and behind a restore no watermark says so.
            without |= starts + self._windows.size_ms <= watermark_ms
        if not without.any():
            return
        due = np.unique(slots[without])
        for named in self._keys.of(due):
            key, start = _apart(named)
            self._timers.add_event(key, min(start + self._windows.size_ms, LAST_WATERMARK_MS))
        self._timed[due] = True
        if log is not None:
            log.add((_forget, self._timed, due))

    def settle(self) -> None:
        """Write what has changed into the state, which a timer is about to read.

        It removes windows there. Those are over, so no row comes to them; their slots go when all is given back.
        """
        if self._values.accumulators.dirty:
            self.write_back()

    def give_back(self) -> None:
        """Write everything into the state, and know nothing of it any more: a row is added there."""
        if len(self._keys):
            self.write_back()
            self._begin()


class _Contents:
    """The state of windows by key and start."""

    def __init__(self, maps: MapTable) -> None:
        self._maps = maps

    def get(self, named: Key, default: Any) -> Any:
        key, start = _apart(named)
        return self._maps.items(key).get(start, default)

    def update(self, pairs: Iterable[tuple[Key, Any]]) -> None:
        for named, content in pairs:
            self._maps.put(*_apart(named), content)


def _apart(named: Any) -> tuple[Key, int]:
    """Return key and start of what has both as one key."""
    *key, start = named
    return (key[0] if len(key) == 1 else tuple(key)), start


def _forget(timed: Bools, due: I32) -> None:
    """A batch is taken back, and the timers that it has set."""
    timed[due] = False
