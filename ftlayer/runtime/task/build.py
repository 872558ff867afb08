"""From the graph to the tasks of one slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import Histogram
from ftlayer.functions.conversion import VALUES, concat, misfit_text, records_in_form, to_batch
from ftlayer.functions.current import CurrentRecord, running, worst
from ftlayer.functions.failures import failure_of, raise_signalled
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import I64Array, U64Array
from ftlayer.records.keyhash import key_column, spark_hash
from ftlayer.records.partitioning import Forward
from ftlayer.runtime.handler import Handler
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.task import actions as task_actions
from ftlayer.runtime.task import join_buffer
from ftlayer.runtime.task.chain_plan import ChainPlan, TaskMode
from ftlayer.runtime.task.contract import BoolArray, Task, known_of, replayed
from ftlayer.runtime.task.emitter import Emitter, reports
from ftlayer.runtime.task.event_time import Alarm, StatusWatermarkValve
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import Join, Replay, Source
from ftlayer.vertex.calls import StreamOptions


@dataclass(frozen=True)
class Found:
    """Pairs of rows with equal keys.

    Attributes:
        mine: int64[n], the batch's row of each pair, ascending.
        theirs: int64[n], the other side's row of each, as a place in ``rows``.
        rows: the other side's rows that were found.
        parts: where these lie: runs, and rows of each, one after the other.
    """

    mine: I64Array
    theirs: I64Array
    rows: join_buffer.JoinRows
    parts: tuple[tuple[join_buffer.Run, I64Array], ...]

    @classmethod
    def of(
        cls,
        columns: Sequence[pa.Array],
        their_keys: tuple[str, ...],
        met: list[tuple[join_buffer.Run, I64Array, I64Array]],
    ) -> Found:
        """Sort out the pairs that have just the key's hash in common.

        Args:
            columns: the key's columns in the batch.
            their_keys: the names of the other side's.
            met: what `JoinBuffer.matches` gave: at least one run.
        """
        mine: list[I64Array] = []
        theirs: list[I64Array] = []
        parts: list[tuple[join_buffer.Run, I64Array]] = []
        count = 0
        for run, my_rows, their_rows in met:
            same = join_buffer.same_keys(columns, my_rows, run.keys(their_keys), their_rows)
            rows, places = np.unique(their_rows[same], return_inverse=True)
            mine.append(my_rows[same])
            theirs.append(places + count)
            parts.append((run, rows))
            count += len(rows)
        order = np.argsort(np.concatenate(mine), kind="stable")
        # Rows of replays lie beside others: how long they are held is of no interest here.
        taken = join_buffer.concat_rows(
            [replace(run.rows.take(rows), hold_until=None) for run, rows in parts]
        )
        return cls(np.concatenate(mine)[order], np.concatenate(theirs)[order], taken, tuple(parts))

    def kill(self, places: list[int]) -> None:
        gone = np.zeros(len(self.rows), np.bool_)
        gone[places] = True
        start = 0
        for run, rows in self.parts:
            run.kill(rows[gone[start : start + len(rows)]])
            start += len(rows)

    def owe(self, owed: U64Array) -> None:
        """Add to what the ``rows`` owe: ``owed`` has a value for each of their RecordIds."""
        start = 0
        for run, rows in self.parts:
            if run.rows.owed is not None and run.rows.lineage is not None:
                places, _ = run.rows.lineage.entries(rows)
                run.rows.owed[places] ^= owed[start : start + len(places)]
                start += len(places)


@dataclass(frozen=True)
class Paired:
    """The results of pairs.

    Attributes:
        payload: the results of the pairs whose two records are both unharmed, in the order of the pairs.
        pairs: int64[k], which pairs these are.
        failed_left, failed_right: why records failed, by their place among those given; first failures only.
    """

    payload: pa.RecordBatch
    pairs: I64Array
    failed_left: dict[int, RowFailure]
    failed_right: dict[int, RowFailure]


@dataclass(slots=True)
class Calls:
    """How many pairs the function was called for, the one it works on included. Any thread may look."""

    begun: int = 0


def pair_up(
    operator: Join,
    left: Sequence[Any],
    left_of: I64Array,
    right: Sequence[Any],
    right_of: I64Array,
    calls: Calls,
    acknowledged: int | None = None,
) -> Paired:
    """Call the function for ``left[left_of[i]]`` and ``right[right_of[i]]``, for each i, and count in ``calls``.

    Where it raises, or returns what does not fit the schema, both records fail, and no pair of theirs gives a
    result any more; a record that Python cannot hold (an `Exception` in its place) fails alone.

    Records of the side ``acknowledged`` (0: left, 1: right) do not fail: their other pairs give results. With one
    of them that Python cannot hold, no pair gives one, and nothing fails.
    """
    results: list[Any] = []
    pairs: list[int] = []
    failed_left: dict[int, RowFailure] = {}
    failed_right: dict[int, RowFailure] = {}
    function = operator.function

    def fail(a: int, b: int, error: BaseException, *, ours: bool = True, theirs: bool = True) -> None:
        ours, theirs = ours and acknowledged != 0, theirs and acknowledged != 1
        if not (ours or theirs):
            return
        failure = failure_of(0, operator.uid, error, operator.rules)
        if ours:
            failed_left.setdefault(a, failure)
        if theirs:
            failed_right.setdefault(b, failure)

    for pair, (a, b) in enumerate(zip(left_of.tolist(), right_of.tolist(), strict=True)):
        calls.begun += 1
        if a in failed_left or b in failed_right:
            continue
        x, y = left[a], right[b]
        if isinstance(x, Exception):
            fail(a, b, x, theirs=False)
        elif isinstance(y, Exception):
            fail(a, b, y, ours=False)
        else:
            try:
                results.append(function(x, y))
                pairs.append(pair)
            except BaseException as error:  # noqa: BLE001 - whatever a user's function raises fails its records
                fail(a, b, error)

    kept: I64Array = np.array(pairs, np.int64)
    try:
        payload = to_batch(results, operator.schema, VALUES, lax=operator.rules.lax)
    except BaseException as error:  # noqa: BLE001 - anything may be among what a user's function returned
        raise_signalled(error)
        good = []
        fits = np.zeros(len(results), np.bool_)
        for place, (pair, result) in enumerate(zip(pairs, results, strict=True)):
            try:
                good.append(to_batch([result], operator.schema, VALUES, lax=operator.rules.lax))
                fits[place] = True
            except BaseException as error:  # noqa: BLE001 - as above
                raise_signalled(error)
                misfit = TypeError(
                    f"what {operator.uid!r} returned does not fit its schema: {misfit_text(error)}; "
                    f"{VALUES.expected(operator.schema)}"
                )
                fail(int(left_of[pair]), int(right_of[pair]), misfit)
        payload = concat(good, operator.schema)
        kept = kept[fits]
    if failed_left or failed_right:
        unharmed = ~(_among(left_of[kept], failed_left) | _among(right_of[kept], failed_right))
        payload = payload.filter(pa.array(unharmed))
        kept = kept[unharmed]
    return Paired(payload, kept, failed_left, failed_right)


def without(
    paired: Paired,
    left_of: I64Array,
    right_of: I64Array,
    failures: Sequence[RowFailure],
    acknowledged: int | None = None,
) -> tuple[Paired, BoolArray]:
    """Fail both records of some results (``row`` counts in them); return also which results are left.

    Records of the side ``acknowledged`` do not fail, as in `pair_up`.
    """
    failed_left, failed_right = dict(paired.failed_left), dict(paired.failed_right)
    for failure in failures:
        pair = paired.pairs[failure.row]
        if acknowledged != 0:
            failed_left.setdefault(int(left_of[pair]), failure)
        if acknowledged != 1:
            failed_right.setdefault(int(right_of[pair]), failure)
    kept = ~(_among(left_of[paired.pairs], failed_left) | _among(right_of[paired.pairs], failed_right))
    payload = paired.payload.filter(pa.array(kept))
    return Paired(payload, paired.pairs[kept], failed_left, failed_right), kept


def _among(places: I64Array, failed: dict[int, RowFailure]) -> BoolArray:
    return np.isin(places, np.fromiter(failed, np.int64, len(failed)))


MAX_PAST_BYTES = 128 << 20
"""Payload that is remembered of one side; beyond it the oldest runs are forgotten early."""

STEPS = 16
"""Rows are forgotten in so many portions over the time they are remembered: each costs a look at all of them."""


class PastRows:
    """Acknowledged rows of one side. They are in ``buffer`` for ``remember_ms``, and up to 1/16 of it longer."""

    def __init__(self, remember_ms: int) -> None:
        self.buffer = join_buffer.JoinBuffer()
        self._remember_ms = remember_ms
        self._step_ms = max(remember_ms // STEPS, 1)
        self._next_ms = messages.MIN_TIME_MS

    def add(self, rows: join_buffer.JoinRows, mono_ms: int) -> None:
        if not len(rows):
            return
        until = -(-(mono_ms + self._remember_ms) // self._step_ms) * self._step_ms
        self.buffer.add(
            replace(
                rows,
                keep_until=np.full(len(rows), messages.MIN_TIME_MS, np.int64),
                hold_until=np.full(len(rows), until, np.int64),
                owed=np.zeros_like(rows.owed) if rows.owed is not None else None,
            )
        )
        while self.buffer.payload_bytes > MAX_PAST_BYTES:
            self.buffer.drop_oldest_run()

    def forget(self, mono_ms: int) -> None:
        if mono_ms < self._next_ms:
            return
        self._next_ms = (mono_ms // self._step_ms + 1) * self._step_ms
        for _ in self.buffer.expire(messages.MIN_TIME_MS + 1, mono_ms):
            pass
        self.buffer.tidy()


# An interval join in event time.
#
# A record is joined with what is there of the other side and then waits for what is still to come, unacknowledged;
# when the watermark has passed the last time that could match it, it is acknowledged with all that its pairs owe.
# Until then its own id keeps its root from being complete, so the ids of pairs may reach the vertex in any order.


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
        self._buffers = (join_buffer.JoinBuffer(), join_buffer.JoinBuffer())
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
        return self._gate.time_ms

    def handle(self, event: task_actions.TaskEvent, now: Now) -> list[task_actions.Action]:
        if self._ended:
            return []
        match event:
            case task_actions.ElementCame(channel, element):
                if isinstance(element, messages.Batch):
                    return self._take(self._input[channel.edge], element, now)
                if isinstance(element, messages.LatencyMarker):
                    return [*self._emitter.marker(element)]
                self._gate.mark(channel, element)
                return self._gate_moved(now)
            case task_actions.TimeCame():
                self._alarm.rung()
                return [*self._evict(now), *self._wake()]
            case task_actions.TaskStart():
                return self._gate_moved(now)
            case task_actions.ChannelReset(channel):
                self._gate.reset(channel)
                return self._gate_moved(now)
            case _:
                raise task_actions.refused(self.uid, event)

    def held_roots(self) -> U64Array:
        runs = [run for buffer in self._buffers for run in buffer.runs]
        return np.concatenate([run.roots for run in runs]) if runs else np.zeros(0, np.uint64)

    @property
    def progress(self) -> int:
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

    def _gate_moved(self, now: Now) -> list[task_actions.Action]:
        actions: list[task_actions.Action] = []
        while (mark := self._gate.news()) is not None:
            if isinstance(mark, messages.Watermark):
                actions.extend(self._evict(now))
            actions.extend(self._emitter.mark(mark))
        if self._gate.ended:
            actions.extend(self._finish())
        return actions

    def _evict(self, now: Now) -> list[task_actions.Action]:
        for buffer, past in zip(self._buffers, self._past, strict=True):
            for run, rows in buffer.expire(self._gate.time_ms, now.mono_ms):
                self._settle(run, rows)
                if run.rows.owed is not None:
                    past.add(run.rows.take(rows), now.mono_ms)
            buffer.tidy()
            past.forget(now.mono_ms)
        return reports(self._handler.xor)

    def _finish(self) -> list[task_actions.Action]:
        self._ended = True
        for buffer in self._buffers:
            for run in buffer.runs:
                self._settle(run, np.flatnonzero(run.alive))
            buffer.clear()
        for past in self._past:
            past.buffer.clear()
        return [
            *reports(self._handler.xor),
            *self._emitter.mark(messages.EndOfStream()),
            task_actions.TaskEnded(),
        ]

    def _settle(self, run: join_buffer.Run, rows: I64) -> None:
        if run.rows.owed is not None:
            self._handler.xor.settle(run.rows.lineage, run.rows.owed, rows)

    def _wake(self) -> list[task_actions.Action]:
        holds = [hold for buffer in self._buffers if (hold := buffer.next_hold()) is not None]
        return self._alarm.set(min(holds, default=None))

    # ------------------------------------------------------------ records

    def _take(self, side: int, batch: messages.Batch, now: Now) -> list[task_actions.Action]:
        lineage, times = batch.lineage, batch.times
        if times is None:
            return self._refuse(batch)
        again = _NO_REPLAYS if lineage is None else replayed(lineage)
        replays = bool(again.any())
        if replays:
            self._replace(lineage)
        columns = [key_column(batch.payload, name) for name in self._operator.keys[side]]
        first, last = (
            join_buffer.shifted(times, self._first[side]),
            join_buffer.shifted(times, self._last[side]),
        )
        owed = None if lineage is None else np.zeros(len(lineage.roots), np.uint64)
        rows = join_buffer.JoinRows(batch.payload, spark_hash(columns), times, last, None, lineage, owed)
        failures: dict[int, RowFailure] = {}
        actions: list[task_actions.Action] = []
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
        self._keep(side, rows, alive, join_buffer.rows_without_null(columns), again if replays else None, now)
        actions.extend(reports(self._handler.xor))
        return [*actions, *self._wake()] if replays else actions

    def _refuse(self, batch: messages.Batch) -> list[task_actions.Action]:
        reason = (
            "the record has no event time, and a join goes by it; put assign_watermarks before the join, "
            "behind every operator with timers"
        )
        failures = (RowFailure(row, self.uid, reason, "") for row in range(batch.num_rows))
        self._handler.xor.fail(batch.lineage, failures)
        return reports(self._handler.xor)

    def _replace(self, lineage: messages.RecordIds | None) -> None:
        """Forget what the stored records that come again have here: its roots have left the table."""
        if lineage is None or lineage.origins is None:
            return
        again = lineage.origins != lineage.roots
        for buffer in (*self._buffers, *(past.buffer for past in self._past)):
            buffer.replace(lineage.origins[again], lineage.roots[again])

    def _join(
        self,
        side: int,
        rows: join_buffer.JoinRows,
        columns: list[pa.Array],
        met: list[tuple[join_buffer.Run, I64, I64]],
        failures: dict[int, RowFailure],
        *,
        past: bool = False,
    ) -> list[task_actions.Action]:
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
        rows: join_buffer.JoinRows,
        alive: BoolArray,
        with_key: BoolArray | None,
        again: BoolArray | None,
        now: Now,
    ) -> None:
        waits = ~join_buffer.is_past(rows.keep_until, self._gate.time_ms)
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

    one: messages.RecordIds | None
    one_of: I64
    other: messages.RecordIds | None
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


class LinkedTask:
    """`Task` of two of them: a join, or a source where nothing is tracked, and what is chained to it.

    Tickets are the second one's: the first one persists nothing. Any thread may look at the properties.
    """

    def __init__(self, first: Task, link: Channel, second: Task) -> None:
        self.uid = first.uid
        self.subtask = first.subtask
        self._first = first
        self._link = link
        self._second = second

    def handle(self, event: task_actions.TaskEvent, now: Now) -> list[task_actions.Action]:
        match event:
            case task_actions.TaskStart():
                actions = self._second.handle(event, now)
                return [*actions, *self._pass_on(self._first.handle(event, now), now)]
            case task_actions.TimeCame():
                actions = self._pass_on(self._first.handle(event, now), now)
                return [*actions, *self._second.handle(event, now)]
            case task_actions.RowsPersisted():
                return self._second.handle(event, now)
            case _:
                return self._pass_on(self._first.handle(event, now), now)

    def held_roots(self) -> U64Array:
        return np.concatenate([self._first.held_roots(), self._second.held_roots()])

    @property
    def progress(self) -> int:
        return sum(getattr(task, "progress", 0) for task in (self._first, self._second))

    @property
    def watermark_ms(self) -> int:
        return getattr(self._second, "watermark_ms", messages.MIN_TIME_MS)

    @property
    def late(self) -> int:
        return sum(getattr(task, "late", 0) for task in (self._first, self._second))

    @property
    def latencies(self) -> Mapping[str, Histogram]:
        return getattr(self._second, "latencies", {})

    @property
    def row(self) -> int | None:
        return getattr(self._first, "row", None)

    def _pass_on(self, actions: list[task_actions.Action], now: Now) -> list[task_actions.Action]:
        """Carry out what concerns the link, and return the rest. The end is the second one's to tell."""
        rest: list[task_actions.Action] = []
        for action in actions:
            if isinstance(action, task_actions.Send) and action.channel == self._link:
                rest.extend(self._second.handle(task_actions.ElementCame(self._link, action.element), now))
            elif not isinstance(action, task_actions.TaskEnded):
                rest.append(action)
        return rest


MAX_REMEMBER_MS = 5 * 60_000
"""A join remembers acknowledged rows no longer for replays: they are as many as come in that time."""


def build_task(graph: JobGraph, uid: str, subtask: int, mode: TaskMode) -> Task:
    """Make one subtask of the chain ``uid`` ready.

    The task is a `ReplayTask` for a chain of a `Replay`.

    Args:
        graph: what runs.
        uid: uid of the chain.
        subtask: which of its subtasks, from 0.
        mode: makes what is of the mode. A chain that ends in a `Sink` has its sink opened at once, and in barrier
            mode one that keeps state its backend.

    Raises:
        InvalidTopologyError: the operators cannot be run as a chain, or not in this mode.
        ConfigError: the sink cannot be opened.
        CheckpointError: state cannot be restored.
    """
    operators = graph.vertex(uid).operators
    mode.check(operators)
    handler = mode.handler(uid)
    first = operators[0]
    if isinstance(first, Replay):
        return mode.replay(graph, uid, subtask, handler)
    if isinstance(first, Source | Join) and len(operators) > 1:
        cut, edge = _cut_behind_first(graph, uid)
        behind = _input_task(cut, edge.target, subtask, handler, mode)
        link = Channel(edge.number, subtask, subtask)
        ahead = mode.source if isinstance(first, Source) else partial(_input_task, mode=mode)
        return LinkedTask(ahead(cut, uid, subtask, handler), link, behind)
    if isinstance(first, Source):
        return mode.source(graph, uid, subtask, handler)
    return _input_task(graph, uid, subtask, handler, mode)


def _input_task(graph: JobGraph, uid: str, subtask: int, handler: Handler, mode: TaskMode) -> Task:
    first = graph.vertex(uid).operators[0]
    if not isinstance(first, Join):
        return mode.chain(ChainPlan(graph, uid, subtask, handler))
    edges = graph.edges_into(uid)
    gate = StatusWatermarkValve.of(graph, uid, subtask)
    emitter = Emitter(graph, uid, subtask, handler)
    return JoinTask(uid, subtask, first, edges, gate, handler, emitter, _hold_ms(graph), _remember_ms(graph))


def _hold_ms(graph: JobGraph) -> int:
    """Both sides of a pair that failed come again within the longest timeout of all."""
    return max((options.timeout_ms for _, options in graph.options), default=StreamOptions().timeout_ms)


def _remember_ms(graph: JobGraph) -> int:
    """A record that failed on its way comes within this time, though it gets lost once and fails all other times."""
    return max((min(_retry_span_ms(options), MAX_REMEMBER_MS) for _, options in graph.options), default=0)


def _retry_span_ms(options: StreamOptions) -> int:
    if options.max_attempts is None:
        return MAX_REMEMBER_MS
    pauses = options.backoff_ms[: options.max_attempts - 1]
    more = max(options.max_attempts - 1 - len(pauses), 0)
    total = sum(pauses) + more * (options.backoff_ms[-1] if options.backoff_ms else 0)
    # The vertex notices a timeout after one and a half at the latest, with its usual number of buckets.
    return options.timeout_ms * 3 // 2 + int(total * (1 + options.jitter))


def _cut_behind_first(graph: JobGraph, uid: str) -> tuple[JobGraph, JobEdge]:
    """Cut a chain in two behind its first operator; return the graph with it, and the edge between the two.

    What a join emits, and what a source reads, are records of their own with ids of their own: a record of a join
    is not done when the rows of its pairs are, and the other way round.
    """
    vertex = graph.vertex(uid)
    first, second = vertex.operators[0], vertex.operators[1]
    halves = (
        JobVertex(uid, vertex.operators[:1], vertex.parallelism),
        JobVertex(second.uid, vertex.operators[1:], vertex.parallelism),
    )
    vertices = [half for other in graph.vertices for half in (halves if other is vertex else (other,))]
    edges = [replace(edge, source=second.uid) if edge.source == uid else edge for edge in graph.edges]
    link = JobEdge(len(edges), uid, second.uid, 0, Forward(), first.schema)
    return replace(graph, vertices=tuple(vertices), edges=(*edges, link)), link
