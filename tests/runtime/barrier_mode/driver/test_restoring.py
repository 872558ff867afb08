"""What subtasks get of a checkpoint: nothing lost, nothing doubled, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Checkpoint,
    Committable,
    KeyedSnapshot,
    OperatorState,
    Piece,
    Redistribution,
    StatePiece,
    SubtaskRestore,
    SubtaskSnapshot,
    TableInfo,
)
from ftlayer.errors import CheckpointDamagedError, IncompatibleCheckpointError
from ftlayer.functions.steps import Map, Reduce
from ftlayer.records.partitioning import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKeyGroup,
    Rebalance,
    Shuffle,
    groups_of,
)
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.barrier_mode.driver.restoring import edge_infos, goes_back, operator_infos, restores
from ftlayer.runtime.barrier_mode.task.failing.attempts import WAITING_TABLE
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex, keys_of
from ftlayer.topology.operators import FunctionSink, IterableSource, Operator, Sink, Source

SCHEMA = pa.schema([("key", pa.string()), ("n", pa.int64())])
GROUPS = 128


def source(uid: str = "source", partitions: int = 200) -> Source:
    return Source(uid, IterableSource((list,) * partitions), SCHEMA)


def keep(uid: str) -> Map:
    return Map(uid, lambda record: record, SCHEMA)


def total(uid: str, key: str = "key") -> Reduce:
    return Reduce(uid, lambda left, right: right, SCHEMA, (key,))


def sink(uid: str = "sink") -> Sink:
    return Sink(uid, FunctionSink(print), SCHEMA)


def by_key(groups: int = GROUPS) -> HashByKeyGroup:
    return HashByKeyGroup(KeySelector(("key",)), groups)


def graph(
    *chains: tuple[int, tuple[Operator, ...]], partitioner: Any = None, groups: int = GROUPS
) -> JobGraph:
    """Chains with their parallelism, one behind the other."""
    vertices = tuple(JobVertex(operators[0].uid, operators, parallelism) for parallelism, operators in chains)
    edges = tuple(
        JobEdge(number, vertex.uid, vertices[number + 1].uid, 0, partitioner or by_key(groups), SCHEMA)
        for number, vertex in enumerate(vertices[:-1])
    )
    return JobGraph("job", vertices, edges, tracked=False, max_parallelism=groups)


def line(sources: int, counters: int, partitioner: Any = None, groups: int = GROUPS) -> JobGraph:
    return graph(
        (sources, (source(),)),
        (counters, (total("count"), keep("after"), sink())),
        partitioner=partitioner,
        groups=groups,
    )


def piece(text: str = "") -> Piece:
    return Piece(b"", len(text), text.encode())


def snapshots(of: JobGraph, in_flight: bool = False) -> Iterator[SubtaskSnapshot]:
    """Yield what the subtasks of a graph would have."""
    for vertex in of.vertices:
        for subtask in range(vertex.parallelism):
            keyed = [operator.uid for operator in vertex.operators if any(keys_of(operator))]
            groups = groups_of(subtask, vertex.parallelism, of.max_parallelism)
            tables = tuple(
                TableInfo(number, uid, "total", "value", "msgpack", 1) for number, uid in enumerate(keyed)
            )
            state = StatePiece("entries", piece(f"{vertex.uid}/{subtask}"), 1, 7)
            states = tuple(
                OperatorState(operator.uid, kind.name, kind, (f"{subtask}a".encode(), f"{subtask}b".encode()))
                for operator in vertex.operators
                for kind in Redistribution
            )
            yield SubtaskSnapshot(
                vertex.uid,
                subtask,
                KeyedSnapshot(groups.start, groups.stop, tables, (state,)) if keyed else None,
                states,
                {f"p{subtask}": f"at {subtask}".encode()} if isinstance(vertex.operators[0], Source) else {},
                channels=tuple(channel_states(of, vertex.uid, subtask)) if in_flight else (),
            )


def channel_states(of: JobGraph, uid: str, subtask: int) -> Iterator[ChannelState]:
    """Yield two frames a channel, one that waited at its receiver and one that had not left its sender."""
    for edge in of.edges:
        for channel in of.channels(edge):
            ends = {(edge.target, channel.receiver): False, (edge.source, channel.sender): True}
            if (uid, subtask) not in ends:
                continue
            outgoing = ends[uid, subtask]
            text = f"{edge.number}:{channel.sender}>{channel.receiver}:{'out' if outgoing else 'in'}"
            yield ChannelState(
                edge.source,
                edge.tag,
                edge.target,
                edge.input,
                channel.sender,
                channel.receiver,
                outgoing,
                piece(text),
                1,
                edge.number,
            )


def checkpoint_of(of: JobGraph, parts: Iterable[SubtaskSnapshot] | None = None, **options: Any) -> Checkpoint:
    in_flight = options.pop("in_flight", False)
    return Checkpoint(
        7,
        "job",
        "run",
        "checkpoint",
        0,
        0,
        of.max_parallelism,
        operator_infos(of),
        tuple(snapshots(of, in_flight) if parts is None else parts),
        edges=edge_infos(of),
        location="/chk-7",
        **options,
    )


def assigned(checkpoint: Checkpoint, to: JobGraph) -> dict[tuple[str, int], SubtaskRestore]:
    found = {}
    for slot, restore in restores(checkpoint, to, allow_unclaimed=False).by_slot.items():
        assert (restore.checkpoint, restore.location) == (7, "/chk-7")
        for subtask in restore.subtasks:
            assert to.slot_of(subtask.uid, subtask.subtask) == slot
            found[subtask.uid, subtask.subtask] = subtask
    assert set(found) == {(vertex.uid, n) for vertex in to.vertices for n in range(vertex.parallelism)}
    return found


def check_groups(before: JobGraph, after: JobGraph) -> None:
    """Every group of every operator is in the snapshots that its subtask gets, exactly once."""
    got = assigned(checkpoint_of(before), after)
    for vertex in after.vertices:
        for operator in vertex.operators:
            if not any(keys_of(operator)):
                continue
            owner = next(
                old for old in before.vertices if operator.uid in {each.uid for each in old.operators}
            )
            for subtask in range(vertex.parallelism):
                groups = groups_of(subtask, vertex.parallelism, GROUPS)
                found = [
                    (group, snapshot.pieces[0].piece.inline)
                    for snapshot in got[vertex.uid, subtask].keyed
                    for group in range(snapshot.first_group, snapshot.end_group)
                    if group in groups and operator.uid in {table.operator for table in snapshot.tables}
                ]
                wanted = [
                    (group, f"{owner.uid}/{old}".encode())
                    for old in range(owner.parallelism)
                    for group in groups_of(old, owner.parallelism, GROUPS)
                    if group in groups
                ]
                assert sorted(found) == sorted(wanted)


def dealt(
    got: dict[tuple[str, int], SubtaskRestore], uid: str, parallelism: int, kind: Redistribution
) -> Any:
    return [
        [
            item.decode()
            for state in got[uid, subtask].operators
            if (state.operator, state.redistribution) == (uid, kind)
            for item in state.items
        ]
        for subtask in range(parallelism)
    ]


# ---------------------------------------------------------------- keyed state


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (4, 2), (1, 128), (2, 2), (128, 5)])
def test_every_key_group_goes_to_the_subtask_that_has_it(before: int, after: int) -> None:
    check_groups(line(2, before), line(2, after))


@settings(max_examples=40, deadline=None)
@given(before=st.integers(1, GROUPS), after=st.integers(1, GROUPS))
def test_key_groups_at_any_parallelism(before: int, after: int) -> None:
    check_groups(line(1, before), line(1, after))


STEPS: tuple[Operator, ...] = (total("a"), keep("b"), total("c"), total("d"), sink("e"))


def cut(places: set[int], parallelisms: Iterable[int]) -> JobGraph:
    """Chain `STEPS`, cut in front of these places."""
    edges = [0, *sorted(places), len(STEPS)]
    chains = [STEPS[start:end] for start, end in pairwise(edges)]
    sizes = iter(parallelisms)
    return graph((1, (source(),)), *((next(sizes), chain) for chain in chains))


@settings(deadline=None)
@given(st.data())
def test_chains_that_are_cut_otherwise(data: st.DataObject) -> None:
    places = st.sets(st.integers(1, len(STEPS) - 1))
    sizes = st.lists(st.integers(1, 9), min_size=5, max_size=5)
    before, after = (cut(data.draw(places), data.draw(sizes)) for _ in range(2))
    check_groups(before, after)


# ---------------------------------------------------------------- operator state, positions


def test_operator_state_at_the_same_parallelism() -> None:
    got = assigned(checkpoint_of(line(1, 2)), line(1, 2))
    assert dealt(got, "count", 2, Redistribution.SPLIT) == [["0a", "0b"], ["1a", "1b"]]
    assert dealt(got, "count", 2, Redistribution.UNION) == [["0a", "0b", "1a", "1b"]] * 2
    assert dealt(got, "count", 2, Redistribution.BROADCAST) == [["0a", "0b"], ["1a", "1b"]]


def test_operator_state_at_another_parallelism() -> None:
    got = assigned(checkpoint_of(line(1, 2)), line(1, 3))
    assert dealt(got, "count", 3, Redistribution.SPLIT) == [["0a", "1b"], ["0b"], ["1a"]]
    assert dealt(got, "count", 3, Redistribution.UNION) == [["0a", "0b", "1a", "1b"]] * 3
    assert dealt(got, "count", 3, Redistribution.BROADCAST) == [["0a", "0b"], ["1a", "1b"], ["0a", "0b"]]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(1, 9))
def test_no_item_of_a_split_list_is_lost_or_doubled(sizes: list[int], after: int) -> None:
    before = line(1, len(sizes))
    numbers = count()
    parts = [
        SubtaskSnapshot(
            "count",
            subtask,
            operators=(
                OperatorState(
                    "after", "buffer", Redistribution.SPLIT, tuple(b"%d" % next(numbers) for _ in range(size))
                ),
            ),
        )
        for subtask, size in enumerate(sizes)
    ]
    got = assigned(checkpoint_of(before, parts), line(1, after))
    shares = [
        [int(item) for state in got["count", subtask].operators for item in state.items]
        for subtask in range(after)
    ]
    assert sorted(item for share in shares for item in share) == list(range(sum(sizes)))
    assert all(share == sorted(share) for share in shares)
    if len(sizes) != after:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_operator_state_moves_with_its_operator() -> None:
    before = graph((1, (source(),)), (2, (keep("a"), keep("b"))))
    after = graph((1, (source(),)), (2, (keep("a"),)), (3, (keep("b"),)))
    got = assigned(checkpoint_of(before), after)
    assert {state.operator for state in got["a", 1].operators} == {"a"}
    assert {state.operator for state in got["b", 2].operators} == {"b"}


@pytest.mark.parametrize("after", [1, 2, 5])
def test_all_subtasks_of_a_source_get_all_positions(after: int) -> None:
    got = assigned(checkpoint_of(line(3, 1)), line(after, 1))
    for subtask in range(after):
        assert got["source", subtask].positions == {"p0": b"at 0", "p1": b"at 1", "p2": b"at 2"}
    assert got["count", 0].positions == {}


@pytest.mark.parametrize("after", [1, 2, 3])
def test_event_time_begins_at_the_lowest_of_the_subtasks(after: int) -> None:
    before = line(1, 2)
    parts = [
        replace(
            part,
            event_times={"count": 70 - 10 * part.subtask},
            split_times={"count": {"source#1": part.subtask}},
        )
        if part.uid == "count"
        else part
        for part in snapshots(before)
    ]
    for (uid, _), restored in assigned(checkpoint_of(before, parts), line(1, after)).items():
        assert restored.event_times == ({"count": 60} if uid == "count" else {})
        assert restored.split_times == ({"count": {"source#1": 1}} if uid == "count" else {})


def read_by(*counts: int | None) -> Checkpoint:
    parts = (SubtaskSnapshot("source", number, read=count) for number, count in enumerate(counts))
    return checkpoint_of(line(len(counts), 1), parts)


@pytest.mark.parametrize("after", [1, 2, 3])
def test_what_a_source_has_read_is_counted_over_restores(after: int) -> None:
    """The sum over its subtasks goes on."""
    found = assigned(read_by(5, 7), line(after, 1))
    assert sum(found["source", subtask].read for subtask in range(after)) == 12


@pytest.mark.parametrize(
    ("newer", "older", "said"),
    [
        ((1_000, 1_500), (400, 100), "committed again: 2,000 records of source 'source'"),
        ((9,), (4, 5), "committed again: 0 records of source 'source'"),
        ((9,), (None,), "all records that were read since, it is not known how many, of source 'source'"),
        ((None,), (4,), "again: of all records that were read since; what is left does not tell how many"),
        ((3,), (4,), "it is not known how many"),
    ],
)
def test_how_far_back_a_job_goes(
    newer: tuple[int | None, ...], older: tuple[int | None, ...], said: str
) -> None:
    assert said in goes_back("it is damaged", read_by(*newer), read_by(*older))
    assert "what is left does not tell" in goes_back("it is damaged", None, read_by(*older))


def test_positions_that_contradict_each_other() -> None:
    parts = [SubtaskSnapshot("source", n, positions={"p0": b"%d" % n}) for n in range(2)]
    with pytest.raises(CheckpointDamagedError, match="partition 'p0'"):
        assigned(checkpoint_of(line(2, 1), parts), line(2, 1))


# ---------------------------------------------------------------- records in flight


def texts(parts: Iterable[Any]) -> list[tuple[int, str, str]]:
    return [(part.sender, part.state.frames.inline.decode(), part.keep) for part in parts]


def test_records_in_flight_stay_where_they_were() -> None:
    before = line(2, 2)
    got = assigned(checkpoint_of(before, in_flight=True), before)
    assert texts(got["count", 1].in_flight) == [(0, "0:0>1:in", ""), (1, "0:1>1:in", "")]
    assert texts(got["source", 1].outgoing) == [(1, "0:1>0:out", ""), (1, "0:1>1:out", "")]
    assert not got["source", 1].in_flight + got["count", 1].outgoing


def test_by_key_all_receivers_look_for_their_own() -> None:
    got = assigned(checkpoint_of(line(2, 2), in_flight=True), line(1, 3))
    everything = [
        (0, f"0:{sender}>{receiver}:{place}", "groups")
        for sender in range(2)
        for receiver in range(2)
        for place in ("in", "out")
    ]
    for subtask in range(3):
        assert texts(got["count", subtask].in_flight) == everything


@pytest.mark.parametrize(
    "partitioner", [by_key(), Rebalance(), Broadcast(), Custom(KeySelector(("key",)), hash)]
)
def test_other_senders_and_the_same_receivers(partitioner: Any) -> None:
    before, after = line(3, 2, partitioner), line(2, 2, partitioner)
    got = assigned(checkpoint_of(before, in_flight=True), after)
    assert texts(got["count", 1].in_flight) == [
        (sender % 2, f"0:{sender}>1:{place}", "") for sender in range(3) for place in ("in", "out")
    ]
    assert not got["source", 0].outgoing


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_where_any_receiver_will_do_each_frame_goes_to_one(s0: int, r0: int, s1: int, r1: int) -> None:
    for partitioner in (Rebalance(), Shuffle()):
        got = assigned(checkpoint_of(line(s0, r0, partitioner), in_flight=True), line(s1, r1, partitioner))
        places: dict[tuple[str, int], list[str]] = {}
        for (uid, _), restore in got.items():
            for part in restore.in_flight:
                assert (uid, part.keep) == ("count", "")
                channel = part.state.sender, part.state.receiver
                places.setdefault(channel, []).append("out" if part.state.outgoing else "in")
                assert part.sender == part.state.sender % s1
        outgoing = [part for restore in got.values() for part in restore.outgoing]
        if (s0, r0) == (s1, r1):
            assert len(outgoing) == s0 * r0
            assert set(map(tuple, places.values())) == {("in",)}
        else:
            assert not outgoing
            assert len(places) == s0 * r0
            assert set(map(tuple, places.values())) == {("in", "out")}


def test_global_records_stay_with_the_first() -> None:
    got = assigned(checkpoint_of(line(2, 1, Global()), in_flight=True), line(2, 3, Global()))
    assert len(got["count", 0].in_flight) == 4
    assert not got["count", 1].in_flight


@pytest.mark.parametrize("partitioner", [Forward(), Broadcast(), Custom(KeySelector(("key",)), hash)])
def test_what_cannot_be_dealt_out_is_refused(partitioner: Any) -> None:
    checkpoint = checkpoint_of(line(2, 2, partitioner), in_flight=True)
    with pytest.raises(IncompatibleCheckpointError, match=r"'source' to 'count'.*take a savepoint"):
        restores(checkpoint, line(3, 3, partitioner), allow_unclaimed=True)
    # An aligned one has nothing in flight.
    assigned(checkpoint_of(line(2, 2, partitioner)), line(3, 3, partitioner))


def test_edges_are_found_again_when_chains_are_cut_otherwise() -> None:
    before = graph((1, (source(),)), (2, (keep("a"), keep("b"))), (2, (total("c"),)))
    after = graph((1, (source(),)), (2, (keep("a"),)), (2, (keep("b"),)), (2, (total("c"), keep("d"))))
    checkpoint = checkpoint_of(before, in_flight=True)
    got = assigned(checkpoint, after)
    assert [part.edge for part in got["c", 0].in_flight] == [2, 2]
    assert [part.edge for part in got["b", 1].outgoing] == [2, 2]
    assert [part.edge for part in got["a", 1].in_flight] == [0]
    # The other way round what was between the two chains is within one.
    with pytest.raises(IncompatibleCheckpointError, match="no such stream"):
        restores(checkpoint_of(after, in_flight=True), before, allow_unclaimed=True)


def twins(*partitioners: Any, sources: int = 2, counters: int = 2) -> JobGraph:
    """Edges that lead from the same output to the same input."""
    one = line(sources, counters)
    edges = tuple(
        replace(one.edges[0], number=number, partitioner=partitioner)
        for number, partitioner in enumerate(partitioners)
    )
    return replace(one, edges=edges)


def test_edges_between_the_same_chains_are_told_apart() -> None:
    before = twins(by_key(), Rebalance(), by_key())
    got = assigned(checkpoint_of(before, in_flight=True), before)
    for part in (*got["count", 0].in_flight, *got["source", 1].outgoing):
        assert part.state.frames.inline.decode().startswith(f"{part.edge}:")
    assert {part.edge for part in got["count", 1].in_flight} == {0, 1, 2}
    # The second one goes by another rule now, and the third one as it did.
    got = assigned(checkpoint_of(before, in_flight=True), twins(by_key(), Global(), by_key()))
    assert [part.edge for part in got["count", 1].in_flight] == [0, 0, 2, 2]
    assert [part.edge for part in got["count", 0].in_flight].count(1) == 8
    with pytest.raises(IncompatibleCheckpointError, match=r"3 such streams.*2 now.*take a savepoint"):
        restores(checkpoint_of(before, in_flight=True), twins(by_key(), Rebalance()), allow_unclaimed=True)


OTHER_KEY = HashByKeyGroup(KeySelector(("n",)), GROUPS)


@pytest.mark.parametrize("before", [Rebalance(), OTHER_KEY, Forward(), Custom(KeySelector(("key",)), hash)])
def test_another_partitioner_deals_them_out_anew(before: Any) -> None:
    """At the same parallelism too: where they were going others of their key do not go any more."""
    checkpoint = checkpoint_of(line(2, 2, before), in_flight=True)
    states = sum(len(part.channels) for part in checkpoint.subtasks)
    got = assigned(checkpoint, line(2, 2, by_key()))
    for subtask in range(2):
        assert len(got["count", subtask].in_flight) == states
        assert {part.keep for part in got["count", subtask].in_flight} == {"groups"}
    got = assigned(checkpoint, line(2, 2, Global()))
    assert len(got["count", 0].in_flight) == states
    assert not any(got["source", subtask].outgoing for subtask in range(2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Broadcast(), by_key()),
        (Broadcast(), Rebalance()),
        (by_key(), Broadcast()),
        (by_key(), Forward()),
        (by_key(), Custom(KeySelector(("key",)), hash)),
        (Custom(KeySelector(("key",)), hash), Custom(KeySelector(("key",)), max)),
    ],
)
@pytest.mark.parametrize("receivers", [2, 3])
def test_another_partitioner_that_cannot_deal_them_out_is_refused(
    before: Any, after: Any, receivers: int
) -> None:
    checkpoint = checkpoint_of(line(2, 2, before), in_flight=True)
    with pytest.raises(IncompatibleCheckpointError, match=r"'source' to 'count'.* now.*take a savepoint"):
        restores(checkpoint, line(receivers, receivers, after), allow_unclaimed=True)


# ---------------------------------------------------------------- refusals


def test_another_number_of_key_groups() -> None:
    with pytest.raises(IncompatibleCheckpointError, match="set max_parallelism=128"):
        restores(checkpoint_of(line(1, 1)), line(1, 1, groups=64), allow_unclaimed=True)


def test_more_subtasks_than_key_groups() -> None:
    checkpoint = checkpoint_of(line(1, 4, groups=4))
    with pytest.raises(IncompatibleCheckpointError, match="'count' has parallelism 5"):
        restores(checkpoint, line(1, 5, groups=4), allow_unclaimed=True)


def test_a_key_of_another_type() -> None:
    after = graph((1, (source(),)), (1, (total("count", "n"), keep("after"), sink())))
    with pytest.raises(IncompatibleCheckpointError, match=r"'count'.*\(string\).*\(int64\)"):
        restores(checkpoint_of(line(1, 1)), after, allow_unclaimed=True)
    # Without state it does not matter.
    assigned(checkpoint_of(line(1, 1), []), after)


def with_policy(of: JobGraph) -> JobGraph:
    vertices = (
        vertex if isinstance(vertex.operators[0], Source) else replace(vertex, failures=FailurePolicy())
        for vertex in of.vertices
    )
    return replace(of, vertices=tuple(vertices))


def test_records_that_wait_are_restored_where_their_operator_has_a_policy_or_refused() -> None:
    """Nothing of them is dropped in silence."""
    before = with_policy(graph((1, (source(),)), (2, (keep("first"),)), (2, (keep("second"), sink()))))
    parts = [replace(part, waiting=part.uid == "second") for part in snapshots(before)]
    checkpoint = checkpoint_of(before, parts)
    assigned(checkpoint, before)
    longer = graph((1, (source(),)), (2, (keep("first"), keep("second"), sink())))
    without = graph((1, (source(),)), (2, (keep("first"),)), (2, (keep("second"), sink())))
    with pytest.raises(IncompatibleCheckpointError, match="wait for another attempt, and enter at 'second'"):
        restores(checkpoint, without, allow_unclaimed=False)
    assert len(restores(checkpoint, without, allow_unclaimed=(f"second/{WAITING_TABLE}",)).dropped) == 1
    # A chain that has them in its middle lets them enter there.
    assert not restores(checkpoint, with_policy(longer), allow_unclaimed=False).dropped
    parts = [replace(part, waiting=part.uid == "first") for part in snapshots(before)]
    assert not restores(checkpoint_of(before, parts), with_policy(longer), allow_unclaimed=False).dropped


def test_an_operator_at_which_records_could_wait_and_none_does_may_go() -> None:
    before = with_policy(graph((1, (source(),)), (1, (keep("first"),)), (1, (keep("second"), sink()))))
    table = TableInfo(0, "second", WAITING_TABLE, "map", "msgpack", 1)
    after = with_policy(graph((1, (source(),)), (1, (keep("first"), sink()))))
    for waiting, dropped in ((0, 0), (1, 1)):
        part = SubtaskSnapshot("second", 0, KeyedSnapshot(0, 128, (table,), ()), waiting=waiting)
        found = restores(checkpoint_of(before, [part]), after, allow_unclaimed=True)
        assert len(found.dropped) == dropped


def test_positions_of_partitions_that_vanished_are_refused_unless_they_are_named() -> None:
    parts = [SubtaskSnapshot("source", 0, positions={f"p{n}": b"%d" % n for n in range(4)})]
    checkpoint = checkpoint_of(graph((1, (source(partitions=4),)), (1, (keep("after"),))), parts)
    fewer = graph((1, (source(partitions=2),)), (1, (keep("after"),)))
    with pytest.raises(IncompatibleCheckpointError, match="partition 2 of source 'source'") as refused:
        restores(checkpoint, fewer, allow_unclaimed=("source/partition-3",))
    assert "partition 3" not in str(refused.value)
    assert "['source/partition-2']" in str(refused.value)
    for allowed in (True, ("source",), ("source/partition-2", "source/partition-3")):
        found = restores(checkpoint, fewer, allow_unclaimed=allowed)  # type: ignore[arg-type]
        assert len(found.dropped) == 2
        (restore,) = found.by_slot.values()
        assert [subtask.positions for subtask in restore.subtasks if subtask.uid == "source"] == [
            {"p0": b"0", "p1": b"1"}
        ]


def test_what_may_be_left_behind_is_given_by_names() -> None:
    before = line(1, 2)
    checkpoint = checkpoint_of(before, snapshots(before))
    after = graph((1, (source("other"),)), (1, (total("sum"), sink("print"))))
    with pytest.raises(IncompatibleCheckpointError) as refused:
        restores(checkpoint, after, allow_unclaimed=("source", "count/total"))
    assert "'total'" not in str(refused.value)
    assert "source 'source'" not in str(refused.value)
    assert "'after/SPLIT'" in str(refused.value)
    assert restores(checkpoint, after, allow_unclaimed=("source", "count", "after", "sink")).dropped


def test_unclaimed_state_is_refused_or_named() -> None:
    before = line(1, 2)
    parts = [
        replace(part, committables=(Committable("sink", b"", 7),) if part.uid == "count" else ())
        for part in snapshots(before, in_flight=True)
    ]
    checkpoint = checkpoint_of(before, parts)
    after = graph((1, (source("other"),)), (1, (total("sum"), sink("print"))))
    with pytest.raises(IncompatibleCheckpointError, match="allow_unclaimed_state=True") as refused:
        restores(checkpoint, after, allow_unclaimed=False)
    found = restores(checkpoint, after, allow_unclaimed=True)
    for text in (
        "keyed state 'total' of operator 'count'",
        "operator state 'SPLIT' of operator 'after'",
        "positions of source 'source'",
        "uncommitted rows of sink 'sink'",
        "records on their way to operator 'count'",
    ):
        assert found.dropped.count(text) == 1
        assert text in str(refused.value)
    for restore in found.by_slot.values():
        for subtask in restore.subtasks:
            assert not subtask.keyed + subtask.operators + subtask.in_flight + subtask.outgoing
            assert not subtask.positions


def test_new_operators_begin_with_nothing() -> None:
    before = line(2, 2)
    after = graph((2, (source(),)), (2, (keep("new"),)), (2, (total("count"), keep("after"), sink())))
    got = assigned(checkpoint_of(before), after)
    assert got["new", 1] == SubtaskRestore("new", 1)


def test_operator_infos() -> None:
    infos = operator_infos(line(2, 3))
    assert [(info.uid, info.chain, info.kind, info.parallelism, info.keys) for info in infos] == [
        ("source", "source", "Source", 2, ()),
        ("count", "count", "Reduce", 3, ("string",)),
        ("after", "count", "Map", 3, ()),
        ("sink", "count", "Sink", 3, ()),
    ]
