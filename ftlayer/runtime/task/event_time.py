"""`AssignWatermarks` in a task: the times of records, and what follows from them for the watermark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from ftlayer.records.ids import I64Array
from ftlayer.runtime.protocol.elements import MAX_TIME_MS, MIN_TIME_MS, NAMED_SPLIT, Idle, Splits, Watermark
from ftlayer.runtime.task.actions import Action, Send, SourceRows, WakeAt
from ftlayer.runtime.task.emitter import Emitter
from ftlayer.runtime.task.gate import CombinedWatermark
from ftlayer.runtime.task.lineages import BoolArray
from ftlayer.topology.job_graph import Channel
from ftlayer.topology.operators import AssignWatermarks


class Alarm:
    """Asks for a call at the earliest time something is due, and not again while such a call is to come."""

    def __init__(self) -> None:
        self._set_for: int | None = None

    def rung(self) -> None:
        self._set_for = None

    def set(self, due_ms: int | None) -> list[Action]:
        """Ask to be called at ``due_ms`` (None: nothing is due)."""
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
            if split >= NAMED_SPLIT or source in unknown or (source, split) in read
        }

    def restore(self, time_ms: int, times: Mapping[str, int]) -> None:
        self._combined.restore(time_ms)
        for name, time in times.items():
            source, _, split = name.rpartition("#")
            self._times[source, int(split)] = time

    def start(self, mono_ms: int) -> None:
        self._since_ms = dict.fromkeys(self._since_ms, mono_ms)
        self._due_ms = 0

    def splits(self, channel: Channel, splits: Splits, mono_ms: int) -> None:
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
            if part[1] is not None and part[1] < NAMED_SPLIT:
                self._times.pop((source, part[1]), None)
        for part, may_rest in rests.items():
            if part in come or may_rest != self._may_rest[part]:
                self._since_ms[part] = mono_ms
            self._may_rest[part] = may_rest
        if gone or come:
            self._combined.replace(gone, come)
        for part, may_rest in rests.items():
            if not may_rest and self._combined.is_idle(part):
                self._combined.watermark(part, MIN_TIME_MS)

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
            self._combined.replace(gone, {part: MIN_TIME_MS})
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
            self._times[key] = max(highest, self._times.get(key, MIN_TIME_MS))
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
        time_ms = min(max(highest - self._disorder, MIN_TIME_MS), MAX_TIME_MS - 1)
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

    def mark(self, mono_ms: int) -> Watermark | Idle | None:
        """Return what is to be said now, once; None: nothing."""
        if self._idle_ms is not None and mono_ms >= self._due_ms and self.time_ms != MAX_TIME_MS:
            self._find_idle(mono_ms, self._idle_ms)
        return self._combined.news()

    @property
    def due_ms(self) -> int | None:
        """The monotone time (ms) at which something becomes idle; None: never."""
        if self._idle_ms is None or self.time_ms == MAX_TIME_MS:
            return None
        if not self._due_ms:
            self._find_idle(MIN_TIME_MS, self._idle_ms)
        return None if self._due_ms == MAX_TIME_MS else self._due_ms

    def _find_idle(self, mono_ms: int, idle_ms: int) -> None:
        """Let those be idle that have had nothing for so long. Others are looked at again when one of them may be."""
        active = {part: self._since_ms[part] for part in self._combined.active}
        self._last_ms = last_ms = max(active.values(), default=0)
        self._due_ms, silent = MAX_TIME_MS, []
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
        time = MIN_TIME_MS if split is None else self._times.get((source, split), MIN_TIME_MS)
        return max(time - self._disorder, MIN_TIME_MS)


class SplitMarks:
    """What a source's subtask says of its splits where watermarks are made of its records."""

    def __init__(self, emitter: Emitter) -> None:
        self._emitter = emitter
        self._told: Splits | None = None

    def around(self, rows: SourceRows, sends: list[Send]) -> list[Send]:
        """Return the batches of these rows with what is to be said before and behind them."""
        found = [*self._say(rows.splits or Splits((rows.in_time,))), *sends]
        return found if rows.left is None else [*found, *self._say(rows.left)]

    def _say(self, splits: Splits) -> list[Send]:
        if splits == self._told:
            return []
        self._told = splits
        return self._emitter.splits(splits)
