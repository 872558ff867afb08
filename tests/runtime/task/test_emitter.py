"""Where rows go, what goes with them, and that replays go where the originals went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import CodecError, ConfigError
from ftlayer.functions.steps import Map
from ftlayer.records.ids import random_root_ids
from ftlayer.records.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    Partitioner,
    Rebalance,
    Shuffle,
)
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.handler import FTHandler, Handler, NonFTHandler
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, RecordIds, Watermark
from ftlayer.runtime.task.actions import Send
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.topology.job_graph import Channel, JobEdge, JobGraph, JobVertex
from ftlayer.topology.job_graph_generator import OpFTLayerBuilder, replay_uid
from ftlayer.topology.operators import IterableSource, Source

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64())])
KEY = KeySelector(("key",))
OTHER_KEY = KeySelector(("n",))
BY_LENGTH = Custom(KEY, lambda key, channels: len(key) % channels)

Out = tuple[Partitioner, int]
"""An edge: its partitioner and the parallelism of its target."""


def fan_out(parallelism: int, *outs: Out, tags: Sequence[str] = ()) -> JobGraph:
    """A source ``a`` with edges 0, 1, … to chains ``b0``, ``b1``, …"""
    source = JobVertex("a", (Source("a", IterableSource(()), SCHEMA),), parallelism)
    targets = tuple(
        JobVertex(f"b{number}", (Map(f"b{number}", lambda record: record, SCHEMA),), count)
        for number, (_, count) in enumerate(outs)
    )
    edges = tuple(
        JobEdge(number, "a", f"b{number}", 0, partitioner, SCHEMA, tags[number] if tags else "")
        for number, (partitioner, _) in enumerate(outs)
    )
    return JobGraph("job", (source, *targets), edges, tracked=False)


def emitter(graph: JobGraph, subtask: int = 0, uid: str = "a", handler: Handler | None = None) -> Emitter:
    return Emitter(graph, uid, subtask, handler or FTHandler(uid, job="job", run="run"))


def payload(*keys: str) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array(keys, pa.string()), pa.array(range(len(keys)), pa.int64())], schema=SCHEMA
    )


def lineage(n: int) -> RecordIds:
    return RecordIds(random_root_ids(n), random_root_ids(n))


def batches(sends: Sequence[Send]) -> dict[Channel, Batch]:
    found: dict[Channel, Batch] = {}
    for send in sends:
        assert isinstance(send.element, Batch)
        assert send.channel not in found, "one batch a channel"
        found[send.channel] = send.element
    return found


def numbers(batch: Batch) -> list[int]:
    """Column ``n``: which rows these are."""
    return list(batch.payload.column("n").to_pylist())


def placed(sends: Sequence[Send]) -> dict[Channel, list[int]]:
    return {channel: numbers(batch) for channel, batch in batches(sends).items()}


def test_a_forward_edge_has_the_rows_as_they_are() -> None:
    rows, times = payload("x", "y"), np.array([5, 6])
    emission = emitter(fan_out(2, (Forward(), 2)), subtask=1).derived(
        "", rows, lineage(2), np.array([0, 1]), times
    )
    (send,) = emission.sends
    assert send.channel == Channel(0, 1, 1)
    assert isinstance(send.element, Batch)
    assert send.element.payload is rows
    assert send.element.times is times


@pytest.mark.parametrize(
    "partitioner", [HashByKey(KEY), BY_LENGTH, Rebalance(1), Shuffle(), Global(), Broadcast()]
)
def test_a_single_channel_gets_the_rows_as_they_are(partitioner: Partitioner) -> None:
    rows = payload("x", "y")
    (send,) = emitter(fan_out(1, (partitioner, 1))).derived("", rows, lineage(2), np.array([0, 1])).sends
    assert send.channel == Channel(0, 0, 0)
    assert isinstance(send.element, Batch)
    assert send.element.payload is rows


def test_rows_are_split_by_channel_in_their_order_with_all_that_belongs_to_them() -> None:
    anchors = RecordIds(random_root_ids(4), random_root_ids(4), None, random_root_ids(4))
    rows = payload("", "x", "", "xyz", "xy")
    parents, times = np.array([3, 0, 0, 2, 1]), np.arange(10, 15)
    emission = emitter(fan_out(1, (BY_LENGTH, 3))).derived("", rows, anchors, parents, times)
    found = batches(emission.sends)
    assert placed(emission.sends) == {
        Channel(0, 0, 0): [0, 2, 3],
        Channel(0, 0, 1): [1],
        Channel(0, 0, 2): [4],
    }
    for batch in found.values():
        places = numbers(batch)
        assert batch.times is not None
        assert batch.lineage is not None
        assert batch.lineage.origins is not None
        assert anchors.origins is not None
        assert batch.times.tolist() == times[places].tolist()
        assert batch.lineage.roots.tolist() == anchors.roots[parents[places]].tolist()
        assert batch.lineage.origins.tolist() == anchors.origins[parents[places]].tolist()


def test_a_broadcast_sends_the_same_rows_under_other_ids() -> None:
    rows = payload("x", "y")
    found = batches(
        emitter(fan_out(1, (Broadcast(), 3))).derived("", rows, lineage(2), np.array([0, 1])).sends
    )
    assert list(found) == [Channel(0, 0, receiver) for receiver in range(3)]
    assert all(batch.payload is rows for batch in found.values())
    ids = [record_id for batch in found.values() if batch.lineage for record_id in batch.lineage.ids.tolist()]
    assert len(set(ids)) == 6


def test_channels_take_turns_over_calls() -> None:
    out = emitter(fan_out(1, (Rebalance(), 2)))
    first = out.derived("", payload("a", "b", "c"), lineage(1), np.zeros(3, np.int64))
    second = out.derived("", payload("d", "e"), lineage(1), np.zeros(2, np.int64))
    assert placed(first.sends) == {Channel(0, 0, 0): [0, 2], Channel(0, 0, 1): [1]}
    assert placed(second.sends) == {Channel(0, 0, 1): [0], Channel(0, 0, 0): [1]}


def test_a_shuffle_spreads_children_of_one_parent() -> None:
    rows = payload(*["k"] * 200)
    sends = emitter(fan_out(1, (Shuffle(), 2))).derived("", rows, lineage(1), np.zeros(200, np.int64)).sends
    assert all(len(rows) > 50 for rows in placed(sends).values())
    assert len(sends) == 2


def test_each_output_goes_by_its_own_edges() -> None:
    graph = fan_out(1, (Global(), 1), (Global(), 1), tags=["", "late"])
    out, anchors = emitter(graph), lineage(1)
    main = out.derived("", payload("x"), anchors, np.array([0]))
    late = out.derived("late", payload("x"), anchors, np.array([0]))
    unused = out.derived("unused", payload("x"), anchors, np.array([0]))
    assert list(placed(main.sends)) == [Channel(0, 0, 0)]
    assert list(placed(late.sends)) == [Channel(1, 0, 0)]
    assert unused.sends == []
    assert unused.owed.tolist() == [0]


def test_no_rows_are_not_sent() -> None:
    graph = OpFTLayerBuilder().wire(fan_out(1, (HashByKey(KEY), 2)), {})
    out, nothing = emitter(graph), np.zeros(0, np.int64)
    emission = out.derived("", payload(), lineage(2), nothing)
    assert emission.sends == []
    assert emission.owed.tolist() == [0, 0]
    assert out.pairs(payload(), lineage(1), nothing, lineage(1), nothing).sends == []
    roots = out.roots(payload(), np.zeros(0, np.uint64))
    assert roots.sends == []
    assert roots.key_hashes is not None
    assert roots.key_hashes.shape == (0, 1)


def test_marks_go_to_all_channels_of_all_edges() -> None:
    graph = fan_out(2, (Forward(), 2), (Broadcast(), 2), (HashByKey(KEY), 1), tags=["", "late", ""])
    sends = emitter(graph, subtask=1).mark(Watermark(7))
    assert [send.element for send in sends] == [Watermark(7)] * 4
    assert {send.channel for send in sends} == {
        Channel(0, 1, 1),
        Channel(1, 1, 0),
        Channel(1, 1, 1),
        Channel(2, 1, 0),
    }
    assert emitter(fan_out(1)).mark(EndOfStream()) == []


def test_as_many_parents_as_rows_are_needed() -> None:
    with pytest.raises(ValueError, match="2 rows have 1 children"):
        emitter(fan_out(1, (Forward(), 1))).derived("", payload("x", "y"), lineage(1), np.array([0]))


def test_a_custom_partitioner_that_names_no_channel_is_a_clear_error() -> None:
    graph = fan_out(1, (Custom(KEY, lambda key, channels: channels), 2))
    with pytest.raises(ConfigError, match=r"must return an int in 0\.\.1"):
        emitter(graph).derived("", payload("x"), lineage(1), np.array([0]))


def test_a_source_stores_one_number_for_each_rule() -> None:
    graph = fan_out(
        2, (HashByKey(KEY), 3), (Broadcast(), 2), (HashByKey(KEY), 2), (Forward(), 2), (BY_LENGTH, 2)
    )
    rows = payload("", "x", "yz")
    wired = OpFTLayerBuilder().wire(graph, {})
    emission = emitter(wired, subtask=1).roots(rows, random_root_ids(3))
    assert emission.key_hashes is not None
    assert emission.key_hashes.tolist() == [
        [int(number), 1, length % 2] for number, length in zip(KEY.hash(rows), (0, 1, 2), strict=True)
    ]
    plain = OpFTLayerBuilder().wire(fan_out(1, (Rebalance(), 2)), {})
    assert emitter(plain).roots(rows, random_root_ids(3)).key_hashes is None


def test_the_custom_function_of_a_source_is_called_once_a_row() -> None:
    calls: list[Any] = []

    def choose(key: Any, channels: int) -> int:
        calls.append(key)
        return 0

    wired = OpFTLayerBuilder().wire(fan_out(1, (Custom(KEY, choose), 2)), {})
    emitter(wired).roots(payload("x", "y"), random_root_ids(2))
    assert calls == ["x", "y"]


outs = st.lists(
    st.tuples(
        st.sampled_from(
            [HashByKey(KEY), HashByKey(OTHER_KEY), BY_LENGTH, Global(), Broadcast(), Rebalance(), Shuffle(5)]
        ),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=4,
)
keys = st.lists(st.text("ab", max_size=4), max_size=12)


@settings(deadline=None)
@given(outs, st.integers(1, 3), st.data(), keys)
def test_a_chain_that_is_run_again_repeats_every_copy(
    outs: list[Out], parallelism: int, data: st.DataObject, keys: list[str]
) -> None:
    graph = fan_out(parallelism, *outs)
    subtask = data.draw(st.integers(0, parallelism - 1))
    rows, anchors, parents = payload(*keys), lineage(2), np.arange(len(keys)) % 2

    def named() -> dict[Channel, list[int]]:
        found = batches(emitter(graph, subtask).derived("", rows, anchors, parents).sends)
        return {channel: batch.lineage.ids.tolist() for channel, batch in found.items() if batch.lineage}

    first = named()
    assert named() == first
    ids = list(chain(*first.values()))
    assert len(set(ids)) == len(ids)


@settings(deadline=None)
@given(outs, st.integers(1, 3), st.data(), keys)
def test_replays_go_where_the_originals_went(
    outs: list[Out], parallelism: int, data: st.DataObject, keys: list[str]
) -> None:
    graph = OpFTLayerBuilder().wire(fan_out(parallelism, (Forward(), parallelism), *outs), {})
    subtask = data.draw(st.integers(0, parallelism - 1))
    rows, n = payload(*keys), len(keys)
    original = emitter(graph, subtask).roots(rows, random_root_ids(n))
    replay = emitter(graph, uid=replay_uid("a"))
    anchors = lineage(n)
    again = replay.replayed(rows, anchors, original.key_hashes)

    went, goes = placed(original.sends), placed(again.sends)
    edges = len(outs) + 1
    for edge in graph.edges[:edges]:
        receivers = range(graph.vertex(edge.target).parallelism)
        before = [went.get(Channel(edge.number, subtask, receiver), []) for receiver in receivers]
        after = [goes.get(Channel(edge.number + edges, 0, receiver), []) for receiver in receivers]
        if isinstance(edge.partitioner, Rebalance | Shuffle):
            assert sorted(chain(*after)) == sorted(chain(*before))
        else:
            assert after == before
    by_root = dict.fromkeys(anchors.roots.tolist(), 0)
    for batch in batches(again.sends).values():
        assert batch.lineage is not None
        for root, record_id in zip(batch.lineage.roots.tolist(), batch.lineage.ids.tolist(), strict=True):
            by_root[root] ^= record_id
    assert by_root == dict(zip(anchors.roots.tolist(), again.owed.tolist(), strict=True))


def test_a_replay_without_the_numbers_its_edges_need_is_refused() -> None:
    graph = OpFTLayerBuilder().wire(fan_out(1, (HashByKey(KEY), 2), (HashByKey(OTHER_KEY), 2)), {})
    replay = emitter(graph, uid=replay_uid("a"))
    with pytest.raises(CodecError, match="stored without the key hash"):
        replay.replayed(payload("x"), lineage(1), None)
    with pytest.raises(CodecError, match="number 1 of those stored"):
        replay.replayed(payload("x"), lineage(1), np.array([[4]], np.int32))


@settings(deadline=None)
@given(outs, st.lists(keys, max_size=3))
def test_with_fault_tolerance_off_the_same_rows_go_the_same_way(
    outs: list[Out], calls: list[list[str]]
) -> None:
    graph = fan_out(2, (Forward(), 2), *outs)
    shuffled = {edge.number for edge in graph.edges if isinstance(edge.partitioner, Shuffle)}

    def ways(sends: Sequence[Send]) -> dict[Channel, list[int]]:
        return {channel: rows for channel, rows in placed(sends).items() if channel.edge not in shuffled}

    on, off = emitter(graph, 1), emitter(graph, 1, handler=NonFTHandler())
    for keys in calls:
        rows, n = payload(*keys), len(keys)
        parents, times = np.zeros(n, np.int64), np.arange(n)
        tracked = on.derived("", rows, lineage(1), parents, times)
        untracked = off.derived("", rows, None, parents, times)
        assert ways(untracked.sends) == ways(tracked.sends)
        assert len(untracked.owed) == 0
        assert all(
            isinstance(send.element, Batch) and send.element.lineage is None for send in untracked.sends
        )
        roots, rootless = on.roots(rows, random_root_ids(n)), off.roots(rows, None)
        assert ways(rootless.sends) == ways(roots.sends)
        assert (len(rootless.values), rootless.key_hashes, rootless.ids) == (0, None, None)
        pairs, unpaired = (
            on.pairs(rows, lineage(1), parents, lineage(1), parents),
            off.pairs(rows, None, parents, None, parents),
        )
        assert ways(unpaired.sends) == ways(pairs.sends)
        assert len(unpaired.owed_left) == len(unpaired.owed_right) == 0
