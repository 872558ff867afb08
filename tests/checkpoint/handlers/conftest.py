"""Handlers' events and decisions as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ftlayer.checkpoint.barrier import Alignment, Barrier, SnapshotKind
from ftlayer.checkpoint.handlers import (
    AllBarriers,
    BarrierHandler,
    BlockChannel,
    Decision,
    GiveUp,
    StopCapture,
    TakeSnapshot,
    Unblock,
)

TIMEOUT_MS = 100


def said(decision: Decision) -> str:
    """Return a decision as tests write it."""
    match decision:
        case BlockChannel(channel):
            return f"block {channel}"
        case Unblock(channel):
            return f"unblock {channel}"
        case TakeSnapshot(barrier, _, _, capture):
            if barrier.alignment is not Alignment.UNALIGNED:
                assert not capture
                return f"snapshot {barrier.checkpoint}"
            return f"snapshot {barrier.checkpoint} with {','.join(map(str, capture))}"
        case StopCapture(checkpoint, channel):
            return f"stop {checkpoint} on {channel}"
        case AllBarriers(checkpoint, _):
            return f"all of {checkpoint}"
        case GiveUp(checkpoint, _):
            return f"give up {checkpoint}"
    raise AssertionError(decision)


class Play:
    """Tells a handler what a line says.

    ``b0 7``: barrier of checkpoint 7 has its turn on channel 0; ``n0 7``: one waits there; ``u0 7``: an unaligned
    one has come. ``s0 7`` and ``w0 7`` are a savepoint's turn and its waiting. ``x0 7``: cancel marker; ``e0``:
    channel 0 has ended; ``abort 7``: says the coordinator; ``@50``: it is 50 ms now. Checkpoint n starts at 0.
    """

    def __init__(self, handler: BarrierHandler) -> None:
        self.handler = handler
        self.now_ms = 0

    def tell(self, event: str) -> list[Decision]:
        what, *rest = event.split()
        if what.startswith("@"):
            self.now_ms = int(what[1:])
            return self.handler.on_time(self.now_ms)
        if what == "abort":
            return self.handler.aborted(int(rest[0]), self.now_ms)
        kind, channel = what[0], int(what[1:])
        if kind == "e":
            return self.handler.ended(channel, self.now_ms)
        checkpoint = int(rest[0])
        if kind == "x":
            return self.handler.cancelled(channel, checkpoint, self.now_ms)
        unaligned = Alignment.UNALIGNED if kind == "u" else Alignment.ALIGNED
        savepoint = kind in "sw"
        barrier = Barrier(
            checkpoint,
            0,
            unaligned,
            None if savepoint else TIMEOUT_MS,
            SnapshotKind.SAVEPOINT if savepoint else SnapshotKind.CHECKPOINT,
        )
        if kind in "bs":
            return self.handler.barrier(channel, barrier, self.now_ms)
        return self.handler.announced(channel, barrier, self.now_ms)


@pytest.fixture
def play() -> Callable[[BarrierHandler, str], None]:
    """Return what plays lines ``event, event, … -> decisions``: the decisions are those of the last event.

    The events before it on its line decide nothing.
    """

    def run(handler: BarrierHandler, lines: str) -> None:
        stage = Play(handler)
        for line in filter(None, map(str.strip, lines.splitlines())):
            events, _, wanted = line.partition("->")
            *quiet, last = (event.strip() for event in events.split(","))
            for event in quiet:
                assert [said(d) for d in stage.tell(event)] == [], f"{event} in: {line}"
            expected = [text.strip() for text in wanted.split(";") if text.strip()]
            assert [said(d) for d in stage.tell(last)] == expected, line

    return run
