from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.clock import Now
from ftlayer.config import TopologyOptions
from ftlayer.errors import CodecError
from ftlayer.runtime.protocol.channel_frames import ElementCodec, decode_grants
from ftlayer.runtime.protocol.messages import (
    MAX_TIME_MS,
    Batch,
    CancelMarker,
    CheckpointAborted,
    CheckpointCompleted,
    EndTasks,
    TriggerCheckpoint,
)
from ftlayer.topology.job_graph import Channel


def test_an_unaligned_barrier_passes_though_no_task_reads(kit: Any, tools: Any) -> None:
    world = kit.full_of_records(tools, kit.unaligned)
    for slot in world.slots:
        # Some of it is taken, so that there is something in every place.
        for _ in range(3):
            slot.core.run_next(world.now)
    kit.pass_on(world)
    world.trigger(world.barrier(1, Alignment.UNALIGNED))
    assert kit.pass_on(world) < 10
    assert world.complete(1)
    captured = world.in_flight(1, 0) + world.in_flight(1, 1)
    assert {channel.outgoing for channel in captured} == {False, True}
    world.check_exact(1)
    counters = world.slots[0].core.counters()
    mine = [channel for channels, _ in world.slots[0].shelf.done.values() for channel in channels]
    assert counters["in_flight_records"] == sum(channel.records for channel in mine)
    assert counters["snapshots"] == 3
    assert counters["snapshots/work"] == 1
    assert all(times.unaligned for _, times in world.slots[0].shelf.done.values())


def test_an_aligned_barrier_turns_unaligned_where_it_waits_too_long(kit: Any, tools: Any) -> None:
    world = kit.full_of_records(tools, kit.turning)
    kit.pass_on(world)
    world.trigger(world.barrier(1, Alignment.ALIGNED, 20))
    kit.pass_on(world)
    assert not world.complete(1)
    assert not any(key == ("source", 0) for key, _ in world.slots[0].shelf.done), "it may still overtake"
    due = {slot.core.due_ms for slot in world.slots}
    assert due == {20}
    world.clock = 19
    kit.pass_on(world)
    assert not world.complete(1)
    rules = world.slots[0].core._mode
    assert [rules.interrupts(*when) for when in ((False, 19), (True, 19), (False, 20))] == [
        False,
        True,
        True,
    ], "timers wait for a barrier that has just come, or that may overtake by now"
    world.clock = 20
    assert kit.pass_on(world) < 10
    assert world.complete(1)
    world.check_exact(1)
    kinds = {barrier.alignment for slot in world.slots for barrier in slot.shelf.barriers.values()}
    assert kinds == {Alignment.ALIGNED, Alignment.UNALIGNED}
    _, times = world.slots[0].shelf.done[("work", 0), 1]
    assert times.unaligned
    assert all(slot.core.due_ms is None or slot.core.due_ms > 20 for slot in world.slots)


def test_a_barrier_that_was_in_time_overtakes_nothing(kit: Any, tools: Any) -> None:
    world = kit.world(tools, kit.turning)
    world.slots[0].core.rows(("source", 0), tools.source_rows(0, 20), world.now)
    world.trigger(world.barrier(1, Alignment.ALIGNED, 20))
    world.run_out(random.Random(1))
    assert world.clock < 20 or world.complete(1)
    world.check_exact(1)
    assert not world.in_flight(1, 0) + world.in_flight(1, 1)


def test_a_blocked_channel_holds_its_elements_and_its_credit(kit: Any, tools: Any) -> None:
    world, slot = kit.one_of_two(tools, kit.aligned)
    barrier = world.barrier(1, Alignment.ALIGNED)
    slot.core.frame(1, kit.frame(world, kit.from_1, barrier))
    for i in range(3):
        slot.core.frame(1, kit.frame(world, kit.from_1, Batch(tools.rows_of(100 * i, 10))))
    while slot.core.run_next(world.now):
        pass
    assert slot.tasks["work", 0].taken == []
    assert not slot.core.is_quiet
    slot.core.idle(1_000)
    given = [its for grants in slot.links.grants.pop(1) for its in decode_grants(grants)]
    assert given == [(kit.from_1, len(kit.frame(world, kit.from_1, barrier)))], "for the barrier alone"
    slot.core.handle(TriggerCheckpoint(barrier), world.now)
    assert slot.core.run_next(world.now)
    assert (("work", 0), 1) in slot.shelf.done
    assert slot.shelf.begun[("work", 0), 1].taken == ()
    while slot.core.run_next(world.now):
        pass
    assert len(slot.tasks["work", 0].taken) == 30


def test_an_aborted_checkpoint_holds_nothing_up(kit: Any, tools: Any) -> None:
    world, slot = kit.one_of_two(tools, kit.aligned)
    slot.core.frame(1, kit.frame(world, kit.from_1, world.barrier(7, Alignment.ALIGNED)))
    slot.core.frame(1, kit.frame(world, kit.from_1, Batch(tools.rows_of(0, 10))))
    while slot.core.run_next(world.now):
        pass
    assert slot.tasks["work", 0].taken == []
    slot.core.handle(CheckpointAborted(7), world.now)
    while slot.core.run_next(world.now):
        pass
    assert slot.tasks["work", 0].taken == list(range(10))
    assert (("work", 0), 7) in slot.shelf.cancelled
    assert all(task.told == [("aborted", 7)] for task in slot.tasks.values())
    slot.core.handle(CheckpointCompleted(8), world.now)
    assert all(task.told[-1] == ("completed", 8) for task in slot.tasks.values())
    assert not slot.shelf.given_up


def test_an_aborted_checkpoint_overtakes_nothing_any_more(kit: Any, tools: Any) -> None:
    world = kit.full_of_records(tools, kit.turning)
    kit.pass_on(world)
    world.trigger(world.barrier(1, Alignment.ALIGNED, 20))
    for slot in world.slots:
        slot.core.handle(CheckpointAborted(1), world.now)
    assert {slot.core.due_ms for slot in world.slots} == {None}
    world.clock = 1_000
    kit.pass_on(world)
    assert not any(slot.shelf.done for slot in world.slots)


def test_a_checkpoint_that_is_given_up_is_given_up_behind_it_too(kit: Any, tools: Any) -> None:
    world, slot = kit.one_of_two(tools, kit.aligned)
    slot.core.handle(TriggerCheckpoint(world.barrier(1, Alignment.ALIGNED)), world.now)
    slot.core.frame(1, kit.frame(world, kit.from_1, CancelMarker(1)))
    slot.core.frame(1, kit.frame(world, kit.from_1, Batch(tools.rows_of(0, 10))))
    while slot.core.run_next(world.now):
        pass
    slot.core.frame(1, kit.frame(world, Channel(1, 1, 0), CancelMarker(1)))
    while slot.core.run_next(world.now):
        pass
    assert slot.shelf.given_up == [(("work", 0), 1), (("sink", 0), 1)]
    assert slot.tasks["work", 0].taken == list(range(10))
    codec = ElementCodec(world.graph.edges)
    said = [codec.decode(pa.py_buffer(data)) for data in slot.links.frames[1]]
    assert (Channel(1, 0, 1), CancelMarker(1)) in said


def test_a_task_that_cannot_be_snapshotted_ends_the_slot_and_is_named(kit: Any, tools: Any) -> None:
    world, slot = kit.one_of_two(tools, kit.aligned)

    def fail(barrier: Barrier, now: Now) -> Any:
        raise RuntimeError("no state today")

    slot.tasks["source", 0].snapshot = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no state today"):
        slot.core.handle(TriggerCheckpoint(world.barrier(1, Alignment.ALIGNED)), world.now)
    assert slot.core.working is not None
    assert slot.core.working.uid == "source"


def test_a_source_whose_rows_have_ended_goes_on_with_barriers(kit: Any, tools: Any) -> None:
    world = kit.world(tools, kit.aligned, 1)
    (slot,) = world.slots
    slot.core.source_ended(("source", 0), world.now)
    world.run_out(random.Random(0))
    assert slot.core.is_quiet
    assert not slot.core.has_ended
    assert slot.tasks["work", 0].times == {kit.from_0: MAX_TIME_MS}
    barrier = Barrier(1, world.now.wall_ms - 300, final=True)
    slot.core.handle(TriggerCheckpoint(barrier), world.now)
    world.run_out(random.Random(0))
    assert world.complete(1)
    assert slot.shelf.barriers[("sink", 0), 1] == barrier
    assert slot.core.counters()["start_delay_ms/source"] == 300
    slot.core.handle(CheckpointCompleted(1), world.now)
    slot.core.handle(EndTasks(), world.now)
    world.run_out(random.Random(0))
    assert slot.core.has_ended
    slot.core.handle(CheckpointAborted(2), world.now)
    assert all(task.told == [("completed", 1)] for task in slot.tasks.values()), "they are gone"


def test_a_barrier_has_no_place_in_a_graph_without_checkpoints(kit: Any, tools: Any) -> None:
    graph = tools.graph_of(2)
    slot = tools.slot.of(graph, 0, TopologyOptions())
    data = ElementCodec(graph.edges).encode(kit.from_1, Barrier(1, 0))
    with pytest.raises(CodecError, match="another mode"):
        slot.core.frame(1, pa.py_buffer(data))


def test_a_slow_task_is_sent_less(kit: Any, tools: Any) -> None:
    config = CheckpointConfig(debloating=True)
    world = kit.world(tools, config, 2, batch_rows=4_096, channel_bytes=1 << 20)
    key, draw = ("source", 0), random.Random(3)
    first = 0
    for _ in range(3_000):
        for slot in world.slots:
            if slot is world.slots[0] and slot.core.may_read(key):
                rows = slot.core.rows_wanted(key)
                slot.core.rows(key, tools.source_rows(first, rows), world.now)
                first += rows
        before = [len(slot.tasks["sink", place].taken) for place, slot in enumerate(world.slots)]
        world.step(draw)
        for place, slot in enumerate(world.slots):
            # Some 20 bytes a millisecond.
            world.clock += len(slot.tasks["sink", place].taken) - before[place]
        if world.clock > 400_000:
            break
    limit = world.slots[1].core.seating.seats["sink", 1].inbox.limit_bytes
    assert limit < 1 << 16
    assert 64 <= world.slots[0].core.rows_wanted(key) < 2_048
    to_sink = world.slots[0].core.seating.remote[Channel(1, 0, 1)]
    assert to_sink.window.limit == limit
    assert to_sink.window.in_flight <= limit + (1 << 12)
