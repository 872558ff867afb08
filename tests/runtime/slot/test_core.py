from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.common.rules.histogram import LATENCY_BOUNDS
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.runtime.acker_mode.slot.rules import CALL_ROOTS, MAX_WAIT_MS
from ftlayer.runtime.protocol.channel_frames import ElementCodec, decode_grants, encode_grants
from ftlayer.runtime.protocol.messages import (
    PERSIST,
    Batch,
    EndOfStream,
    LatencyMarker,
    ReplayNow,
    Watermark,
    histograms_of,
)
from ftlayer.runtime.slot.rules.events import (
    Grant,
    ReplaysCame,
    RootsAccepted,
    RowsDone,
    RowsRead,
    RunTask,
    TimePassed,
    Transmit,
    Turn,
)
from ftlayer.runtime.slot.rules.outgoing import AGES_A_FRAME, LONGEST_AGES
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import Records

LIMIT = 1 << 10
LATER_MS = 1_000


class World:
    """Two or more slots in one thread; what is on its way is delivered when the test says so."""

    def __init__(self, tools: Any, slots: int, draw: random.Random, copies: int = 1) -> None:
        self.tools, self.draw = tools, draw
        self.graph = tools.graph_of(slots)
        self.options = TopologyOptions(batch_rows=16, batch_age_ms=0, channel_bytes=LIMIT)
        self.slots = [tools.slot.of(self.graph, slot, self.options, copies=copies) for slot in range(slots)]
        for place, slot in enumerate(self.slots):
            for other in range(slots):
                if other != place:
                    slot.core.peer_up(other)
        self.codec = ElementCodec(self.graph.edges)
        self.clock = 0

    @property
    def now(self) -> Now:
        self.clock += 1
        return Now(self.clock, self.clock)

    def step(self) -> bool:
        """Do one thing that can be done, at random; False if there is none."""
        moves = []
        for place, slot in enumerate(self.slots):
            moves.append(lambda slot=slot: slot.core.run_next(self.now))
            for other, frames in slot.links.frames.items():
                moves.append(lambda f=frames, p=place, o=other: self.deliver(f, p, o))
            for other, grants in slot.links.grants.items():
                moves.append(lambda g=grants, o=other: bool(g) and self.give(g.popleft(), o))
        self.draw.shuffle(moves)
        if any(move() for move in moves):
            return True
        for slot in self.slots:
            slot.core.idle(self.now.mono_ms + LATER_MS)
        return any(
            queue
            for slot in self.slots
            for kind in (slot.links.frames, slot.links.grants)
            for queue in kind.values()
        )

    def deliver(self, frames: Any, sender: int, receiver: int) -> bool:
        if not frames:
            return False
        self.slots[receiver].core.frame(sender, pa.py_buffer(frames.popleft()))
        return True

    def give(self, grants: bytes, to: int) -> bool:
        self.slots[to].core.granted(grants)
        return True

    def check_in_flight(self) -> None:
        for slot in self.slots:
            for channel, output in slot.core.seating.remote.items():
                frames = slot.core.on_the_way.get(channel, ())
                assert output.window.in_flight == sum(frames)
                # A frame that is larger than all the credit travels alone.
                assert output.window.in_flight <= LIMIT or len(frames) == 1


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(2, 3), st.integers(1, 3))
def test_slots_that_send_to_each_other_end_with_everything(
    tools: Any, draw: random.Random, slots: int, copies: int
) -> None:
    world = World(tools, slots, draw, copies)
    todo = {
        place: [(place * 10_000 + i * 100, draw.randrange(1, 60)) for i in range(8)] for place in range(slots)
    }
    sent = [n for parts in todo.values() for first, rows in parts for n in range(first, first + rows)]
    ended: set[int] = set()
    for _ in range(100_000):
        for place, slot in enumerate(world.slots):
            key = ("source", place)
            if todo[place] and slot.core.may_read(key):
                slot.core.rows(key, tools.source_rows(*todo[place].pop(0)), world.now)
            elif not todo[place] and place not in ended:
                ended.add(place)
                slot.core.source_ended(key, world.now)
        moved = world.step()
        world.check_in_flight()
        if not moved and all(slot.core.has_ended for slot in world.slots):
            break
    assert all(slot.core.has_ended for slot in world.slots)
    taken = [n for place, slot in enumerate(world.slots) for n in slot.tasks["sink", place].taken]
    assert sorted(taken) == sorted(sent * copies)


def one_of_two(tools: Any, **options: Any) -> Any:
    defaults = {"batch_rows": 16, "batch_age_ms": 5, "channel_bytes": LIMIT}
    graph = tools.graph_of(2, tracked=options.pop("tracked", False))
    return tools.slot.of(graph, 0, TopologyOptions(**defaults | options), tracked=graph.tracked)


def frame_for(tools: Any, slot: Any, channel: Channel, first: int = 0, n: int = 4) -> pa.Buffer:
    payload = tools.rows_of(first, n)
    codec = ElementCodec(slot.tasks["work", 0].graph.edges)
    lineage = tools.lineage_of(payload) if slot.vertex is not None else None
    return pa.py_buffer(codec.encode(channel, Batch(payload, lineage)))


FROM_1 = Channel(0, 1, 0)


def test_small_batches_wait_for_others_until_they_are_old_or_nothing_else_is_to_do(tools: Any) -> None:
    slot = one_of_two(tools, channel_bytes=1 << 16)
    slot.core.peer_up(1)
    key = ("source", 0)
    slot.core.rows(key, tools.source_rows(0, 4), Now(10, 0))
    assert not slot.links.frames
    slot.core.run_next(Now(14, 0))
    assert not slot.links.frames
    slot.core.run_next(Now(15, 0))
    assert len(slot.links.frames[1]) == 1
    slot.core.rows(key, tools.source_rows(4, 4), Now(16, 0))
    slot.core.rows(key, tools.source_rows(8, 4), Now(16, 0))
    slot.core.idle(LATER_MS)
    assert len(slot.links.frames[1]) == 2
    slot.core.rows(key, tools.source_rows(12, 32), Now(17, 0))
    assert len(slot.links.frames[1]) == 3
    slot.core.rows(key, tools.source_rows(44, 2), Now(17, 0))
    slot.core.source_ended(key, Now(17, 0))
    assert len(slot.links.frames[1]) == 5, "a mark takes what waits with it"


def aging(tools: Any, slots: int) -> tuple[Any, Any]:
    """A slot of ``slots`` whose loop has used up what it may send small batches for, and a source's batch for all."""
    slot = tools.slot.of(
        tools.graph_of(slots), 0, TopologyOptions(batch_rows=100, batch_age_ms=5, channel_bytes=1 << 20)
    )
    for other in range(1, slots):
        slot.core.peer_up(other)
    rows = tools.source_rows(0, slots)
    key = ("source", 0)
    for _ in range(3):
        slot.core.rows(key, rows, Now(0, 0))
        slot.core.handle(TimePassed(0), Now(5, 0))
    slot.core.idle(5)
    for frames in slot.links.frames.values():
        frames.clear()
    return slot, partial(slot.core.rows, key, rows)


def frames_of(slot: Any) -> int:
    return sum(map(len, slot.links.frames.values()))


def test_a_busy_loop_lets_old_small_batches_go_for_its_cpu_time_the_oldest_first(tools: Any) -> None:
    slot, read = aging(tools, 8)
    for turn in range(1, 71):
        read(Now(5 * turn, 0))
        slot.core.handle(TimePassed(2 * turn), Now(5 * turn + 5, 0))
        # However often it comes round: one frame for 20 ms of CPU time.
        assert frames_of(slot) == 2 * turn // (AGES_A_FRAME * 5)
    assert [len(slot.links.frames[other]) for other in range(1, 8)] == [1] * 7
    read(Now(400, 0))
    slot.core.idle(400)
    assert frames_of(slot) == 14, "a loop that rests lets all go"


def test_a_busy_loop_that_has_not_sent_may_send_one_of_each_channel_and_no_more(tools: Any) -> None:
    slot, read = aging(tools, 8)
    read(Now(10, 0))
    slot.core.handle(TimePassed(10_000), Now(15, 0))
    assert frames_of(slot) == 7
    channels = len(slot.core.seating.remote)
    for turn in range(channels):
        read(Now(20, 0))
        slot.core.handle(TimePassed(10_000), Now(25 + turn, 0))
    assert frames_of(slot) == channels


def test_a_small_batch_waits_no_longer_than_so_many_ages_however_busy_the_loop_is(tools: Any) -> None:
    slot, read = aging(tools, 3)
    read(Now(10, 0))
    slot.core.handle(TimePassed(0), Now(9 + 5 * LONGEST_AGES, 0))
    assert not frames_of(slot)
    slot.core.handle(TimePassed(0), Now(10 + 5 * LONGEST_AGES, 0))
    assert frames_of(slot) == 2


def test_nothing_waits_where_the_age_is_none(tools: Any) -> None:
    options = TopologyOptions(batch_rows=100, batch_age_ms=0)
    slot = tools.slot.of(tools.graph_of(3), 0, options)
    slot.core.peer_up(1)
    slot.core.peer_up(2)
    for turn in range(1, 9):
        slot.core.rows(("source", 0), tools.source_rows(0, 3), Now(0, 0))
        slot.core.handle(TimePassed(0), Now(0, 0))
        assert frames_of(slot) == 2 * turn


def test_a_task_without_credit_is_not_run_and_its_inputs_go_on(tools: Any) -> None:
    slot = one_of_two(tools)
    for i in range(9):
        slot.core.frame(1, frame_for(tools, slot, FROM_1, 20 * i, 20))
    runs = 0
    while slot.core.run_next(tools.now):
        runs += 1
    assert runs < 9, "the sink's slot cannot be reached"
    assert slot.tasks["work", 0].taken
    assert not slot.core.is_quiet
    slot.core.peer_up(1)
    while slot.core.run_next(tools.now):
        pass
    assert len(slot.tasks["work", 0].taken) < 180, "it can be sent to, and has given no credit back"
    assert sum(map(len, slot.links.frames[1])) <= LIMIT


def test_a_frame_from_the_wrong_slot_or_for_no_task_here_is_refused(tools: Any) -> None:
    slot = one_of_two(tools)
    for sender, channel in ((0, FROM_1), (1, Channel(0, 0, 0)), (1, Channel(0, 1, 1))):
        with pytest.raises(CodecError, match="does not lead"):
            slot.core.frame(sender, frame_for(tools, slot, channel))


def test_credit_goes_back_by_quarters_or_a_little_later(tools: Any) -> None:
    slot = one_of_two(tools, channel_bytes=2_048)
    slot.core.peer_up(1)
    slot.core.frame(1, frame_for(tools, slot, FROM_1, 0, 1))
    slot.core.run_next(tools.now)
    slot.core.idle(4)
    assert not slot.links.grants
    assert slot.core.due_ms == 5
    slot.core.idle(5)
    assert slot.core.due_ms is None
    assert len(slot.links.grants[1]) == 1
    slot.core.frame(1, frame_for(tools, slot, FROM_1, 0, 40))
    while slot.core.run_next(tools.now):
        pass
    assert len(slot.links.grants[1]) == 2


def test_a_peer_that_is_dropped_is_forgotten_and_begins_with_full_credit(tools: Any) -> None:
    slot = one_of_two(tools)
    slot.core.peer_up(1)
    for i in range(6):
        slot.core.frame(1, frame_for(tools, slot, FROM_1, 20 * i, 20))
    while slot.core.run_next(tools.now):
        pass
    slot.core.idle(LATER_MS)
    assert not slot.core.is_quiet
    slot.core.drop_peer(1, tools.now)
    assert {channel.sender for channel in slot.tasks["work", 0].resets} == {1}
    assert slot.core.counters()["dropped"] > 0
    assert slot.core.counters()["late"] == 0
    slot.tasks["work", 0].late = 3
    assert slot.core.counters()["late"] == slot.core.counters()["late/work"] == 3
    assert not slot.core.unsent_to(1)
    before = len(slot.links.frames[1])
    slot.core.frame(1, frame_for(tools, slot, FROM_1, 0, 20))
    assert slot.core.run_next(tools.now)
    slot.core.idle(LATER_MS)
    assert len(slot.links.frames[1]) == before, "held until there is a new instance"
    slot.core.peer_up(1)
    assert len(slot.links.frames[1]) > before


def test_a_new_instance_hears_the_last_mark_first(tools: Any) -> None:
    slot = one_of_two(tools)
    slot.core.peer_up(1)
    output = next(iter(slot.core.seating.remote.values()))
    # A latency marker is none that a new instance has to hear.
    for mark in (Watermark(5), Watermark(7), LatencyMarker("source", 3)):
        output.send(mark, 0)
    slot.core.drop_peer(1, tools.now)
    slot.core.peer_up(1)
    said = [slot.core.codec.decode(pa.py_buffer(frame)) for frame in slot.links.frames[1]]
    assert said == [(output.channel, Watermark(7))]


def test_roots_are_held_from_the_asking_for_their_persistence_to_the_last_send(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True)
    key = ("source", 0)

    def held() -> set[int]:
        return {int(root) for roots in slot.core.held_roots() for root in roots}

    slot.core.rows(key, tools.source_rows(0, 6), tools.now)
    ((_, ticket, _),) = slot.vertex.persists
    assert held() == set(range(1, 7))
    assert not slot.core.is_quiet
    slot.vertex.persists.clear()
    slot.core.handle(RootsAccepted(key, ticket, 0.02), tools.now)
    assert held() == set(range(1, 7)), "in the queue of a task, and in the window to slot 1"
    while slot.core.run_next(tools.now):
        pass
    slot.core.peer_up(1)
    assert held(), "in XORs that wait for more of their kind"
    slot.core.idle(LATER_MS)
    assert sum(len(event.roots) for event in slot.vertex.xors) > 0
    assert not held()
    assert slot.core.counters()["persisted"] == 6
    exemplars = slot.core.exemplars()
    (took,) = histograms_of(PERSIST, slot.core.counters(), LATENCY_BOUNDS, exemplars).items()
    assert (took[0], took[1].count, took[1].total) == ("source", 1, 0.02)
    assert [each.root for each in took[1].exemplars if each] == [6]


def test_frames_and_credit_leave_before_a_function_runs(tools: Any) -> None:
    """It may take long, and other slots would wait for them as long."""
    slot = one_of_two(tools, channel_bytes=2_048)
    slot.core.peer_up(1)
    slot.core.rows(("source", 0), tools.source_rows(1, 1), tools.now)
    assert not slot.links.frames
    slot.core.frame(1, frame_for(tools, slot, FROM_1, 0, 40))
    slot.tasks["work", 0].taken.clear()
    later = Now(LATER_MS, LATER_MS)
    due = slot.core.core.handle(TimePassed(LATER_MS), later)
    assert [type(each) for each in due] == [Transmit], "it has waited for others long enough"
    turn = slot.core.core.handle(Turn(), later)
    assert [type(each) for each in turn] == [Grant, RunTask], "a quarter of the channel has been taken"
    assert not slot.tasks["work", 0].taken, "its function has not run"
    slot.core.core.handle(turn[-1], later)
    assert slot.tasks["work", 0].taken == list(range(40))


def test_roots_are_held_between_a_decision_and_its_carrying_out(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True)
    core, vertex = slot.core.core, slot.vertex
    slot.core.peer_up(1)

    def held() -> set[int]:
        return {int(root) for roots in core.held_roots() for root in roots}

    def carry_out(event: Any) -> list[Any]:
        """Return what is wanted, with what runs decide; nothing is given away yet."""
        wanted = []
        todo = core.handle(event, tools.now)
        while todo:
            if isinstance(todo[0], RunTask):
                assert held() >= roots, "what a task is to work on"
                todo = core.handle(todo[0], tools.now) + todo[1:]
            else:
                wanted.append(todo.pop(0))
            assert held() >= roots
        return wanted

    roots: set[int] = set()
    (persist,) = carry_out(RowsRead(("source", 0), 1, tools.source_rows(0, 32)))
    roots = set(range(1, 33))
    assert held() == roots
    sent = carry_out(RootsAccepted(("source", 0), persist.ticket))
    assert [type(each) for each in sent] == [Transmit, RowsDone]
    core.carried_out()
    here = {int(root) for root in range(1, 33) if root % 2}
    assert held() == here, "the others are on their way, and held there"
    roots = here
    carry_out(Turn())
    assert vertex is not None


def test_a_source_waits_for_the_vertex_and_for_room(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True)
    key = ("source", 0)
    slot.vertex.room = False
    assert not slot.core.may_read(key)
    slot.vertex.room = True
    reads = 0
    while slot.core.may_read(key):
        slot.core.rows(key, tools.source_rows(reads, 1), tools.now)
        reads += 1
    assert reads == 16
    while slot.vertex.persists:
        _, ticket, _ = slot.vertex.persists.popleft()
        slot.core.handle(RootsAccepted(key, ticket), tools.now)
    slot.core.source_ended(key, tools.now)
    assert not slot.core.may_read(key)


def test_a_source_reads_early_while_the_vertex_has_nothing_to_answer(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True)
    key = ("source", 0)
    assert slot.core.reads_early(key)
    slot.core.rows(key, tools.source_rows(0, 1), tools.now)
    assert not slot.core.reads_early(key)
    _, ticket, _ = slot.vertex.persists.popleft()
    slot.core.handle(RootsAccepted(key, ticket), tools.now)
    assert slot.core.reads_early(key)


def test_acknowledgements_travel_together(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True, batch_rows=4_096, channel_bytes=1 << 24)
    slot.core.peer_up(1)
    rows = CALL_ROOTS // 15
    for i in range(30):
        slot.core.frame(1, frame_for(tools, slot, FROM_1, rows * i, rows))
        slot.core.run_next(Now(0, 0))
    while slot.core.run_next(Now(0, 0)):
        pass
    assert slot.vertex.xors
    assert all(len(event.roots) >= CALL_ROOTS for event in slot.vertex.xors)
    slot.core.idle(MAX_WAIT_MS - 1)
    told = len(slot.vertex.xors)
    slot.core.idle(MAX_WAIT_MS)
    assert len(slot.vertex.xors) == told + 1
    roots = np.concatenate([event.roots for event in slot.vertex.xors])
    # The sink's own half of the rows is acknowledged here, too.
    assert len(roots) == 30 * rows + 15 * rows


def test_replays_are_asked_for_where_there_is_room(tools: Any) -> None:
    slot = one_of_two(tools, tracked=True)
    slot.core.handle(ReplayNow(), tools.now)
    assert len(slot.vertex.asks) == 1
    activity = slot.core.activity
    slot.core.handle(ReplaysCame(("replay", 0), ()), tools.now)
    assert slot.core.activity == activity, "asking for nothing is no activity"
    payload = tools.rows_of(0, 64)
    lineage = tools.lineage_of(payload)
    ones = np.ones(64, np.int32)
    records = Records(payload, lineage.roots, lineage.roots, ones)
    slot.core.handle(ReplaysCame(("replay", 0), (records,)), tools.now)
    assert slot.core.activity > activity
    slot.core.handle(ReplayNow(), tools.now)
    assert len(slot.vertex.asks) == 1
    slot.core.peer_up(1)
    while slot.core.run_next(tools.now):
        pass
    slot.core.on_time(tools.now)
    assert len(slot.vertex.asks) == 1, "slot 1 has given no credit back"


def test_a_slot_that_has_ended_has_given_all_credit_back(tools: Any) -> None:
    slot = one_of_two(tools, channel_bytes=1 << 16)
    slot.core.peer_up(1)
    slot.core.source_ended(("source", 0), tools.now)
    for channel in (Channel(0, 1, 0), Channel(1, 1, 0)):
        slot.core.frame(
            1, pa.py_buffer(ElementCodec(slot.tasks["work", 0].graph.edges).encode(channel, EndOfStream()))
        )
    while slot.core.run_next(tools.now):
        pass
    for frame in slot.links.frames[1]:
        channel, _ = ElementCodec(slot.tasks["work", 0].graph.edges).decode(pa.py_buffer(frame))
        slot.core.granted(encode_grants({channel: len(frame)}))
    assert slot.core.is_quiet
    slot.core.idle(0)
    assert slot.core.has_ended
    given = [channel for grants in slot.links.grants[1] for channel, _ in decode_grants(grants)]
    assert set(given) == {Channel(0, 1, 0), Channel(1, 1, 0)}
