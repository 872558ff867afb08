"""The reader sources of a job with checkpoints: what a checkpoint holds of them, and where a restore leads them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias, assert_never

import msgpack

from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.runtime.connectors.offset_reader import RangeProgress, SplitPosition, partition_key, unpack_split
from ftlayer.runtime.driver.rules.planner_rules import Beginning, KeptRanges, PlannedRange, RangeKeeper
from ftlayer.runtime.protocol.messages import reseal
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import Source

Positions = Mapping[str, SplitPosition]
"""By partition: the last split that was read under its number, and how far."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The part of a checkpoint that a source has beside its positions.

    Attributes:
        at: the offset at which the first range begins that it has read nothing of.
        last: highest number of a range that it has read of, 0 for none.
        ranges: those up to ``last`` that it has not read to their end.
    """

    at: str
    last: int
    ranges: tuple[PlannedRange, ...]

    @property
    def end(self) -> str | None:
        """The offset up to which everything is read; None if nothing is."""
        if not self.last:
            return None
        return self.ranges[0].start if self.ranges else self.at

    def pack(self) -> bytes:
        packed: bytes = msgpack.packb(
            [
                self.at,
                self.last,
                [[one.number, one.start, one.end, one.digest, list(one.payloads)] for one in self.ranges],
            ]
        )
        return packed


def unpack_captured(packed: bytes) -> Captured:
    at, last, ranges = msgpack.unpackb(packed)
    return Captured(
        at,
        last,
        tuple(
            PlannedRange(number, start, end, digest, tuple(payloads))
            for number, start, end, digest, payloads in ranges
        ),
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says of one source; with no positions and None: there is none, the source begins again."""

    positions: Positions
    captured: Captured | None


def unpack_restored(source: str, positions: Mapping[str, bytes], captured: bytes | None) -> Restored:
    """Read the positions of all subtasks of a source in a checkpoint, and what `Captured.pack` wrote for it.

    Raises `IncompatibleCheckpointError`, or `ConfigError`, for a checkpoint whose source was of another kind.
    """
    if not captured and positions:
        raise IncompatibleCheckpointError(
            f"source {source!r}: the checkpoint has positions of a source without a reader; give the new "
            "source a uid of its own"
        )
    return Restored(_unpacked(source, positions), unpack_captured(captured) if captured else None)


def reseal_captured(packed: bytes, old: bytes, new: bytes) -> bytes:
    """Return what `Captured.pack` wrote, its splits sealed with ``new`` in place of ``old``, or `UnauthorizedError`."""
    if not packed:
        return b""
    captured = unpack_captured(packed)
    ranges = (
        replace(one, payloads=tuple(payload and reseal(payload, old, new) for payload in one.payloads))
        for one in captured.ranges
    )
    return replace(captured, ranges=tuple(ranges)).pack()


class RangeLog:
    """A source's ranges, so that checkpoints are restored exactly. For one thread at a time, save `capture`.

    A reader may plan the same range otherwise when it is asked again, and a checkpoint's positions count rows of single
    splits. So a checkpoint holds the splits themselves of every range that it has begun and not ended. That may be more
    than one: subtasks take their snapshots at different moments, and a quick one may be ranges ahead of a slow one.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        # Its ``ranges`` are those that a checkpoint may still be in the middle of. Replaced, never changed.
        self._book: Captured | None = None
        self._origin: str | None = None
        self._restored: Positions = {}

    def begin(self, at: str) -> None:
        """The source is read from ``at``. A restore of no checkpoint leads back here."""
        self._origin = at
        self._book = Captured(at, 0, ())

    @property
    def now(self) -> Captured | None:
        """All ranges that are remembered, and where the next one begins; None before `begin`."""
        return self._book

    def opened(self, planned: PlannedRange) -> None:
        assert self._book is not None
        self._book = Captured(planned.end, planned.number, (*self._book.ranges, planned))

    def moved(self, at: str) -> None:
        assert self._book is not None
        self._book = replace(self._book, at=at)

    def forget_below(self, number: int) -> None:
        assert self._book is not None
        if self._book.ranges and self._book.ranges[0].number < number:
            ranges = tuple(planned for planned in self._book.ranges if planned.number >= number)
            self._book = replace(self._book, ranges=ranges)

    def capture(self, positions: Mapping[str, bytes]) -> Captured | None:
        """Return what a checkpoint with these positions has to hold; None if the source has not begun. Any thread."""
        book, read = self._book, _unpacked(self._source, positions)
        if book is None:
            return None
        last = max((position.range.number for position in read.values()), default=0)
        at = next((planned.start for planned in book.ranges if planned.number > last), book.at)
        begun = (planned for planned in book.ranges if planned.number <= last and not _is_read(planned, read))
        return Captured(at, last, tuple(begun))

    def restore(self, restored: Restored) -> None:
        captured = restored.captured
        if captured is None and self._origin is not None:
            captured = Captured(self._origin, 0, ())
        self._restored = restored.positions
        self._book = captured

    def progress(self, planned: PlannedRange) -> RangeProgress:
        splits = range(len(planned.payloads))
        rows, done = zip(*(_read_of(planned, split, self._restored) for split in splits), strict=True)
        return RangeProgress(planned.range, rows, done)


def _unpacked(source: str, positions: Mapping[str, bytes]) -> Positions:
    return {key: unpack_split(source, packed) for key, packed in positions.items()}


def _is_read(planned: PlannedRange, read: Positions) -> bool:
    return all(_read_of(planned, split, read)[1] for split in range(len(planned.payloads)))


def _read_of(planned: PlannedRange, split: int, read: Positions) -> tuple[int, bool]:
    """Return how many rows of a split are read, and whether those are all.

    The splits of one number are read one after the other, by one subtask: a later one says that this one is done.
    """
    if not planned.payloads[split]:
        return 0, True
    position = read.get(partition_key(split))
    if position is None or position.range.number < planned.number:
        return 0, False
    if position.range.number > planned.number:
        return 0, True
    return position.rows, position.done


@dataclass(frozen=True, slots=True)
class RangesRestored:
    """The job goes back to a checkpoint, or begins with it.

    All subtasks of the source are down, and come up behind this.
    """

    restored: Restored


@dataclass(frozen=True, slots=True)
class UnderWay:
    """These checkpoints are under way; told before the barrier of a new one is sent."""

    checkpoints: frozenset[int]


@dataclass(frozen=True, slots=True)
class ReadUpTo:
    """A completed checkpoint has read everything up to here."""

    end: str


LogEvent: TypeAlias = RangesRestored | UnderWay | ReadUpTo


class LogKeeper(RangeKeeper[LogEvent]):
    """Where positions are in checkpoints, and nothing is planned before `RangesRestored`.

    The ranges that a checkpoint was in the middle of are read on with the very splits they had. The reader commits
    once a completed checkpoint has read a range to its end, and again for one that was restored. A range without
    splits counts from the next checkpoint on.
    """

    # A subtask goes on until it is told of the restore: its rows will come again.
    outlives_subtasks = False

    def __init__(self, source: str) -> None:
        self._log = RangeLog(source)
        self._to_commit: deque[str] = deque()
        self._committed: str | None = None
        # For each checkpoint under way the first range that it may not have read to its end.
        self._needed: dict[int, int] = {}

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        captured = self._log.capture(positions)
        return b"" if captured is None else captured.pack()

    def handle(self, event: LogEvent, first_unread: int) -> Beginning | None:
        match event:
            case RangesRestored(restored):
                return self._go_back(restored)
            case UnderWay(checkpoints):
                # Whatever is done by now was done before their barriers: this is told before those are sent.
                self._needed = {number: self._needed.get(number, first_unread) for number in checkpoints}
                self._forget(first_unread)
            case ReadUpTo(end):
                if end != (self._to_commit[-1] if self._to_commit else self._committed):
                    self._to_commit.append(end)
            case _:
                assert_never(event)
        return None

    def begun(self, at: str, number: int) -> None:
        if self._log.now is None:
            self._log.begin(at)

    def opened(self, planned: PlannedRange) -> None:
        self._forget(planned.number)
        self._log.opened(planned)

    def moved(self, end: str) -> None:
        self._log.moved(end)

    def to_commit(self, complete: str | None) -> str | None:
        """What is complete is not durable before a checkpoint has it."""
        return self._to_commit[0] if self._to_commit else None

    def committed(self, end: str) -> None:
        self._to_commit.popleft()
        self._committed = end

    def _go_back(self, restored: Restored) -> Beginning:
        self._log.restore(restored)
        self._needed = {}  # none is under way that was begun before
        captured = restored.captured
        # That the checkpoint is complete is certain; whether the reader was told is not.
        self._committed = None
        self._to_commit = deque(() if captured is None or captured.end is None else (captured.end,))
        now = self._log.now
        if captured is None:
            return Beginning(None if now is None else now.at, 0)
        ranges = tuple((planned, self._log.progress(planned)) for planned in captured.ranges)
        return Beginning(captured.at, captured.last, restored=ranges)

    def _forget(self, first_unread: int) -> None:
        if self._log.now is not None:
            self._log.forget_below(min([first_unread, *self._needed.values()]))


class SourceCheckpoints:
    """One reader source's part in checkpoints. Methods return at once, from any thread."""

    def __init__(self, source: str, happened: Callable[[LogEvent], None]) -> None:
        """``happened`` has an event handled by the source's planner before it returns."""
        self.keeper = LogKeeper(source)
        self._source = source
        self._happened = happened

    def restore(self, positions: Mapping[str, bytes], captured: bytes | None) -> None:
        """Go back to a checkpoint, or begin with it; without positions and None: to where the source has begun.

        ``positions`` are of all subtasks, ``captured`` is what `capture` gave. All subtasks are down
        (`ReaderPlanner.slot_down`), and come up behind this. Nothing that was planned before is sent once this has
        returned. Raises as `unpack_restored`.
        """
        self._happened(RangesRestored(unpack_restored(self._source, positions, captured)))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """Told before the barrier of a new one is sent: what none of these checkpoints needs is forgotten."""
        self._happened(UnderWay(frozenset(checkpoints)))

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        return self.keeper.capture(positions)

    def completed(self, captured: bytes | None) -> None:
        end = unpack_captured(captured).end if captured else None
        if end is not None:
            self._happened(ReadUpTo(end))


class ReaderCheckpoints:
    """The `SourceCheckpoints` of each reader source whose planner has asked for it.

    Methods return at once, from any thread. Nothing is planned before `restore`.
    """

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._sources: dict[str, SourceCheckpoints] = {}

    def open(self, source: Source, happened: Callable[[LogEvent], None]) -> KeptRanges:
        """Return the source's keeper: this is an `OpenKeeper`. To be called before the job starts."""
        opened = self._sources[source.uid] = SourceCheckpoints(source.uid, happened)
        return KeptRanges(opened.keeper)

    def restore(self, checkpoint: Checkpoint | None, slots: Collection[int]) -> None:
        """Go back to a checkpoint (None: to the begin) with the sources of a region of ``slots``.

        To be called behind `Planners.slot_down` of all of them, and before the event that leads to their deployment is
        in the coordinator's queue: what was sent before may lie there still, and must find them down.

        Raises as `SourceCheckpoints.restore`.
        """
        for uid, source in self._sources.items():
            if not slots or min(slots) >= self._graph.vertex(uid).parallelism:
                continue
            if checkpoint is None:
                source.restore({}, None)
            else:
                source.restore(_positions_in(checkpoint.subtasks, uid), checkpoint.sources.get(uid))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These are under way: to be told before the barrier of a new one is sent, that one included."""
        for source in self._sources.values():
            source.under_way(checkpoints)

    def capture(self, subtasks: Iterable[SubtaskSnapshot]) -> dict[str, bytes]:
        """Return `Checkpoint.sources` for a checkpoint that is under way, and has these parts."""
        parts = tuple(subtasks)
        return {uid: source.capture(_positions_in(parts, uid)) for uid, source in self._sources.items()}

    def completed(self, checkpoint: Checkpoint) -> None:
        """What the job would be restored from is complete: readers may forget what it has read."""
        for uid, source in self._sources.items():
            source.completed(checkpoint.sources.get(uid))


def _positions_in(parts: Iterable[SubtaskSnapshot], uid: str) -> dict[str, bytes]:
    return {
        partition: position
        for part in parts
        if part.uid == uid
        for partition, position in part.positions.items()
    }
