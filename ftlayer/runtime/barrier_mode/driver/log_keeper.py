"""Where a reader source has come to in a job with checkpoints: goes back to one exactly, and commits behind them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, assert_never

from ftlayer.runtime.barrier_mode.driver.range_log import Captured, RangeLog, unpack_captured
from ftlayer.runtime.connectors.offset_reader import without_rows
from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.range_keeper import Beginning, CommitOffset, KeeperInstruction, StartOver
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits
from ftlayer.runtime.protocol.sealed import seal


@dataclass(frozen=True, slots=True)
class _Restore:
    captured: Captured | None
    generation: int


@dataclass(frozen=True, slots=True)
class _UnderWay:
    checkpoints: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Completed:
    end: str


LogEvent: TypeAlias = _Restore | _UnderWay | _Completed


class LogKeeper:
    """`RangeKeeper` where positions are in checkpoints, and nothing is planned before `restore`.

    The ranges that a checkpoint was in the middle of are read on with the very splits they had. The reader commits
    once a completed checkpoint has read a range to its end, and again for one that was restored. A range without
    splits counts from the next checkpoint on.
    """

    # Of a subtask that goes on until it is told of the restore: its rows will come again.
    takes_from_lost = False

    def __init__(self, source: str, key: bytes, post: Callable[[LogEvent], None]) -> None:
        """``key`` is `CheckpointPlan.key`: what a checkpoint holds is sent to slots as it is.

        ``post`` has an event handled in the planner's thread.
        """
        self._key = key
        self._post = post
        # Guards the log. A method of the reader may take long, and what it gave is of no use behind a `restore`: it
        # must come neither into the log nor to tasks, which begin elsewhere.
        self._lock = threading.Lock()
        self._log = RangeLog(source)
        self._restores = 0
        # All below belongs to the planner's thread.
        self._generation = -1
        self._number = 0
        self._restored: deque[PlannedRange] = deque()
        self._committed: str | None = None
        # For each checkpoint under way the first range that it may not have read to its end.
        self._needed: dict[int, int] = {}

    # ------------------------------------------------------------ any thread

    def restore(self, positions: Mapping[str, bytes], captured: bytes | None) -> None:
        """Go back to a checkpoint, or begin with it; without positions and None: to where the source has begun.

        All its subtasks are down (`ReaderPlanner.slot_down`), and come up behind this. Nothing that was planned before
        is sent once this has returned.

        Args:
            positions: of all subtasks in the checkpoint.
            captured: what `capture` gave for it.

        Raises:
            IncompatibleCheckpointError, ConfigError: the source was of another kind.
        """
        unpacked = unpack_captured(captured) if captured else None
        with self._lock:
            self._log.restore(positions, unpacked)
            self._restores += 1
            self._post(_Restore(unpacked, self._restores))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way; told before the barrier of a new one is sent.

        What none of them needs is forgotten.
        """
        self._post(_UnderWay(frozenset(checkpoints)))

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        """Return what a checkpoint under way with these positions holds beside them; b"" before the source begins."""
        with self._lock:
            captured = self._log.capture(positions)
        return b"" if captured is None else captured.pack()

    def completed(self, captured: bytes | None) -> None:
        """The checkpoint that holds this is complete."""
        end = unpack_captured(captured).end if captured else None
        if end is not None:
            self._post(_Completed(end))

    # ------------------------------------------------------------ the planner's thread

    @property
    def is_current(self) -> bool:
        """See `RangeKeeper`: False where the log is ahead of this thread, before the first `restore` too."""
        return self._generation == self._restores

    def handle(self, event: LogEvent, open_range: int | None) -> Sequence[KeeperInstruction]:
        """See `RangeKeeper`."""
        match event:
            case _Restore():
                self._go_back(event)
                return [StartOver()]
            case _UnderWay(checkpoints):
                # Whatever is done by now was done before their barriers: this was told before those were sent.
                first = self._first_unread(open_range)
                self._needed = {number: self._needed.get(number, first) for number in checkpoints}
                self._forget(first)
                return []
            case _Completed(end):
                return [CommitOffset(end)] if end != self._committed else []
            case _:
                assert_never(event)

    def beginning(self) -> Beginning:
        """See `RangeKeeper`."""
        now = self._log.now
        return Beginning(None if now is None else now.at, self._number)

    def begun(self, at: str) -> bool:
        """See `RangeKeeper`."""
        with self._lock:
            if self.is_current and self._log.now is None:
                self._log.begin(at)
            return self.is_current

    def next_restored(self) -> PlannedRange | None:
        """See `RangeKeeper`."""
        return self._restored.popleft() if self._restored else None

    def opened(self, planned: PlannedRange, splits: Sequence[Any]) -> None:
        """See `RangeKeeper`."""
        kept = [without_rows(split) for split in splits]
        payloads = (
            payload if one is split else seal(one, self._key)
            for one, split, payload in zip(kept, splits, planned.payloads, strict=True)
        )
        opened = replace(planned, payloads=tuple(payloads))
        self._number = planned.number
        self._forget(planned.number)
        with self._lock:
            if self.is_current:
                self._log.opened(opened)

    def moved(self, end: str) -> None:
        """See `RangeKeeper`."""
        with self._lock:
            if self.is_current:
                self._log.moved(end)

    def progress(self, planned: PlannedRange) -> RangeProgress:
        """See `RangeKeeper`."""
        return self._log.progress(planned)

    def to_commit(self, at: str) -> None:
        """See `RangeKeeper`: what is complete is not durable before a checkpoint has it."""

    def committed(self, end: str) -> None:
        """See `RangeKeeper`."""
        self._committed = end

    def pass_on(self, messages: Sequence[AssignSplits], send: Callable[[AssignSplits], None]) -> None:
        """See `RangeKeeper`. No `restore` comes in between."""
        with self._lock:
            if self.is_current:
                for message in messages:
                    send(message)

    def _go_back(self, event: _Restore) -> None:
        captured = event.captured
        self._generation = event.generation
        self._restored = deque(() if captured is None else captured.ranges)
        self._number = 0 if captured is None else captured.last
        self._needed = {}  # none is under way that was begun before
        # That the checkpoint is complete is certain; whether the reader was told is not.
        self._committed = None
        if captured is not None and captured.end is not None:
            self._post(_Completed(captured.end))

    def _first_unread(self, open_range: int | None) -> int:
        """Return the number of the first range that is not known to be read."""
        if open_range is not None:
            return open_range
        return self._restored[0].number if self._restored else self._number + 1

    def _forget(self, first_unread: int) -> None:
        with self._lock:
            if self.is_current and self._log.now is not None:
                self._log.forget_below(min([first_unread, *self._needed.values()]))
