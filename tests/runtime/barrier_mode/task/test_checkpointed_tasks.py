"""Tasks of graphs with checkpoints: what is in a snapshot, what comes back, and what the end of a job takes."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

import pyarrow as pa
import pytest
from chain_shell import IN, RETRYING, ROW, ModelBackend, Writer, batch, graph, no_cancel, now, sent
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.checkpoint.snapshots import Committable, SinkPart, SubtaskRestore
from ftlayer.errors import InvalidTopologyError, JobError, ProtocolError, SnapshotCancelledError, SourceError
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process, Reduce
from ftlayer.records.partitioning import Broadcast, Rebalance
from ftlayer.runtime.barrier_mode.task.mode import LOOK_MS, BarrierTaskMode
from ftlayer.runtime.connectors.offset_reader import pack_rows, partition_key
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, EndOfStream, EndTasks, Splits, Watermark
from ftlayer.runtime.task.actions import (
    ElementCame,
    HoldInput,
    RowsPersisted,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS, Settled
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import (
    AssignWatermarks,
    FunctionSink,
    IterableSource,
    Join,
    Replay,
    Sink,
    Source,
    WriterSink,
)
from ftlayer.vertex.calls import SourcePosition


class ModelSink:
    """A `CommittingSinkBody` whose messages are its rows."""

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.aside: dict[int, list[int]] = {}
        self.said: list[Any] = []

    def write(self, batch: pa.RecordBatch, mono_ms: int) -> Settled:
        self.gathered += batch.column("n").to_pylist()
        return Settled(0)

    def flush(self, mono_ms: int, *, force: bool) -> Settled:
        return Settled(0)

    due_ms = None

    def close(self) -> None:
        self.said.append("closed")

    def precommit(self, checkpoint: int) -> Callable[[], SinkPart]:
        self.aside[checkpoint], self.gathered = self.gathered, []
        return lambda: SinkPart(tuple(Committable("out", bytes(rows), c) for c, rows in self.aside.items()))

    def completed(self, checkpoint: int) -> None:
        self.said.append(("completed", checkpoint))

    def discard(self, restored: int) -> None:
        self.said.append(("discard", restored))


class Alarmed(ProcessFunction):
    """Sets a timer of processing time for each record, and emits when it fires."""

    closed = 0

    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.processing(record[1])
        return []

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return [(ctx.key, time_ms)]

    def close(self) -> None:
        type(self).closed += 1


def build(
    graph: JobGraph,
    uid: str,
    *,
    sink: Any = None,
    backend: Any = None,
    restore: SubtaskRestore | None = None,
    subtask: int = 0,
) -> tuple[Any, Any]:
    """Return a task, and its part in checkpoints."""
    opened: list[Mapping[str, pa.Schema]] = []

    def open_backend(chain: str, number: int, keys: Mapping[str, pa.Schema]) -> Any:
        assert (chain, number) == (uid, subtask)
        opened.append(keys)
        return backend

    restored = {} if restore is None else {(uid, subtask): restore}
    mode = BarrierTaskMode(restored, open_backend, lambda *_: sink, lambda _: NO_SUSPECTS)
    task = build_task(graph, uid, subtask, mode)
    assert len(opened) == (backend is not None)
    return task, mode.checkpointed[uid, subtask]


SUM = Reduce("sum", lambda old, new: (new[0], old[1] + new[1]), ROW, ("key",))


# ---------------------------------------------------------------- chains


def test_a_task_whose_state_is_too_much_for_memory_takes_no_input_until_there_is_room() -> None:
    backend = ModelBackend()
    task, _ = build(graph(SUM), "sum", backend=backend)
    task.handle(TaskStart(), now(0))
    assert not any(
        isinstance(action, HoldInput) for action in task.handle(ElementCame(IN, batch(("a", 1))), now(1))
    )
    assert backend.handled == 1
    backend.is_full = True
    actions = task.handle(ElementCame(IN, batch(("a", 1), ("b", 2))), now(2))
    assert actions[-1] == HoldInput(2 + LOOK_MS)
    assert backend.handled == 3
    assert task.handle(TimeCame(), now(10))[-1] == HoldInput(10 + LOOK_MS)
    backend.is_full = False
    assert not any(isinstance(action, HoldInput) for action in task.handle(TimeCame(), now(20)))
    assert backend.tended == [1, 2, 10, 20]


def test_the_backend_is_told_that_functions_are_open_behind_the_last_one_and_before_a_record() -> None:
    backend = ModelBackend()
    seen: list[bool] = []

    class Opens(Alarmed):
        def open(self, ctx: Any) -> None:
            seen.append(backend.is_open)

    task, _ = build(
        graph(*[Process(uid, Opens(), ROW, ("key",)) for uid in ("p", "q")]), "p", backend=backend
    )
    task.handle(TaskStart(), now(0))
    assert seen == [False, False]
    assert backend.is_open
    assert not backend.tended


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(0, 9)), st.sampled_from(["barrier", "crash"])
        ),
        max_size=25,
    )
)
def test_state_is_that_of_all_records_before_the_barrier_and_none_behind(events: list[Any]) -> None:
    job = graph(SUM)
    backend = ModelBackend()
    task, checkpoints = build(job, "sum", backend=backend)
    task.handle(TaskStart(), now(0))
    sums: dict[str, int] = {}
    kept: tuple[Any, dict[str, int]] = (None, {})
    for number, event in enumerate(events, start=1):
        if event == "barrier":
            actions, pending = checkpoints.snapshot(Barrier(number, 0), now(0))
            assert actions == []
            expected = dict(sums)
            # Records that come while it is written are not in it.
            task.handle(ElementCame(IN, batch(("a", 1))), now(0))
            sums["a"] = sums.get("a", 0) + 1
            pending.write(Writer(), no_cancel)
            pending.release()
            checkpoints.completed(number)
            kept = backend.written[number], expected
        elif event == "crash":
            checkpoints.discard(0, 0)
            backend = ModelBackend(kept[0])
            task, checkpoints = build(job, "sum", backend=backend)
            task.handle(TaskStart(), now(0))
            sums = dict(kept[1])
        else:
            key, amount = event
            sums[key] = sums.get(key, 0) + amount
            assert sent(task.handle(ElementCame(IN, batch(event)), now(0))) == [(key, sums[key])]


def test_the_snapshot_of_a_chain_has_its_state_and_what_its_sink_has_written() -> None:
    backend, sink = ModelBackend(), ModelSink()
    task, checkpoints = build(
        graph(SUM, Sink("out", WriterSink(None, 1, 1), ROW)), "sum", backend=backend, sink=sink
    )
    task.handle(TaskStart(), now(0))
    task.handle(ElementCame(IN, batch(("a", 1), ("a", 2))), now(0))
    _, pending = checkpoints.snapshot(Barrier(4, 0), now(0))
    task.handle(ElementCame(IN, batch(("a", 5))), now(0))
    snapshot = pending.write(Writer(), no_cancel)
    assert (snapshot.uid, snapshot.subtask) == ("sum", 0)
    assert snapshot.keyed is not None
    assert [piece.checkpoint for piece in snapshot.keyed.pieces] == [3, 4]
    assert [operator.name for operator in snapshot.operators] == ["list"]
    assert snapshot.committables == (Committable("out", bytes([1, 3]), 4),)
    assert sink.gathered == [8]
    checkpoints.completed(4)
    assert sink.said == backend.said == [("completed", 4)]


def test_rows_are_not_written_for_a_checkpoint_that_was_given_up() -> None:
    sink = ModelSink()
    task, checkpoints = build(graph(Sink("out", WriterSink(None, 1, 1), ROW)), "out", sink=sink)
    task.handle(TaskStart(), now(0))
    _, pending = checkpoints.snapshot(Barrier(1, 0), now(0))
    with pytest.raises(SnapshotCancelledError, match="'out'"):
        pending.write(Writer(), lambda: True)
    pending.release()


def test_a_chain_without_state_has_no_backend_and_an_empty_snapshot() -> None:
    task, checkpoints = build(
        graph(Map("map", lambda row: row, ROW), AssignWatermarks("time", "n", 0, None, ROW)), "map"
    )
    task.handle(TaskStart(), now(0))
    assert sent(task.handle(ElementCame(IN, batch(("a", 1))), now(0))) == [("a", 1)]
    _, pending = checkpoints.snapshot(Barrier(1, 0), now(0))
    snapshot = pending.write(Writer(), no_cancel)
    pending.release()
    assert (snapshot.keyed, snapshot.operators, snapshot.committables) == (None, (), ())
    checkpoints.completed(1)
    checkpoints.aborted(2)
    checkpoints.discard(1, 1)


def test_the_backend_is_tended_between_batches_and_told_what_became_of_checkpoints() -> None:
    backend = ModelBackend()
    task, checkpoints = build(graph(SUM), "sum", backend=backend)
    task.handle(TaskStart(), now(0))
    task.handle(ElementCame(IN, batch(("a", 1))), now(5))
    task.handle(TimeCame(), now(7))
    task.handle(ElementCame(IN, Watermark(3)), now(8))
    assert backend.tended == [5, 7, 8]
    checkpoints.aborted(1)
    checkpoints.completed(2)
    assert backend.said == [("aborted", 1), ("completed", 2)]


@pytest.mark.parametrize("ends", [True, False])
def test_the_backend_is_closed_behind_the_last_snapshot_that_is_written(ends: bool) -> None:
    backend = ModelBackend()
    task, checkpoints = build(graph(SUM), "sum", backend=backend)
    task.handle(TaskStart(), now(0))
    _, first = checkpoints.snapshot(Barrier(1, 0), now(0))
    _, second = checkpoints.snapshot(Barrier(2, 0), now(0))
    first.release()
    if ends:
        assert task.handle(ElementCame(IN, EndOfStream()), now(0))[-1] == TaskEnded()
        checkpoints.discard(2, 2)
    else:
        checkpoints.discard(2, 2)
        assert task.handle(ElementCame(IN, batch(("a", 1))), now(0)) == []
    checkpoints.completed(2)
    assert backend.said == []
    second.write(Writer(), no_cancel)
    second.release()
    assert backend.said == ["closed"]


def marks(actions: list[Any]) -> list[int]:
    return [each.element.time_ms for each in actions if isinstance(getattr(each, "element", None), Watermark)]


@pytest.mark.parametrize("ends", [False, True])
def test_event_time_goes_on_where_it_was_and_the_end_is_not_restored(ends: bool) -> None:
    operators = AssignWatermarks("times", "n", 0, None, ROW), Map("map", lambda row: row, ROW)
    splits = Splits((1, 2), endless=False)

    def rows(split: int, n: int) -> ElementCame:
        return ElementCame(IN, replace(batch(("a", n)), split=split))

    task, checkpoints = build(graph(*operators), "times")
    for event in (TaskStart(), ElementCame(IN, splits), rows(1, 100)):
        assert marks(task.handle(event, now(0))) == []
    assert marks(task.handle(rows(2, 50), now(0))) == [50]
    if ends:
        assert marks(task.handle(ElementCame(IN, Watermark(MAX_TIME_MS)), now(0))) == [MAX_TIME_MS]
    _, pending = checkpoints.snapshot(Barrier(1, 0), now(0))
    part = pending.write(Writer(), no_cancel)
    assert part.event_times == {"times": 50, "map": 50}
    restore = SubtaskRestore("times", 0, event_times={"times": 40, "map": 40}, split_times=part.split_times)
    task, checkpoints = build(graph(*operators), "times", restore=restore)
    task.handle(TaskStart(), now(0))
    assert task.watermark_ms == 40
    # What was read of the first one is known.
    assert marks(task.handle(ElementCame(IN, splits), now(0))) == [50]
    assert marks(task.handle(rows(2, 80), now(0))) == [80]


def test_restored_timers_fire_with_the_next_call() -> None:
    first = ModelBackend()
    operator = Process("alarm", Alarmed(), ROW, ("key",))
    task, checkpoints = build(graph(operator), "alarm", backend=first)
    task.handle(TaskStart(), now(0))
    task.handle(ElementCame(IN, batch(("a", 500), ("b", 900))), now(0))
    _, pending = checkpoints.snapshot(Barrier(1, 0), now(0))
    pending.write(Writer(), no_cancel)
    task, checkpoints = build(graph(operator), "alarm", backend=ModelBackend(first.written[1]))
    # The wall clock has gone on; the monotone one is another machine's.
    assert WakeAt(7) in task.handle(TaskStart(), now(7, wall_ms=600))
    assert sent(task.handle(TimeCame(), now(7, wall_ms=600))) == [("a", 500)]
    assert sent(task.handle(TimeCame(), now(8, wall_ms=900))) == [("b", 900)]


def test_no_timer_fires_behind_the_last_barrier_unless_that_was_for_nothing() -> None:
    backend = ModelBackend()
    task, checkpoints = build(graph(Process("alarm", Alarmed(), ROW, ("key",))), "alarm", backend=backend)
    task.handle(TaskStart(), now(0))
    task.handle(ElementCame(IN, batch(("a", 500))), now(0))
    task.handle(ElementCame(IN, Watermark(MAX_TIME_MS)), now(0))
    checkpoints.snapshot(Barrier(1, 0, final=True), now(0))
    (again,) = task.handle(TimeCame(), now(600))
    assert isinstance(again, WakeAt)
    checkpoints.aborted(1)
    assert again.mono_ms > 600
    assert sent(task.handle(TimeCame(), now(again.mono_ms))) == [("a", 500)]
    checkpoints.snapshot(Barrier(2, 0, final=True), now(0))
    assert task.handle(ElementCame(IN, EndOfStream()), now(0))[-1] == TaskEnded()
    assert task.handle(TimeCame(), now(9_000)) == []


def test_a_function_that_does_not_close_does_not_hinder_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Alarmed):
        def close(self) -> None:
            raise OSError("stuck")

    backend, sink = ModelBackend(), ModelSink()
    task, checkpoints = build(
        graph(Process("p", Stuck(), ROW, ("key",)), Sink("out", WriterSink(None, 1, 1), ROW)),
        "p",
        backend=backend,
        sink=sink,
    )
    task.handle(TaskStart(), now(0))
    with caplog.at_level(logging.WARNING):
        checkpoints.discard(3, 3)
        checkpoints.discard(3, 3)
    assert "'p' does not close cleanly" in caplog.text
    assert backend.said == ["closed"]
    assert sink.said == [("discard", 3)]


def test_what_a_savepoint_may_hold_is_not_aborted() -> None:
    def snapshot(checkpoints: Any, number: int, kind: SnapshotKind) -> None:
        checkpoints.snapshot(Barrier(number, 0, kind=kind), now(0))

    cases = (("nothing", 4, 3), ("aborted", 4, 1), ("aborted before", 4, 1), ("not acknowledged", 2, 1))
    for what, acked, kept in cases:
        sink = ModelSink()
        task, checkpoints = build(graph(Sink("out", WriterSink(None, 1, 1), ROW)), "out", sink=sink)
        task.handle(TaskStart(), now(0))
        if what == "aborted before":
            checkpoints.aborted(3)
        snapshot(checkpoints, 3, SnapshotKind.SAVEPOINT)
        snapshot(checkpoints, 4, SnapshotKind.CHECKPOINT)
        if what == "aborted":
            checkpoints.aborted(3)
        checkpoints.discard(1, acked)
        assert sink.said == [("discard", kept)]


def test_functions_are_closed_if_they_were_opened() -> None:
    Alarmed.closed = 0
    operator = Process("alarm", Alarmed(), ROW, ("key",))
    build(graph(operator), "alarm", backend=ModelBackend())[1].discard(0, 0)
    assert Alarmed.closed == 0
    task, checkpoints = build(graph(operator), "alarm", backend=ModelBackend())
    task.handle(TaskStart(), now(0))
    checkpoints.discard(0, 0)
    assert Alarmed.closed == 1


def test_a_failing_function_fails_the_slot_and_is_named() -> None:
    def bad(row: Any) -> Any:
        raise ValueError(f"not {row[0]}")

    task, _ = build(graph(Map("first", lambda row: row, ROW), Map("bad", bad, ROW)), "first")
    task.handle(TaskStart(), now(0))
    with pytest.raises(JobError, match=r"'bad' failed: ValueError: not a.*failures=FailurePolicy"):
        task.handle(ElementCame(IN, batch(("a", 1))), now(0))


def test_of_what_is_broadcast_no_policy_is_advised() -> None:
    def bad(row: Any) -> Any:
        raise ValueError("no")

    job = graph(Map("bad", bad, ROW))
    copies = dataclasses.replace(job.edges[0], partitioner=Broadcast())
    task, _ = build(dataclasses.replace(job, edges=(copies, *job.edges[1:])), "bad")
    task.handle(TaskStart(), now(0))
    with pytest.raises(
        JobError, match=r"'bad' failed: ValueError: no \(its input is broadcast.*catch the error"
    ):
        task.handle(ElementCame(IN, batch(("a", 1))), now(0))


class Both(CoProcessFunction):
    def process_left(self, record: Any, ctx: Any) -> Any:
        return [("left", record[1])]

    def process_right(self, record: Any, ctx: Any) -> Any:
        return [("right", record[1])]


def test_a_chain_of_two_inputs() -> None:
    backend = ModelBackend()
    operator = CoProcess("both", Both(), ROW, (("key",), ("key",)), (ROW, ROW))
    task, checkpoints = build(graph(operator, inputs=2), "both", backend=backend)
    task.handle(TaskStart(), now(0))
    assert sent(task.handle(ElementCame(Channel(0, 0, 0), batch(("a", 1))), now(0))) == [("left", 1)]
    assert sent(task.handle(ElementCame(Channel(1, 0, 0), batch(("a", 2))), now(0))) == [("right", 2)]
    _, pending = checkpoints.snapshot(Barrier(1, 0), now(0))
    assert pending.write(Writer(), no_cancel).keyed is not None


# ---------------------------------------------------------------- sources


def rows(partition: int, first: int, *numbers: int) -> SourceRows:
    payload = pa.record_batch([["k"] * len(numbers), list(numbers)], schema=ROW)
    end = pack_rows(first + len(numbers))
    key = partition_key(partition)
    return SourceRows(key, partition, first, payload, SourcePosition(key, None, end))


def source_graph(parallelism: int) -> JobGraph:
    source = JobVertex("src", (Source("src", IterableSource(()), ROW),), parallelism)
    sink = JobVertex("end", (Sink("end", FunctionSink(print), ROW),), 2)
    edges = (JobEdge(0, "src", "end", 0, Rebalance(), ROW),)
    return JobGraph("job", (source, sink), edges, tracked=False, max_parallelism=8)


def positions_of(task: Any) -> dict[str, bytes]:
    actions, pending = task.snapshot(Barrier(1, 0), now(0))
    assert actions == []
    task.handle(rows(0, 100, 1), now(0))
    snapshot = pending.write(Writer(), no_cancel)
    pending.release()
    assert (snapshot.uid, snapshot.keyed, snapshot.committables) == ("src", None, ())
    return dict(snapshot.positions)


def test_a_source_sends_at_once_and_its_positions_are_its_snapshot() -> None:
    task, _ = build(source_graph(1), "src")
    assert task.handle(TaskStart(), now(0)) == task.handle(TimeCame(), now(0)) == []
    assert sent(task.handle(rows(0, 0, 1, 2), now(0))) == [("k", 1), ("k", 2)]
    assert sent(task.handle(rows(3, 0, 7), now(0))) == [("k", 7)]
    assert task.handle(rows(4, 5), now(0)) == []
    assert positions_of(task) == {"p0": pack_rows(2), "p3": pack_rows(1), "p4": pack_rows(5)}
    assert len(task.held_roots()) == 0


def test_positions_that_were_restored_stay_with_the_subtask_that_reads_the_partition() -> None:
    restore = SubtaskRestore("src", 0, positions={partition_key(i): pack_rows(i) for i in range(5)})
    found = [positions_of(build(source_graph(2), "src", restore=restore, subtask=i)[0]) for i in range(2)]
    assert sorted(found[0]) == ["p0", "p2", "p4"]
    assert sorted(found[1]) == ["p1", "p3"]
    assert found[0] | found[1] == restore.positions


def test_what_a_source_has_read_is_in_its_snapshot() -> None:
    task, _ = build(source_graph(1), "src", restore=SubtaskRestore("src", 0, read=40))
    for event in (rows(0, 0, 1, 2), rows(3, 0, 7), rows(4, 5)):
        task.handle(event, now(0))
    _, pending = task.snapshot(Barrier(1, 0), now(0))
    task.handle(rows(0, 2, 1), now(0))
    assert pending.write(Writer(), no_cancel).read == 43


def test_a_source_goes_on_with_barriers_when_its_rows_have_ended() -> None:
    task, checkpoints = build(source_graph(1), "src")
    task.handle(rows(0, 0, 1), now(0))
    assert [action.element for action in task.handle(SourceOver(), now(0))] == [Watermark(MAX_TIME_MS)] * 2
    assert positions_of(task) == {"p0": pack_rows(1)}
    checkpoints.completed(1)
    checkpoints.aborted(2)
    *marks, end = task.handle(EndTasks(), now(0))
    assert [action.element for action in marks] == [EndOfStream()] * 2
    assert end == TaskEnded()
    checkpoints.discard(1, 1)


def test_what_a_source_with_checkpoints_does_not_know() -> None:
    task, _ = build(source_graph(1), "src")
    with pytest.raises(ProtocolError):
        task.handle(RowsPersisted(1), now(0))
    pushed = SourceRows("push-0", 0, 0, batch(("a", 1)).payload, None)
    with pytest.raises(SourceError, match="'src' cannot rewind"):
        task.handle(pushed, now(0))


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("operators", "says"),
    [
        ((Replay("r", "s", "src", ROW),), "'r' lets records in again"),
        ((Join("j", max, ROW, (("key",), ("key",)), (ROW, ROW), 0, 1),), "join 'j'.*CoProcess"),
        ((Source("s", IterableSource(()), ROW), Map("m", max, ROW)), "'s' is chained with 'm'"),
    ],
)
def test_chains_that_barriers_cannot_go_through(operators: Any, says: str) -> None:
    job = JobGraph("job", (JobVertex(operators[0].uid, operators, 1),), (), tracked=False, max_parallelism=8)
    with pytest.raises(InvalidTopologyError, match=says):
        build(job, operators[0].uid)


class Ringing(ProcessFunction):
    """Sets a timer for each record; gives (key, time) when it fires, and sets one more for some."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event(record[1])

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        if time_ms % 5 == 0:
            ctx.timers.event(time_ms + 1)
        yield ctx.key, time_ms


class InterruptedChain:
    """A chain with timers whose barriers come at drawn places; a watermark that it is given waits for its turn."""

    def __init__(
        self, interruptions: Iterator[bool], policy: FailurePolicy | None, *ahead: Any, function: Any = None
    ) -> None:
        self.interruptions, self.policy = interruptions, policy
        self.operators = (*ahead, Process("p", function or Ringing(), ROW, ("key",)))
        self.fired: list[tuple[str, int]] = []
        self.start(None, None)

    def start(self, state: Any, part: Any) -> None:
        self.backend = ModelBackend(state)
        made, uid = graph(*self.operators), self.operators[0].uid
        vertices = tuple(
            replace(vertex, failures=self.policy) if vertex.uid == uid else vertex for vertex in made.vertices
        )
        job = JobGraph("job", vertices, made.edges, tracked=False, max_parallelism=8)
        restored = {} if part is None else {(uid, 0): SubtaskRestore(uid, 0, event_times=part.event_times)}
        mode = BarrierTaskMode(
            restored,
            lambda *_: self.backend,
            lambda *_: None,
            lambda _: NO_SUSPECTS,
            interrupted=lambda: next(self.interruptions, False),
        )
        self.task: Any = build_task(job, uid, 0, mode)
        self.checkpoints = mode.checkpointed[uid, 0]
        self.is_held = False
        self.take(TaskStart())

    def take(self, event: Any) -> None:
        """Let the task handle it; nothing passes a watermark that is due before it."""
        for action in self.task.handle(event, now(0)):
            if isinstance(action, Send) and isinstance(action.element, Watermark):
                due = self.backend.timers("p").event.next_ms()
                assert due is None or due > action.element.time_ms
                self.passed = action.element.time_ms
            self.fired += sent([action])
            self.is_held = isinstance(action, HoldInput) or (self.is_held and not isinstance(event, TimeCame))

    def settle(self) -> None:
        while self.is_held:
            self.is_held = False
            self.take(TimeCame())

    def crash(self, checkpoint: int) -> None:
        """Take a snapshot now, whatever waits, and begin again from it."""
        _, pending = self.checkpoints.snapshot(Barrier(checkpoint, 0), now(0))
        part = pending.write(Writer(), no_cancel)
        self.start(self.backend.written[checkpoint], part)


@pytest.mark.parametrize("policy", [None, RETRYING])
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_timers_that_a_barrier_interrupts_fire_once_and_before_their_watermark(
    policy: FailurePolicy | None, data: st.DataObject
) -> None:
    interruptions = iter(data.draw(st.lists(st.booleans(), max_size=40), label="interruptions"))
    chain = InterruptedChain(interruptions, policy)
    wanted: set[tuple[str, int]] = set()
    time_ms = 0
    for number in range(data.draw(st.integers(1, 4))):
        rows = data.draw(st.lists(st.tuples(st.sampled_from("abc"), st.integers(time_ms + 1, time_ms + 12))))
        if rows:
            chain.take(ElementCame(IN, batch(*rows)))
            chain.settle()
        wanted |= {*rows, *((key, at + 1) for key, at in rows if at % 5 == 0)}
        time_ms += data.draw(st.integers(1, 12))
        chain.take(ElementCame(IN, Watermark(time_ms)))
        if data.draw(st.booleans(), label="crash"):
            chain.crash(number + 1)
        chain.settle()
        assert {timer for timer in wanted if timer[1] <= time_ms} == set(chain.fired)
    chain.take(ElementCame(IN, Watermark(MAX_TIME_MS)))
    chain.settle()
    assert chain.passed == MAX_TIME_MS
    assert sorted(chain.fired) == sorted(wanted)


def test_timers_left_in_a_snapshot_fire_behind_a_restore_though_nothing_comes() -> None:
    ahead = AssignWatermarks("times", "n", 0, None, ROW)
    chain = InterruptedChain(iter([True] * 4), None, ahead)
    chain.take(ElementCame(IN, batch(("a", 1), ("b", 2), ("a", 3), ("a", 9))))
    assert chain.fired == [("a", 1)]
    assert chain.is_held
    chain.crash(1)
    assert chain.fired == [("a", 1), ("b", 2)]
    chain.settle()
    assert chain.fired == [("a", 1), ("b", 2), ("a", 3), ("a", 9)]
    assert chain.passed == 9
    assert not chain.is_held


class Retried(ProcessFunction):
    """Has timers of event time due at once by one of the wall clock, and a record that fails once."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def process(self, record: Any, ctx: Any) -> None:
        if record[0] == "b":
            ctx.timers.processing(1)
        elif ctx.attempt == 1:
            raise ValueError("once")
        else:
            self.seen.append("again")

    def on_timer(self, time_ms: int, ctx: Any) -> None:
        self.seen.append(time_ms)
        if ctx.timestamp is None:
            for due_ms in (2, 3, 4):
                ctx.timers.event(due_ms)


def test_a_record_that_is_tried_again_comes_behind_timers_that_were_interrupted() -> None:
    function = Retried()
    chain = InterruptedChain(repeat(True), RETRYING, function=function)
    chain.take(ElementCame(IN, Watermark(10)))
    chain.take(ElementCame(IN, batch(("a", 1), ("b", 2))))
    for _ in range(4):
        chain.task.handle(TimeCame(), now(100_000))
    assert function.seen == [1, 2, 3, 4, "again"]
