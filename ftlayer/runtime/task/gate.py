"""What the input channels of a task have said of event time and of their end, and what follows for the task.

The rules are those of Flink's watermark valve, with two differences: only a `Watermark` ends a channel's
idleness (a batch does not, since it may carry replays alone), and channels from `Replay` vertices have no say
in event time.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, Self, TypeVar

from ftlayer.runtime.protocol.elements import MAX_TIME_MS, MIN_TIME_MS, EndOfStream, Idle, Mark, Watermark
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import Replay

K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Claim:
    """The last word of a channel: its highest time but `MAX_TIME_MS`, which makes it `over` as its end does."""

    time_ms: int = MIN_TIME_MS
    idle: bool = False
    over: bool = False
    ended: bool = False
    listed: bool = False


class CombinedWatermark(Generic[K]):
    """The watermark of several parts, which are channels, or splits of a source. It follows from their last words.

    It is the lowest of the parts that are neither idle nor over. Where there is none of these, it is as high as any
    part has come, so that it makes no difference in which order they fell silent; and `MAX_TIME_MS` where all are
    over: one that has no more to say does not speak for one that is idle.

    Attributes:
        active: the parts that are neither idle nor over.
        time_ms: the watermark; it never goes back.
        reached_ms: the highest one before `MAX_TIME_MS`.
        idle: no part holds it back, and at least one may go on later.
    """

    def __init__(self, parts: Iterable[K] = (), *, idle_count: bool = True) -> None:
        """``idle_count`` False: where none holds it back, only those count that are over."""
        self._idle_count = idle_count
        self.time_ms = self.reached_ms = MIN_TIME_MS
        self.idle = False
        self._claims: dict[K, _Claim] = {part: _Claim() for part in parts}
        self.active: dict[K, _Claim] = {}
        # A heap that has each active claim once, with its time or an earlier one.
        self._listed: list[tuple[int, int, _Claim]] = []
        self._numbers = count()
        for part, claim in self._claims.items():
            self._activate(part, claim)
        self._lowest_ms = MIN_TIME_MS
        self._told_ms = MIN_TIME_MS
        self._told_idle = False

    def restore(self, time_ms: int) -> None:
        self.time_ms = self.reached_ms = time_ms

    def replace(self, gone: Iterable[K], come: Mapping[K, int]) -> None:
        """Let parts take the place of others; each of them holds the watermark back at its time."""
        for part in gone:
            self._claims.pop(part).over = True
            self.active.pop(part, None)
        for part, time_ms in come.items():
            claim = self._claims[part] = _Claim(time_ms)
            self._activate(part, claim)
        self._update()

    def claimed(self, part: K) -> int:
        return self._claims[part].time_ms

    def is_idle(self, part: K) -> bool:
        return self._claims[part].idle

    def is_over(self, part: K) -> bool:
        return self._claims[part].over

    def watermark(self, part: K, time_ms: int) -> None:
        """Take a part's watermark; one that is lower than what it said before counts for nothing."""
        claim = self._claims.get(part)
        if claim is not None and not claim.ended:
            before = claim.time_ms
            if time_ms == MAX_TIME_MS:
                claim.over = True
            else:
                claim.time_ms = max(before, time_ms)
            claim.idle = False
            if claim.over or part not in self.active or before == self._lowest_ms < claim.time_ms:
                self._changed(part, claim)

    def become_idle(self, *parts: K) -> None:
        for part in parts:
            claim = self._claims.get(part)
            if claim is not None and not claim.ended:
                claim.idle = True
                self.active.pop(part, None)
        self._update()

    def end(self, part: K) -> None:
        claim = self._claims[part]
        claim.over = claim.ended = True
        self._changed(part, claim)

    def news(self) -> Watermark | Idle | None:
        """Return what is to be said downstream since the last call. The end of idleness is a watermark, too."""
        if self.time_ms > self._told_ms or (self._told_idle and not self.idle):
            self._told_ms, self._told_idle = self.time_ms, False
            return Watermark(self.time_ms)
        if self.idle and not self._told_idle:
            self._told_idle = True
            return Idle()
        return None

    def _changed(self, part: K, claim: _Claim) -> None:
        if claim.over or claim.idle:
            self.active.pop(part, None)
        else:
            self._activate(part, claim)
        self._update()

    def _activate(self, part: K, claim: _Claim) -> None:
        self.active[part] = claim
        if not claim.listed:
            claim.listed = True
            heappush(self._listed, (claim.time_ms, next(self._numbers), claim))

    def _lowest(self) -> int:
        """Return the lowest time of the active claims, of which there are some."""
        while True:
            time_ms, number, claim = self._listed[0]
            if claim.over or claim.idle:
                heappop(self._listed)
                claim.listed = False
            elif claim.time_ms > time_ms:
                heapreplace(self._listed, (claim.time_ms, number, claim))
            else:
                return time_ms

    def _update(self) -> None:
        if self.active:
            self.idle = False
            time_ms = self._lowest_ms = self._lowest()
        else:
            claims = self._claims.values()
            self.idle = any(not claim.over for claim in claims)
            ever = (claim.time_ms for claim in claims if claim.over or self._idle_count)
            time_ms = max(ever, default=MIN_TIME_MS) if self.idle else MAX_TIME_MS
        self.time_ms = max(self.time_ms, time_ms)
        if self.time_ms < MAX_TIME_MS:
            self.reached_ms = self.time_ms


class StatusWatermarkValve(CombinedWatermark[Channel]):
    """The input channels of one subtask, over all its inputs.

    `CombinedWatermark` of all channels but those from a `Replay`.

    Attributes:
        sources_ended: every channel but those from replays has ended.
        ended: every channel has.
    """

    def __init__(self, channels: Iterable[Channel], replays: Collection[int] = ()) -> None:
        """``replays`` are the numbers of the edges that come from a `Replay`."""
        found = list(channels)
        super().__init__(channel for channel in found if channel.edge not in replays)
        self._replays = {channel: False for channel in found if channel.edge in replays}
        self.sources_ended = False
        self.ended = False
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

    def end(self, part: Channel) -> None:
        if part in self._replays:
            self._replays[part] = True
            self._update()
        else:
            super().end(part)

    def reset(self, channel: Channel) -> None:
        """Forget what a channel said: it is open, and holds the watermark back until it says how far it is."""
        if channel in self._replays:
            self._replays[channel] = False
        else:
            self.replace([channel], {channel: MIN_TIME_MS})
        self._update()

    def _update(self) -> None:
        super()._update()
        self.sources_ended = all(claim.ended for claim in self._claims.values())
        self.ended = self.sources_ended and all(self._replays.values())
