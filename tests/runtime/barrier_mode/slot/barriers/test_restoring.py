from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Alignment
from ftlayer.checkpoint.snapshots import ChannelState, InFlight, Piece, Restore, SubtaskRestore
from ftlayer.errors import FTLayerError, IncompatibleCheckpointError
from ftlayer.records.partitioning import OutgoingRows, Rebalance
from ftlayer.runtime.barrier_mode.slot.in_flight import CapturedChannel, read_batches
from ftlayer.runtime.protocol.channel_frames import ElementCodec
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.task.actions import SourceRows
from ftlayer.topology.job_graph import Channel, JobEdge


class Places:
    """Pieces by number, as a storage has them."""

    def __init__(self) -> None:
        self.data: list[bytes] = []

    def write(self, chunks: Iterable[bytes], scope: Any = None, in_flight_of: str = "") -> Piece:
        self.data.append(b"".join(chunks))
        return Piece(b"", len(self.data[-1]), path=str(len(self.data) - 1))

    def read(self, piece: Piece) -> bytes:
        return self.data[int(piece.path)]


def states(world: Any, places: Places, checkpoint: int) -> list[ChannelState]:
    return [
        channel.write(places, "sum/0")  # type: ignore[arg-type]
        for edge in (0, 1)
        for channel in world.in_flight(checkpoint, edge)
    ]


def edge_of(state: ChannelState) -> int:
    return 0 if state.source == "source" else 1


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 3))
def test_records_in_flight_come_first_after_a_restore(
    kit: Any, tools: Any, draw: random.Random, slots: int, later: int
) -> None:
    world = kit.full_of_records(tools, kit.unaligned, slots)
    for _ in range(draw.randrange(60)):
        world.step(draw)
    world.trigger(world.barrier(1, Alignment.UNALIGNED))
    kit.pass_on(world)
    assert world.complete(1)
    places = Places()
    found = states(world, places, 1)
    after = kit.world(tools, kit.unaligned, later)
    for place, slot in enumerate(after.slots):
        slot.restore(restore_of(found, slots, later, place), places.read)
        for task in slot.tasks.values():
            old = world.slots[place].shelf.begun if later == slots else {}
            state = old.get(((task.uid, task.subtask), 1))
            task.taken = list(state.taken) if state is not None else []
    assert sum(slot.core.counters()["records_in"] for slot in after.slots) == 0
    fresh = [tools.source_rows(place * 1_000_000 + 500_000, 10) for place in range(later)]
    for place, slot in enumerate(after.slots):
        slot.core.rows(("source", place), fresh[place], after.now)
    after.run_out(draw)
    came = [n for place in range(later) for n in after.task("sink", place).taken]
    if later == slots:
        assert sorted(came) == sorted(world.held(1, "source") + [n for r in fresh for n in ints(r)])
        for place in range(slots):
            taken = after.task("work", place).taken
            for sender in range(slots):
                its = [n for n in taken if n // 1_000_000 == sender]
                assert its == sorted(its), "in front of what is new, and in its order"
    else:
        there = [n for state in found for n in read_numbers(state, places, world)]
        assert sorted(came) == sorted(there + [n for r in fresh for n in ints(r)])
        by_key = [n for state in found if edge_of(state) == 0 for n in read_numbers(state, places, world)]
        for place in range(later):
            mine = [n for n in after.task("work", place).taken if n in set(by_key)]
            assert all(subtask_of(world.graph, n, later) == place for n in mine)


def ints(rows: SourceRows) -> list[int]:
    numbers: list[int] = rows.payload.column(0).to_pylist()
    return numbers


def subtask_of(graph: Any, number: int, parallelism: int) -> int:
    edge = graph.edges[0]
    rows = pa.record_batch([pa.array([number], pa.int64()), pa.array([""])], schema=edge.schema)
    return int(edge.partitioner.select(OutgoingRows(rows, np.zeros(1, np.uint64)), parallelism)[0])


def read_numbers(state: ChannelState, places: Places, world: Any) -> list[int]:
    edge = world.graph.edges[edge_of(state)]
    batches = read_batches(places.read(state.frames), edge, ElementCodec(world.graph.edges))
    return [n for batch in batches for n in batch.payload.column(0).to_pylist()]


def restore_of(found: list[ChannelState], before: int, after: int, slot: int) -> Restore:
    """Deal out what was in flight as a coordinator does: by place, or all of it by key group."""
    parts = []
    for uid, edge in (("source", -1), ("work", 0), ("sink", 1)):
        here = [state for state in found if edge_of(state) == edge]
        if before == after:
            in_flight = [
                InFlight(edge, state.sender, state)
                for state in here
                if not state.outgoing and state.receiver == slot
            ]
            leaving = [
                InFlight(edge + 1, slot, state)
                for state in found
                if edge_of(state) == edge + 1 and state.outgoing and state.sender == slot
            ]
            parts.append(SubtaskRestore(uid, slot, in_flight=tuple(in_flight), outgoing=tuple(leaving)))
            continue
        keep = "groups" if edge == 0 else ""
        ordered = sorted(here, key=lambda state: state.outgoing)
        in_flight = [
            InFlight(edge, state.sender % after, state, keep)
            for state in ordered
            if keep or state.receiver % after == slot
        ]
        parts.append(SubtaskRestore(uid, slot, in_flight=tuple(in_flight)))
    return Restore(1, "", tuple(parts))


def captured_of(tools: Any, edge: JobEdge, channel: Channel, places: Places) -> ChannelState:
    codec = ElementCodec([JobEdge(n, "a", "b", 0, Rebalance(), edge.schema) for n in range(edge.number + 1)])
    captured = CapturedChannel(edge, channel, False, (Batch(tools.rows_of(0, 5)),), codec)
    return captured.write(places, "sum/0")  # type: ignore[arg-type]


def test_records_in_flight_that_do_not_fit_are_refused(kit: Any, tools: Any) -> None:
    world, slot = kit.one_of_two(tools, kit.unaligned)
    places = Places()
    state = captured_of(tools, world.graph.edges[1], Channel(1, 0, 0), places)

    def restored(**changes: Any) -> Restore:
        part = replace(InFlight(1, 0, state), **changes)
        return Restore(1, "", (SubtaskRestore("sink", 0, in_flight=(part,)),))

    with pytest.raises(IncompatibleCheckpointError, match="not partitioned by key"):
        slot.restore(restored(keep="groups"), places.read)
    with pytest.raises(IncompatibleCheckpointError, match="none of this slot"):
        slot.restore(restored(edge=0), places.read)
    leaving = SubtaskRestore("sink", 0, outgoing=(InFlight(1, 0, state),))
    with pytest.raises(IncompatibleCheckpointError, match="none of this slot"):
        slot.restore(Restore(1, "", (leaving,)), places.read)
    slot.restore(restored(), places.read)


def test_records_of_another_schema_are_refused(kit: Any, tools: Any) -> None:
    places = Places()
    schema = pa.schema([("n", pa.timestamp("us")), ("text", pa.string())])
    now = JobEdge(0, "source", "work", 0, Rebalance(), schema)
    state = captured_of(tools, replace(now, schema=kit.schema), kit.from_0, places)
    with pytest.raises(IncompatibleCheckpointError, match=r"n int64.*savepoint"):
        read_batches(places.read(state.frames), now, ElementCodec([now]))


@given(st.randoms(use_true_random=False))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_records_in_flight_are_an_error(kit: Any, tools: Any, draw: random.Random) -> None:
    places = Places()
    edge = JobEdge(0, "source", "work", 0, Rebalance(), kit.schema)
    state = captured_of(tools, edge, kit.from_0, places)
    data = bytearray(places.read(state.frames))
    del data[draw.randrange(len(data)) :]
    for _ in range(draw.randrange(3)):
        if data:
            data[draw.randrange(len(data))] = draw.randrange(256)
    try:
        read_batches(bytes(data), edge, ElementCodec([edge]))
    except FTLayerError:
        return
