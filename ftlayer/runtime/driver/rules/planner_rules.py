"""When the reader of a source is asked what, and which splits are assigned: the rules. No I/O, no threads, no clock.

One call of the reader is under way at a time. What it gives is an event like any other, and comes at any moment: a
source that has started over since has no use for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar, TypeVarTuple, assert_never

from ftlayer.common.clock import Now
from ftlayer.runtime.connectors.offset_reader import RangeProgress
from ftlayer.runtime.driver.rules.range_keeper import (
    Beginning,
    PlannedRange,
    RangeKeeper,
    ReaderCalls,
    SplitPlanner,
)
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ReaderAnswered:
    """A call has succeeded. ``answer`` is what its method has returned."""

    call: CallReader
    answer: Any


@dataclass(frozen=True, slots=True)
class SubtaskUp:
    """A new instance runs this subtask: it knows of no splits yet."""

    subtask: int


@dataclass(frozen=True, slots=True)
class SubtaskDown:
    """The subtask is lost, with all splits it has not reported."""

    subtask: int


@dataclass(frozen=True, slots=True)
class DrainSource:
    """No further ranges are to be opened. One that is complete is committed still."""


@dataclass(frozen=True, slots=True)
class CloseSource:
    """The reader is to be stopped, behind what it is to commit by now."""


@dataclass(frozen=True, slots=True)
class KeeperEvent:
    event: Any


@dataclass(frozen=True, slots=True)
class PollDue:
    """The time has come that the rules were to be told of (`PlannerRules.due_ms`)."""


PlannerEvent: TypeAlias = (
    ReaderAnswered | SubtaskUp | SubtaskDown | SplitDone | DrainSource | CloseSource | KeeperEvent | PollDue
)


# ---------------------------------------------------------------- instructions


@dataclass(frozen=True, slots=True)
class CallReader:
    """Carry this call out, and no earlier one that is not begun; the answer is a `ReaderAnswered`.

    Attributes:
        method: of `ReaderCalls`.
        then: the rules' own: takes the answer.
    """

    method: Callable[..., Any]
    arguments: tuple[Any, ...]
    then: Callable[[Any, Now], list[PlannerInstruction]] = field(compare=False, repr=False)

    def carried_out(self, calls: ReaderCalls) -> ReaderAnswered:
        return ReaderAnswered(self, getattr(calls, self.method.__name__)(*self.arguments))


@dataclass(frozen=True, slots=True)
class TellBacklog:
    """Say whether the source works off a backlog."""

    is_behind: bool


@dataclass(frozen=True, slots=True)
class WarnReadAgain:
    """A range is planned otherwise than before: its rows that were accepted will come again."""

    progress: RangeProgress


@dataclass(frozen=True, slots=True)
class StopReader:
    """Stop the reader. There are no calls behind this."""


PlannerInstruction: TypeAlias = CallReader | AssignSplits | TellBacklog | WarnReadAgain | StopReader


POLL_MS = 20
"""The reader is asked for its latest offset after this pause …"""

MAX_POLL_MS = 200
"""… which doubles up to this while there is nothing new."""


LAG_MS = 5_000
"""The reader is asked so often how many records there are behind those that are read."""

FLOORS_MS = 500
"""So often it is asked how far the source was accepted, where ranges are kept until it was."""

MAX_KEPT = 256
"""So many ranges are open at once where they are kept."""


class PlannerRules:
    """Plans one reader source: range by range, each assigned when the one before is read.

    Where rows are read again that are lost, a range is noted before it is assigned, and kept until all of its rows are
    done, behind others that are read meanwhile.

    Where the source has come to, and when its reader commits, is the `RangeKeeper`'s to say.

    Attributes:
        lag: records that were not read when the reader was asked last, None if it cannot tell. Those of a range count
            until all of the range is read.
    """

    def __init__(
        self,
        source: str,
        parallelism: int,
        keeper: RangeKeeper[Any],
        *,
        stop_at_latest: bool = False,
        tells_backlog: bool = False,
    ) -> None:
        """Nothing is asked before the first event.

        Args:
            source: its uid.
            parallelism: its subtasks.
            keeper: belongs to this from now on.
            stop_at_latest: end the source at the offset that is the latest when it starts.
            tells_backlog: whether it is asked for at all.
        """
        self._splits = SplitPlanner(source, parallelism, keeps=keeper.reads_again)
        self._keeper = keeper
        self._stop_at_latest = stop_at_latest
        self._tells_backlog = tells_backlog
        # None, too, while one is under way that was given up.
        self._asked: CallReader | None = None
        # Subtasks that are up, and get splits when it is known how far the one before each has come; those of the call
        # under way came up before it.
        self._awaiting: set[int] = set()
        self._asked_for: set[int] = set()
        self._beginning: Beginning | None = None
        self._knows_end = False
        self._end: str | None = None
        # From here on it is what the source has come to since it began; None: it has not.
        self._at: str | None = None
        self._number = 0
        self._restored: deque[tuple[PlannedRange, RangeProgress | None]] = deque()
        self._progress: tuple[RangeProgress, ...] = ()
        self._next: tuple[PlannedRange, PlannedRange] | None = None
        # Planned again, and not noted yet.
        self._again: PlannedRange | None = None
        self._is_behind: bool | None = None
        self._due_ms = 0
        self._pause_ms = 0
        self._draining = False
        self._closing = False
        self._is_over = False
        self.lag: int | None = None
        self._tells_lag = True
        self._lag_due_ms = 0
        self._floors_due_ms = 0
        self._asked_at_the_end = False

    # ------------------------------------------------------------ views

    @property
    def due_ms(self) -> int | None:
        """When the reader is asked again for its latest offset or lag (`PollDue`); None: when something happens."""
        if self._asked is not None:
            return None
        dues = [self._due_ms] if self._may_plan else []
        if self._may_ask_lag:
            dues.append(self._lag_due_ms)
        if self._may_ask_floors:
            dues.append(self._floors_due_ms)
        return min(dues, default=None)

    @property
    def _may_ask_floors(self) -> bool:
        return self._keeper.reads_again and self._at is not None and bool(self._splits.kept)

    @property
    def _may_ask_lag(self) -> bool:
        return self._tells_lag and self._read_to is not None and not self._stops

    @property
    def _read_to(self) -> str | None:
        """The offset up to which everything is read; None while that is not known."""
        if self._at is None:
            return None
        planned = self._splits.range
        if planned is not None and self._splits.reading:
            return planned.start
        return self._restored[0][0].start if self._restored else self._at

    @property
    def _complete(self) -> str | None:
        return None if self._splits.reading or self._restored else self._at

    @property
    def _may_plan(self) -> bool:
        return self._complete is not None and not self._stops and len(self._splits.kept) < MAX_KEPT

    @property
    def _stops(self) -> bool:
        return self._draining or self._closing or self._splits.ended

    @property
    def _first_unread(self) -> int:
        planned = self._splits.range
        if planned is not None and self._splits.reading:
            return planned.number
        return self._restored[0][0].number if self._restored else self._number + 1

    def validate(self) -> None:
        """Raise `AssertionError` for a state that no events lead to."""
        asked = None if self._asked is None else self._asked.method
        assert not self._awaiting & self._asked_for, "a subtask waits for two answers"
        assert not self._asked_for or asked is ReaderCalls.progress, "nothing is asked for these subtasks"
        assert self._at is None or self._beginning is not None, "begun from nowhere"
        assert self._at is not None or not self._splits.reading, "a range is read, and nothing has begun"
        assert self._next is None or asked in (ReaderCalls.is_behind, ReaderCalls.keep), (
            "a range is planned, and not opened"
        )
        assert self._again is None or self._at is None, "a range was planned again, and is not noted"
        assert not (self._splits.ended and (self._splits.reading or self._restored)), "ended within a range"
        assert not (self._is_over and asked), "a call behind the end"
        numbers = [planned.number for planned, _ in self._restored]
        assert numbers == sorted(set(numbers)), "restored ranges are out of order"

    # ------------------------------------------------------------ events

    def handle(self, event: PlannerEvent, now: Now) -> list[PlannerInstruction]:
        taken = self._take(event, now)
        return [*taken, *self._go_on(now)]

    def _take(self, event: PlannerEvent, now: Now) -> list[PlannerInstruction]:
        match event:
            case ReaderAnswered(call, answer):
                if call is not self._asked:
                    return []
                self._asked = None
                return call.then(answer, now)
            case SubtaskUp(subtask):
                if self._keeper.outlives_subtasks and self._splits.range is not None:
                    self._awaiting.add(subtask)
                    return []
                return [*self._splits.slot_up(subtask, self._progress)]
            case SubtaskDown(subtask):
                self._awaiting.discard(subtask)
                self._asked_for.discard(subtask)
                self._splits.slot_down(subtask)
            case SplitDone():
                if self._keeper.outlives_subtasks or self._splits.is_up(event.split):
                    self._splits.split_done(event)
            case DrainSource():
                self._draining = True
            case CloseSource():
                self._closing = True
            case KeeperEvent(own):
                beginning = self._keeper.handle(own, self._first_unread)
                if beginning is not None:
                    self._start_over(beginning)
            case PollDue():
                pass
            case _:
                assert_never(event)
        return []

    def _start_over(self, beginning: Beginning) -> None:
        # Where the source ends is not to be asked twice: it ends there wherever it begins.
        if self._asked is not None and self._asked.method is not ReaderCalls.find_end:
            self._asked = None
        self._beginning = beginning
        self._at = None
        self._number = beginning.number
        self._restored = deque(beginning.restored)
        self._progress = ()
        self._next = self._again = None
        self._is_behind = None  # to be said again
        self._splits.restart()

    def _progress_known(self, progress: tuple[RangeProgress, ...], now: Now) -> list[PlannerInstruction]:
        if self._keeper.reads_again and progress:
            self._floors_due_ms = now.mono_ms + FLOORS_MS
            # Who was told to read a range may read it yet, though all of its rows are done meanwhile.
            if self._at is None or progress[0].range.number <= self._first_unread - progress[0].complete:
                self._splits.passed(progress)
                first = progress[0].range
                self._keeper.passed(first.end if progress[0].complete else first.start)
        if self._beginning is None:
            unfinished = tuple(each for each in progress if not each.complete)
            last = progress[-1].range if progress else None
            at, number = (None, 0) if last is None else (last.end, last.number)
            self._start_over(Beginning(at, number, unfinished))
            return []
        subtasks, self._asked_for = sorted(self._asked_for), set()
        return [message for subtask in subtasks for message in self._splits.slot_up(subtask, progress)]

    def _initial_known(self, at: str, now: Now) -> list[PlannerInstruction]:
        assert self._beginning is not None
        self._beginning = replace(self._beginning, at=at)
        return []

    def _end_known(self, end: str | None, now: Now) -> list[PlannerInstruction]:
        self._knows_end = True
        self._end = end
        return []

    def _lag_known(self, records: int | None, now: Now) -> list[PlannerInstruction]:
        self.lag = records
        self._tells_lag = records is not None
        self._lag_due_ms = now.mono_ms + LAG_MS
        return []

    def _committed(self, end: str, now: Now) -> list[PlannerInstruction]:
        self._keeper.committed(end)
        return []

    # ------------------------------------------------------------ going on

    def _go_on(self, now: Now) -> list[PlannerInstruction]:
        if self._asked is not None or self._is_over:
            return []
        if self._closing:
            return self._close()
        if self._at is None:
            if missing := self._ask_missing():
                return missing
            if self._beginning is None:
                return []  # an event of the mode will say from where it is read
            assert self._beginning.at is not None
            # Not before the first range is on its way.
            self._lag_due_ms = now.mono_ms + LAG_MS
            self._at = self._beginning.at
            self._pause_ms = self._due_ms = 0
            self._keeper.begun(self._at, self._beginning.number)
        return [*self._open_restored(), *self._ask_next(now)]

    def _close(self) -> list[PlannerInstruction]:
        end = self._keeper.to_commit(self._complete)
        if end is not None:
            return self._ask(ReaderCalls.commit, self._committed, end)
        # All that was read is done by now.
        stops_by_itself = self._draining or self._splits.ended
        if self._may_ask_floors and stops_by_itself and not self._asked_at_the_end:
            self._asked_at_the_end = True
            return self._ask_progress()
        self._is_over = True
        return [StopReader()]

    def _ask_missing(self) -> list[PlannerInstruction]:
        """Find out what has to be known before the source is read."""
        beginning = self._beginning
        if beginning is None:
            return self._ask_progress() if self._keeper.outlives_subtasks else []
        if beginning.at is None:
            return self._ask(ReaderCalls.initial, self._initial_known)
        if (again := self._again) is not None:
            first = self._restored[0][0].number if self._restored else again.number
            return self._ask(ReaderCalls.keep, self._noted, again, first)
        if beginning.unfinished:
            one = beginning.unfinished[0].range
            digest = one.digest if self._keeper.reads_again else b""
            return self._ask(ReaderCalls.splits, self._planned_again, one.number, one.start, one.end, digest)
        if self._stop_at_latest and not self._knows_end:
            return self._ask(ReaderCalls.find_end, self._end_known, beginning.at)
        return []

    def _ask(
        self,
        method: Callable[[ReaderCalls, *Arguments], Answer],
        then: Callable[[Answer, Now], list[PlannerInstruction]],
        *arguments: *Arguments,
    ) -> list[PlannerInstruction]:
        self._asked = CallReader(method, arguments, then)
        return [self._asked]

    def _ask_progress(self) -> list[PlannerInstruction]:
        self._asked_for, self._awaiting = self._awaiting, set()
        return self._ask(ReaderCalls.progress, self._progress_known)

    def _ask_next(self, now: Now) -> list[PlannerInstruction]:
        if self._awaiting:
            return self._ask_progress()
        end = self._keeper.to_commit(self._complete)
        if end is not None:
            return self._ask(ReaderCalls.commit, self._committed, end)
        if self._may_ask_floors and now.mono_ms >= self._floors_due_ms:
            return self._ask_progress()
        if self._may_ask_lag and now.mono_ms >= self._lag_due_ms:
            assert self._read_to is not None
            return self._ask(ReaderCalls.lag, self._lag_known, self._read_to)
        if not self._may_plan or now.mono_ms < self._due_ms:
            return []
        if self._end is not None:
            return self._plan_to(self._end, now)
        assert self._at is not None
        return self._ask(ReaderCalls.latest, self._plan_to, self._at)

    # ------------------------------------------------------------ ranges

    def _plan_to(self, end: str, now: Now) -> list[PlannerInstruction]:
        if not self._may_plan:
            return []
        assert self._at is not None
        if end == self._at:
            return self._nothing_up_to(end, now)
        return self._ask(ReaderCalls.splits, self._planned, self._number + 1, self._at, end, b"")

    def _nothing_up_to(self, end: str, now: Now) -> list[PlannerInstruction]:
        if self._stop_at_latest and end == self._at:
            return [*self._splits.end()]
        self._pause_ms = min(MAX_POLL_MS, max(POLL_MS, 2 * self._pause_ms))
        self._due_ms = now.mono_ms + self._pause_ms
        self._at = end
        self._keeper.moved(end)
        return []

    def _planned(self, found: tuple[PlannedRange, PlannedRange], now: Now) -> list[PlannerInstruction]:
        if not self._may_plan:
            return []
        planned, _ = found
        if not planned.payloads:
            return self._nothing_up_to(planned.end, now)
        self._next = found
        if not self._tells_backlog:
            return self._note_next()
        return self._ask(ReaderCalls.is_behind, self._backlog_known, planned.start, planned.end)

    def _planned_again(self, found: tuple[PlannedRange, PlannedRange], now: Now) -> list[PlannerInstruction]:
        assert self._beginning is not None
        unfinished = self._beginning.unfinished[0]
        before = unfinished.range
        # Behind one that has a new number all get new ones.
        in_order = not self._restored or self._restored[-1][0].number < before.number
        same = found[0].digest == before.digest and in_order
        planned = found[0] if same else replace(found[0], number=self._number + 1)
        self._beginning = replace(self._beginning, number=max(planned.number, self._beginning.number))
        self._number = self._beginning.number
        if self._keeper.reads_again:
            self._again = planned
            return []
        self._restore(planned)
        return [] if same else [WarnReadAgain(unfinished)]

    def _restore(self, planned: PlannedRange) -> None:
        assert self._beginning is not None
        before, *others = self._beginning.unfinished
        self._beginning = replace(self._beginning, unfinished=tuple(others))
        self._restored.append((planned, before))

    def _note_next(self) -> list[PlannerInstruction]:
        if not self._keeper.reads_again:
            return self._open_next()
        assert self._next is not None
        planned, _ = self._next
        first = self._splits.kept[0].number if self._splits.kept else planned.number
        return self._ask(ReaderCalls.keep, self._noted, planned, first)

    def _noted(self, _: None, now: Now) -> list[PlannerInstruction]:
        if self._again is not None:
            planned, self._again = self._again, None
            self._restore(planned)
            return []
        if self._may_plan:
            if not self._splits.kept:
                self._floors_due_ms = now.mono_ms + FLOORS_MS
            return self._open_next()
        # It is read by the next run.
        self._next = None
        return []

    def _backlog_known(self, is_behind: bool, now: Now) -> list[PlannerInstruction]:
        if not self._may_plan:
            self._next = None
            return []
        told = [] if is_behind == self._is_behind else [TellBacklog(is_behind)]
        self._is_behind = is_behind
        return [*told, *self._note_next()]

    def _open_next(self) -> list[PlannerInstruction]:
        assert self._next is not None
        (planned, kept), self._next = self._next, None
        self._number = planned.number
        self._at = planned.end
        self._pause_ms = self._due_ms = 0
        self._keeper.opened(kept)
        return self._open(planned, None, kept)

    def _open_restored(self) -> list[PlannerInstruction]:
        instructions: list[PlannerInstruction] = []
        while self._restored and not self._splits.reading:
            instructions += self._open(*self._restored.popleft())
        return instructions

    def _open(
        self, planned: PlannedRange, progress: RangeProgress | None, kept: PlannedRange | None = None
    ) -> list[PlannerInstruction]:
        self._progress = () if progress is None else (progress,)
        return [*self._splits.open(planned, progress, kept if self._keeper.reads_again else None)]
