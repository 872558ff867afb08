"""The thread that plans a reader source in the driver: offsets in, splits out, commit when all are accepted."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

from ftlayer.errors import FTLayerError, SourceError
from ftlayer.functions.conversion import text_of
from ftlayer.runtime.connectors.offset_reader import OffsetReader, digest_of, offset_reader
from ftlayer.runtime.connectors.positions import RangeProgress
from ftlayer.runtime.driver.range_keeper import CommitOffset, KeeperInstruction, OpenKeeper, StartOver
from ftlayer.runtime.driver.splits import PlannedRange, SplitPlanner
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.runtime.protocol.sealed import seal
from ftlayer.topology.operators import ReaderSource, Source

logger = logging.getLogger(__name__)

POLL_MS = 20
"""The reader is asked for its latest offset after this pause …"""

MAX_POLL_MS = 200
"""… which doubles up to this while there is nothing new."""

STOP_WAIT_S = 5.0
"""How long `close` waits for a method of the reader that does not return."""


@dataclass(frozen=True, slots=True)
class _SlotUp:
    subtask: int


@dataclass(frozen=True, slots=True)
class _SlotDown:
    subtask: int


@dataclass(frozen=True, slots=True)
class _Drain:
    pass


@dataclass(frozen=True, slots=True)
class _Close:
    pass


@dataclass(frozen=True, slots=True)
class _ForKeeper:
    event: Any


_Event = _SlotUp | _SlotDown | SplitDone | _Drain | _Close | _ForKeeper


class ReaderPlanner:
    """Plans one reader source: a thread of its own calls the reader's methods, which may block.

    The reader is a copy of the one given. All public methods return at once, save `close`, and can be called
    from any thread. Where the source has come to, and when its reader commits, is the `RangeKeeper`'s to say.
    """

    def __init__(
        self,
        source: Source,
        parallelism: int,
        *,
        key: bytes,
        keeper: OpenKeeper,
        send: Callable[[AssignSplits], None],
        failed: Callable[[str, FTLayerError], None],
        stop_at_latest: bool = False,
        backlog: Callable[[str, bool], None] | None = None,
    ) -> None:
        """Take the source over; nothing is called before `start`.

        Args:
            source: a source with a `ReaderSource`.
            parallelism: its subtasks.
            key: the job's key, to seal splits with.
            keeper: opens the source's keeper; called at once. What the keeper raises fails the planner.
            send: sends a message to the slot of its subtask; called in the planner's thread, must not block
                for long. A message to a slot that has just been lost may be dropped.
            failed: told of (source uid, error) when the reader or the keeper raised; the thread has ended,
                and `start` goes on with the step that failed.
            stop_at_latest: end the source at the offset that is the latest when it starts.
            backlog: told whether the source, by its uid, works off a backlog: whether its reader's limit cuts what
                there is to read. None: that is not asked for.
        """
        assert isinstance(source.connector, ReaderSource)
        self._uid = source.uid
        self._connector = source.connector
        self._key = key
        self._send = send
        self._failed = failed
        self._stop_at_latest = stop_at_latest
        self._tell_backlog = backlog
        self._core = SplitPlanner(source.uid, parallelism)
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # All below belongs to the thread.
        self._keeper = keeper(source, lambda event: self._events.put(_ForKeeper(event)))
        self._reader: OffsetReader | None = None
        self._number = 0
        self._at: str | None = None
        self._target: str | None = None
        self._knows_target = False
        self._is_behind: bool | None = None
        self._draining = False
        self._ended = False
        self._closed = False
        self._pause_ms = 0
        # Kept until it is handled: a failure on the way must not lose it.
        self._event: _Event | None = None

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Begin to plan, or go on after a failure."""
        self._thread = threading.Thread(target=self._run, name=f"ftlayer-plan-{self._uid}", daemon=True)
        self._thread.start()

    def slot_up(self, subtask: int) -> None:
        """A new instance runs this subtask and takes splits."""
        self._events.put(_SlotUp(subtask))

    def slot_down(self, subtask: int) -> None:
        """The subtask is lost, with all splits it has not reported."""
        self._events.put(_SlotDown(subtask))

    def split_done(self, message: SplitDone) -> None:
        """A slot reported a split."""
        self._events.put(message)

    def drain(self) -> None:
        """Open no further ranges. One that is complete is committed still."""
        self._events.put(_Drain())

    def close(self) -> None:
        """End the thread and stop the reader; waits a few seconds for a method of the reader that blocks."""
        self._events.put(_Close())
        if self._thread is None:
            return
        self._thread.join(STOP_WAIT_S)
        if self._reader is not None and not self._thread.is_alive():
            # It had ended by a failure.
            last = threading.Thread(target=self._stop_reader, daemon=True)
            last.start()
            last.join(STOP_WAIT_S)

    # ------------------------------------------------------------ the planner's thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step()
        except FTLayerError as error:
            self._failed(self._uid, error)
        except Exception as error:  # noqa: BLE001 - whatever a reader raises is reported
            failure = SourceError(
                f"source {self._uid!r}: its reader failed in the driver: {type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            self._failed(self._uid, failure)
        else:
            self._stop_reader()

    def _stop_reader(self) -> None:
        reader, self._reader = self._reader, None
        try:
            if reader is not None:
                reader.stop()
        except Exception:
            logger.warning("source %r: its reader did not stop cleanly", self._uid, exc_info=True)

    def _step(self) -> None:
        """Do the one thing that is due, or wait for what comes."""
        if self._reader is None:
            self._reader = offset_reader(self._uid, _copy(self._connector.reader))
        reader = self._reader
        if not self._keeper.is_current:
            self._handle_next(reader, None)
        elif self._at is None:
            self._begin(reader)
        elif self._core.reading:
            self._handle_next(reader, None)
        elif (restored := self._keeper.next_restored()) is not None:
            self._open(restored, self._keeper.progress(restored))
        elif (end := self._keeper.to_commit(self._at)) is not None:
            self._commit(reader, end)
        elif self._draining or self._ended:
            self._handle_next(reader, None)
        elif not self._handle_next(reader, self._pause_ms):
            self._plan_next(reader)

    def _handle_next(self, reader: OffsetReader, wait_ms: int | None) -> bool:
        """Handle the next event; return False if none comes within ``wait_ms`` (None: wait for one)."""
        if self._event is None:
            try:
                self._event = self._events.get(timeout=None if wait_ms is None else wait_ms / 1_000)
            except queue.Empty:
                return False
        self._handle(reader, self._event)
        self._event = None
        return True

    def _handle(self, reader: OffsetReader, event: _Event) -> None:
        match event:
            case SplitDone():
                if self._keeper.takes_from_lost or self._core.is_up(event.split):
                    self._core.split_done(event)
            case _SlotUp(subtask):
                self._send_all(self._core.slot_up(subtask, self._progress()))
            case _SlotDown(subtask):
                self._core.slot_down(subtask)
            case _Drain():
                self._draining = True
            case _Close():
                self._closed = True
            case _ForKeeper(own):
                for instruction in self._keeper.handle(own, self._open_range):
                    self._carry_out(reader, instruction)
            case _:
                assert_never(event)

    def _carry_out(self, reader: OffsetReader, instruction: KeeperInstruction) -> None:
        match instruction:
            case StartOver():
                self._core.restart()
                self._at = None
                self._ended = False
                self._is_behind = None  # to be said again
            case CommitOffset(end):
                self._commit(reader, end)
            case _:
                assert_never(instruction)

    def _commit(self, reader: OffsetReader, end: str) -> None:
        reader.commit(end)
        self._keeper.committed(end)

    # ------------------------------------------------------------ ranges

    def _begin(self, reader: OffsetReader) -> None:
        """Find out where the source has come to, and open the range that is not complete."""
        found = self._keeper.beginning()
        at = reader.initial() if found.at is None else found.at
        reopened = None if found.unfinished is None else self._reopened(reader, found.unfinished)
        self._find_target(reader, at)
        if not self._keeper.begun(at):
            return
        self._at = at
        self._pause_ms = 0
        self._number = found.number
        if reopened is not None:
            self._number = reopened.number
            self._open(reopened, found.unfinished)

    def _find_target(self, reader: OffsetReader, at: str) -> None:
        """Find out where the source ends, the first time alone."""
        if self._stop_at_latest and not self._knows_target:
            if not reader.prepare_to_stop():
                self._target = reader.latest(at, all_of_it=True)
            self._knows_target = True

    def _reopened(self, reader: OffsetReader, progress: RangeProgress) -> PlannedRange:
        """Plan the open range again."""
        start, end = progress.start, progress.end
        splits = reader.splits(start, end)
        digest = digest_of(splits)
        number = progress.number
        if digest != progress.digest:
            number += 1
            logger.warning(
                "source %r: its reader plans the range from %s to %s otherwise than before; it is read again "
                "from its start, and %d rows that were accepted will come again",
                self._uid,
                start,
                end,
                sum(progress.rows),
            )
        return self._planned(number, start, end, splits, digest)

    def _plan_next(self, reader: OffsetReader) -> None:
        """Open the next range if there is something new."""
        assert self._at is not None
        start = self._at
        end = self._target if self._target is not None else reader.latest(start, all_of_it=False)
        splits = reader.splits(start, end) if end != start else []
        if splits:
            planned = self._planned(self._number + 1, start, end, splits, digest_of(splits))
            self._number = planned.number
            self._pause_ms = 0
            self._look_for_backlog(reader, start, end)
            self._keeper.opened(planned, splits)
            self._open(planned, None)
        elif self._stop_at_latest and end == start:
            self._send_all(self._core.end())
            self._ended = True
        else:
            self._pause_ms = min(MAX_POLL_MS, max(POLL_MS, 2 * self._pause_ms))
            self._keeper.moved(end)
        self._at = end

    def _look_for_backlog(self, reader: OffsetReader, start: str, end: str) -> None:
        if self._tell_backlog is None:
            return
        is_behind = reader.is_behind(start, end)
        if is_behind != self._is_behind:
            self._is_behind = is_behind
            self._tell_backlog(self._uid, is_behind)

    def _open(self, planned: PlannedRange, progress: RangeProgress | None) -> None:
        self._send_all(self._core.open(planned, progress))

    def _planned(self, number: int, start: str, end: str, splits: list[Any], digest: bytes) -> PlannedRange:
        payloads = tuple(seal(split, self._key) for split in splits)
        return PlannedRange(number, start, end, digest, payloads)

    @property
    def _open_range(self) -> int | None:
        planned = self._core.range
        return planned.number if planned is not None and self._core.reading else None

    def _progress(self) -> RangeProgress | None:
        """Return how far the last range was read by instances that are gone."""
        planned = self._core.range
        return None if planned is None else self._keeper.progress(planned)

    def _send_all(self, messages: list[AssignSplits]) -> None:
        self._keeper.pass_on(messages, self._send)


def _copy(reader: Any) -> Any:
    """Return a copy, made as Spark makes its own: what it opens in the driver is not sent to slots."""
    from pyspark import cloudpickle

    return cloudpickle.loads(cloudpickle.dumps(reader))  # type: ignore[no-untyped-call]
