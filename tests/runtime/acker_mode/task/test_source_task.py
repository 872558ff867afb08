"""A source emits what the vertex has accepted, in its own order, and nothing before."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError
from ftlayer.functions.steps import Map
from ftlayer.records.ids import RootRange, ids_of, xor_fold_by_root
from ftlayer.records.partitioning import Broadcast, Forward, HashByKey
from ftlayer.records.traced import KeySelector
from ftlayer.runtime.acker_mode.task.mode import PersistingSourceTask
from ftlayer.runtime.handler import FTHandler
from ftlayer.runtime.protocol.messages import Batch, EndOfStream, LatencyMarker
from ftlayer.runtime.task.actions import (
    Action,
    FailRoots,
    PersistRoots,
    RowsPersisted,
    Send,
    SourceOver,
    SourceRows,
    TaskEnded,
    TaskStart,
    TimeCame,
)
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.job_graph_generator import OpFTLayerBuilder
from ftlayer.topology.operators import IterableSource, Source
from ftlayer.vertex.calls import SourcePosition
from ftlayer.vertex.calls.common import check_event_ids

NOW = Now(0, 0)
SCHEMA = pa.schema([("n", pa.int64())])


def graph() -> JobGraph:
    def chain(uid: str) -> JobVertex:
        return JobVertex(uid, (Map(uid, lambda record: record, SCHEMA),), 2)

    source = JobVertex("s", (Source("s", IterableSource(()), SCHEMA),), 2)
    edges = (
        JobEdge(0, "s", "f", 0, Forward(), SCHEMA),
        JobEdge(1, "s", "h", 0, HashByKey(KeySelector(("n",))), SCHEMA),
        JobEdge(2, "s", "b", 0, Broadcast(), SCHEMA),
    )
    plain = JobGraph("job", (source, chain("f"), chain("h"), chain("b")), edges, tracked=False)
    return OpFTLayerBuilder().wire(plain, {})


def task(*, exact: bool = False, shard: int = 0) -> PersistingSourceTask:
    return PersistingSourceTask(
        graph(), "s", 1, FTHandler("s", job="job", run="run", shard=shard, shards=4, exact=exact)
    )


def rows(*numbers: int, first: int = 0, split: int = 0) -> SourceRows:
    payload = pa.record_batch([pa.array(numbers, pa.int64())], schema=SCHEMA)
    return SourceRows("p", split, first, payload, SourcePosition("p", None, b"1"))


def ticket_of(actions: list[Action]) -> int:
    (persist,) = actions
    assert isinstance(persist, PersistRoots)
    return persist.ticket


def sent(actions: list[Action]) -> list[Batch]:
    found = []
    for action in actions:
        assert isinstance(action, Send)
        if not isinstance(action.element, LatencyMarker):
            assert isinstance(action.element, Batch)
            found.append(action.element)
    return found


def forwarded(actions: list[Action]) -> list[list[int]]:
    """What went by the forward edge, batch by batch."""
    return [
        action.element.payload.column(0).to_pylist()
        for action in actions
        if isinstance(action, Send) and action.channel.edge == 0 and isinstance(action.element, Batch)
    ]


def test_rows_are_registered_with_the_ids_of_all_that_will_be_sent() -> None:
    source = task(shard=2)
    (persist,) = source.handle(rows(1, 2, 3), NOW)
    assert isinstance(persist, PersistRoots)
    call = persist.call
    assert (call.stream, call.position) == ("job/s", SourcePosition("p", None, b"1"))
    assert call.payload.column(0).to_pylist() == [1, 2, 3]
    assert isinstance(call.roots, RootRange)
    assert (call.roots.ids() >> np.uint64(62) == 2).all()
    hashes = KeySelector(("n",)).hash(call.payload)
    assert call.key_hashes is not None
    assert call.key_hashes.tolist() == [[1, number] for number in hashes.tolist()]
    lineages = [batch.lineage for batch in sent(source.handle(RowsPersisted(persist.ticket), NOW))]
    roots, values = xor_fold_by_root(
        np.concatenate([lineage.roots for lineage in lineages if lineage]),
        np.concatenate([lineage.ids for lineage in lineages if lineage]),
    )
    assert roots.tolist() == call.roots.ids().tolist()
    assert call.values is not None
    assert values.tolist() == call.values.tolist()
    assert sum(len(lineage) for lineage in lineages if lineage) == 3 * (1 + 1 + 2)


def test_a_latency_marker_is_as_old_as_the_rows_and_waits_for_the_vertex_behind_them() -> None:
    source = task()
    read_at, accepted_at = Now(5_000, 60_000), Now(5_400, 60_400)
    tickets = [ticket_of(source.handle(rows(n, 7, first=2 * n), read_at)) for n in range(2)]
    assert source.handle(RowsPersisted(tickets[1]), accepted_at) == []
    elements = [
        action.element
        for action in source.handle(RowsPersisted(tickets[0]), accepted_at)
        if isinstance(action, Send) and action.channel.edge == 0
    ]
    first, marker, second = elements
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert first.lineage is not None
    assert marker == LatencyMarker("s", 60_000, int(first.lineage.roots[-1]))


def test_a_vertex_with_the_exact_tracker_gets_the_single_ids() -> None:
    (persist,) = task(exact=True).handle(rows(1, 2), NOW)
    assert isinstance(persist, PersistRoots)
    ids = persist.call.ids
    assert ids is not None
    assert persist.call.values is not None
    check_event_ids(ids, persist.call.values, "Persist")
    assert sorted(ids.operators[owner] for owner in ids.owners[: ids.offsets[1]]) == ["b", "b", "f", "h"]


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda n: st.permutations(range(n))), st.data())
def test_rows_are_sent_in_their_order_whatever_order_they_are_accepted_in(
    order: list[int], data: st.DataObject
) -> None:
    source = task()
    tickets = [ticket_of(source.handle(rows(n, first=n), NOW)) for n in range(len(order))]
    end_after = data.draw(st.integers(0, len(order)))
    done: set[int] = set()
    out: list[list[int]] = []
    last: list[Action] = []
    for place, n in enumerate(order):
        if place == end_after:
            assert source.handle(SourceOver(), NOW) == []
        last = source.handle(RowsPersisted(tickets[n]), NOW)
        out += forwarded(last)
        done.add(n)
        ready = next(n for n in range(len(order) + 1) if n not in done)
        assert out == [[n] for n in range(ready)]
        assert len(source.held_roots()) == len(order) - ready
    if end_after == len(order):
        last = source.handle(SourceOver(), NOW)
    assert last[-1] == TaskEnded()
    marks = [action for action in last if isinstance(action, Send) and action.element == EndOfStream()]
    assert len(marks) == 1 + 2 + 2
    assert last[-1 - len(marks) : -1] == marks


def test_all_that_is_held_is_named_until_it_is_sent() -> None:
    source = task()
    first, second = source.handle(rows(1, 2), NOW), source.handle(rows(3, first=2), NOW)
    assert isinstance(first[0], PersistRoots)
    assert isinstance(second[0], PersistRoots)
    roots = [root for (each,) in (first, second) for root in ids_of(each.call.roots).tolist()]
    assert source.held_roots().tolist() == roots
    source.handle(RowsPersisted(second[0].ticket), NOW)
    assert source.held_roots().tolist() == roots
    source.handle(RowsPersisted(first[0].ticket), NOW)
    assert source.held_roots().tolist() == []


def test_rows_of_different_splits_and_ordinals_have_different_roots() -> None:
    source = task()
    calls = [source.handle(part, NOW) for part in (rows(1), rows(1, first=1), rows(1, split=1))]
    roots = {int(ids_of(call[0].call.roots)[0]) for call in calls if isinstance(call[0], PersistRoots)}
    assert len(roots) == 3


def test_a_position_without_rows_is_persisted_too() -> None:
    source = task()
    ticket = ticket_of(source.handle(rows(), NOW))
    assert source.handle(RowsPersisted(ticket), NOW) == []


def test_a_ticket_that_is_not_out_is_an_error() -> None:
    source = task()
    ticket = ticket_of(source.handle(rows(1), NOW))
    other = ticket_of(source.handle(rows(2, first=1), NOW))
    source.handle(RowsPersisted(other), NOW)
    for wrong in (other, other + 1, ticket - 1):
        with pytest.raises(ProtocolError, match=f"ticket {wrong}"):
            source.handle(RowsPersisted(wrong), NOW)


def test_time_brings_nothing_and_an_empty_source_ends_at_once() -> None:
    source = task()
    assert source.handle(TaskStart(), NOW) == source.handle(TimeCame(), NOW) == []
    assert source.handle(SourceOver(), NOW)[-1] == TaskEnded()


def test_a_row_that_does_not_fit_is_stored_as_it_came_and_fails_for_good() -> None:
    source = task(exact=True)
    before = source.handle(rows(1, 2), NOW)
    odd = SourceRows(
        "p",
        0,
        2,
        pa.record_batch({"row": ["'x'"]}),
        SourcePosition("p", b"1", b"2"),
        misfit="row 2 of split 'p': …",
    )
    (persist,) = source.handle(odd, NOW)
    assert isinstance(persist, PersistRoots)
    assert persist.call.payload.to_pylist() == [{"row": "'x'"}]
    assert persist.call.position == odd.position
    assert persist.call.values is None  # one copy, which nobody has
    assert source.handle(RowsPersisted(persist.ticket), NOW) == []
    actions = source.handle(RowsPersisted(ticket_of(before)), NOW)
    (failed,) = [action for action in actions if isinstance(action, FailRoots)]
    (failure,) = failed.failures
    assert (failure.fatal, failure.reason, failure.operator) == (True, odd.misfit, "s")
    assert [failure.root] == ids_of(persist.call.roots).tolist()
    assert actions[-1] is failed
