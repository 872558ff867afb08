"""What the planner of a reader source asks of the reader and of the job's mode, and the ranges that it has open."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, NoReturn, TypeAlias, TypeVar

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
        """``keeps``: rows that are lost are read again."""
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
        """Open a range, the one before being complete; ``progress`` is what the vertex knows of it.

        ``kept`` is the same range as it is assigned later on, if that differs.
        """
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
        """A new instance runs this subtask: it knows of no splits yet. ``progress`` is as `progress_of` returns it."""
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
        """The subtask is lost: its splits wait for the next instance."""
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

    def moved(self, end: str) -> None:
        """There is nothing to read up to ``end``."""

    def passed(self, end: str) -> None:
        """All rows up to here are done, where they are read again."""

    @abstractmethod
    def to_commit(self, complete: str | None) -> str | None:
        """Return what the reader is to commit now; None for nothing.

        ``complete``: all ranges up to there are read; None while one is not.
        """

    @abstractmethod
    def committed(self, end: str) -> None:
        """The reader has committed up to here."""


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
        keeper: belongs to the source's planner.
        progress: returns how far the source was accepted, as `progress_of` does; may block, and raise.
        note: notes a range durably that is about to be opened, and forgets those below a number; may block, and raise.
            None where ranges need not be noted.
    """

    keeper: RangeKeeper[Any]
    progress: Callable[[], tuple[RangeProgress, ...]] = tuple
    note: Callable[[PlannedRange, int], None] | None = None


class ReaderCalls:
    """What the rules of a source's planner ask of the reader, and of the job's mode. A method may block, and raise.

    Attributes:
        reader: it is open from the first call for it to `stop`.
    """

    def __init__(self, source: str, opens: Callable[[], OffsetReader], key: bytes, kept: KeptRanges) -> None:
        """``opens`` opens the reader of the source of this uid; ``key`` is the job's, to seal splits with."""
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
        """Return how far the source was accepted, as `KeptRanges` says; (): nothing was."""
        return self._kept.progress()

    def initial(self) -> str:
        """Return the offset at which the source begins."""
        return self._opened().initial()

    def find_end(self, start: str) -> str | None:
        """Have the source end with what there is now; None: the reader itself goes no further than its end."""
        reader = self._opened()
        return None if reader.prepare_to_stop() else reader.latest(start, all_of_it=True)

    def latest(self, start: str) -> str:
        """Return how far the source can be read from ``start`` now, within the reader's limit."""
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
        """Note durably that this range is opened; those below number ``first`` need not be noted any more."""
        assert self._kept.note is not None, "a mode whose rows are read again notes ranges"
        self._kept.note(planned, first)

    def is_behind(self, start: str, end: str) -> bool:
        """Whether more than up to ``end`` could be read from ``start`` now: the reader's limit is in the way."""
        return self._opened().is_behind(start, end)

    def lag(self, at: str) -> int | None:
        """Return how many records there are behind this offset; None if the reader cannot tell."""
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
