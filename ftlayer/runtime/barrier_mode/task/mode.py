"""Barrier mode's tasks: sources that give their positions, and chains whose state and sink are in checkpoints."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA, DeadLetter, row_of, shown_record
from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterKind
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.checkpoint.snapshots import SinkPart, SubtaskRestore, SubtaskSnapshot
from ftlayer.checkpoint.storage.writer import PieceWriter
from ftlayer.common.clock import Now
from ftlayer.errors import InvalidTopologyError, SnapshotCancelledError, SourceError
from ftlayer.functions.aggregates import KeyedAggregate
from ftlayer.functions.chains.firing import Interrupted, never
from ftlayer.functions.keyed import MapTable
from ftlayer.functions.steps import MAIN, Process, Record, Reduce
from ftlayer.functions.undo import UndoLog
from ftlayer.records.failures import RowFailure
from ftlayer.records.ids import NO_ROOTS, U64Array
from ftlayer.records.ipc import read_one_batch
from ftlayer.records.partitioning import Broadcast, groups_of
from ftlayer.runtime.barrier_mode.task.failing import attempts as record_attempts
from ftlayer.runtime.barrier_mode.task.failing.alone import RecordsAlone, ToChannels
from ftlayer.runtime.connectors.offset_reader import partition_index
from ftlayer.runtime.handler import Handler, NonFTHandler
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.protocol.messages import EndTasks
from ftlayer.runtime.task.actions import (
    Action,
    DataEnded,
    HoldInput,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskEvent,
    TaskStart,
    TimeCame,
    refused,
)
from ftlayer.runtime.task.chain_plan import ChainPlan, RowsAlone
from ftlayer.runtime.task.chain_task import NO_FAILURES, ChainTask, FailureCounts
from ftlayer.runtime.task.contract import ChainCompanion, ReplayTask, SinkBody, Suspects, Task, TaskKey
from ftlayer.runtime.task.emitter import Emitter, SinkLatencies, SourceMarkers
from ftlayer.runtime.task.event_time import SplitMarks
from ftlayer.runtime.task.pipeline import ChannelOutlet, OperatorChain, Outlet, Passed, Routed, SinkOutlet
from ftlayer.runtime.task.routes import key_schemas
from ftlayer.state.contract import BackendSnapshot, Frozen
from ftlayer.state.heap import HeapBackend
from ftlayer.state.opening import LayeredBackend
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.job_graph import LETTERS, JobGraph, rules_of_operator, stream_name
from ftlayer.topology.operators import CoProcess, Join, Operator, Sink, Source, WriterSink
from ftlayer.vertex.calls import Attempt


class PendingSnapshot(Protocol):
    """A task's snapshot between its synchronous part, which is over, and its end."""

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """The asynchronous part; runs once, in another thread. ``channels`` and ``times`` are not filled in.

        Raises as `ftlayer.state.contract.Frozen.write`; any exception declines the checkpoint.
        """

    def release(self) -> None:
        """Give up what is kept for it; called once in the task's thread, behind `write` or in its place."""


class Checkpointed(Protocol):
    """One subtask's part in checkpoints; its methods belong to the task's thread.

    `TaskStart` restores what the task was made with. Barriers never come to it as elements.
    """

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], PendingSnapshot]:
        """The synchronous part. The actions come before the barrier on the task's outputs.

        (They are `Send`s of what had to be flushed.) The caller sends the barrier on to all outputs by itself.
        """

    def completed(self, checkpoint: int, read: int = 0) -> None:
        """The checkpoint is complete, and its committables are committed; ``read`` as of `CheckpointComplete`."""

    def aborted(self, checkpoint: int) -> None:
        """The checkpoint was given up: the next one has to hold what it would have held."""

    def discard(self, stands: int, acked: int) -> None:
        """The task goes away before its end: close everything, abort what no checkpoint can hold.

        ``stands`` is the latest checkpoint that may stand, ``acked`` the latest that the task has acknowledged: it is
        in none behind that, and in no savepoint either.
        """


class CommittingSinkBody(SinkBody, Protocol):
    """A sink whose rows become visible with the checkpoint that holds them.

    ``refused``: how many rows its writer has refused so far. Any thread may look.
    """

    refused: int

    def precommit(self, checkpoint: int) -> Callable[[], SinkPart]:
        """Set aside the rows so far, and return what writes them (in another thread, once).

        It returns every committable that this subtask has not been told to be committed, this checkpoint's last, and
        the letters of rows that were refused on the way.
        """

    def completed(self, checkpoint: int) -> None:
        """All committables for checkpoints up to this one are committed, and their letters are kept."""

    def discard(self, restored: int) -> None:
        """Abort what was written for checkpoints behind ``restored``, and what is gathered."""


class SharedBackend:
    """A backend, and the snapshots of it that are being written. All methods belong to the task's thread.

    Another thread may be writing a snapshot when the task ends or is discarded: the backend is closed behind the last
    one.
    """

    def __init__(self, backend: LayeredBackend) -> None:
        self.backend = backend
        self.closed = False
        self._out = 0

    def freeze(self, barrier: Barrier, now_ms: int) -> _SharedFrozen:
        frozen = self.backend.freeze(barrier, now_ms)
        self._out += 1
        return _SharedFrozen(frozen, self._released)

    def close(self) -> None:
        """Close the backend as soon as no snapshot is out; once is enough."""
        if not self.closed:
            self.closed = True
            self._close_if_unused()

    def _released(self) -> None:
        self._out -= 1
        if self.closed:
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if not self._out:
            self.backend.close()


class _SharedFrozen:
    def __init__(self, frozen: Frozen, released: Callable[[], None]) -> None:
        self._frozen = frozen
        self._released = released

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> BackendSnapshot:
        return self._frozen.write(writer, cancelled)

    def release(self) -> None:
        self._frozen.release()
        self._released()


RETRY_MS = 100
"""How often a task that rests behind the last barrier looks whether that checkpoint was given up."""

LOOK_MS = 2
"""How often a task whose state is too much for memory looks whether there is room again."""


class BarrierCompanion(ChainCompanion):
    """Of barrier mode.

    Attributes:
        backend: the chain's state; None: it keeps none.
        last_barrier: the checkpoint that the job ends with, once its barrier has passed. Behind it no timer of
            processing time fires, and nothing goes round a loop: what came of it would be in no checkpoint.
    """

    def __init__(
        self, uid: str, subtask: int, backend: SharedBackend | None, *, keeps_failed: bool = False
    ) -> None:
        """``keeps_failed``: records may wait in the chain, so that its own end is not that of its inputs."""
        self._uid = uid
        self._subtask = subtask
        self._keeps_failed = keeps_failed
        self.backend = backend
        self.last_barrier: int | None = None

    def opened(self) -> None:
        if self.backend is not None:
            self.backend.backend.opened()

    def closed(self) -> None:
        if self.backend is not None:
            self.backend.close()

    def loop_ended(self) -> list[Action]:
        """Tell the coordinator: the job's last checkpoint waits for it, as for the end of a source's data.

        Where records may wait in the chain, `data_ended` does.
        """
        return [] if self._keeps_failed else [DataEnded(self._uid, self._subtask)]

    def data_ended(self) -> list[Action]:
        return [DataEnded(self._uid, self._subtask)] if self._keeps_failed else []

    def tend(self, records: int, now: Now) -> list[Action]:
        """Let the backend do its work beside; hold the input while there is no room for more state."""
        if self.backend is None or self.backend.closed:
            return []
        backend = self.backend.backend
        backend.tend(now.mono_ms, records)
        # Where a snapshot is in the way, it says so by no event.
        return [HoldInput(now.mono_ms + LOOK_MS)] if backend.is_full else []

    @property
    def rest_ms(self) -> int | None:
        return None if self.last_barrier is None else RETRY_MS


Precommitted = Callable[[], SinkPart]


class ChainCheckpoints:
    """`Checkpointed` of a chain: its state, and its sink if that commits."""

    def __init__(
        self,
        chain: ChainTask,
        companion: BarrierCompanion,
        sink: CommittingSinkBody | None,
        suspects: Suspects,
        letters: record_attempts.MadeLetters | None,
    ) -> None:
        """``companion`` and ``suspects`` are the chain's, ``sink`` the one at its end.

        ``letters`` are what its records become that fail; None: they fail the job.
        """
        self._chain = chain
        self._companion = companion
        self._sink = sink
        self._suspects = suspects
        self._letters = letters
        self._savepoints: set[int] = set()
        self._given_up: set[int] = set()

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], ChainSnapshot]:
        actions = self._chain.flush(now)
        if barrier.final:
            self._companion.last_barrier = barrier.checkpoint
        # That it was given up may be known before its barrier has come.
        if barrier.kind is SnapshotKind.SAVEPOINT and barrier.checkpoint not in self._given_up:
            self._savepoints.add(barrier.checkpoint)
        backend = self._companion.backend
        frozen = None if backend is None else backend.freeze(barrier, now.wall_ms)
        precommitted = None if self._sink is None else self._sink.precommit(barrier.checkpoint)
        part = SubtaskSnapshot(
            self._chain.uid,
            self._chain.subtask,
            condemned=self._suspects.snapshot(barrier.checkpoint),
            event_times=self._chain.event_times,
            split_times=self._chain.split_times,
        )
        if self._letters is not None:
            letters, readmitted = self._letters.snapshot(barrier.checkpoint)
            waiting = self._chain.failures.waiting
            part = replace(part, letters=letters, waiting=waiting, readmitted=readmitted)
        return actions, ChainSnapshot(part, barrier.checkpoint, frozen, precommitted)

    def completed(self, checkpoint: int, read: int = 0) -> None:
        self._suspects.completed(checkpoint, read)
        if self._letters is not None:
            self._letters.completed(checkpoint)
        backend = self._companion.backend
        if backend is not None and not backend.closed:
            backend.backend.completed(checkpoint)
        self._savepoints = {savepoint for savepoint in self._savepoints if savepoint > checkpoint}
        self._given_up = {other for other in self._given_up if other > checkpoint}
        if self._sink is not None:
            self._sink.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """What a sink has written goes into the next one by itself."""
        if checkpoint == self._companion.last_barrier:
            self._companion.last_barrier = None
        self._savepoints.discard(checkpoint)
        self._given_up.add(checkpoint)
        backend = self._companion.backend
        if backend is not None and not backend.closed:
            backend.backend.aborted(checkpoint)

    def discard(self, stands: int, acked: int) -> None:
        """What a function raises while it is closed is logged."""
        if self._chain.is_over:
            return
        self._chain.abandon()
        self._companion.closed()
        if self._sink is not None:
            # A savepoint is a user's: what it holds of the sink stays, whether the job goes on from there or not.
            savepoints = (savepoint for savepoint in self._savepoints if savepoint <= acked)
            self._sink.discard(max([min(stands, acked), *savepoints]))


class ChainSnapshot:
    """`ftlayer.runtime.barrier_mode.task.mode.PendingSnapshot` of a chain.

    The caller of `write` syncs the writer, and measures.
    """

    def __init__(
        self, part: SubtaskSnapshot, checkpoint: int, frozen: Frozen | None, precommitted: Precommitted | None
    ) -> None:
        self._part = part
        self._checkpoint = checkpoint
        self._frozen = frozen
        self._precommitted = precommitted

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        """The state comes first: what a sink has written is seen by others."""
        state = BackendSnapshot(None, ())
        if self._frozen is not None:
            state = self._frozen.write(writer, cancelled)
        sink = SinkPart()
        if self._precommitted is not None:
            if cancelled():
                raise SnapshotCancelledError(
                    f"checkpoint {self._checkpoint} was given up before the sink of {self._part.uid!r} wrote its rows"
                )
            sink = self._precommitted()
        return replace(
            self._part,
            keyed=state.keyed,
            operators=state.operators,
            committables=sink.committables,
            letters=self._part.letters + sink.letters,
        )

    def release(self) -> None:
        if self._frozen is not None:
            self._frozen.release()


class RowsToSink(Outlet):
    """`WayOut` of such a chain, and its outlet.

    A row that a function refuses fails at once; a two-phase writer refuses rows when it writes them for a checkpoint,
    and gives its letters by itself.

    Attributes:
        latencies: how old records are when the sink has been given them.
    """

    due_ms: int | None = None
    waiting = False
    held = NO_ROOTS

    def __init__(
        self,
        sink: SinkBody,
        attempts: record_attempts.RecordAttempts,
        emitter: Emitter,
        committing: CommittingSinkBody | None = None,
    ) -> None:
        """``emitter`` sends marks to those that take the sink's dead letters.

        ``committing`` is the sink, if its rows become visible with their checkpoint.
        """
        self.latencies = SinkLatencies()
        self._sink = sink
        self._committing = committing
        self._attempts = attempts
        self._emitter = emitter

    @property
    def refused(self) -> int:
        return 0 if self._committing is None else self._committing.refused

    def route(self, given: record_attempts.Given, passed: Passed, log: UndoLog) -> Routed:
        return Routed({MAIN: (passed.outputs[MAIN], None)}, passed.failures)

    def send(self, given: record_attempts.Given, routed: Routed, now: Now) -> list[Action]:
        self._attempts.ended(given, self._sink.write(given.payload, now.mono_ms).failures, now)
        return []

    def mark(self, mark: messages.Watermark | messages.Idle | messages.EndOfStream) -> list[Action]:
        return [*self._emitter.mark(mark)]

    def marker(self, marker: messages.LatencyMarker, now: Now) -> list[Action]:
        self.latencies.came(marker, now)
        return []

    def close(self) -> None:
        self._sink.close()


_ORIGIN_BYTES = 8


def letter_rows(letters: Sequence[ChainLetter], job: str) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [row_of(shown(letter, job)) for letter in letters], schema=LETTER_SCHEMA
    )


def sent_letters(emitter: Emitter, job: str, letters: Sequence[ChainLetter]) -> list[Action]:
    rows = np.arange(len(letters), dtype=np.int64)
    return [*emitter.derived(LETTERS, letter_rows(letters, job), None, rows).sends]


def shown(letter: ChainLetter, job: str) -> DeadLetter:
    """Return a letter of the topology ``job`` as a program sees it.

    Its stream is named after its chain, as an operator's with timers in acker mode. What is shown of a timer are its
    key and its time.
    """
    last = letter.attempts[-1]
    return DeadLetter(
        key=letter.letter.hex(),
        stream=stream_name(job, letter.chain),
        record=_record(letter),
        reason=last.reason,
        operator=letter.operator,
        traceback=last.traceback,
        attempts=last.number,
        first_failed_at=_time(letter.first_failed_ms),
        died_at=_time(letter.died_ms),
        origin=letter.letter[:_ORIGIN_BYTES].hex(),
    )


def _record(letter: ChainLetter) -> Record:
    if letter.kind is LetterKind.TIMER:
        return {"key": unpack(letter.key), "timer_ms": letter.event_time_ms}
    return shown_record(read_one_batch(letter.payload))


def _time(wall_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(wall_ms / 1_000, dt.UTC)


@dataclass(frozen=True)
class FailingAlone:
    alone: RowsAlone
    outlet: ChannelOutlet | RowsToSink
    attempts: record_attempts.RecordAttempts


def entered_inside(plan: ChainPlan, restored: SubtaskRestore | None) -> list[str]:
    """Return the operators behind the chain's head at which restored records enter.

    They were heads of chains when those failed, and others have been put before them since.
    """
    tables = () if restored is None else (table for part in restored.keyed for table in part.tables)
    heads = {table.operator for table in tables if table.name == record_attempts.WAITING_TABLE}
    return [operator.uid for operator in plan.vertex.operators[1:] if operator.uid in heads]


def keys_with_waiting(plan: ChainPlan, keys: dict[str, pa.Schema]) -> dict[str, pa.Schema]:
    """Return the key columns of the chain's operators, with those of the records that wait at one of them."""
    return {
        **dict.fromkeys((operator.uid for operator in plan.vertex.operators), record_attempts.DRAWN_KEY),
        **keys,
    }


def failing_alone(
    plan: ChainPlan,
    policy: FailurePolicy,
    backend: LayeredBackend,
    sink: SinkBody | None,
    suspects: Suspects,
    place: str,
    restored_inside: Iterable[str] = (),
) -> FailingAlone:
    """Make them. ``sink`` None: the chain has outputs. ``place`` says in words which process this is.

    ``restored_inside`` is what `entered_inside` gives.
    """
    own = {
        operator.uid: limit
        for operator in plan.vertex.operators
        if (limit := rules_of_operator(operator).limit) is not None
    }
    breakers = record_attempts.Breakers(plan.uid, policy.rules.limit, own)
    inside = {operator.uid: before.schema for before, operator in pairwise(plan.vertex.operators)}

    def table_of(enters: str) -> MapTable:
        return backend.state(enters or plan.uid).maps(record_attempts.WAITING_TABLE)

    attempts = record_attempts.RecordAttempts(
        (plan.uid, plan.subtask),
        policy,
        record_attempts.HeadKeys(plan.vertex.operators[0], plan.inputs, _drawn_keys(plan)),
        record_attempts.WaitingRecords(table_of, restored_inside),
        breakers,
        place,
        inside,
    )
    log = UndoLog()
    emitter = plan.emitter()
    outlet: ChannelOutlet | RowsToSink = ChannelOutlet(plan.handler, emitter)
    if plan.sink is not None and sink is not None:
        commits = isinstance(plan.sink.connector, WriterSink)
        committing = cast(CommittingSinkBody, sink) if commits else None
        outlet = RowsToSink(sink, attempts, emitter, committing)
    out = ToChannels(outlet, attempts) if isinstance(outlet, ChannelOutlet) else outlet

    def make(pipeline: OperatorChain) -> RecordsAlone:
        timers = None
        if isinstance(outlet, ChannelOutlet):
            timers = record_attempts.TimersAlone(pipeline, log, outlet, attempts, suspects)
        rows = RecordsAlone(
            plan.uid, policy, pipeline, log, attempts, breakers, out, timers, suspects, plan.inputs, inside
        )
        if plan.graph.sends_letters(plan.uid):
            rows.send_letters = partial(sent_letters, emitter, plan.graph.name)
        return rows

    return FailingAlone(RowsAlone(log, make), outlet, attempts)


def _drawn_keys(plan: ChainPlan) -> record_attempts.DrawnKeys:
    most = plan.graph.max_parallelism
    return record_attempts.DrawnKeys(groups_of(plan.subtask, plan.vertex.parallelism, most), most)


class CheckpointedSourceTask:
    """A source as a task, and its part in checkpoints: `Task` and `Checkpointed`.

    It sends rows at once, and their position is its own from then on.
    A partition's position is in the snapshot of the subtask that reads it, whether it has read of it since the
    restore or not: partition i is subtask i modulo parallelism's.
    """

    def __init__(
        self,
        graph: JobGraph,
        uid: str,
        subtask: int,
        handler: Handler,
        restored: SubtaskRestore,
        place: str = "",
    ) -> None:
        self._place = place
        self._letters = None if graph.vertex(uid).failures is None else record_attempts.MadeLetters()
        self._job, self._sends_letters = graph.name, graph.sends_letters(uid)
        self._packer = record_attempts.RowPacker()
        self.uid = uid
        self.subtask = subtask
        self._emitter = Emitter(graph, uid, subtask, handler)
        self._markers = SourceMarkers(self._emitter, uid)
        self._splits = SplitMarks(self._emitter)
        parallelism = graph.vertex(uid).parallelism
        self._positions = {
            partition: position
            for partition, position in restored.positions.items()
            if partition_index(partition) % parallelism == subtask
        }
        self._read_rows = restored.read

    def handle(self, event: TaskEvent, now: Now) -> list[Action]:
        """Behind `SourceOver` the task goes on: barriers come until `EndTasks`."""
        match event:
            case SourceRows():
                return self._read(event, now)
            case SourceOver():
                return [*self._emitter.mark(messages.Watermark(messages.MAX_TIME_MS))]
            case EndTasks():
                return [*self._emitter.mark(messages.EndOfStream()), TaskEnded()]
            case TaskStart() | TimeCame():
                return []
            case _:
                raise refused(self.uid, event)

    def _read(self, rows: SourceRows, now: Now) -> list[Action]:
        """Send rows, and take their position over. One without rows counts, too."""
        if rows.position is None:
            raise SourceError(f"source {self.uid!r} cannot rewind: it gives no positions to restore it from")
        self._positions[rows.position.partition] = rows.position.end
        self._read_rows += rows.payload.num_rows + len(rows.aside)
        letters: list[Action] = []
        for odd in (*rows.aside, rows):
            if odd.misfit:
                letters += self._bury(odd.payload, RowFailure(0, self.uid, odd.misfit, ""), now)
        payload = rows.payload
        sends: list[Send] = []
        if not rows.misfit:
            routes = None if self._letters is None else self._emitter.ask("", payload)
            if routes is not None and routes.failures:
                keep = np.ones(payload.num_rows, bool)
                for failure in routes.failures:
                    keep[failure.row] = False
                    letters += self._bury(payload.take(pa.array([failure.row])), failure, now)
                payload, routes = payload.filter(pa.array(keep)), routes.keep(keep)
            sends = self._emitter.roots(payload, None, split=rows.in_time, routes=routes).sends
        return [*letters, *self._splits.around(rows, sends), *self._markers.behind(payload.num_rows, now)]

    def _bury(self, row: pa.RecordBatch, failure: RowFailure, now: Now) -> list[Action]:
        assert self._letters is not None
        attempt = Attempt(1, now.wall_ms, failure.reason, failure.operator, self._place, failure.traceback)
        self._letters.add(
            ChainLetter(
                secrets.token_bytes(LETTER_BYTES),
                0,
                self.uid,
                self.subtask,
                0,
                LetterKind.RECORD,
                failure.operator,
                b"",
                self._packer.pack(row),
                None,
                (attempt,),
                now.wall_ms,
                now.wall_ms,
            )
        )
        if not self._sends_letters:
            return []
        return sent_letters(self._emitter, self._job, self._letters.take())

    @property
    def failures(self) -> FailureCounts:
        return NO_FAILURES if self._letters is None else FailureCounts(dead=self._letters.made)

    def held_roots(self) -> U64Array:
        return NO_ROOTS

    # ------------------------------------------------------------ checkpoints

    def snapshot(self, barrier: Barrier, now: Now) -> tuple[list[Action], SourceSnapshot]:
        letters = () if self._letters is None else self._letters.snapshot(barrier.checkpoint)[0]
        positions = dict(self._positions)
        part = SubtaskSnapshot(
            self.uid, self.subtask, positions=positions, letters=letters, read=self._read_rows
        )
        return [], SourceSnapshot(part)

    def completed(self, checkpoint: int, read: int = 0) -> None:
        if self._letters is not None:
            self._letters.completed(checkpoint)

    def aborted(self, checkpoint: int) -> None:
        """The next one has the positions of its own time."""

    def discard(self, stands: int, acked: int) -> None:
        """Nothing to close: the reader is the slot's."""


class SourceSnapshot:
    def __init__(self, snapshot: SubtaskSnapshot) -> None:
        self._snapshot = snapshot

    def write(self, writer: PieceWriter, cancelled: Callable[[], bool]) -> SubtaskSnapshot:
        return self._snapshot

    def release(self) -> None:
        """Nothing is kept."""


OpenBackend = Callable[[str, int, Mapping[str, pa.Schema]], LayeredBackend]
"""``open_backend(chain, subtask, keys)`` opens, and restores, the state of one subtask of a chain.

``keys`` are the types of the key columns of each operator that has a key, by uid.
"""

OpenSink = Callable[[Sink, int, int, bool], SinkBody]
"""``open_sink(sink, subtask, parallelism, may_refuse)`` makes the sink of one subtask ready.

``may_refuse``: a writer's rows may become dead letters. It raises `ConfigError` if it cannot.
"""

STATEFUL = Reduce | KeyedAggregate | Process | CoProcess
"""Functions that may keep state."""

REMEDY = (
    " (with CheckpointConfig(failures=FailurePolicy(…)), or on_failure(FailurePolicy(…)) of this operator, a record "
    "that fails is tried again, and then a dead letter; all others go on)"
)
"""Behind the reason for which a record fails the job."""

NO_REMEDY = (
    " (its input is broadcast, so that no FailurePolicy holds for it: catch the error in the function)"
)
"""The same of an operator that has no policy whatever is said."""


class BarrierTaskMode:
    """`ftlayer.runtime.task.contract.TaskMode` of barrier mode.

    Attributes:
        checkpointed: what takes part in checkpoints of each task that was made.
    """

    def __init__(
        self,
        restored: Mapping[TaskKey, SubtaskRestore],
        open_backend: OpenBackend,
        open_sink: OpenSink,
        suspects: Callable[[str], Suspects],
        place: str = "",
        interrupted: Interrupted = never,
    ) -> None:
        """Begin without tasks.

        Args:
            restored: what subtasks begin with. A source takes its positions from it; state is restored by
                ``open_backend``.
            open_backend: called for each chain with an operator that can keep state; raises `CheckpointError`.
            open_sink: makes a `CommittingSinkBody` for a `WriterSink`.
            suspects: makes those of a chain with this uid, for one subtask.
            place: which process this is, in words.
            interrupted: whether watermarks are to wait, and the timers that they make due.
        """
        self._restored = restored
        self._open_backend = open_backend
        self._open_sink = open_sink
        self._suspects = suspects
        self._place = place
        self._interrupted = interrupted
        self.checkpointed: dict[TaskKey, Checkpointed] = {}

    def check(self, operators: tuple[Operator, ...]) -> None:
        first = operators[0]
        if isinstance(first, Join):
            raise InvalidTopologyError(
                f"join {first.uid!r}: its buffers are in no checkpoint; with checkpoints a join is a CoProcess with "
                "keyed state"
            )
        if isinstance(first, Source) and len(operators) > 1:
            raise InvalidTopologyError(
                f"source {first.uid!r} is chained with {operators[1].uid!r}; with checkpoints it is a chain of its own"
            )

    def handler(self, uid: str) -> Handler:
        return NonFTHandler()

    def source(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> Task:
        restored = self._restored.get((uid, subtask)) or SubtaskRestore(uid, subtask)
        task = CheckpointedSourceTask(graph, uid, subtask, handler, restored, self._place)
        self.checkpointed[uid, subtask] = task
        return task

    def replay(self, graph: JobGraph, uid: str, subtask: int, handler: Handler) -> ReplayTask:
        raise InvalidTopologyError(
            f"{uid!r} lets records in again that were not acknowledged, and with checkpoints none is: "
            "leave fault tolerance by records or checkpointing out"
        )

    def chain(self, plan: ChainPlan) -> Task:
        broadcast = any(isinstance(edge.partitioner, Broadcast) for edge in plan.graph.edges_into(plan.uid))
        plan = replace(plan, handler=NonFTHandler(NO_REMEDY if broadcast else REMEDY))
        policy = plan.vertex.failures
        restored = self._restored.get((plan.uid, plan.subtask))
        backend = self._backend(plan)
        companion = BarrierCompanion(plan.uid, plan.subtask, backend, keeps_failed=policy is not None)
        body = None
        if plan.sink is not None:
            body = self._open_sink(plan.sink, plan.subtask, plan.vertex.parallelism, policy is not None)
        suspects = self._suspects(plan.uid)
        failing = None
        if policy is not None:
            assert backend is not None
            inside = entered_inside(plan, restored)
            failing = failing_alone(plan, policy, backend.backend, body, suspects, self._place, inside)
            outlet: Outlet = failing.outlet
        elif body is None:
            outlet = ChannelOutlet(plan.handler, plan.emitter())
        else:
            outlet = SinkOutlet(plan.handler, body)
        state = HeapBackend() if backend is None else backend.backend
        alone = None if failing is None else failing.alone
        task = plan.task(state, outlet, companion, alone=alone, interrupted=self._interrupted)
        if restored is not None:
            task.restore_event_time(restored.event_times, restored.split_times)
        commits = plan.sink is not None and isinstance(plan.sink.connector, WriterSink)
        sink = cast(CommittingSinkBody, body) if commits else None
        letters = None if failing is None else failing.attempts.letters
        self.checkpointed[plan.uid, plan.subtask] = ChainCheckpoints(task, companion, sink, suspects, letters)
        return task

    def _backend(self, plan: ChainPlan) -> SharedBackend | None:
        keys = key_schemas(plan.functions, plan.inputs)
        if plan.vertex.failures is not None:
            keys = keys_with_waiting(plan, keys)
        elif not any(isinstance(operator, STATEFUL) for operator in plan.functions):
            return None
        return SharedBackend(self._open_backend(plan.uid, plan.subtask, keys))
