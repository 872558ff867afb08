"""The head of an iteration: what it says of its end, and when."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.common.clock import Now
from ftlayer.config import FTStatus
from ftlayer.runtime.barrier_mode.task.mode import BarrierTaskMode
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, Batch, EndOfStream, Idle, LoopWaits, Watermark
from ftlayer.runtime.task.actions import (
    Action,
    DataEnded,
    ElementCame,
    Send,
    TaskEnded,
    TaskStart,
    TimeCame,
    WakeAt,
)
from ftlayer.runtime.task.build import build_task
from ftlayer.runtime.task.contract import NO_SUSPECTS
from ftlayer.runtime.task.iteration import HeadTask, LoopGate, Quiet
from ftlayer.runtime.task.untracked import UntrackedTaskMode
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.job_graph_generator import job_graph

FRESH, SECOND = Channel(0, 0, 0), Channel(1, 0, 0)
FINAL = Barrier(3, 0, final=True)


def batch_of(*numbers: int) -> Batch:
    return Batch(pa.record_batch([pa.array(numbers, pa.int64())], names=["n"]))


def graph_of(*, checkpoints: bool) -> JobGraph:
    env = GraphBuilder("loop", status=FTStatus.OFF)
    loop = env.source([], "n bigint", uid="source").iterate("100ms", uid="head")
    body = loop.rebalance().map(lambda n: n - 1)
    loop.close_with(body.filter(lambda n: n > 0))
    body.sink(print)
    return job_graph(env.build(), FTStatus.OFF, max_parallelism=8 if checkpoints else 0)


class Rig:
    """A head alone, with what it has decided."""

    def __init__(self, checkpoints: bool) -> None:
        self.graph = graph_of(checkpoints=checkpoints)
        self.mono = 0
        mode: Any = (
            BarrierTaskMode({}, None, None, lambda _: NO_SUSPECTS) if checkpoints else UntrackedTaskMode(None)
        )  # type: ignore[arg-type]
        task = build_task(self.graph, "head", 0, mode)
        assert isinstance(task, HeadTask)
        self.checkpoints: Any = mode.checkpointed["head", 0] if checkpoints else None
        self.task: Any = task
        (self.fresh, self.back) = (
            Channel(
                next(edge.number for edge in self.graph.edges_into("head") if edge.feedback is feedback), 0, 0
            )
            for feedback in (False, True)
        )
        self.busy = False
        self.task.watch(lambda: self.busy)
        self.wake: int | None = None
        self.did: list[Action] = []
        self.do(self.task.handle(TaskStart(), self.now))

    @property
    def now(self) -> Now:
        return Now(self.mono, 1_000_000 + self.mono)

    def do(self, actions: list[Action]) -> list[Any]:
        for action in actions:
            if isinstance(action, WakeAt):
                self.wake = action.mono_ms if self.wake is None else min(self.wake, action.mono_ms)
        done = [action for action in actions if not isinstance(action, WakeAt)]
        self.did += done
        return [action.element if isinstance(action, Send) else action for action in done]

    def take(self, channel: Channel, element: Any) -> list[Any]:
        return self.do(self.task.handle(ElementCame(channel, element), self.now))

    def tell(self, event: Any) -> list[Any]:
        return self.do(self.task.handle(event, self.now))

    def wait(self, ms: int) -> list[Any]:
        """Let time pass, as a slot does that has nothing else to do."""
        until, told = self.mono + ms, []
        while self.wake is not None and self.wake <= until:
            self.mono, self.wake = max(self.mono, self.wake), None
            told += self.do(self.task.handle(TimeCame(), self.now))
        self.mono = until
        return told


@pytest.fixture(params=[False, True], ids=["untracked", "checkpoints"])
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.param)


@pytest.fixture
def checked() -> Rig:
    return Rig(True)


def test_it_ends_when_nothing_has_come_back_for_long_enough() -> None:
    rig = Rig(False)
    assert len(rig.take(rig.fresh, batch_of(1))) == 1
    assert rig.wait(10_000) == []
    assert rig.take(rig.fresh, EndOfStream()) == []
    assert rig.wait(99) == []
    assert rig.wait(2) == [Watermark(MAX_TIME_MS), EndOfStream(), TaskEnded()]
    assert rig.wait(10_000) == []


def test_what_comes_back_begins_the_wait_anew(rig: Rig) -> None:
    rig.take(rig.fresh, Watermark(MAX_TIME_MS))
    if rig.checkpoints is not None:
        assert rig.did == []
    else:
        rig.take(rig.fresh, EndOfStream())
    for _ in range(5):
        assert rig.wait(90) == []
        assert len(rig.take(rig.back, batch_of(7, 8))) == 1
    assert rig.wait(99) == []
    assert rig.wait(2)[0] == Watermark(MAX_TIME_MS)


def test_a_busy_loop_is_waited_for(rig: Rig) -> None:
    rig.busy = True
    rig.take(rig.fresh, EndOfStream())
    assert rig.wait(5_000) == []
    rig.busy = False
    assert rig.wait(85) == []
    assert rig.wait(20)


def test_a_loop_in_which_records_wait_elsewhere_is_waited_for_and_they_have_time_to_come_back(
    checked: Rig,
) -> None:
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    assert checked.wait(85) == []
    assert checked.tell(LoopWaits("head", True)) == []
    assert checked.wait(5_000) == []
    assert checked.tell(LoopWaits("head", False)) == []
    assert checked.wait(95) == []
    assert checked.wait(10)


def test_who_hears_of_others_late_waits_for_longer(checked: Rig) -> None:
    checked.task.watch(lambda: False, 2_000)
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    assert checked.wait(2_050) == []
    assert checked.wait(100)


def test_a_slot_that_was_kept_from_looking_looks_again(rig: Rig) -> None:
    """A function took a minute: in that time no record can have come back, whether there is one or not."""
    rig.take(rig.fresh, EndOfStream())
    rig.mono = 60_000
    assert rig.wait(80) == []
    assert rig.wait(20)


def test_its_end_is_told_the_coordinator(checked: Rig) -> None:
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    assert checked.wait(200) == [Watermark(MAX_TIME_MS), DataEnded("head", 0)]
    assert checked.wait(10_000) == []
    # What still comes back goes round, until the last barrier has passed.
    assert len(checked.take(checked.back, batch_of(1))) == 1
    assert checked.take(checked.fresh, EndOfStream()) == [EndOfStream(), TaskEnded()]


def test_behind_the_last_barrier_nothing_goes_round(checked: Rig, caplog: pytest.LogCaptureFixture) -> None:
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    checked.wait(200)
    checked.checkpoints.snapshot(FINAL, checked.now)
    assert checked.take(checked.back, batch_of(1, 2)) == []
    assert checked.wait(1_000) == []
    assert checked.take(checked.fresh, EndOfStream()) == [EndOfStream(), TaskEnded()]
    assert checked.task.late == 2
    assert "longer max_wait" in caplog.text
    # The next is late as well, and nothing is left to wait for.
    assert checked.take(checked.back, batch_of(3)) == []
    assert checked.task.late == 3
    assert checked.wait(1_000) == []
    assert checked.wake is None


def test_what_was_kept_goes_on_if_the_last_checkpoint_was_given_up(checked: Rig) -> None:
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    checked.wait(200)
    checked.checkpoints.snapshot(FINAL, checked.now)
    checked.take(checked.back, batch_of(1))
    checked.take(checked.back, batch_of(2))
    checked.checkpoints.aborted(FINAL.checkpoint)
    sent = checked.wait(1_000)
    assert [element.payload.column(0).to_pylist() for element in sent] == [[1], [2]]
    assert checked.wait(10_000) == []
    assert checked.task.late == 0


def test_what_was_kept_goes_ahead_of_the_next_barrier(checked: Rig) -> None:
    checked.take(checked.fresh, Watermark(MAX_TIME_MS))
    checked.wait(200)
    checked.checkpoints.snapshot(FINAL, checked.now)
    checked.take(checked.back, batch_of(1))
    checked.checkpoints.aborted(FINAL.checkpoint)
    actions, _ = checked.checkpoints.snapshot(Barrier(4, 0, final=True), checked.now)
    assert [element.payload.column(0).to_pylist() for element in checked.do(actions)] == [[1]]


def test_what_comes_behind_the_end_is_dropped() -> None:
    rig = Rig(False)
    rig.take(rig.fresh, EndOfStream())
    rig.wait(200)
    assert rig.take(rig.back, batch_of(1, 2)) == []
    assert rig.take(rig.back, batch_of(3)) == []
    assert rig.task.late == 3


def test_the_gate_keeps_the_end_to_itself() -> None:
    gate = LoopGate([FRESH, SECOND])
    gate.watermark(FRESH, 10)
    gate.watermark(SECOND, 5)
    assert gate.news() == Watermark(5)
    gate.become_idle(FRESH)
    gate.become_idle(SECOND)
    assert gate.news() == Watermark(10)
    assert gate.news() == Idle()
    gate.end(FRESH)
    assert not gate.holds
    gate.watermark(SECOND, MAX_TIME_MS)
    assert gate.holds
    assert gate.time_ms == 10
    # Not idle any more, and no further: what is still in the loop counts.
    assert gate.news() == Watermark(10)
    gate.end(SECOND)
    assert not gate.ended
    assert gate.news() is None
    gate.let_go()
    assert gate.ended
    assert not gate.holds
    assert gate.news() == Watermark(MAX_TIME_MS)


@pytest.mark.parametrize("max_wait_ms", [1, 7, 10, 95, 5_000])
def test_it_is_quiet_after_the_whole_wait_and_not_before(max_wait_ms: int) -> None:
    quiet = Quiet(max_wait_ms)
    assert not quiet.look(10**9, False)
    quiet.begin(0)
    for now in range(max_wait_ms):
        assert not quiet.look(now, False)
    assert any(quiet.look(now, False) for now in range(max_wait_ms, max_wait_ms + 12))
    assert quiet.due_ms is None
