"""What a slot measures of its tasks: shares of time, rates, watermarks, and what waits for them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.config import TopologyOptions
from ftlayer.runtime.protocol.messages import MAX_TIME_MS, MIN_TIME_MS
from ftlayer.runtime.slot.rules.load import BusyTimes, LoadMeter, edge_loads
from ftlayer.runtime.slot.rules.outgoing import RemoteOutput
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls.jobs import EdgeDetails, SubtaskDetails

S = 1_000_000_000
A, B = ("a", 0), ("b", 0)


def test_a_task_that_runs_now_is_busy_up_to_now() -> None:
    busy = BusyTimes()
    busy.began(A, 100)
    assert busy.totals(150) == {A: 50}
    busy.ended(160)
    busy.began(B, 200)
    busy.ended(230)
    busy.began(A, 300)
    assert busy.totals(310) == {A: 70, B: 30}


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 50), st.integers(0, 50))))
def test_all_runs_are_counted_once(runs: list[tuple[tuple[str, int], int, int]]) -> None:
    busy, now, expected = BusyTimes(), 0, {A: 0, B: 0}
    for key, pause, length in runs:
        now += pause
        busy.began(key, now)
        now += length
        expected[key] += length
        assert {A: 0, B: 0} | busy.totals(now) == expected
        busy.ended(now)
        assert {A: 0, B: 0} | busy.totals(now + 7) == expected


def loads_of(loads: tuple[SubtaskDetails, ...]) -> dict[str, SubtaskDetails]:
    return {load.uid: load for load in loads}


@pytest.fixture
def slot(tools: Any) -> Any:
    return tools.slot.of(tools.graph_of(2, tracked=True), 0, TopologyOptions(batch_rows=4), tracked=True)


def test_shares_and_rates_are_those_since_the_last_time(tools: Any, slot: Any) -> None:
    busy = BusyTimes()
    meter = LoadMeter(slot.core.core, busy, 0)
    slot.core.rows(("source", 0), tools.source_rows(0, 6), tools.now)
    busy.began(("source", 0), S)
    busy.ended(2 * S)
    first = loads_of(meter.measure(4 * S))
    assert set(first) == {"source", "work", "sink", "replay"}
    assert (first["source"].busy, first["source"].in_per_s, first["source"].records_in) == (0.25, 1.5, 6)
    assert (first["work"].busy, first["work"].in_per_s) == (0.0, 0.0)
    second = loads_of(meter.measure(5 * S))
    assert (second["source"].busy, second["source"].in_per_s, second["source"].records_in) == (0.0, 0.0, 6)


def test_a_run_that_does_not_end_is_busy_all_the_time(slot: Any) -> None:
    busy = BusyTimes()
    meter = LoadMeter(slot.core.core, busy, 0)
    busy.began(("work", 0), 0)
    assert [loads_of(meter.measure(second * S))["work"].busy for second in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_a_source_that_may_not_persist_is_back_pressured(slot: Any) -> None:
    meter = LoadMeter(slot.core.core, BusyTimes(), 0)
    for room in (True, False, False, False):
        slot.vertex.room = room
        meter.sample()
    assert loads_of(meter.measure(S))["source"].back_pressured == 0.75
    meter.sample()
    assert loads_of(meter.measure(2 * S))["source"].back_pressured == 1.0
    assert loads_of(meter.measure(3 * S))["source"].back_pressured == 0.0


def test_a_task_is_back_pressured_that_has_input_and_no_room(tools: Any, slot: Any) -> None:
    meter = LoadMeter(slot.core.core, BusyTimes(), 0)
    work = slot.core.seating.seats["work", 0]
    remote = next(output for output in work.outputs.values() if isinstance(output, RemoteOutput))
    remote.window.limit = 0
    remote.window.put(b"x" * 10)
    assert remote.window.take()
    meter.sample()  # it has nothing to do
    work.inbox.put(Channel(0, 0, 0), tools.batch(tools.rows_of(0, 3)), 0)
    meter.sample()
    loads = loads_of(meter.measure(S))
    assert (loads["work"].back_pressured, loads["sink"].back_pressured) == (0.5, 0.0)


@pytest.mark.parametrize(("time_ms", "shown"), [(MIN_TIME_MS, None), (7, 7), (MAX_TIME_MS, None)])
def test_a_watermark_is_shown_while_there_is_one(slot: Any, time_ms: int, shown: int | None) -> None:
    seat = slot.core.seating.seats["work", 0]
    seat.task = SimpleNamespace(watermark_ms=time_ms)
    assert seat.watermark_ms == shown


def test_what_waits_is_shown_by_edge(tools: Any, slot: Any) -> None:
    inbox = slot.core.seating.seats["work", 0].inbox
    batch = tools.batch(tools.rows_of(0, 3))
    inbox.put(Channel(0, 0, 0), batch, 0)
    inbox.put(Channel(0, 1, 0), batch, 0)
    one = inbox.queued()[0][1]
    assert one > 0
    assert set(edge_loads(slot.core.core)) == {
        EdgeDetails("source", "work", 0, 2 * one, 6),
        EdgeDetails("replay", "work", 0, 0, 0),
        EdgeDetails("work", "sink", 0, 0, 0),
    }


def test_edges_between_the_same_chains_are_one(tools: Any, slot: Any) -> None:
    core = slot.core.core
    core.graph = SimpleNamespace(edges=[replace(edge, source="source") for edge in core.graph.edges])
    inbox, batch = slot.core.seating.seats["work", 0].inbox, tools.batch(tools.rows_of(0, 3))
    for channel in {channel.edge: channel for channel, _, _ in inbox.queued()}.values():
        inbox.put(channel, batch, 0)
    (found,) = [load for load in edge_loads(core) if load.target == "work"]
    assert found == EdgeDetails("source", "work", 0, sum(size for _, size, _ in inbox.queued()), 6)
