"""An interval join in event time.

A record is joined with what is there of the other side and then waits for what is still to come, unacknowledged;
when the watermark has passed the last time that could match it, it is acknowledged with all that its pairs owe.
Until then its own id keeps its root from being complete, so the ids of pairs may reach the vertex in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ftlayer.clock import Now
from ftlayer.functions.conversion import VALUES, records_in_form
from ftlayer.functions.current import CurrentRecord, running, worst
from ftlayer.functions.failures import RowFailure
from ftlayer.handler.handler import Handler
from ftlayer.records.ids import I64Array, U64Array
from ftlayer.records.keyhash import key_column, spark_hash
from ftlayer.runtime.protocol.elements import Batch, EndOfStream, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task.actions import Action, TaskEnded
from ftlayer.runtime.task.alarm import Alarm
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.events import ChannelReset, ElementCame, TaskEvent, TaskStart, TimeCame, refused
from ftlayer.runtime.task.gate import StatusWatermarkValve
from ftlayer.runtime.task.join_buffer import (
    JoinBuffer,
    JoinRows,
    Run,
    is_past,
    rows_without_null,
    shifted,
)
from ftlayer.runtime.task.join_found import Found
from ftlayer.runtime.task.join_pairs import Calls, pair_up, without
from ftlayer.runtime.task.join_past import PastRows
from ftlayer.runtime.task.lineages import BoolArray, known_of, replayed
from ftlayer.runtime.task.reports import reports
from ftlayer.topology.job_graph import JobEdge
from ftlayer.topology.operators import Join

PAIRS_AT_A_TIME = 16_384
"""Results are emitted in portions of about so many: a hot key may have millions of pairs with one batch."""

I64 = I64Array


class JoinTask:
    """One subtask of a `Join`.

    What has no part in event time any more when it arrives is joined with what is there and not kept; ``late``
    counts such records. A replay is never late: it is kept until ``hold_ms`` of processing time have gone by at
    least, so that the replay of the other side still meets it, and it takes the place of what the same stored
    record has in the buffers (if such a row has other roots too, they are left unacknowledged and time out: their
    share of the row is gone). Keys with a null match nothing.

    Rows that were acknowledged are remembered for a while, for replays of the other side: a record that failed on
    its way here finds its partners, though they have no part in event time any more. Such a pair is anchored to the
    replay alone, and fails it alone. With a replay that comes later than `PastRows` remembers, the pair is lost.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        operator: Join,
        edges: tuple[JobEdge, ...],
        gate: StatusWatermarkValve,
        handler: Handler,
        emitter: Emitter,
        hold_ms: int,
        remember_ms: int,
    ) -> None:
        """Make one subtask ready; nothing is remembered with fault tolerance off.

        Args:
            uid, subtask: which one it is.
            operator: the join.
            edges: those into the chain.
            gate, handler, emitter: its own.
            hold_ms: should be the timeout of the streams whose records are joined.
            remember_ms: should be the longest time from a record's first attempt to the end of its retries.
        """
        self.uid = uid
        self.subtask = subtask
        self.late = 0
        self._operator = operator
        self._input = {edge.number: edge.input for edge in edges}
        self._gate = gate
        self._handler = handler
        self._emitter = emitter
        self._hold_ms = hold_ms
        self._buffers = (JoinBuffer(), JoinBuffer())
        self._past = (PastRows(remember_ms), PastRows(remember_ms))
        # Of a row of side s, matches have times from + _first[s] to + _last[s].
        self._first = (operator.lower_ms, -operator.upper_ms)
        self._last = (operator.upper_ms, -operator.lower_ms)
        self._alarm = Alarm()
        self._ended = False
        self._calls = Calls()
        # Of the pairs whose function runs: the batch's row of each, and how many calls there were before.
        self._running: tuple[I64, int] | None = None

    @property
    def watermark_ms(self) -> int:
        """The event time that the join has come to. Any thread may look."""
        return self._gate.time_ms

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        if self._ended:
            return []
        match event:
            case ElementCame(channel, element):
                if isinstance(element, Batch):
                    return self._take(self._input[channel.edge], element, now)
                if isinstance(element, LatencyMarker):
                    return [*self._emitter.marker(element)]
                self._gate.mark(channel, element)
                return self._gate_moved(now)
            case TimeCame():
                self._alarm.rung()
                return [*self._evict(now), *self._wake()]
            case TaskStart():
                return self._gate_moved(now)
            case ChannelReset(channel):
                self._gate.reset(channel)
                return self._gate_moved(now)
            case _:
                raise refused(self.uid, event)

    def held_roots(self) -> U64Array:
        runs = [run for buffer in self._buffers for run in buffer.runs]
        return np.concatenate([run.roots for run in runs]) if runs else np.zeros(0, np.uint64)

    @property
    def progress(self) -> int:
        """A number that changes with every pair. Any thread may look."""
        return self._calls.begun

    @property
    def row(self) -> int | None:
        """The row of its batch whose pair the function works on now, None if unknown. Any thread may look."""
        running, begun = self._running, self._calls.begun
        if running is None:
            return None
        rows, before = running
        place = begun - before - 1
        return int(rows[place]) if 0 <= place < len(rows) else None

    # ------------------------------------------------------------ event time

    def _gate_moved(self, now: Now) -> list[Action]:
        actions: list[Action] = []
        while (mark := self._gate.news()) is not None:
            if isinstance(mark, Watermark):
                actions.extend(self._evict(now))
            actions.extend(self._emitter.mark(mark))
        if self._gate.ended:
            actions.extend(self._finish())
        return actions

    def _evict(self, now: Now) -> list[Action]:
        """Acknowledge what nothing can match any more."""
        for buffer, past in zip(self._buffers, self._past, strict=True):
            for run, rows in buffer.expire(self._gate.time_ms, now.mono_ms):
                self._settle(run, rows)
                if run.rows.owed is not None:
                    past.add(run.rows.take(rows), now.mono_ms)
            buffer.tidy()
            past.forget(now.mono_ms)
        return reports(self._handler.xor)

    def _finish(self) -> list[Action]:
        self._ended = True
        for buffer in self._buffers:
            for run in buffer.runs:
                self._settle(run, np.flatnonzero(run.alive))
            buffer.clear()
        for past in self._past:
            past.buffer.clear()
        return [*reports(self._handler.xor), *self._emitter.mark(EndOfStream()), TaskEnded()]

    def _settle(self, run: Run, rows: I64) -> None:
        if run.rows.owed is not None:
            self._handler.xor.settle(run.rows.lineage, run.rows.owed, rows)

    def _wake(self) -> list[Action]:
        holds = [hold for buffer in self._buffers if (hold := buffer.next_hold()) is not None]
        return self._alarm.set(min(holds, default=None))

    # ------------------------------------------------------------ records

    def _take(self, side: int, batch: Batch, now: Now) -> list[Action]:
        lineage, times = batch.lineage, batch.times
        if times is None:
            return self._refuse(batch)
        again = _NO_REPLAYS if lineage is None else replayed(lineage)
        replays = bool(again.any())
        if replays:
            self._replace(lineage)
        columns = [key_column(batch.payload, name) for name in self._operator.keys[side]]
        first, last = shifted(times, self._first[side]), shifted(times, self._last[side])
        owed = None if lineage is None else np.zeros(len(lineage.roots), np.uint64)
        rows = JoinRows(batch.payload, spark_hash(columns), times, last, None, lineage, owed)
        failures: dict[int, RowFailure] = {}
        actions: list[Action] = []
        for met in self._buffers[1 - side].matches(rows.hashes, first, last, PAIRS_AT_A_TIME):
            actions.extend(self._join(side, rows, columns, met, failures))
        if replays:
            probes = np.flatnonzero(again)
            for met in self._past[1 - side].buffer.matches(
                rows.hashes[probes], first[probes], last[probes], PAIRS_AT_A_TIME
            ):
                met = [(run, probes[which], others) for run, which, others in met]
                actions.extend(self._join(side, rows, columns, met, failures, past=True))
        self._handler.xor.fail(lineage, failures.values())
        alive = np.ones(len(rows), np.bool_)
        alive[list(failures)] = False
        self._keep(side, rows, alive, rows_without_null(columns), again if replays else None, now)
        actions.extend(reports(self._handler.xor))
        return [*actions, *self._wake()] if replays else actions

    def _refuse(self, batch: Batch) -> list[Action]:
        reason = (
            "the record has no event time, and a join goes by it; put assign_watermarks before the join, "
            "behind every operator with timers"
        )
        failures = (RowFailure(row, self.uid, reason, "") for row in range(batch.num_rows))
        self._handler.xor.fail(batch.lineage, failures)
        return reports(self._handler.xor)

    def _replace(self, lineage: RecordIds | None) -> None:
        """Forget what the stored records that come again have here: its roots have left the table."""
        if lineage is None or lineage.origins is None:
            return
        again = lineage.origins != lineage.roots
        for buffer in (*self._buffers, *(past.buffer for past in self._past)):
            buffer.replace(lineage.origins[again], lineage.roots[again])

    def _join(
        self,
        side: int,
        rows: JoinRows,
        columns: list[pa.Array],
        met: list[tuple[Run, I64, I64]],
        failures: dict[int, RowFailure],
        *,
        past: bool = False,
    ) -> list[Action]:
        """Call the function for the pairs of ``rows`` with rows of the other side's runs, and emit the results.

        Those of the ``past`` were acknowledged: they owe nothing more, and cannot fail with a pair.
        """
        found = Found.of(columns, self._operator.keys[1 - side], met)
        mine, theirs, others = found.mine, found.theirs, found.rows
        if failures:
            unharmed = ~np.isin(mine, list(failures))
            mine, theirs = mine[unharmed], theirs[unharmed]
        if not len(mine):
            return []
        my_rows, my_places = np.unique(mine, return_inverse=True)
        my_records = records_in_form(rows.payload.take(pa.array(my_rows)), VALUES)
        their_records = records_in_form(others.payload, VALUES)
        calls = self._calls
        self._running = mine, calls.begun
        lefts, lefts_of, rights, rights_of = my_records, my_places, their_records, theirs
        if side == 1:
            lefts, lefts_of, rights, rights_of = their_records, theirs, my_records, my_places
        acknowledged = 1 - side if past else None
        with running(_KnownPairs(rows.lineage, mine, others.lineage, theirs), _pair_of(calls, calls.begun)):
            paired = pair_up(self._operator, lefts, lefts_of, rights, rights_of, calls, acknowledged)
        self._running = None
        routes = self._emitter.ask("", paired.payload)
        if routes is not None and routes.failures:
            paired, kept = without(paired, lefts_of, rights_of, routes.failures, acknowledged)
            routes = routes.keep(kept)
        mine_failed, theirs_failed = paired.failed_left, paired.failed_right
        if side == 1:
            mine_failed, theirs_failed = theirs_failed, mine_failed
        for place, failure in mine_failed.items():
            row = int(my_rows[place])
            failures[row] = replace(failure, row=row)
        if theirs_failed:
            found.kill(list(theirs_failed))
            failed = (replace(failure, row=place) for place, failure in theirs_failed.items())
            self._handler.xor.fail(others.lineage, failed)
        if not paired.payload.num_rows:
            return []
        mine, theirs = mine[paired.pairs], theirs[paired.pairs]
        times = np.maximum(rows.times[mine], others.times[theirs])
        if past:
            children = self._emitter.derived("", paired.payload, rows.lineage, mine, times, routes)
            if rows.owed is not None:
                np.bitwise_xor(rows.owed, children.owed, out=rows.owed)
            return list(children.sends)
        if side == 0:
            emission = self._emitter.pairs(
                paired.payload, rows.lineage, mine, others.lineage, theirs, times, routes
            )
            owed, owed_by_others = emission.owed_left, emission.owed_right
        else:
            emission = self._emitter.pairs(
                paired.payload, others.lineage, theirs, rows.lineage, mine, times, routes
            )
            owed, owed_by_others = emission.owed_right, emission.owed_left
        if rows.owed is not None:
            np.bitwise_xor(rows.owed, owed, out=rows.owed)
            found.owe(owed_by_others)
        return list(emission.sends)

    def _keep(
        self,
        side: int,
        rows: JoinRows,
        alive: BoolArray,
        with_key: BoolArray | None,
        again: BoolArray | None,
        now: Now,
    ) -> None:
        """Buffer the rows that may still be matched, and acknowledge the others that are ``alive``."""
        waits = ~is_past(rows.keep_until, self._gate.time_ms)
        if again is not None:
            waits |= again
        late = ~waits
        self.late += int(np.count_nonzero(late))
        if with_key is not None:
            waits &= with_key
            late &= with_key
        if rows.owed is not None:
            self._handler.xor.settle(rows.lineage, rows.owed, np.flatnonzero(alive & ~waits))
            self._past[side].add(rows.take(np.flatnonzero(alive & late)), now.mono_ms)
        waits &= alive
        fresh = waits if again is None else waits & ~again
        buffer = self._buffers[side]
        buffer.add(rows if fresh.all() else rows.take(np.flatnonzero(fresh)))
        if again is not None:
            held = rows.take(np.flatnonzero(waits & again))
            until = np.full(len(held), now.mono_ms + self._hold_ms, np.int64)
            buffer.add(replace(held, hold_until=until))


@dataclass(frozen=True, slots=True)
class _KnownPairs:
    """`ftlayer.functions.current.Known` of pairs: of the two records, the one that was tried more often."""

    one: RecordIds | None
    one_of: I64
    other: RecordIds | None
    other_of: I64

    def record(self, row: int) -> CurrentRecord:
        one = known_of(self.one).record(int(self.one_of[row]))
        return worst(one, known_of(self.other).record(int(self.other_of[row])))

    def tries(self, rows: I64) -> U64Array:
        one, other = (
            known_of(self.one).tries(self.one_of[rows]),
            known_of(self.other).tries(self.other_of[rows]),
        )
        larger: U64Array = np.maximum(one, other)
        return larger


def _pair_of(calls: Calls, before: int) -> Callable[[], int]:
    return lambda: calls.begun - before - 1


_NO_REPLAYS: BoolArray = np.zeros(0, np.bool_)
