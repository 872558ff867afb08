"""Acker mode's tasks: sources that persist, replays, and chains that acknowledge records."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from ftlayer.common.clock import Now
from ftlayer.common.rules.restart import is_of_no_row
from ftlayer.config import TopologyOptions
from ftlayer.errors import JobStartError, ProtocolError
from ftlayer.functions.steps import MAIN
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import NO_ROOTS, I64Array, U64Array, first_failed_of
from ftlayer.runtime.acker_mode.task.range_source import RangeSourceTask
from ftlayer.runtime.acker_mode.task.replay_task import StreamReplayTask
from ftlayer.runtime.handler import Handler, XorHandler
from ftlayer.runtime.protocol.messages import EndOfStream, Idle, LatencyMarker, RecordIds, Watermark
from ftlayer.runtime.task import actions as task_actions
from ftlayer.runtime.task import contract
from ftlayer.runtime.task.chain_plan import ChainPlan, OpenSink
from ftlayer.runtime.task.emitter import Emitter, SinkLatencies, SourceMarkers, failures_of, reports
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.runtime.task.pipeline import ChannelOutlet, Outlet, Passed, Rows, unharmed
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.job_graph import JobGraph, has_timers, reads_again
from ftlayer.topology.operators import Operator
from ftlayer.vertex.calls import Failure, Persist


class AckerCompanion(contract.ChainCompanion):
    rest_ms: int | None = None

    def __init__(self, xor: XorHandler) -> None:
        self._xor = xor

    def reports(self) -> list[task_actions.Action]:
        """Return failures first, so that no root of theirs is open."""
        return reports(self._xor)


@dataclass(slots=True)
class _BatchAtSink:
    """The records of one batch whose rows are at the sink.

    Attributes:
        lineage: of all records of the batch.
        row_record: int64[r], which record each row at the sink comes from.
        first_row: number of the first of these rows among all the rows the sink ever got.
        open: bool[n], neither done nor failed yet.
    """

    lineage: RecordIds
    row_record: I64Array
    first_row: int
    open: contract.BoolArray

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.row_record)


@dataclass(frozen=True, slots=True)
class Done:
    """Records of one batch that a sink has settled: which, and the failures of those that failed.

    ``failures`` count in records of the batch; a failed record is not among ``records``. No record is named
    twice, neither here nor in a later answer.
    """

    lineage: RecordIds
    records: I64Array
    failures: tuple[RowFailure, ...] = ()


@dataclass(slots=True)
class SettleQueue:
    """Maps what a sink says of its rows back to the records they come from.

    A record is done when all its rows are settled, and fails with the first of them that fails. ``held`` are
    the roots of the records that are still open, replaced with every change.
    """

    held: U64Array = field(default_factory=lambda: NO_ROOTS)
    _waiting: deque[_BatchAtSink] = field(default_factory=deque)
    _given: int = 0
    _settled: int = 0

    @property
    def given(self) -> int:
        return self._given

    @property
    def settled(self) -> int:
        return self._settled

    @property
    def empty(self) -> bool:
        return not self._waiting

    def add(self, lineage: RecordIds, row_record: I64Array, alive: I64Array) -> Done:
        """Take the records ``alive`` of a batch, whose rows go to the sink in this order, one a ``row_record``.

        Returns those that have no row there: they are done at once.
        """
        without_rows = np.zeros(len(lineage), np.bool_)
        without_rows[alive] = True
        without_rows[row_record] = False
        if len(row_record):
            is_open = np.zeros(len(lineage), np.bool_)
            is_open[row_record] = True
            self._waiting.append(_BatchAtSink(lineage, row_record, self._given, is_open))
            self._given += len(row_record)
            self._publish()
        return Done(lineage, np.flatnonzero(without_rows))

    def settle(self, settled: contract.Settled) -> list[Done]:
        """Take what the sink said; return what is done by it, batch by batch."""
        failures = [
            (self._settled + failure.row, failure)
            for failure in sorted(settled.failures, key=lambda failure: failure.row)
        ]
        self._settled += settled.rows
        if self._settled > self._given:
            raise ValueError(f"the sink settled {self._settled} rows and was given {self._given}")
        if not settled.rows:
            return []
        done = []
        while self._waiting and self._waiting[0].first_row < self._settled:
            waiting = self._waiting[0]
            mine = []
            while failures and failures[0][0] < waiting.end_row:
                mine.append(failures.pop(0))
            done.append(self._settle_batch(waiting, mine))
            if waiting.end_row > self._settled:
                break
            self._waiting.popleft()
        self._publish()
        return done

    def _settle_batch(self, waiting: _BatchAtSink, failures: list[tuple[int, RowFailure]]) -> Done:
        failed = []
        for row, failure in failures:
            record = int(waiting.row_record[row - waiting.first_row])
            if waiting.open[record]:
                waiting.open[record] = False
                failed.append(replace(failure, row=record))
        finished = waiting.open.copy()
        finished[waiting.row_record[self._settled - waiting.first_row :]] = False
        waiting.open &= ~finished
        return Done(waiting.lineage, np.flatnonzero(finished), tuple(failed))

    def _publish(self) -> None:
        parts = []
        for waiting in self._waiting:
            parts.append(waiting.lineage.roots[contract.ids_mask(waiting.lineage, waiting.open)])
        self.held = np.concatenate(parts) if parts else NO_ROOTS


class AckingSinkOutlet(Outlet):
    """`ftlayer.runtime.task.pipeline.Outlet` of a chain with a sink; records are settled when all their rows are.

    Attributes:
        latencies: how old records are when the sink has settled their rows.
    """

    waiting = False

    def __init__(self, handler: Handler, sink: contract.SinkBody, uid: str, *, is_first: bool) -> None:
        """``is_first``: see `AckerTaskMode`; a mistake in the program may show then."""
        self._handler = handler
        self._sink = sink
        self._uid = uid
        self._may_be_wrong = is_first
        self._queue = SettleQueue()
        self.latencies = SinkLatencies()

    def take(
        self, lineage: RecordIds | None, records: int, passed: Passed, now: Now
    ) -> list[task_actions.Action]:
        if lineage is None:
            raise ProtocolError("a record without RecordIds came to a sink that acknowledges")
        xor = self._handler.xor
        if passed.failures:
            xor.fail(lineage, passed.failures)
        alive = unharmed(records, passed.failures)
        rows = passed.outputs[MAIN]
        nothing = self._queue.empty
        settled = contract.Settled(0)
        if rows.payload.num_rows:
            settled = self._sink.write(rows.payload, now.mono_ms)
        if nothing and settled.rows == rows.payload.num_rows and not settled.failures:
            self._may_be_wrong = False
            xor.settle(lineage, None, alive)
            return []
        if alive is None:
            alive = np.arange(records, dtype=np.int64)
        self._done(self._queue.add(lineage, rows.parents, alive))
        self._settle(settled)
        return []

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[task_actions.Action]:
        """Refuse: results of timers become roots before a sink gets them, and a chain ends there."""
        raise ProtocolError("results of timers came to a sink in their own chain, which acknowledges records")

    def marker(self, marker: LatencyMarker, now: Now) -> list[task_actions.Action]:
        self.latencies.came(marker, now, given=self._queue.given, settled=self._queue.settled)
        return []

    def flush(self, now: Now, *, force: bool) -> None:
        self.latencies.look(self._queue.settled, now)
        self._settle(self._sink.flush(now.mono_ms, force=force))
        if force:
            # No call may come behind this one.
            self.latencies.look(self._queue.settled, now)

    def close(self) -> None:
        self._sink.close()

    @property
    def due_ms(self) -> int | None:
        """See `Outlet.due_ms`.

        A write takes its time, and no clock is read behind it: the next call sees how old the records are now.
        """
        return 0 if self.latencies.is_due(self._queue.settled) else self._sink.due_ms

    @property
    def held(self) -> U64Array:
        return self._queue.held

    def _settle(self, settled: contract.Settled) -> None:
        done = self._queue.settle(settled)
        if self._may_be_wrong and settled.rows:
            tries = [each.lineage.tries for each in done if each.lineage.tries is not None]
            self._judge(settled, is_first=not any(first_failed_of(each).any() for each in tries))
        for each in done:
            self._done(each)

    def _judge(self, settled: contract.Settled, *, is_first: bool) -> None:
        """End the job if the first rows ever that the sink is given show that the program is wrong."""
        failures = settled.failures
        self._may_be_wrong = False
        if not is_first or len(failures) < settled.rows:
            return
        if is_of_no_row([each.traceback for each in failures], dead=any(each.fatal for each in failures)):
            error = JobStartError(
                f"sink {self._uid!r} could write no row of its first {len(failures):,}: {failures[0].reason}. Starting "
                "again would meet it again; the records wait in the vertex, for the program that is mended"
            )
            error.operator = self._uid
            raise error

    def _done(self, done: Done) -> None:
        if done.failures:
            self._handler.xor.fail(done.lineage, done.failures)
        if len(done.records):
            self._handler.xor.settle(done.lineage, None, done.records)


# Rows that the vertex was given, ready to be sent.
@dataclass(slots=True)
class _Unsent:
    roots: U64Array
    sends: list[task_actions.Send]
    failures: tuple[Failure, ...]
    accepted: bool = False

    def actions(self) -> list[task_actions.Action]:
        return [*self.sends, *([task_actions.FailRoots(self.failures)] if self.failures else [])]


class PersistingSourceTask:
    """`ftlayer.runtime.task.contract.Task` of a source. Sends rows in the order it got them, and no watermarks."""

    def __init__(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> None:
        """``handler`` is this subtask's own; its run is a name no earlier start of the subtask has had."""
        self.uid = uid
        self.subtask = subtask
        self._stream = graph.stream_of(uid)
        self._handler = handler
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)
        self._unsent: deque[_Unsent] = deque()
        self._first_ticket = 1  # of the first in `_unsent`
        self._held: tuple[U64Array, ...] = ()
        self._ending = False

    def handle(self, event: task_actions.TaskEvent, now: Now) -> list[task_actions.Action]:
        match event:
            case task_actions.SourceRows():
                return [action for rows in (*event.aside, event) for action in self._persist(rows, now)]
            case task_actions.RowsPersisted(ticket):
                return self._persisted(ticket)
            case task_actions.SourceOver():
                self._ending = True
                return self._ended()
            case task_actions.TaskStart() | task_actions.TimeCame():
                return []
            case _:
                raise task_actions.refused(self.uid, event)

    def _persist(self, rows: task_actions.SourceRows, now: Now) -> list[task_actions.Action]:
        persister = self._handler.persister
        n = rows.payload.num_rows
        among = persister.root_range(self._stream, self.subtask, rows.number, rows.first_ordinal, n)
        if among is None:
            raise ProtocolError(f"source {self.uid!r} persists rows only with fault tolerance on")
        roots = among.ids()
        if rows.misfit:
            # Replays of its letter fail as well: it has not the source's schema.
            emission = self._emitter.unsent(roots)
            failures: tuple[Failure, ...] = (Failure(int(roots[0]), rows.misfit, self.uid, fatal=True),)
        else:
            emission = self._emitter.roots(rows.payload, roots, split=rows.in_time)
            failures = failures_of(roots, emission.failures)
        call = Persist(
            self._stream,
            rows.payload,
            among,
            emission.values,
            key_hashes=emission.key_hashes,
            position=rows.position,
            ids=emission.ids,
        )
        # It is as old as the rows, which wait for the vertex first.
        markers = self._markers.behind(n, now, int(roots[-1]) if n else 0)
        sends = [*self._splits.around(rows, emission.sends), *markers]
        self._unsent.append(_Unsent(roots, sends, failures))
        self._publish()
        return [task_actions.PersistRoots(self._first_ticket + len(self._unsent) - 1, call)]

    def _persisted(self, ticket: int) -> list[task_actions.Action]:
        """Send what is persisted, up to the first rows that are not: answers may come in any order."""
        place = ticket - self._first_ticket
        if not 0 <= place < len(self._unsent) or self._unsent[place].accepted:
            raise ProtocolError(f"source {self.uid!r}: ticket {ticket} was accepted, which is not out")
        self._unsent[place].accepted = True
        actions: list[task_actions.Action] = []
        while self._unsent and self._unsent[0].accepted:
            actions += self._unsent.popleft().actions()
            self._first_ticket += 1
        self._publish()
        return actions + self._ended()

    def held_roots(self) -> U64Array:
        held = self._held
        return np.concatenate(held) if held else np.zeros(0, np.uint64)

    def _ended(self) -> list[task_actions.Action]:
        if not self._ending or self._unsent:
            return []
        return [*self._emitter.mark(EndOfStream()), task_actions.TaskEnded()]

    def _publish(self) -> None:
        self._held = tuple(unsent.roots for unsent in self._unsent)


Mark = Watermark | Idle | EndOfStream


class TimerRootsOutlet(ChannelOutlet):
    """Of a chain that ends in timers: their results become roots, and marks wait until everything before them was sent.

    A watermark says that the records up to it have gone by; those that it made timers put out have gone by once
    they are sent. What is derived from records meanwhile may overtake a mark: that makes nothing late. Markers of
    latency wait for none.
    """

    def __init__(
        self, graph: JobGraph, uid: str, operator: str, subtask: int, handler: Handler, emitter: Emitter
    ) -> None:
        super().__init__(handler, emitter)
        self._graph = graph
        self._uid = operator
        self._read = {edge.tag for edge in graph.edges_from(uid)}
        self._subtask = subtask
        self._queue: deque[_Unsent | Mark] = deque()
        self._out: dict[int, _Unsent] = {}
        self._tickets = 0
        self._counts: dict[str, int] = {}
        self._held: tuple[U64Array, ...] = ()

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    @property
    def held(self) -> U64Array:
        """The roots that were given to the vertex and are not sent yet. Another thread may look."""
        held = self._held
        return np.concatenate(held) if held else np.zeros(0, np.uint64)

    def take_fired(self, outputs: dict[str, Rows], now: Now) -> list[task_actions.Action]:
        actions: list[task_actions.Action] = []
        for tag, rows in outputs.items():
            if rows.payload.num_rows:
                actions.extend(self._persist(tag, rows.payload, rows.times))
        return actions

    def _persist(
        self, tag: str, payload: pa.RecordBatch, times: I64Array | None
    ) -> list[task_actions.Action]:
        """Give rows of an output (the side output ``tag``, "" for the main one) roots and have them persisted.

        Those of an output without readers are dropped.
        """
        if tag not in self._read:
            return []
        stream = self._graph.stream_of(self._uid, tag)
        first = self._counts.get(tag, 0)
        self._counts[tag] = first + payload.num_rows
        persister = self._handler.persister
        among = persister.root_range(stream, 0, self._subtask, first, payload.num_rows)
        if among is None:
            raise ProtocolError(f"{self._uid!r}: timers make new roots only with fault tolerance on")
        roots = among.ids()
        emission = self._emitter.roots(payload, roots, times, tag)
        call = Persist(
            stream, payload, among, emission.values, key_hashes=emission.key_hashes, ids=emission.ids
        )
        self._tickets += 1
        unsent = _Unsent(roots, emission.sends, failures_of(roots, emission.failures))
        self._queue.append(unsent)
        self._out[self._tickets] = unsent
        self._publish()
        return [task_actions.PersistRoots(self._tickets, call)]

    def mark(self, mark: Mark) -> list[task_actions.Action]:
        """Send a mark behind everything persisted before it, at once if that is nothing."""
        if not self._queue:
            return super().mark(mark)
        if isinstance(mark, Watermark) and isinstance(self._queue[-1], Watermark):
            self._queue.pop()  # a later watermark says all that this one does
        self._queue.append(mark)
        return []

    def accepted(self, number: int) -> list[task_actions.Action]:
        """Send what the vertex has persisted, and the marks for which it was the last to wait for.

        Raises `ProtocolError` for a ticket that is not out.
        """
        unsent = self._out.pop(number, None)
        if unsent is None:
            raise ProtocolError(f"{self._uid!r}: ticket {number} was accepted, which is not out")
        unsent.accepted = True
        self._publish()
        actions = unsent.actions()
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Unsent):
                if not head.accepted:
                    break
            else:
                actions.extend(self._emitter.mark(head))
            self._queue.popleft()
        return actions

    def _publish(self) -> None:
        self._held = tuple(unsent.roots for unsent in self._out.values())


@dataclass(frozen=True)
class Holding:
    """How sources hold partitions whose rows the vertex does not store.

    ``holder`` is a name that no earlier instance of the slot has had; ``known(uid, subtask)`` are the partitions of a
    subtask that were read before.
    """

    holder: str
    known: Callable[[str, int], Sequence[str]]


class AckerTaskMode:
    def __init__(
        self,
        make_handler: Callable[[str], Handler],
        options: TopologyOptions,
        open_sink: OpenSink,
        holding: Holding | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """``make_handler(uid)`` makes one that tracks records, as `TaskMode.handler` does.

        ``holding`` may be left out where no source has ``replay="source"``. ``is_first``: no slot was lost before.
        """
        self._is_first = is_first
        self._holding = holding
        self._make_handler = make_handler
        self._options = options
        self._open_sink = open_sink

    def check(self, operators: tuple[Operator, ...]) -> None:
        """Every chain can be run."""

    def handler(self, uid: str) -> Handler:
        return self._make_handler(uid)

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> contract.Task:
        if not reads_again(graph.vertex(uid).operators[0]):
            return PersistingSourceTask(graph, uid, subtask, handler)
        assert self._holding is not None, "who holds its rows has no name"
        known = self._holding.known(uid, subtask)
        return RangeSourceTask(graph, uid, subtask, handler, self._holding.holder, known)

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> contract.ReplayTask:
        return StreamReplayTask(graph, uid, subtask, handler, self._options)

    def chain(self, plan: ChainPlan) -> contract.Task:
        return plan.task(HeapBackend(), self._outlet(plan), AckerCompanion(plan.handler.xor))

    def _outlet(self, plan: ChainPlan) -> Outlet:
        sink, handler, last = plan.sink, plan.handler, plan.vertex.operators[-1]
        if sink is not None:
            body = self._open_sink(sink, plan.subtask, plan.vertex.parallelism)
            return AckingSinkOutlet(handler, body, sink.uid, is_first=self._is_first)
        if not has_timers(last):
            return ChannelOutlet(handler, plan.emitter())
        return TimerRootsOutlet(plan.graph, plan.uid, last.uid, plan.subtask, handler, plan.emitter())
