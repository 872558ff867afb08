"""The planners of a job's reader sources, each started again by its source's strategy when a reader fails."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import assert_never

from ftlayer.common.clock import Now, system_now
from ftlayer.common.printable import described
from ftlayer.common.rules.restart import RestartStrategy, lasting, note_success, pause_after
from ftlayer.errors import FTLayerError, SourceError
from ftlayer.functions.failures import raise_signalled
from ftlayer.runtime.connectors.offset_reader import OffsetReader, offset_reader
from ftlayer.runtime.driver.rules import planner_rules
from ftlayer.runtime.driver.rules.planner_rules import OpenKeeper, ReaderCalls
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import ReaderSource, Source

logger = logging.getLogger(__name__)


STOP_WAIT_S = 5.0
"""How long `close` waits for a method of the reader that does not return."""


class ReaderPlanner:
    """Plans one reader source by `PlannerRules`: a thread of its own calls the reader's methods.

    The reader is a copy of the one given. All public methods can be called from any thread, and return at once, save
    `close` and `work`.
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
        clock: Callable[[], Now] = system_now,
    ) -> None:
        """Take a source with a `ReaderSource` over; nothing of it is called before `start`.

        Args:
            keeper: opens what the job's mode has for the source; called at once.
            send: sends a message to the slot of its subtask; any thread, must not block. A message to a slot that has
                just been lost may be dropped.
            failed: told of (source uid, error) when the reader raised, or what the mode was asked; the thread has
                ended, and `start` goes on with the call that failed.
            stop_at_latest: end the source at the offset that is the latest when it starts.
            backlog: told whether the source, by its uid, works off a backlog: whether its reader's limit cuts what
                there is to read; any thread, must not block. None: that is not asked for.
        """
        self._uid = source.uid
        self._send = send
        self._failed = failed
        self._tell_backlog = backlog
        self.answered = False
        self._clock = clock
        self._thread: threading.Thread | None = None
        # Guards the rules and what they want; it is held while that is sent, so that nothing goes out that an event
        # in between has made useless. No method of the reader is called under it.
        self._changed = threading.Condition()
        self._call: planner_rules.CallReader | None = None
        self._called_ms = 0
        self._stops = False
        kept = keeper(source, lambda event: self.handle(planner_rules.KeeperEvent(event)))
        # The thread's.
        self._calls = ReaderCalls(source.uid, partial(_copied_reader, source), key, kept)
        self.rules = planner_rules.PlannerRules(
            source.uid,
            parallelism,
            kept.keeper,
            stop_at_latest=stop_at_latest,
            tells_backlog=backlog is not None,
        )

    @property
    def unanswered_ms(self) -> int:
        """For how long the reader has been asked in vain: it has not returned, or has failed."""
        with self._changed:
            return 0 if self._call is None else self._clock().mono_ms - self._called_ms

    def start(self) -> None:
        self.handle(planner_rules.PollDue())
        self._thread = threading.Thread(target=self._run, name=f"ftlayer-plan-{self._uid}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and stop the reader; waits a few seconds for a method of the reader that blocks."""
        self.handle(planner_rules.CloseSource())
        if self._thread is None:
            return
        self._thread.join(STOP_WAIT_S)
        if self._calls.reader is not None and not self._thread.is_alive():
            # It had ended by a failure.
            last = threading.Thread(target=self._stop_reader, daemon=True)
            last.start()
            last.join(STOP_WAIT_S)

    def handle(self, event: planner_rules.PlannerEvent) -> None:
        with self._changed:
            for instruction in self.rules.handle(event, self._clock()):
                self._carry_out(instruction)
            self._changed.notify()

    def _carry_out(self, instruction: planner_rules.PlannerInstruction) -> None:
        match instruction:
            case planner_rules.CallReader():
                if self._call is None:
                    self._called_ms = self._clock().mono_ms
                self._call = instruction
            case AssignSplits():
                self._send(instruction)
            case planner_rules.TellBacklog(is_behind):
                assert self._tell_backlog is not None
                self._tell_backlog(self._uid, is_behind)
            case planner_rules.WarnReadAgain(progress):
                logger.warning(
                    "source %r: its reader plans the range from %s to %s otherwise than before; it is read again "
                    "from its start, and %d rows that were accepted will come again",
                    self._uid,
                    progress.range.start,
                    progress.range.end,
                    sum(progress.rows),
                )
            case planner_rules.StopReader():
                self._stops = True
            case _:
                assert_never(instruction)

    def _run(self) -> None:
        while self._wait():
            if not self.work():
                return
        self._stop_reader()

    def _wait(self) -> bool:
        """Wait until there is something to do; return False once the reader is to be stopped."""
        with self._changed:
            while not self._stops and (wait_ms := self.wait_ms) != 0:
                self._changed.wait(None if wait_ms is None else wait_ms / 1_000)
            return not self._stops

    @property
    def wait_ms(self) -> int | None:
        """In how many milliseconds there is something for `work` to do; None: not before something happens."""
        with self._changed:
            if self._call is not None:
                return 0
            due_ms = self.rules.due_ms
        return None if due_ms is None else max(0, due_ms - self._clock().mono_ms)

    def work(self) -> bool:
        """Call the reader, if the rules want that now; False if it failed. Not for two threads at once.

        `failed` has been told then, and the next `work` makes the same call again, unless another is wanted.
        """
        if self._call is None:
            self.handle(planner_rules.PollDue())
        call = self._call
        if call is None:
            return True
        try:
            answered = call.carried_out(self._calls)
        except FTLayerError as error:
            self._failed(self._uid, error)
            return False
        except BaseException as error:  # noqa: BLE001 - whatever a reader raises is reported
            raise_signalled(error)
            failure = SourceError(
                f"source {self._uid!r}: its reader failed in the driver: {described(error)}"
            )
            failure.__cause__ = error
            self._failed(self._uid, failure)
            return False
        self.answered = True
        with self._changed:
            if self._call is call:
                self._call = None
            self.handle(answered)
        return True

    def _stop_reader(self) -> None:
        try:
            self._calls.stop()
        except BaseException as error:
            raise_signalled(error)
            logger.warning("source %r: its reader did not stop cleanly", self._uid, exc_info=True)


def _copied_reader(source: Source) -> OffsetReader:
    """Copy the reader as Spark does it: what it opens in the driver is not sent to slots."""
    from pyspark import cloudpickle

    assert isinstance(source.connector, ReaderSource)
    given = cloudpickle.dumps(source.connector.reader)  # type: ignore[no-untyped-call]
    return offset_reader(source.uid, cloudpickle.loads(given))


ANSWER_MS = 10_000
"""What a reader said of its lag holds until it has not answered for so long."""


class Planners:
    """One `ReaderPlanner` for each reader source of a graph. Methods return at once, save `close`."""

    def __init__(
        self,
        graph: JobGraph,
        keeper: OpenKeeper,
        key: bytes,
        *,
        send: Callable[[AssignSplits], None],
        failed: Callable[[FTLayerError], None],
        stop_at_latest: bool = False,
        backlog: Callable[[str, bool], None] | None = None,
        clock: Callable[[], Now] = system_now,
    ) -> None:
        """``failed`` is told of the error of a reader that the strategy has given up; all else as `ReaderPlanner`."""
        self._failed = failed
        self._closed = threading.Event()
        self._parallelism: dict[str, int] = {}
        self.by_source: dict[str, ReaderPlanner] = {}
        self._restarts: dict[str, RestartStrategy] = {}
        for source in graph.sources():
            if not isinstance(source.connector, ReaderSource):
                continue
            uid = source.uid
            parallelism = self._parallelism[uid] = graph.vertex(uid).parallelism
            self._restarts[uid] = copy.deepcopy(source.restart)
            self.by_source[uid] = ReaderPlanner(
                source,
                parallelism,
                keeper=keeper,
                key=key,
                send=send,
                failed=self._reader_failed,
                stop_at_latest=stop_at_latest,
                backlog=backlog,
                clock=clock,
            )

    def lags(self) -> dict[str, int]:
        """Return how many records were not read, of readers that can tell and still answer."""
        return {
            uid: lag
            for uid, planner in self.by_source.items()
            if (lag := planner.rules.lag) is not None and planner.unanswered_ms < ANSWER_MS
        }

    def away(self) -> dict[str, int]:
        return {uid: planner.unanswered_ms for uid, planner in self.by_source.items()}

    def start(self) -> None:
        for planner in self.by_source.values():
            planner.start()

    def slot_up(self, slot: int) -> None:
        self._handle_of(slot, planner_rules.SubtaskUp(slot))

    def slot_down(self, slot: int) -> None:
        self._handle_of(slot, planner_rules.SubtaskDown(slot))

    def _handle_of(self, slot: int, event: planner_rules.PlannerEvent) -> None:
        for uid, planner in self.by_source.items():
            if slot < self._parallelism[uid]:
                planner.handle(event)

    def split_done(self, done: SplitDone) -> None:
        planner = self.by_source.get(done.source)
        if planner is not None:
            planner.handle(done)

    def drain(self) -> None:
        for planner in self.by_source.values():
            planner.handle(planner_rules.DrainSource())

    def close(self) -> None:
        self._closed.set()
        for planner in self.by_source.values():
            planner.close()

    def _reader_failed(self, uid: str, error: FTLayerError) -> None:
        final, planner = lasting(error), self.by_source[uid]
        if planner.answered:
            planner.answered = False
            note_success(self._restarts[uid])
        pause_ms = None if final else pause_after(self._restarts[uid], time.monotonic_ns() // 1_000_000)
        if pause_ms is None:
            self._failed(final or error)
            return
        logger.warning("%s; it is started again in %d ms", error, pause_ms)
        if not self._closed.wait(pause_ms / 1_000):
            planner.start()
