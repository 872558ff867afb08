"""A task with a rate limit takes what its rate lets through; the rest waits in front of it, and the slot goes on."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.functions.token_bucket import BURST_MS
from ftlayer.runtime.protocol.messages import Watermark
from ftlayer.topology.job_graph import Channel

SOURCE = ("source", 0)
INTO_WORK = Channel(0, 0, 0)


class Slot:
    """source → work, limited → sink in one slot, by a clock that is moved to what is due."""

    def __init__(self, tools: Any, rate: float, **kinds: Any) -> None:
        graph = tools.graph_of(1, rate_limit=rate, **kinds)
        options = TopologyOptions(batch_rows=1_000, batch_age_ms=0, channel_bytes=1 << 20)
        self.slot = tools.slot.of(graph, 0, options, tracked=graph.tracked)
        self.core = self.slot.core
        self.work = self.slot.tasks["work", 0]
        self.tools = tools
        self.now_ms = 0
        self.taken_at: list[tuple[int, int]] = []

    @property
    def now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    def read(self, first: int, rows: int) -> None:
        self.core.rows(SOURCE, self.tools.source_rows(first, rows), self.now)

    def run(self) -> None:
        """Run all that can be run at this time."""
        self.core.on_time(self.now)
        before = len(self.work.taken)
        while self.core.run_next(self.now):
            pass
        self.core.idle(self.now_ms)
        if len(self.work.taken) > before:
            self.taken_at.append((self.now_ms, len(self.work.taken) - before))

    def run_to_the_end(self) -> None:
        for _ in range(100_000):
            self.run()
            if self.core.has_ended:
                return
            assert self.core.due_ms is not None, "it waits for nothing, and has not ended"
            assert self.core.due_ms > self.now_ms, "a turn that did nothing, and another one at once"
            self.now_ms = self.core.due_ms
        raise AssertionError("no end")


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([0.5, 3.0, 40.0, 1_000.0, 1e6]), st.lists(st.integers(1, 60), max_size=6))
def test_all_come_in_order_and_no_faster(tools: Any, rate: float, reads: list[int]) -> None:
    slot = Slot(tools, rate)
    number = 0
    for rows in reads:
        slot.read(number, rows)
        number += rows
    slot.core.source_ended(SOURCE, slot.now)
    slot.run_to_the_end()
    assert slot.work.taken == list(range(number))
    burst = max(1.0, rate * BURST_MS / 1_000)
    for place, (start, _) in enumerate(slot.taken_at):
        total = 0
        for end, rows in slot.taken_at[place:]:
            total += rows
            assert total <= rate * (end - start) / 1_000 + burst + 1e-6
    assert slot.now_ms <= number / rate * 1_000 + 2 * BURST_MS + 1_000 / rate + number, "and no slower"


def test_what_else_the_slot_has_to_do_goes_on_and_marks_wait_behind_the_records(tools: Any) -> None:
    slot = Slot(tools, 10)
    slot.read(0, 3)
    inbox = slot.core.seating.receivers[INTO_WORK].inbox
    inbox.put(INTO_WORK, Watermark(5), 0)
    slot.run()
    assert slot.work.taken == []
    assert slot.core.due_ms == 100
    slot.now_ms = 50
    slot.read(3, 2)
    slot.run()
    assert slot.work.taken == []
    slot.now_ms = 100
    slot.run()
    assert slot.work.taken == [0]
    assert inbox.has_records
    assert not slot.core.is_quiet
    slot.core.source_ended(SOURCE, slot.now)
    slot.run_to_the_end()
    assert slot.taken_at == [(100, 1), (200, 1), (300, 1), (400, 1), (500, 1)]
    assert slot.now_ms == 500, "the end of the stream is no record"


def test_replays_count_and_the_vertex_hears_what_waits(tools: Any) -> None:
    slot = Slot(tools, 10, tracked=True)
    replayed = tools.rows_of(7, 2)
    from_replay = Channel(2, 0, 0)
    seat = slot.core.seating.receivers[from_replay]
    lineage = tools.lineage_of(replayed)
    seat.inbox.put(from_replay, tools.batch(replayed, lineage), 0)
    slot.run()
    assert lineage.roots.tolist() in [roots.tolist() for roots in slot.core.held_roots()]
    for slot.now_ms in (100, 200):
        slot.run()
    assert slot.taken_at == [(100, 1), (200, 1)]
    assert slot.work.taken == [7, 8]


def test_a_rate_not_used_is_lost_but_for_a_burst(tools: Any) -> None:
    slot = Slot(tools, 100)
    slot.read(0, 1)
    slot.run()
    slot.now_ms = 60_000
    slot.run()
    slot.now_ms = 90_000
    slot.read(1, 100)
    slot.run()
    assert slot.taken_at == [(60_000, 1), (90_000, 10)]


def test_without_a_limit_no_bucket_is_kept(tools: Any) -> None:
    slot = tools.slot.of(tools.graph_of(1), 0, TopologyOptions(batch_age_ms=0))
    slot.core.rows(SOURCE, tools.source_rows(0, 500), Now(0, 0))
    while slot.core.run_next(Now(0, 0)):
        pass
    assert len(slot.tasks["work", 0].taken) == 500
    assert slot.core.seating.seats["work", 0].bucket is None
