"""Tables of events: at least once."""

from __future__ import annotations

import pytest

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.handlers import MAX_TRACKED, TOO_MANY, GiveUp, TakeSnapshot, TrackingHandler

TABLES = {
    "nothing is blocked": """
        n0 1, b0 1, b2 1 ->
        b1 1 -> snapshot 1
        b1 2, b2 2 ->
        b0 2 -> snapshot 2
    """,
    "several under way": """
        b0 1, b0 2, b0 3, b1 1, b1 2 ->
        b2 1 -> snapshot 1
        b2 2 -> snapshot 2
        b2 3, @500 ->
        b1 3 -> snapshot 3
    """,
    "a later barrier where the earlier one is missing": """
        b0 1, b0 2 ->
        b1 2 -> give up 1
        b1 1, b2 1 ->
        b2 2 -> snapshot 2
        b2 1 ->
    """,
    "cancelled before the first barrier": """
        x0 1 -> give up 1
        b1 1, b2 1, x1 1 ->
        b0 2, b1 2 ->
        b2 2 -> snapshot 2
    """,
    "cancelled in the middle, the later one goes on": """
        b0 1, b0 2, b1 1 ->
        x2 1 -> give up 1
        x1 1, b1 2 ->
        b2 2 -> snapshot 2
    """,
    "a later one is cancelled, the earlier one goes on": """
        b0 1, b1 1 ->
        x0 2 -> give up 2
        b1 2 ->
        b2 1 -> snapshot 1
        b2 2, x2 2 ->
    """,
    "a later one is cancelled where the earlier one is missing": """
        b0 1, b1 1 ->
        x2 3 -> give up 1; give up 3
        b0 3, b1 3, b0 1 ->
    """,
    "channels end": """
        e0, b1 1, b1 2 ->
        b2 1 -> snapshot 1
        e2 -> snapshot 2
        b1 3 -> snapshot 3
        e1 ->
    """,
    "the end of one completes several": """
        b0 1, b1 1, b0 2, b1 2, x0 3 -> give up 3
        b1 3 ->
        e2 -> snapshot 1; snapshot 2
        b0 3 ->
    """,
    "the coordinator aborts before, meanwhile and after": """
        abort 1, b0 1, b1 1, b2 1 ->
        b0 2, abort 2, b1 2, x2 2 ->
        b0 3, b1 3 ->
        b2 3 -> snapshot 3
        abort 3, abort 3 ->
    """,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_three_channels(play, table: str) -> None:
    play(TrackingHandler(3), table)


def test_a_single_channel(play) -> None:
    play(
        TrackingHandler(1),
        """
        b0 1 -> snapshot 1
        x0 2 -> give up 2
        abort 3, b0 3 ->
        b0 4 -> snapshot 4
        """,
    )


def test_the_earliest_of_too_many_is_given_up() -> None:
    handler = TrackingHandler(2)
    for checkpoint in range(1, MAX_TRACKED + 1):
        assert handler.barrier(0, Barrier(checkpoint, 0), 0) == []
    assert handler.barrier(0, Barrier(MAX_TRACKED + 1, 0), 0) == [GiveUp(1, TOO_MANY)]
    assert handler.barrier(1, Barrier(1, 0), 0) == []
    assert [type(d) for d in handler.barrier(1, Barrier(2, 0), 0)] == [TakeSnapshot]


def test_aborted_ones_are_not_remembered_for_ever() -> None:
    handler = TrackingHandler(2)
    for checkpoint in range(1, 10 * MAX_TRACKED):
        assert handler.aborted(checkpoint, 0) == []
    assert len(handler._tracked) <= MAX_TRACKED


def test_times() -> None:
    handler = TrackingHandler(2)
    handler.barrier(0, Barrier(1, started_ms=1_000), 1_250)
    handler.barrier(0, Barrier(2, started_ms=1_300), 1_400)
    snapshot = handler.barrier(1, Barrier(1, started_ms=1_000), 1_700)[0]
    assert isinstance(snapshot, TakeSnapshot)
    assert (snapshot.start_delay_ms, snapshot.alignment_ms) == (250, 450)
