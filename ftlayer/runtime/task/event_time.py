"""`AssignWatermarks` in a task: the times of records, and what follows from them for the watermark."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import count
from typing import Generic, Self, TypeVar

import pyarrow as pa

from ftlayer.records.ids import I64Array
from ftlayer.runtime.protocol import messages
from ftlayer.runtime.task.actions import Action, Send, SourceRows, WakeAt
from ftlayer.runtime.task.contract import BoolArray
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.topology.job_graph import Channel, JobGraph
from ftlayer.topology.operators import AssignWatermarks, Replay

# What the input channels of a task have said of event time and of their end, and what follows for the task.
#
# The rules are those of Flink's watermark valve, with two differences: only a `Watermark` ends a channel's
# idleness (a batch does not, since it may carry replays alone), and channels from `Replay` vertices have no say
# in event time.


K = TypeVar("K", bound=Hashable)


@dataclass(slots=True)
class _Claim:
    """The last word of a channel: its highest time but `MAX_TIME_MS`, which makes it `over` as its end does."""

    time_ms: int = messages.MIN_TIME_MS
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
        self.time_ms = self.reached_ms = messages.MIN_TIME_MS
        self.idle = False
        self._claims: dict[K, _Claim] = {part: _Claim() for part in parts}
        self.active: dict[K, _Claim] = {}
        # A heap that has each active claim once, with its time or an earlier one.
        self._listed: list[tuple[int, int, _Claim]] = []
        self._numbers = count()
        for part, claim in self._claims.items():
            self._activate(part, claim)
        self._lowest_ms = messages.MIN_TIME_MS
        self._told_ms = messages.MIN_TIME_MS
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
            if time_ms == messages.MAX_TIME_MS:
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

    def news(self) -> messages.Watermark | messages.Idle | None:
        """Return what is to be said downstream since the last call. The end of idleness is a watermark, too."""
        if self.time_ms > self._told_ms or (self._told_idle and not self.idle):
            self._told_ms, self._told_idle = self.time_ms, False
            return messages.Watermark(self.time_ms)
        if self.idle and not self._told_idle:
            self._told_idle = True
            return messages.Idle()
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
            time_ms = max(ever, default=messages.MIN_TIME_MS) if self.idle else messages.MAX_TIME_MS
        self.time_ms = max(self.time_ms, time_ms)
        if self.time_ms < messages.MAX_TIME_MS:
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

    def mark(self, channel: Channel, mark: messages.Mark) -> None:
        """Take what a channel says of its time and its end; other marks say nothing of these."""
        match mark:
            case messages.Watermark(time_ms):
                self.watermark(channel, time_ms)
            case messages.Idle():
                self.become_idle(channel)
            case messages.EndOfStream():
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
            self.replace([channel], {channel: messages.MIN_TIME_MS})
        self._update()

    def _update(self) -> None:
        super()._update()
        self.sources_ended = all(claim.ended for claim in self._claims.values())
        self.ended = self.sources_ended and all(self._replays.values())


class Alarm:
    """Asks for a call at the earliest time something is due, and not again while such a call is to come."""

    def __init__(self) -> None:
        self._set_for: int | None = None

    def rung(self) -> None:
        self._set_for = None

    def set(self, due_ms: int | None) -> list[Action]:
        if due_ms is None or (self._set_for is not None and self._set_for <= due_ms):
            return []
        self._set_for = due_ms
        return [WakeAt(due_ms)]


_PER_MS = {"us": 1_000, "ns": 1_000_000}


def times_of(column: pa.Array) -> tuple[I64Array, BoolArray | None]:
    """Return the times of a timestamp column, or of one of int64 milliseconds.

    Returns:
        int64[n], milliseconds since 1970, rounded down (a null's is any number); and bool[n], which are null,
        or None where none is.
    """
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    whole = column.cast(pa.int64())
    numbers: I64Array = (whole if nulls is None else whole.fill_null(0)).to_numpy()
    if pa.types.is_timestamp(column.type):
        if column.type.unit == "s":
            numbers = numbers * 1_000
        elif column.type.unit != "ms":
            numbers = numbers // _PER_MS[column.type.unit]
    return numbers, nulls


@dataclass(frozen=True)
class TimedInputs:
    """The inputs whose records a `WatermarkGenerator` sees, save replays and feedback.

    ``sources`` are channels from sources, with the source's uid; a watermark is made of each of their splits. Of what
    comes by the ``others`` one is made together.
    """

    sources: Mapping[Channel, str]
    others: frozenset[Channel] = frozenset()


NO_INPUTS = TimedInputs({})

# A split of a channel; (channel, None) before it is known which there are, and (None, None) all that is of no split.
_Part = tuple[Channel | None, int | None]
_REST: _Part = (None, None)


class WatermarkGenerator:
    """The watermarks behind one `AssignWatermarks`: bounded disorder, idleness by processing time.

    There is one of each split of a source, and the lowest counts (`CombinedWatermark`): one that is not read yet holds
    it back, since a subtask reads its splits in turns, and none knows of another's time. A split that is known to have
    more records does not become idle. The others become idle one by one beside those that go on alone: when nothing at
    all has come for a while, it is as likely that the chain could take nothing, and their records wait.
    """

    def __init__(self, operator: AssignWatermarks, inputs: TimedInputs = NO_INPUTS) -> None:
        self.operator = operator
        self._inputs = inputs
        self._disorder = operator.out_of_orderness_ms
        self._idle_ms = operator.idle_ms
        parts: dict[_Part, bool] = {(channel, None): True for channel in inputs.sources}
        if inputs.others or not parts:
            parts[_REST] = True
        # The parts, and whether each may fall silent; since when it may have.
        self._may_rest = parts
        self._since_ms = dict.fromkeys(parts, 0)
        self._combined = CombinedWatermark(parts, idle_count=False)
        self._over: set[Channel] = set()
        # When any part had news last, and before which time none has to be looked at for idleness; 0: that is unknown.
        self._last_ms = self._due_ms = 0
        # The highest time of each split, by source; also of those that are not known to be read here.
        self._times: dict[tuple[str, int], int] = {}

    @property
    def time_ms(self) -> int:
        """The watermark; `MAX_TIME_MS` once the inputs have ended."""
        return self._combined.time_ms

    @property
    def reached_ms(self) -> int:
        return self._combined.reached_ms

    @property
    def times(self) -> dict[str, int]:
        """The highest times of splits that are read here, or may be, for a checkpoint."""
        unknown = {self._inputs.sources[part[0]] for part in self._may_rest if part[0] and part[1] is None}
        read = {(self._inputs.sources[part[0]], part[1]) for part in self._may_rest if part[0]}
        return {
            f"{source}#{split}": time
            for (source, split), time in self._times.items()
            if split >= messages.NAMED_SPLIT or source in unknown or (source, split) in read
        }

    def restore(self, time_ms: int, times: Mapping[str, int]) -> None:
        self._combined.restore(time_ms)
        for name, time in times.items():
            source, _, split = name.rpartition("#")
            self._times[source, int(split)] = time

    def start(self, mono_ms: int) -> None:
        self._since_ms = dict.fromkeys(self._since_ms, mono_ms)
        self._due_ms = 0

    def splits(self, channel: Channel, splits: messages.Splits, mono_ms: int) -> None:
        source = self._inputs.sources.get(channel)
        if source is None or channel in self._over:
            return
        rests = dict.fromkeys([(channel, split) for split in splits.open], splits.endless)
        known = (split for split in splits.quiet if (source, split) in self._times)
        rests |= dict.fromkeys([(channel, split) for split in (*splits.done, *known)], True)
        if not rests:
            return
        self._due_ms = 0
        gone = [part for part in self._may_rest if part[0] == channel and part not in rests]
        come: dict[_Part, int] = {
            part: self._claim(source, part[1]) for part in rests if part not in self._may_rest
        }
        for part in gone:
            del self._may_rest[part], self._since_ms[part]
            if part[1] is not None and part[1] < messages.NAMED_SPLIT:
                self._times.pop((source, part[1]), None)
        for part, may_rest in rests.items():
            if part in come or may_rest != self._may_rest[part]:
                self._since_ms[part] = mono_ms
            self._may_rest[part] = may_rest
        if gone or come:
            self._combined.replace(gone, come)
        for part, may_rest in rests.items():
            if not may_rest and self._combined.is_idle(part):
                self._combined.watermark(part, messages.MIN_TIME_MS)

    def reset(self, channel: Channel, mono_ms: int) -> None:
        """Another sender begins afresh: it holds the watermark back until it says what it reads."""
        self._over.discard(channel)
        self._due_ms = 0
        if channel in self._inputs.sources:
            gone = [part for part in self._may_rest if part[0] == channel]
            for part in gone:
                del self._may_rest[part], self._since_ms[part]
            part = (channel, None)
            self._may_rest[part], self._since_ms[part] = True, mono_ms
            self._combined.replace(gone, {part: messages.MIN_TIME_MS})
            for other in tuple(self._over):
                self.over(other)

    def over(self, channel: Channel) -> None:
        """Nothing new comes on a channel any more. That all is over comes by `end`, when the chain is ready for it."""
        self._over.add(channel)
        self._due_ms = 0
        if channel in self._inputs.sources:
            ended = [part for part in self._may_rest if part[0] == channel]
        else:
            ended = [_REST] if _REST in self._may_rest and self._over >= self._inputs.others else []
        if not all(part in ended or self._combined.is_over(part) for part in self._may_rest):
            for part in ended:
                self._combined.end(part)

    def observe(
        self, times: I64Array, fresh: bool, mono_ms: int, origin: tuple[Channel, int] | None = None
    ) -> None:
        """Note the times of records that came, from a split of a channel where there is an ``origin``.

        Replays alone (not ``fresh``) may raise the watermark, as they would have on their first way, but they
        do not end idleness: an old record must not make others wait. Nor does what is of no known split raise it beside
        several.
        """
        if not len(times):
            return
        highest = int(times.max())
        source = self._inputs.sources.get(origin[0]) if origin is not None and fresh else None
        if source is not None and origin is not None:
            key = source, origin[1]
            self._times[key] = max(highest, self._times.get(key, messages.MIN_TIME_MS))
            part: _Part = origin
        elif _REST in self._may_rest:
            part = _REST
        else:
            part = next(iter(self._may_rest))
            if len(self._may_rest) > 1:
                return
        if part not in self._may_rest:
            return
        claimed = self._combined.claimed(part)
        time_ms = min(max(highest - self._disorder, messages.MIN_TIME_MS), messages.MAX_TIME_MS - 1)
        if part not in self._combined.active or (
            self._idle_ms and 2 * (mono_ms - self._last_ms) >= self._idle_ms
        ):
            self._due_ms = 0
        if fresh:
            self._since_ms[part] = self._last_ms = mono_ms
        if fresh or time_ms > claimed:
            self._combined.watermark(part, time_ms)

    def end(self) -> None:
        for part in self._may_rest:
            self._combined.end(part)

    def mark(self, mono_ms: int) -> messages.Watermark | messages.Idle | None:
        if self._idle_ms is not None and mono_ms >= self._due_ms and self.time_ms != messages.MAX_TIME_MS:
            self._find_idle(mono_ms, self._idle_ms)
        return self._combined.news()

    @property
    def due_ms(self) -> int | None:
        """The monotone time (ms) at which something becomes idle; None: never."""
        if self._idle_ms is None or self.time_ms == messages.MAX_TIME_MS:
            return None
        if not self._due_ms:
            self._find_idle(messages.MIN_TIME_MS, self._idle_ms)
        return None if self._due_ms == messages.MAX_TIME_MS else self._due_ms

    def _find_idle(self, mono_ms: int, idle_ms: int) -> None:
        """Let those be idle that have had nothing for so long. Others are looked at again when one of them may be."""
        active = {part: self._since_ms[part] for part in self._combined.active}
        self._last_ms = last_ms = max(active.values(), default=0)
        self._due_ms, silent = messages.MAX_TIME_MS, []
        for part, since_ms in active.items():
            if self._may_rest[part]:
                due_ms = since_ms + idle_ms
                if due_ms <= mono_ms and 2 * (last_ms - since_ms) < idle_ms:
                    due_ms = last_ms + idle_ms
                if due_ms <= mono_ms:
                    silent.append(part)
                else:
                    self._due_ms = min(self._due_ms, due_ms)
        if silent:
            self._combined.become_idle(*silent)

    def _claim(self, source: str, split: int | None) -> int:
        time = (
            messages.MIN_TIME_MS if split is None else self._times.get((source, split), messages.MIN_TIME_MS)
        )
        return max(time - self._disorder, messages.MIN_TIME_MS)


class SplitMarks:
    """What a source's subtask says of its splits where watermarks are made of its records."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._told: messages.Splits | None = None

    def around(self, rows: SourceRows, sends: list[Send]) -> list[Send]:
        """Return the batches of these rows with what is to be said before and behind them."""
        found = [*self._say(rows.splits or messages.Splits((rows.in_time,))), *sends]
        return found if rows.left is None else [*found, *self._say(rows.left)]

    def _say(self, splits: messages.Splits) -> list[Send]:
        if splits == self._told:
            return []
        self._told = splits
        return self._emitter.splits(splits)
