"""What the input channels of a task have said of event time and of their end, and what follows for the task.

The rules are those of Flink's watermark valve, with two differences: only a `Watermark` ends a channel's
idleness (a batch does not, since it may carry replays alone), and channels from `Replay` vertices have no say
in event time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Self

from ftlayer.runtime.protocol.elements import MAX_TIME_MS, MIN_TIME_MS, EndOfStream, Idle, Mark, Watermark
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import Replay


@dataclass(slots=True)
class _Claim:
    """The last word of a channel."""

    time_ms: int = MIN_TIME_MS
    idle: bool = False
    ended: bool = False


class StatusWatermarkValve:
    """The input channels of one subtask, over all its inputs.

    Attributes:
        time_ms: the task's watermark: the minimum over the channels that are neither idle nor ended nor from a
            `Replay`; it never goes back. `MAX_TIME_MS` once every channel but those from replays has ended, or has
            said `MAX_TIME_MS` itself: such a one has no more to say, and does not speak for one that is idle.
        idle: no channel holds the watermark back and at least one may go on later.
        sources_ended: every channel but those from replays has ended.
        ended: every channel has.
    """

    def __init__(self, channels: Iterable[Channel], replays: Collection[int] = ()) -> None:
        """``replays`` are the numbers of the edges that come from a `Replay`."""
        self._timed: dict[Channel, _Claim] = {}
        self._replays: dict[Channel, bool] = {}
        for channel in channels:
            if channel.edge in replays:
                self._replays[channel] = False
            else:
                self._timed[channel] = _Claim()
        self.time_ms = MIN_TIME_MS
        self.idle = False
        self.sources_ended = False
        self.ended = False
        self._told_ms = MIN_TIME_MS
        self._told_idle = False
        self._update()

    @classmethod
    def of(cls, graph: JobGraph, uid: str, subtask: int) -> Self:
        """Make the gate of one subtask of a chain. Feedback edges say nothing of time or end."""
        edges = [edge for edge in graph.edges_into(uid) if not edge.feedback]
        return cls(
            (channel for edge in edges for channel in graph.channels(edge) if channel.receiver == subtask),
            {edge.number for edge in edges if isinstance(graph.vertex(edge.source).operators[0], Replay)},
        )

    def mark(self, channel: Channel, mark: Mark) -> None:
        """Take what a channel says of its time and its end; other marks say nothing of these."""
        match mark:
            case Watermark(time_ms):
                self.watermark(channel, time_ms)
            case Idle():
                self.become_idle(channel)
            case EndOfStream():
                self.end(channel)

    def watermark(self, channel: Channel, time_ms: int) -> None:
        """Take a channel's watermark; one that is lower than what it said before counts for nothing."""
        claim = self._timed.get(channel)
        if claim is not None and not claim.ended:
            claim.time_ms = max(claim.time_ms, time_ms)
            claim.idle = False
            self._update()

    def become_idle(self, channel: Channel) -> None:
        """Let a channel hold nothing back until its next watermark."""
        claim = self._timed.get(channel)
        if claim is not None and not claim.ended:
            claim.idle = True
            self._update()

    def end(self, channel: Channel) -> None:
        """Take a channel's end."""
        if channel in self._replays:
            self._replays[channel] = True
        else:
            self._timed[channel].ended = True
        self._update()

    def reset(self, channel: Channel) -> None:
        """Forget what a channel said: it is open, and holds the watermark back until it says how far it is."""
        if channel in self._replays:
            self._replays[channel] = False
        else:
            self._timed[channel] = _Claim()
        self._update()

    def news(self) -> Watermark | Idle | None:
        """Return what is to be said downstream since the last call. The end of idleness is a watermark, too."""
        if self.time_ms > self._told_ms or (self._told_idle and not self.idle):
            self._told_ms, self._told_idle = self.time_ms, False
            return Watermark(self.time_ms)
        if self.idle and not self._told_idle:
            self._told_idle = True
            return Idle()
        return None

    def _update(self) -> None:
        open_claims = [claim for claim in self._timed.values() if not claim.ended]
        going_on = [claim for claim in open_claims if claim.time_ms < MAX_TIME_MS]
        active = [claim.time_ms for claim in going_on if not claim.idle]
        self.sources_ended = not open_claims
        self.ended = self.sources_ended and all(self._replays.values())
        self.idle = bool(going_on) and not active
        if not going_on:
            self.time_ms = MAX_TIME_MS
        elif active:
            self.time_ms = max(self.time_ms, min(active))
