"""Tables of events: unaligned, and aligned until the time is up."""

from __future__ import annotations

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.handlers import AllBarriers, AlternatingHandler, TakeSnapshot

TABLES = {
    "unaligned from the beginning": """
        u1 1 -> snapshot 1 with 0,1,2; stop 1 on 1
        u0 1 -> stop 1 on 0
        u2 1 -> stop 1 on 2; all of 1
        u0 2 -> snapshot 2 with 0,1,2; stop 2 on 0
    """,
    "in time it is aligned": """
        n0 1, n1 1 ->
        b0 1 -> block 0
        b1 1 -> block 1
        @99 ->
        n2 1 ->
        b2 1 -> snapshot 1; unblock 0; unblock 1
        @500 ->
    """,
    "time is up with a channel blocked, one waiting, one to come": """
        n0 1 ->
        b0 1 -> block 0
        n1 1, @99 ->
        @100 -> snapshot 1 with 1,2; unblock 0; stop 1 on 1
        b1 1 ->
        n2 1 -> stop 1 on 2; all of 1
        b2 1 ->
        b0 2 -> block 0; snapshot 2 with 1,2; unblock 0
    """,
    "time is up, and no barrier has had its turn": """
        n0 1, n1 1, n2 1, @50 ->
        @100 -> snapshot 1 with 0,1,2; stop 1 on 0; stop 1 on 1; stop 1 on 2; all of 1
        b0 1, b1 1, b2 1, @200 ->
    """,
    "a barrier arrives when the time is up": """
        @150 ->
        n1 1 -> snapshot 1 with 0,1,2; stop 1 on 1
        n0 1 -> stop 1 on 0
        u2 1 -> stop 1 on 2; all of 1
    """,
    "aborted while it aligns": """
        n1 1, n0 1 ->
        b1 1 -> block 1
        abort 1 -> unblock 1
        b0 1, @300 ->
    """,
    "an unaligned one from before turns what merely waits": """
        n0 1, n1 1 ->
        u2 1 -> snapshot 1 with 0,1,2; stop 1 on 0; stop 1 on 1; stop 1 on 2; all of 1
        b0 1, b1 1 ->
    """,
    "an unaligned one from before turns what aligns": """
        n0 1 ->
        b0 1 -> block 0
        u2 1 -> snapshot 1 with 1,2; unblock 0; stop 1 on 2
        n1 1 -> stop 1 on 1; all of 1
        b1 1 ->
    """,
    "a savepoint has no timeout": """
        w0 1, w1 1, w2 1, @5000 ->
        s0 1 -> block 0
        s1 1 -> block 1
        s2 1 -> snapshot 1; unblock 0; unblock 1
    """,
    "a checkpoint that waits does not disturb a savepoint that aligns": """
        w0 1 ->
        s0 1 -> block 0
        n0 2, w1 1, n1 2, w2 1, @500 ->
        s1 1 -> block 1
        s2 1 -> snapshot 1; unblock 0; unblock 1; snapshot 2 with 0,1,2; stop 2 on 0; stop 2 on 1
        n2 2 -> stop 2 on 2; all of 2
    """,
    "an unaligned one overtakes a savepoint that aligns": """
        w0 1 ->
        s0 1 -> block 0
        w1 1 ->
        u1 2 -> unblock 0; give up 1; snapshot 2 with 0,1,2; stop 2 on 1
        s1 1, w2 1, s2 1 ->
        u0 2 -> stop 2 on 0
        u2 2 -> stop 2 on 2; all of 2
    """,
    "an unaligned one overtakes a savepoint that merely waits": """
        w0 1, w1 1 ->
        u0 2 -> give up 1; snapshot 2 with 0,1,2; stop 2 on 0
        s0 1, s1 1 ->
    """,
    "a later unaligned one while records are captured": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        u1 2 -> stop 1 on 1; stop 1 on 2; give up 1; snapshot 2 with 0,1,2; stop 2 on 1
        u2 1, u1 1 ->
        u2 2 -> stop 2 on 2
        u0 2 -> stop 2 on 0; all of 2
    """,
    "a later aligned one has its turn while records are captured": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        w0 2 ->
        s0 2 -> stop 1 on 1; stop 1 on 2; give up 1; block 0
        u1 1 ->
    """,
    "cancelled while records are captured": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        x1 1 -> stop 1 on 1; stop 1 on 2; give up 1
        u2 1, x0 1, x2 1 ->
        u2 2 -> snapshot 2 with 0,1,2; stop 2 on 2
    """,
    "cancelled while barriers wait": """
        n0 1 ->
        x1 1 -> give up 1
        @500 ->
        n2 1, b0 1, b2 1 ->
    """,
    "a later one is cancelled": """
        n0 1 ->
        b0 1 -> block 0
        x1 3 -> unblock 0; give up 1; give up 3
        @500, n0 3, n2 2, u2 3 ->
        n1 4 -> snapshot 4 with 0,1,2; stop 4 on 1
    """,
    "channels end while records are captured": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        e1 -> stop 1 on 1
        e2 -> stop 1 on 2; all of 1
        u0 2 -> snapshot 2 with 0; stop 2 on 0; all of 2
    """,
    "a channel ends before and between": """
        e2 ->
        n0 1 ->
        b0 1 -> block 0
        e1 -> snapshot 1; unblock 0
        @500 ->
    """,
    "aborted while records are captured": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        abort 1 -> stop 1 on 1; stop 1 on 2
        u1 1, u2 1, x2 1 ->
        u1 2 -> snapshot 2 with 0,1,2; stop 2 on 1
    """,
    "aborted while barriers wait": """
        n0 1 ->
        abort 1 ->
        @500, n1 1, u2 1, b0 1 ->
        n0 2 -> snapshot 2 with 0,1,2; stop 2 on 0
    """,
    "aborted before anything came": """
        abort 1, u0 1, n1 1, @500, b1 1, u2 1 ->
    """,
    "aborted after it was complete": """
        u0 1 -> snapshot 1 with 0,1,2; stop 1 on 0
        u1 1 -> stop 1 on 1
        u2 1 -> stop 1 on 2; all of 1
        abort 1 ->
    """,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_three_channels(play, table: str) -> None:
    play(AlternatingHandler(3), table)


def test_a_single_channel(play) -> None:
    play(
        AlternatingHandler(1),
        """
        n0 1 ->
        b0 1 -> snapshot 1
        u0 2 -> snapshot 2 with 0; stop 2 on 0; all of 2
        n0 3, @99 ->
        @100 -> snapshot 3 with 0; stop 3 on 0; all of 3
        b0 3 ->
        """,
    )


def test_when_time_matters() -> None:
    handler = AlternatingHandler(2)
    assert handler.due_ms is None
    handler.announced(0, Barrier(1, 1_000, timeout_ms=100), 1_010)
    assert handler.due_ms == 1_100
    handler.barrier(0, Barrier(1, 1_000, timeout_ms=100), 1_020)
    assert handler.due_ms == 1_100
    handler.aborted(1, 1_030)
    assert handler.due_ms is None
    handler.announced(0, Barrier(2, 1_000, timeout_ms=None), 1_010)
    assert handler.due_ms is None
    handler.announced(1, Barrier(3, 1_000, timeout_ms=500, kind=SnapshotKind.SAVEPOINT), 1_010)
    assert handler.due_ms is None


def test_times() -> None:
    handler = AlternatingHandler(2)
    handler.announced(0, Barrier(1, 1_000, timeout_ms=300), 1_100)
    handler.barrier(0, Barrier(1, 1_000, timeout_ms=300), 1_200)
    snapshot = handler.on_time(1_350)[0]
    assert isinstance(snapshot, TakeSnapshot)
    assert (snapshot.start_delay_ms, snapshot.alignment_ms) == (200, 150)
    assert snapshot.barrier == Barrier(1, 1_000, Alignment.UNALIGNED, timeout_ms=300)
    assert handler.announced(1, Barrier(1, 1_000, timeout_ms=300), 1_500)[-1] == AllBarriers(1, 300)


def test_a_barrier_whose_turn_comes_too_late_is_not_waited_for() -> None:
    handler = AlternatingHandler(2)
    barrier = Barrier(1, 1_000, timeout_ms=300)
    decisions = handler.barrier(0, barrier, 1_400)
    snapshot = next(d for d in decisions if isinstance(d, TakeSnapshot))
    assert snapshot.capture == (1,)
