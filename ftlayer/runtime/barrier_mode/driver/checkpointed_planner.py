"""The planner of a reader source in a graph with checkpoints: goes back to one exactly, and commits behind them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ftlayer.errors import FTLayerError
from ftlayer.runtime.barrier_mode.driver.range_log import Captured, RangeLog, unpack_captured
from ftlayer.runtime.connectors.offset_reader import OffsetReader, without_rows
from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.reader_planner import PlannerEvent, ReaderPlanner
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.runtime.protocol.sealed import seal
from ftlayer.topology.operators import Source


@dataclass(frozen=True, slots=True)
class _Restore(PlannerEvent):
    captured: Captured | None
    generation: int


@dataclass(frozen=True, slots=True)
class _UnderWay(PlannerEvent):
    checkpoints: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Commit(PlannerEvent):
    end: str


class CheckpointedReaderPlanner(ReaderPlanner):
    """`ReaderPlanner` where positions are in checkpoints, and nothing is planned before `restore`.

    The ranges that a checkpoint was in the middle of are read on with the very splits they had. ``commit`` of the
    reader is called once a completed checkpoint has read a range to its end, and again for one that was restored. A
    range without splits counts from the next checkpoint on.
    """

    def __init__(
        self,
        source: Source,
        parallelism: int,
        *,
        key: bytes,
        send: Callable[[AssignSplits], None],
        failed: Callable[[str, FTLayerError], None],
        stop_at_latest: bool = False,
        backlog: Callable[[str, bool], None] | None = None,
    ) -> None:
        """``key`` is `CheckpointPlan.key`: what a checkpoint holds is sent to slots as it is. Else as its parent.

        ``backlog`` is told whether the source, by its uid, works off a backlog: whether its reader's limit cuts what
        there is to read. None: that is not asked for.
        """
        super().__init__(
            source,
            parallelism,
            key=key,
            positions=dict,
            send=send,
            failed=failed,
            stop_at_latest=stop_at_latest,
        )
        # Guards the log. A method of the reader may take long, and what it gave is of no use behind a `restore`: it
        # must come neither into the log nor to tasks, which begin elsewhere.
        self._lock = threading.Lock()
        self._log = RangeLog(source.uid)
        self._restores = 0
        self._tell_backlog = backlog
        self._is_behind: bool | None = None
        # All below belongs to the thread.
        self._generation = -1
        self._restored: deque[PlannedRange] = deque()
        self._committed: str | None = None
        # For each checkpoint under way the first range that it may not have read to its end.
        self._needed: dict[int, int] = {}

    # ------------------------------------------------------------ any thread

    def restore(self, positions: Mapping[str, bytes], captured: bytes | None) -> None:
        """Go back to a checkpoint, or begin with it; without positions and None: to where the source has begun.

        All its subtasks are down (`slot_down`), and come up behind this. Nothing that was planned before is sent once
        this has returned.

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
            self._events.put(_Restore(unpacked, self._restores))

    def under_way(self, checkpoints: Collection[int]) -> None:
        """These checkpoints are under way; told before the barrier of a new one is sent.

        What none of them needs is forgotten.
        """
        self._events.put(_UnderWay(frozenset(checkpoints)))

    def capture(self, positions: Mapping[str, bytes]) -> bytes:
        """Return what a checkpoint under way with these positions holds beside them; b"" before the source begins."""
        with self._lock:
            captured = self._log.capture(positions)
        return b"" if captured is None else captured.pack()

    def completed(self, captured: bytes | None) -> None:
        """The checkpoint that holds this is complete."""
        end = unpack_captured(captured).end if captured else None
        if end is not None:
            self._events.put(_Commit(end))

    # ------------------------------------------------------------ the planner's thread

    def _handle(self, event: Any) -> None:
        match event:
            case _Restore():
                self._go_back(event)
            case _UnderWay(checkpoints):
                # Whatever is done by now was done before their barriers: this was told before those were sent.
                first = self._first_unread()
                self._needed = {number: self._needed.get(number, first) for number in checkpoints}
                self._forget()
            case _Commit(end):
                self._commit(end)
            case SplitDone(split=split) if not self._core.is_up(split):
                pass  # of a subtask that goes on until it is told of the restore: its rows will come again
            case _:
                super()._handle(event)

    def _go_back(self, event: _Restore) -> None:
        captured = event.captured
        self._generation = event.generation
        self._restored = deque(() if captured is None else captured.ranges)
        self._number = 0 if captured is None else captured.last
        self._needed = {}  # none is under way that was begun before
        self._core.restart()
        self._at = None
        self._ended = False
        self._is_behind = None  # to be said again
        # That the checkpoint is complete is certain; whether the reader was told is not.
        self._committed = None
        if captured is not None and captured.end is not None:
            self._events.put(_Commit(captured.end))

    def _commit(self, end: str) -> None:
        if self._reader is not None and end != self._committed:
            self._reader.commit(end)
            self._committed = end

    def _begin(self, reader: OffsetReader) -> None:
        log = self._current_log()
        if log is None:
            self._handle_next(None)
            return
        now = log.now
        at = reader.initial() if now is None else now.at
        self._find_target(reader, at)
        with self._lock:
            log = self._current_log()
            if log is None:
                return
            if now is None:
                log.begin(at)
        self._at = at
        self._pause_ms = 0

    def _does_more(self, reader: OffsetReader, at: str) -> bool:
        if not self._restored:
            return False
        planned = self._restored.popleft()
        self._send_all(self._core.open(planned, self._log.progress(planned)))
        return True

    def _opened(self, planned: PlannedRange, splits: list[Any]) -> None:
        self._look_for_backlog(planned.start, planned.end)
        kept = [without_rows(split) for split in splits]
        payloads = (
            payload if one is split else seal(one, self._key)
            for one, split, payload in zip(kept, splits, planned.payloads, strict=True)
        )
        opened = replace(planned, payloads=tuple(payloads))
        self._forget()
        with self._lock:
            if (log := self._current_log()) is not None:
                log.opened(opened)

    def _look_for_backlog(self, start: str, end: str) -> None:
        if self._tell_backlog is None or self._reader is None:
            return
        is_behind = self._reader.is_behind(start, end)
        if is_behind != self._is_behind:
            self._is_behind = is_behind
            self._tell_backlog(self._uid, is_behind)

    def _moved(self, end: str) -> None:
        with self._lock:
            if (log := self._current_log()) is not None:
                log.moved(end)

    def _progress_now(self) -> RangeProgress | None:
        planned = self._core.range
        return None if planned is None else self._log.progress(planned)

    def _send_all(self, messages: list[AssignSplits]) -> None:
        with self._lock:
            if self._current_log() is not None:
                super()._send_all(messages)

    def _current_log(self) -> RangeLog | None:
        """Return the log, unless it is ahead of this thread: then the next events are to be handled first."""
        return self._log if self._generation == self._restores else None

    def _first_unread(self) -> int:
        """Return the number of the first range that is not known to be read."""
        planned = self._core.range
        if planned is not None and self._core.reading:
            return planned.number
        return self._restored[0].number if self._restored else self._number + 1

    def _forget(self) -> None:
        with self._lock:
            log = self._current_log()
            if log is not None and log.now is not None:
                log.forget_below(min([self._first_unread(), *self._needed.values()]))
