"""When a query is drained, for all histories of what Spark and the vertex say."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.spark.query.checkpoint import Drain, LogEnds
from ftlayer.vertex.calls import QueryStatus

IDLE = QueryStatus(0, 0, 0, 0, 3, -1)
few = st.integers(0, 2)


@given(
    first=st.integers(-1, 5),
    events=st.lists(st.sampled_from(["rows", "plan", "commit", "source's end"]), max_size=30),
    waiting=few,
    deliverable=few,
    delivered=few,
    pending=few,
)
def test_drained_means_that_all_the_source_had_is_committed_and_nothing_waits(
    first: int, events: list[str], waiting: int, deliverable: int, delivered: int, pending: int
) -> None:
    """A source of numbered rows: each batch takes those that have come; batches are planned one after the other."""
    ends = [0] * (first + 1)  # of each batch planned, the source row it ends before
    planned = committed = first
    had = rows = 1  # when the drain was asked for
    drain = Drain()
    for event in events:
        if event == "rows":
            rows += 1
        elif event == "plan" and planned == committed and rows > (ends[-1] if ends else 0):
            ends.append(rows)
            planned += 1
        elif event == "commit" and committed < planned:
            committed += 1
        elif event == "source's end" and (ends[-1] if ends else 0) == rows:
            drain.source_ended(LogEnds(planned, committed))
        through = committed >= 0 and ends[committed] >= had
        reached = drain.reached(LogEnds(planned, committed), IDLE)
        assert not reached or through
        if drain.source_read and planned == committed:
            assert reached
    busy = QueryStatus(waiting, deliverable, delivered, pending, 0, -1)
    if waiting or deliverable or delivered or pending:
        assert not drain.reached(LogEnds(planned, committed), busy)


def test_rows_that_come_later_need_not_be_through() -> None:
    drain = Drain()
    assert not drain.reached(LogEnds(4, 4), IDLE)
    drain.source_ended(LogEnds(4, 4))
    assert drain.reached(LogEnds(5, 4), IDLE)
    drain.source_ended(LogEnds(5, 4))
    assert drain.reached(LogEnds(5, 4), IDLE)
    assert not drain.reached(LogEnds(5, 3), IDLE)


def test_a_source_that_never_had_a_row_is_drained() -> None:
    drain = Drain()
    drain.source_ended(LogEnds(-1, -1))
    assert drain.reached(LogEnds(-1, -1), IDLE)
