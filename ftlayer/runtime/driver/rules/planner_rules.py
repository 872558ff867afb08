"""When the reader of a source is asked what, and which splits are assigned: the rules. No I/O, no threads, no clock.

One call of the reader is under way at a time. What it gives is an event like any other, and comes at any moment: a
source that has started over since has no use for it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Generic, NoReturn, TypeAlias, TypeVar, TypeVarTuple, assert_never

from ftlayer.common.clock import Now
from ftlayer.errors import SourceChangedError
from ftlayer.runtime.connectors.offset_reader import (
    OffsetReader,
    RangeProgress,
    digest_of,
    places_of,
    without_rows,
)
from ftlayer.runtime.protocol.messages import AssignSplits, ReaderRange, Split, SplitDone, seal
from ftlayer.topology.operators import Source

# Who reads which split of a reader source: the rules. No I/O, no threads, no clock.
#
# A source is read range by range. The splits of the open range are spread over the subtasks, split i to subtask
# i modulo parallelism, so that what comes from one partition of the broker stays in order. The next range is
# opened when all splits are done. A subtask that is lost is assigned its splits again when it is back, from where
# the vertex has accepted them.
#
# Where rows are read again that are lost, a split is done once it is read, and ranges are kept until all of their rows
# are done: a subtask that is back gets its splits of all of them.


@dataclass(frozen=True)
class PlannedRange:
    """A range with its splits. ``payloads`` are sealed, ``digest`` is that of the partition objects.

    A split of a log that has no records has its place, with b"" as its payload, and is not assigned.
    """

    number: int
    start: str
    end: str
    digest: bytes
    payloads: tuple[bytes, ...]

    @property
    def range(self) -> ReaderRange:
        places = places_of(self.payloads)
        return ReaderRange(self.number, self.start, self.end, len(self.payloads), self.digest, places)


class SplitPlanner:
    """The open range of one source, those that are kept, and the subtasks that are up.

    Attributes:
        range: the one that was opened last.
        ended: whether there are no more ranges.
        kept: ranges that subtasks which are back are assigned again, in their order: the open one, and with ``keeps``
            those before it until they are `passed`.
    """

    def __init__(self, source: str, parallelism: int, *, keeps: bool = False) -> None:
        self._source = source
        self._parallelism = parallelism
        self._keeps = keeps
        self._up: set[int] = set()
        self.range: PlannedRange | None = None
        self.kept: deque[PlannedRange] = deque()
        self._done: set[int] = set()
        self.ended = False

    @property
    def reading(self) -> bool:
        return self.range is not None and len(self._done) < len(self.range.payloads)

    def is_up(self, split: int) -> bool:
        """Whether the subtask runs that reads the splits of this number."""
        return split % self._parallelism in self._up

    def restart(self) -> None:
        """Forget the ranges and their end. The subtasks stay as they are: down, if they start again."""
        self.range = None
        self.kept.clear()
        self._done = set()
        self.ended = False

    def open(
        self, planned: PlannedRange, progress: RangeProgress | None, kept: PlannedRange | None = None
    ) -> list[AssignSplits]:
        """Open a range; ``progress`` is what the vertex knows of it, ``kept`` how it is assigned later on."""
        assert not self.reading, f"range {self.range} of {self._source!r} is still read"
        self.range = planned
        self._done = {split for split, payload in enumerate(planned.payloads) if not payload}
        if not self._keeps:
            self.kept.clear()
        self.kept.append(kept or planned)
        return self._assign(planned, self._up, progress)

    def passed(self, progress: Sequence[RangeProgress]) -> None:
        """Keep ranges no more that are complete, and before all that are not."""
        first = next((each.range.number for each in progress if not each.complete), None)
        while self.kept and (first is None or self.kept[0].number < first):
            self.kept.popleft()

    def slot_up(self, subtask: int, progress: Sequence[RangeProgress]) -> list[AssignSplits]:
        """A new instance runs this subtask: it knows of no splits. ``progress`` is as of `progress_of`."""
        self._up.add(subtask)
        known = {each.range.number: each for each in progress}
        messages: list[AssignSplits] = []
        if self._keeps and self.range is not None and self.range.number not in known:
            # All of its rows are done, and the instance that read them did not live to say so.
            self._done.update(range(subtask, len(self.range.payloads), self._parallelism))
        for planned in self.kept:
            if planned.number in known if self._keeps else not self.ended:
                messages += self._assign(planned, {subtask}, known.get(planned.number))
        return [*messages, self._end_of(subtask)] if self.ended else messages

    def slot_down(self, subtask: int) -> None:
        self._up.discard(subtask)

    def split_done(self, message: SplitDone) -> None:
        """A split is accepted to its end. Messages of other ranges are of no interest."""
        planned = self.range
        if planned is not None and message.range == planned.number and message.split < len(planned.payloads):
            self._done.add(message.split)

    def end(self) -> list[AssignSplits]:
        """There are no more ranges: tell all subtasks, and those that come."""
        assert not self.reading, f"range {self.range} of {self._source!r} is still read"
        self.ended = True
        return [self._end_of(subtask) for subtask in sorted(self._up)]

    def _assign(
        self, planned: PlannedRange, subtasks: set[int], progress: RangeProgress | None
    ) -> list[AssignSplits]:
        rows: dict[int, int] = {}
        done: set[int] = set()
        if progress is not None and progress.range.number == planned.number:
            rows = dict(enumerate(progress.rows))
            done = {split for split, is_done in enumerate(progress.done) if is_done}
        if self.range is not None and planned.number == self.range.number:
            # Accepted to the end by an instance that did not live to say so.
            self._done |= done
        if not self._keeps:
            done = self._done
        messages = []
        for subtask in sorted(subtasks):
            mine = tuple(
                Split(split, payload, rows.get(split, 0))
                for split, payload in enumerate(planned.payloads)
                if split % self._parallelism == subtask and payload and split not in done
            )
            if mine:
                messages.append(AssignSplits(self._source, subtask, planned.range, mine))
        return messages

    def _end_of(self, subtask: int) -> AssignSplits:
        number, end = (self.range.number, self.range.end) if self.range is not None else (0, "null")
        return AssignSplits(self._source, subtask, ReaderRange(number, end, end, 0, b""), ())


@dataclass(frozen=True, slots=True)
class Beginning:
    """From where a source is read.

    Attributes:
        at: the offset behind all that follows; None: the reader's initial one.
        number: of the last range that was planned.
        unfinished: ranges up to ``at`` that are to be planned again, and read to their ends.
        restored: ranges up to ``at`` that are read with the splits they have, and how far each was read.
    """

    at: str | None
    number: int
    unfinished: tuple[RangeProgress, ...] = ()
    restored: tuple[tuple[PlannedRange, RangeProgress], ...] = ()


Own_contra = TypeVar("Own_contra", contravariant=True)
"""Events of the mode alone."""


class RangeKeeper(Generic[Own_contra]):
    """The mode's part of a `PlannerRules`: knows where one reader source has come to."""

    outlives_subtasks: ClassVar[bool] = True
    """Whether what a subtask has read stays read when it is lost.

    Then the rules ask how far a source was accepted, at first and whenever a subtask is back, and a split counts
    whose report comes behind the loss. Otherwise the source goes back to where an event of the mode leads it.
    """

    reads_again: ClassVar[bool] = False
    """Whether rows that are lost are read again: ranges are kept, and noted, until all of their rows are done.

    Then the rules ask now and then how far a source was accepted, and tell the keeper (`passed`).
    """

    def handle(self, event: Own_contra, first_unread: int) -> Beginning | None:
        """Take an event of the mode; return from where the source is read from now on, if the event says that.

        ``first_unread`` is the number of the first range that is not known to be read to its end.
        """
        return None

    @abstractmethod
    def begun(self, at: str, number: int) -> None:
        """The source is read from ``at``, behind the range of that number; 0: behind none."""

    def opened(self, planned: PlannedRange) -> None:
        """A new range is going to be read. Its payloads are what is kept of it: no rows that were read ahead."""

    def moved(self, end: str) -> None: ...

    def passed(self, end: str) -> None:
        """All rows up to here are done, where they are read again."""

    @abstractmethod
    def to_commit(self, complete: str | None) -> str | None:
        """Return what the reader is to commit now; None for nothing.

        ``complete``: all ranges up to there are read; None while one is not.
        """

    @abstractmethod
    def committed(self, end: str) -> None: ...


class PositionKeeper(RangeKeeper[NoReturn]):
    """Where it is asked how far the source was accepted.

    What an open range of an earlier run has left is read first. If the reader plans it as it did (equal digests), its
    splits go on where they were accepted; otherwise it is read again as a whole, and rows that were accepted before
    come again (at least once; a warning says so).

    The reader commits a range once all its rows are accepted. A range without splits is not committed by itself:
    nothing durable says that it was there, so after a restart the source is read from its start again.
    """

    def __init__(self) -> None:
        self._uncommitted = False

    def begun(self, at: str, number: int) -> None:
        self._uncommitted = number > 0

    def opened(self, planned: PlannedRange) -> None:
        self._uncommitted = True

    def to_commit(self, complete: str | None) -> str | None:
        return complete if self._uncommitted else None

    def committed(self, end: str) -> None:
        self._uncommitted = False


@dataclass(frozen=True, slots=True)
class KeptRanges:
    """What a mode has for one reader source.

    Attributes:
        progress: returns how far the source was accepted, as `progress_of` does; may block, and raise.
        note: notes a range durably that is about to be opened, and forgets those below a number; may block, and raise.
            None where ranges need not be noted.
    """

    keeper: RangeKeeper[Any]
    progress: Callable[[], tuple[RangeProgress, ...]] = tuple
    note: Callable[[PlannedRange, int], None] | None = None


class ReaderCalls:
    """What the rules of a source's planner ask of the reader (as `OffsetReader`), and of the job's mode.

    A method may block, and raise.

    Attributes:
        reader: it is open from the first call for it to `stop`.
    """

    def __init__(self, source: str, opens: Callable[[], OffsetReader], key: bytes, kept: KeptRanges) -> None:
        """``opens`` opens the source's reader; splits are sealed with ``key``."""
        self._source = source
        self._opens = opens
        self._key = key
        self._kept = kept
        self.reader: OffsetReader | None = None

    def _opened(self) -> OffsetReader:
        if self.reader is None:
            self.reader = self._opens()
        return self.reader

    def progress(self) -> tuple[RangeProgress, ...]:
        return self._kept.progress()

    def initial(self) -> str:
        return self._opened().initial()

    def find_end(self, start: str) -> str | None:
        """Have the source end with what there is now; None: the reader itself goes no further than its end."""
        reader = self._opened()
        return None if reader.prepare_to_stop() else reader.latest(start, all_of_it=True)

    def latest(self, start: str) -> str:
        return self._opened().latest(start, all_of_it=False)

    def splits(self, number: int, start: str, end: str, digest: bytes) -> tuple[PlannedRange, PlannedRange]:
        """Plan a range: return it as it is opened, and as it is kept, without rows that were read ahead.

        ``digest`` is the one that its splits have to have, since rows of them are to be read again; b"" for any.
        """
        splits = self._opened().splits(start, end)
        payloads = tuple(b"" if split is None else seal(split, self._key) for split in splits)
        kept = tuple(
            payload if bare is split else seal(bare, self._key)
            for bare, split, payload in zip(map(without_rows, splits), splits, payloads, strict=True)
        )
        planned = PlannedRange(number, start, end, digest_of(splits), payloads)
        if digest and planned.digest != digest:
            raise SourceChangedError(
                f"source {self._source!r}: its reader plans the range from {start} to {end} otherwise than "
                "before, and rows of it are not done: they cannot be read again"
            )
        return planned, replace(planned, payloads=kept)

    def keep(self, planned: PlannedRange, first: int) -> None:
        assert self._kept.note is not None, "a mode whose rows are read again notes ranges"
        self._kept.note(planned, first)

    def is_behind(self, start: str, end: str) -> bool:
        return self._opened().is_behind(start, end)

    def lag(self, at: str) -> int | None:
        return self._opened().lag(at)

    def commit(self, end: str) -> str:
        """Have the reader commit up to ``end``; return that."""
        self._opened().commit(end)
        return end

    def stop(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.stop()


OpenKeeper: TypeAlias = Callable[[Source, Callable[[Any], None]], KeptRanges]
"""Opens what a mode has for a source. What it gives the function has got to `RangeKeeper.handle` when it returns."""


Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


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
    is_behind: bool


@dataclass(frozen=True, slots=True)
class WarnReadAgain:
    """A range is planned otherwise than before: its rows that were accepted will come again."""

    progress: RangeProgress


@dataclass(frozen=True, slots=True)
class StopReader:
    """Stop the reader. There are no calls behind this."""


PlannerInstruction: TypeAlias = CallReader | AssignSplits | TellBacklog | WarnReadAgain | StopReader


POLL_MS, MAX_POLL_MS = 20, 200
"""The reader is asked for its latest offset after this pause, which doubles up to the second while nothing is new."""

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
        """Nothing is asked before the first event. ``keeper`` belongs to this from now on.

        ``stop_at_latest``: the source ends at the offset that is the latest when it starts.
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
