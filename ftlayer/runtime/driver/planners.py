"""The planners of a job's reader sources, each started again by its source's strategy when a reader fails."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable, Mapping

from ftlayer.clock import Now, system_now
from ftlayer.errors import FTLayerError
from ftlayer.recovery import lasting
from ftlayer.restart import RestartStrategy, note_success
from ftlayer.runtime.driver.range_keeper import OpenKeeper
from ftlayer.runtime.driver.reader_planner import ReaderPlanner
from ftlayer.runtime.protocol.messages import AssignSplits, SplitDone
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import ReaderSource

logger = logging.getLogger(__name__)

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
        """``failed`` is told of the error of a reader that the strategy has given up, ``backlog`` and
        ``clock`` as `ReaderPlanner` says. ``keeper`` opens that of each source, as the job's mode has it.

        ``key`` is the job's; in a graph with checkpoints `CheckpointPlan.key`, which slots have to open splits with.
        """
        self._failed = failed
        self._closed = threading.Event()
        self._parallelism: dict[str, int] = {}
        self._planners: dict[str, ReaderPlanner] = {}
        self._restarts: dict[str, RestartStrategy] = {}
        for source in graph.sources():
            if not isinstance(source.connector, ReaderSource):
                continue
            uid = source.uid
            parallelism = self._parallelism[uid] = graph.vertex(uid).parallelism
            self._restarts[uid] = copy.deepcopy(source.restart)
            self._planners[uid] = ReaderPlanner(
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

    @property
    def by_source(self) -> Mapping[str, ReaderPlanner]:
        """Each planner by the uid of its source."""
        return self._planners

    def lags(self) -> dict[str, int]:
        """Return, by source, how many records were not read when its reader was asked last, of those that can tell.

        What was known before a reader has stopped to answer is not told.
        """
        return {
            uid: lag
            for uid, planner in self._planners.items()
            if (lag := planner.rules.lag) is not None and planner.unanswered_ms < ANSWER_MS
        }

    def away(self) -> dict[str, int]:
        """Return, by source, for how long (ms) its reader has been asked in vain, see `ReaderPlanner.unanswered_ms`."""
        return {uid: planner.unanswered_ms for uid, planner in self._planners.items()}

    def start(self) -> None:
        for planner in self._planners.values():
            planner.start()

    def slot_up(self, slot: int) -> None:
        """The slot's sources take splits."""
        for uid, planner in self._planners.items():
            if slot < self._parallelism[uid]:
                planner.slot_up(slot)

    def slot_down(self, slot: int) -> None:
        """Splits that the slot was reading wait for its next instance."""
        for uid, planner in self._planners.items():
            if slot < self._parallelism[uid]:
                planner.slot_down(slot)

    def split_done(self, done: SplitDone) -> None:
        """A slot has reported a split."""
        planner = self._planners.get(done.source)
        if planner is not None:
            planner.split_done(done)

    def drain(self) -> None:
        """Open no further ranges."""
        for planner in self._planners.values():
            planner.drain()

    def close(self) -> None:
        """Stop the readers."""
        self._closed.set()
        for planner in self._planners.values():
            planner.close()

    def _reader_failed(self, uid: str, error: FTLayerError) -> None:
        """Called by the planner's thread, its last deed."""
        final, planner = lasting(error), self._planners[uid]
        if planner.answered:
            planner.answered = False
            note_success(self._restarts[uid])
        pause_ms = None if final else self._restarts[uid].on_failure(time.monotonic_ns() // 1_000_000)
        if pause_ms is None:
            self._failed(final or error)
            return
        logger.warning("%s; it is started again in %d ms", error, pause_ms)
        if not self._closed.wait(pause_ms / 1_000):
            planner.start()
