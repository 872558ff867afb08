from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.config import TopologyOptions
from ftlayer.functions.chains.segments import segments_of
from ftlayer.functions.conversion import VALUES
from ftlayer.functions.steps import Map
from ftlayer.runtime.handler import RecordIds
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.slot.pulse import Pulse, _record_of, function_under_way
from ftlayer.runtime.slot.rules.core import Working
from ftlayer.topology.job_graph import Channel

WAIT_S = 600


class Beating:
    def __init__(self, tools: Any, timeout_ms: int = 60_000) -> None:
        self.sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.touched: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.errors: queue.SimpleQueue[Exception] = queue.SimpleQueue()
        self.outside: list[Any] = []
        graph = tools.graph_of(2, tracked=True)
        self.slot = tools.slot.of(graph, 0, TopologyOptions(), tracked=True)
        self.pulse = Pulse(
            self.sent.put,
            10,
            timeout_ms=timeout_ms,
            touch=self.touched.put,
            held=lambda: self.outside,
            on_error=self.errors.put,
        )
        self.pulse.watch(self.slot.core)

    def held(self) -> set[int]:
        return {int(root) for roots in self.pulse.held_roots() for root in roots}


@pytest.fixture
def beating(tools: Any) -> Any:
    beating = Beating(tools)
    yield beating
    beating.pulse.stop()


def mono_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def test_it_beats_while_the_loop_is_busy(beating: Beating) -> None:
    beating.slot.core.working = Working("work", beating.slot.tasks["work", 0], (), mono_ms() - 5_000)
    beating.pulse.start()
    beats = [beating.sent.get(timeout=WAIT_S) for _ in range(3)]
    assert all(beat.busy == "work" and beat.busy_ms >= 5_000 for beat in beats)
    assert beats[0].counters["records_in/work"] == 0


def test_it_says_what_each_task_does(beating: Beating) -> None:
    beating.slot.vertex.room = False
    beating.pulse.start()
    beats = [beating.sent.get(timeout=WAIT_S) for _ in range(3)]
    for beat in beats:
        loads = {load.uid: load for load in beat.subtasks}
        assert set(loads) == {uid for uid, _ in beating.slot.tasks}
        assert (loads["source"].slot, loads["source"].busy, loads["source"].back_pressured) == (0, 0.0, 1.0)
        ends = {("source", "work"), ("work", "sink"), ("replay", "work")}
        assert {(load.source, load.target) for load in beat.edges} == ends


def test_what_waits_anywhere_is_held(tools: Any, beating: Beating) -> None:
    payload = tools.rows_of(0, 4)
    lineage = tools.lineage_of(payload)
    codec = ElementCodec(beating.slot.tasks["work", 0].graph.edges)
    beating.slot.core.frame(1, pa.py_buffer(codec.encode(Channel(0, 1, 0), Batch(payload, lineage))))
    beating.outside = [np.array([99], np.uint64), np.empty(0, np.uint64)]
    assert beating.held() == {1, 2, 3, 4, 99}


def test_a_function_that_hangs_does_not_keep_its_records(tools: Any) -> None:
    beating = Beating(tools, timeout_ms=1_000)
    task = beating.slot.tasks["work", 0]
    roots = (np.array([5], np.uint64),)
    beating.slot.core.working = Working("work", task, roots, mono_ms())
    assert beating.held() == {5}
    beating.slot.core.working = Working("work", task, roots, mono_ms() - 1_000)
    assert beating.held() == set()


def test_a_batch_that_comes_forward_is_held_for_as_long_as_it_takes(tools: Any) -> None:
    beating = Beating(tools, timeout_ms=1_000)
    task = beating.slot.tasks["work", 0]
    task.progress = 1
    beating.slot.core.working = Working("work", task, (np.array([5], np.uint64),), mono_ms() - 500)
    assert beating.held() == {5} or mono_ms() - beating.slot.core.working.since_ms >= 1_000
    task.progress = 2
    beating.slot.core.working = beating.slot.core.working
    assert beating.held() == {5}
    # As if the last look was a timeout ago, and nothing has moved since.
    beating.pulse._seen_since_ms -= 1_000
    assert beating.held() == set()
    task.progress = 3
    assert beating.held() == {5}
    beating.slot.core.working = replace(beating.slot.core.working)
    assert beating.held() == {5} or mono_ms() - beating.slot.core.working.since_ms >= 1_000


def test_a_record_that_hangs_does_not_take_its_batch_along(tools: Any) -> None:
    beating = Beating(tools, timeout_ms=1_000)
    task = beating.slot.tasks["work", 0]
    # The second row has two roots, one of them the first row's too.
    roots = np.array([5, 6, 5, 7], np.uint64)
    lineage = RecordIds(roots, roots, np.array([0, 1, 3, 4], np.int32))
    beating.slot.core.working = Working("work", task, (roots,), mono_ms() - 1_000, lineage)
    for row, held in ((0, {6, 7}), (1, {7}), (2, {5, 6})):
        task.row = row
        assert beating.held() == held


def test_the_record_that_a_function_works_on_is_named(tools: Any) -> None:
    beating = Beating(tools)
    task = beating.slot.tasks["work", 0]
    roots = np.array([5, 6, 255], np.uint64)
    working = Working(
        "work", task, (roots,), mono_ms(), RecordIds(roots, roots, np.arange(4, dtype=np.int32))
    )
    assert _record_of(working) == ""
    task.row = 2
    assert _record_of(working) == ", record 3 of its batch, root 00000000000000ff"
    assert _record_of(replace(working, lineage=None)) == ", record 3 of its batch"


@pytest.mark.parametrize(("rows", "timeouts"), [(1, 1), (3, 3), (10, 10), (500, 10)])
def test_a_call_for_a_batch_has_a_timeout_for_each_record_but_not_for_ever(
    tools: Any, rows: int, timeouts: int
) -> None:
    beating = Beating(tools, timeout_ms=10_000)
    task = beating.slot.tasks["work", 0]
    roots = np.arange(1, rows + 1, dtype=np.uint64)
    lineage = RecordIds(roots, roots)
    long = 10_000 * timeouts
    beating.slot.core.working = Working("work", task, (roots,), mono_ms() - long + 5_000, lineage)
    assert beating.held() == set(range(1, rows + 1))
    beating.slot.core.working = Working("work", task, (roots,), mono_ms() - long, lineage)
    assert beating.held() == set()


def test_touching_what_is_held(tools: Any) -> None:
    beating = Beating(tools, timeout_ms=30)
    beating.outside = [np.array([99], np.uint64)]
    beating.pulse.start()
    for _ in range(3):
        assert [roots.tolist() for roots in beating.touched.get(timeout=WAIT_S)] == [[99]]
    beating.pulse.stop()


def test_what_ends_it_is_told(tools: Any) -> None:
    beating = Beating(tools)
    beating.outside = [None]
    beating.pulse.start()
    assert isinstance(beating.errors.get(timeout=WAIT_S), TypeError)


def test_the_function_that_a_thread_is_in_is_named() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(value: int) -> int:
        entered.set()
        leave.wait(WAIT_S)
        return value

    rows = pa.record_batch({"value": [1]})
    segment = segments_of([Map("slow", slow, rows.schema)], VALUES)[0]
    loop = threading.Thread(target=segment.run, args=(rows, np.arange(1)))
    loop.start()
    assert entered.wait(WAIT_S)
    said = function_under_way(loop.ident or 0)
    leave.set()
    loop.join()
    assert "slow (" in said
    assert f"({__file__}:" in said
    assert function_under_way(loop.ident or 0) == ""
