"""What a vertex says of each of its streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.vertex import calls
from ftlayer.vertex.calls.jobs import JobKind


def _streams(vertex: Any) -> dict[str, calls.StreamDetails]:
    return {details.stream: details for details in vertex.call(calls.ListStreams()).streams}


@pytest.fixture
def two(vertex: Any) -> Any:
    """Two streams of one topology, with 3 and 2 records in flight."""
    vertex.call(calls.ClaimJob("shop", "run"))
    for stream, first, rows in (("shop/orders", 1, 3), ("shop/returns", 11, 2)):
        vertex.open(stream, max_attempts=2)
        vertex.persist(list(range(first, first + rows)), stream=stream)
    return vertex


def test_each_stream_has_counts_of_its_own(two: Any) -> None:
    two.xor((1, 1))
    two.fail(2, 11)
    two.fail(12, fatal=True)
    orders, returns = _streams(two).values()
    assert (orders.persisted, orders.completed, orders.failed, orders.died) == (3, 1, 1, 0)
    assert (orders.pending, orders.waiting, orders.dead) == (1, 1, 0)
    assert (returns.persisted, returns.completed, returns.failed, returns.died) == (2, 0, 2, 1)
    assert (returns.pending, returns.waiting, returns.dead) == (0, 1, 1)
    assert (orders.owner, orders.title, orders.source, orders.kind) == (
        "shop",
        "shop",
        "orders",
        JobKind.TOPOLOGY,
    )


def test_timeouts_are_counted_where_they_happen(two: Any) -> None:
    two.xor((11, 11), (12, 12))
    two.advance(3_000, ticks=30)
    orders, returns = _streams(two).values()
    assert (orders.counters["timed_out"], orders.counters["failed_explicit"]) == (3, 0)
    assert returns.counters["timed_out"] == 0


def test_the_streams_together_are_what_the_vertex_says(two: Any) -> None:
    two.fail(2, 11, fatal=True)
    (letter,) = two.list("dead", "shop/returns")
    two.call(calls.Requeue((letter.key,)))
    two.advance(200)
    assert two.take(stream="shop/returns")
    two.recall("shop/orders")
    stats = two.stats()
    streams = _streams(two).values()
    for name in next(iter(streams)).counters:
        assert sum(stream.counters[name] for stream in streams) == stats[name], name
    assert (stats["requeued"], stats["recalled"], stats["replayed"], stats["dead"]) == (1, 2, 1, 2)


def test_how_long_records_took_is_counted_by_call_and_one_of_them_is_named(two: Any) -> None:
    two.advance(20)
    two.xor((1, 1), (2, 2))
    two.advance(400)
    two.xor((3, 3))
    completion = _streams(two)["shop/orders"].completion
    assert completion is not None
    assert sum(completion.counts) == 3
    assert completion.total == pytest.approx(2 * 0.02 + 0.42)
    assert sorted((each.value, each.root, each.at_ms) for each in completion.exemplars if each) == [
        (0.02, 2, two.wall - 400),
        (0.42, 3, two.wall),
    ]


def test_a_record_of_an_earlier_incarnation_has_no_duration_until_it_is_handed_out(two: Any) -> None:
    two.restart()
    assert _streams(two)["shop/orders"].oldest_ms == 0
    two.advance(1_000)
    handed_out = two.wall
    roots = [row[0] for row in two.take(stream="shop/orders")]
    assert _streams(two)["shop/orders"].oldest_ms == handed_out
    two.advance(50)
    two.xor(*((root, root) for root in roots))
    completion = _streams(two)["shop/orders"].completion
    assert completion is not None
    assert completion.total == pytest.approx(3 * 0.05)


def test_the_oldest_record_is_as_old_as_its_first_failure(vertex: Any) -> None:
    vertex.open(max_attempts=None)
    assert _streams(vertex)["s"].oldest_ms == 0
    started = vertex.wall
    vertex.persist([1, 2])
    assert _streams(vertex)["s"].oldest_ms == started
    vertex.advance(100)
    failed = vertex.wall
    vertex.fail(1)
    vertex.xor((2, 2))
    for _ in range(3):
        assert _streams(vertex)["s"].oldest_ms == failed, "it waits"
        vertex.advance(200)
        ((root, *_),) = vertex.take()
        assert _streams(vertex)["s"].oldest_ms == failed, "it is tried again"
        vertex.fail(root)


def test_records_in_delivery_have_an_age_too(vertex: Any, kit: Any) -> None:
    came = vertex.wall
    vertex.call(calls.Ingest("ingest/web", kit.payload(["a", "b"])))
    vertex.advance(60_000)
    vertex.call(calls.Ingest("ingest/web", kit.payload(["c"])))
    assert _streams(vertex)["ingest/web"].oldest_ms == came
    opened = vertex.call(calls.OpenQuery("clean", "run", ("ingest/web",)))
    vertex.call(calls.Deliverable("ingest/web", 0, 2))
    vertex.call(calls.BeginBatch("clean", opened.epoch, 0))
    vertex.call(calls.Seal("clean", opened.epoch, 0, {"ingest/web": (0, 2)}))
    vertex.call(calls.Commit("clean", opened.epoch, 0))
    assert _streams(vertex)["ingest/web"].oldest_ms == came + 60_000
    vertex.restart()
    assert _streams(vertex)["ingest/web"].oldest_ms == vertex.wall


def test_an_ingest_belongs_to_the_query_that_reads_it(vertex: Any, kit: Any) -> None:
    vertex.call(calls.Ingest("ingest/web", kit.payload(["a", "b"])))
    before = _streams(vertex)["ingest/web"]
    assert (before.owner, before.source, before.kind) == ("", "ingest/web", None)
    assert (before.persisted, before.in_delivery) == (2, 2)
    vertex.call(calls.OpenQuery("clean", "run", ("ingest/web", "clean/files")))
    by_name = _streams(vertex)
    assert (by_name["ingest/web"].owner, by_name["ingest/web"].kind) == ("clean", JobKind.QUERY)
    assert by_name["clean/files"].source == "files"


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.tuples(st.sampled_from("pxfta"), st.integers(1, 12)), max_size=40))
def test_counts_of_streams_add_up_whatever_happens(events: list[tuple[str, int]], kit: Any) -> None:
    vertex = kit.Vertex()
    names = ("job/a", "job/b")
    for name in names:
        vertex.open(name, max_attempts=2)
    for kind, root in events:
        stream = names[root % 2]
        match kind:
            case "p":
                vertex.persist([root], stream=stream)
            case "x":
                vertex.xor((root, root))
            case "f":
                vertex.fail(root)
            case "t":
                for row in vertex.take(stream=stream):
                    vertex.xor((row[0], row[0]))
            case "a":
                vertex.advance(root * 100)
    stats, streams = vertex.stats(), _streams(vertex)
    for name in streams["job/a"].counters:
        assert sum(stream.counters[name] for stream in streams.values()) == stats[name], name
    for stream in streams.values():
        held = stream.pending + stream.waiting + stream.dead
        assert stream.persisted == stream.completed + held
        assert stream.completion is not None
        assert sum(stream.completion.counts) == stream.completed - stream.counters["cancelled_replays"]
