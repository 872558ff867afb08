"""Tables of events: exactly once, aligned."""

from __future__ import annotations

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier
from ftlayer.checkpoint.handlers import AlignedHandler, BlockChannel, TakeSnapshot, TrackingHandler, Unblock
from ftlayer.errors import CheckpointError

TABLES = {
    "each channel waits from its barrier on": """
        b0 1 -> block 0
        b2 1 -> block 2
        b1 1 -> snapshot 1; unblock 0; unblock 2
        b1 2 -> block 1
        b2 2 -> block 2
        b0 2 -> snapshot 2; unblock 1; unblock 2
    """,
    "announcements are nothing new": """
        n0 1, n1 1, n2 1, @500 ->
        b0 1 -> block 0
    """,
    "a later barrier where the earlier one is missing": """
        b0 1 -> block 0
        b1 2 -> unblock 0; give up 1; block 1
        b2 1, b2 1 ->
        b0 2 -> block 0
        b2 2 -> snapshot 2; unblock 1; unblock 0
        b2 1 ->
    """,
    "several in a row are missing": """
        b0 1 -> block 0
        b1 4 -> unblock 0; give up 1; block 1
        b0 2, b0 3, b2 3 ->
        b0 4 -> block 0
        b2 4 -> snapshot 4; unblock 1; unblock 0
    """,
    "cancelled before the first barrier": """
        x0 1 -> give up 1
        b1 1, b2 1, x1 1 ->
        b1 2 -> block 1
    """,
    "cancelled in the middle": """
        b0 1 -> block 0
        x1 1 -> unblock 0; give up 1
        b2 1, x0 1, x1 1 ->
        b2 2 -> block 2
    """,
    "a later one is cancelled where the earlier one is missing": """
        b0 1 -> block 0
        x1 2 -> unblock 0; give up 1; give up 2
        b0 2, b2 1, b2 2, x2 2 ->
        b1 3 -> block 1
    """,
    "a later one is cancelled with nothing under way": """
        x1 5 -> give up 5
        x1 5, b0 3, b0 4, x0 4, b0 5 ->
        b0 6 -> block 0
    """,
    "the marker of one long gone": """
        b0 2 -> block 0
        x1 1 ->
        b1 2 -> block 1
        b2 2 -> snapshot 2; unblock 0; unblock 1
        x0 2 ->
    """,
    "a channel that has ended before": """
        e1 ->
        b0 1 -> block 0
        b2 1 -> snapshot 1; unblock 0
    """,
    "channels that end between barriers": """
        b0 1 -> block 0
        e1 ->
        b2 1 -> snapshot 1; unblock 0
        b2 2 -> block 2
        b0 2 -> snapshot 2; unblock 2
    """,
    "the last one that is missing ends": """
        b0 1 -> block 0
        b1 1 -> block 1
        e2 -> snapshot 1; unblock 0; unblock 1
        e0 ->
        b1 2 -> snapshot 2
        e1 ->
    """,
    "the coordinator aborts before": """
        abort 1, b0 1, b1 1, x2 1 ->
        b0 2 -> block 0
    """,
    "the coordinator aborts meanwhile": """
        b0 1 -> block 0
        b1 1 -> block 1
        abort 1 -> unblock 0; unblock 1
        b2 1, x2 1, abort 1 ->
        b0 2 -> block 0
    """,
    "the coordinator aborts after": """
        b0 1 -> block 0
        b1 1 -> block 1
        b2 1 -> snapshot 1; unblock 0; unblock 1
        abort 1 ->
        b0 2 -> block 0
    """,
    "one that follows is aborted, and the earlier one goes on": """
        b0 1 -> block 0
        abort 2 ->
        b1 1 -> block 1
        b2 1 -> snapshot 1; unblock 0; unblock 1
        b0 2, b1 2, b2 2 ->
        b0 3 -> block 0
    """,
    "the barrier of an aborted one shows what is missing too": """
        b0 1 -> block 0
        abort 2 ->
        b1 2 -> unblock 0; give up 1
        b0 3 -> block 0
    """,
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_three_channels(play, table: str) -> None:
    play(AlignedHandler(3), table)


def test_a_single_channel_never_waits(play) -> None:
    play(
        AlignedHandler(1),
        """
        b0 1 -> snapshot 1
        b0 3 -> snapshot 3
        x0 4 -> give up 4
        abort 5, b0 5 ->
        b0 6 -> snapshot 6
        e0 ->
        """,
    )


@pytest.mark.parametrize("channels", [2, 50, 200])
def test_many_channels(channels: int) -> None:
    handler = AlignedHandler(channels)
    for checkpoint in (1, 2):
        barrier = Barrier(checkpoint, 0)
        for channel in range(channels - 1):
            assert handler.barrier(channel, barrier, 0) == [BlockChannel(channel)]
        snapshot, *rest = handler.barrier(channels - 1, barrier, 0)
        assert isinstance(snapshot, TakeSnapshot)
        assert rest == [Unblock(channel) for channel in range(channels - 1)]


def test_times() -> None:
    handler = AlignedHandler(2)
    handler.barrier(0, Barrier(1, started_ms=1_000), 1_250)
    snapshot = handler.barrier(1, Barrier(1, started_ms=1_000), 1_700)[0]
    assert isinstance(snapshot, TakeSnapshot)
    assert (snapshot.start_delay_ms, snapshot.alignment_ms) == (250, 450)


def test_a_clock_that_is_set_back_gives_no_negative_times() -> None:
    handler = AlignedHandler(2)
    handler.barrier(0, Barrier(1, started_ms=1_000), 900)
    snapshot = handler.barrier(1, Barrier(1, started_ms=1_000), 800)[0]
    assert isinstance(snapshot, TakeSnapshot)
    assert (snapshot.start_delay_ms, snapshot.alignment_ms) == (0, 0)


@pytest.mark.parametrize("handler", [AlignedHandler, TrackingHandler])
def test_an_unaligned_barrier_is_refused(handler: type[AlignedHandler | TrackingHandler]) -> None:
    with pytest.raises(CheckpointError, match="channel 1 brought an unaligned barrier"):
        handler(2).announced(1, Barrier(1, 0, Alignment.UNALIGNED), 0)
