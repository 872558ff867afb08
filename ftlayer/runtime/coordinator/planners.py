"""The planners of a job's reader sources, started again by the restart strategy when a reader fails."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections.abc import Callable

from ftlayer.errors import FTLayerError
from ftlayer.restart import RestartStrategy
from ftlayer.runtime.coordinator.job_vertex import JobVertexCalls
from ftlayer.runtime.coordinator.reader_planner import ReaderPlanner
from ftlayer.runtime.messages import AssignSplits, SplitDone
from ftlayer.stream.job_graph import JobGraph
from ftlayer.stream.operators import ReaderSource

logger = logging.getLogger(__name__)


class Planners:
    """One `ReaderPlanner` for each reader source of a graph. Methods return at once, save `close`."""

    def __init__(
        self,
        graph: JobGraph,
        vertex: JobVertexCalls | None,
        key: bytes,
        restart: RestartStrategy,
        *,
        send: Callable[[AssignSplits], None],
        failed: Callable[[FTLayerError], None],
        stop_at_latest: bool = False,
    ) -> None:
        """``failed`` is told of the error of a reader that the strategy has given up."""
        self._failed = failed
        self._closed = threading.Event()
        self._parallelism: dict[str, int] = {}
        self._planners: dict[str, ReaderPlanner] = {}
        self._restarts: dict[str, RestartStrategy] = {}
        for source in graph.sources():
            if isinstance(source.connector, ReaderSource):
                stream = graph.stream_of(source.uid)
                self._parallelism[source.uid] = graph.vertex(source.uid).parallelism
                self._restarts[source.uid] = copy.deepcopy(restart)
                self._planners[source.uid] = ReaderPlanner(
                    source,
                    self._parallelism[source.uid],
                    key=key,
                    positions=_positions(vertex, stream),
                    send=send,
                    failed=self._reader_failed,
                    stop_at_latest=stop_at_latest,
                )

    def start(self) -> None:
        """Begin to plan."""
        for planner in self._planners.values():
            planner.start()

    def slot_up(self, slot: int) -> None:
        """The slot's sources take splits."""
        for uid, planner in self._planners.items():
            if slot < self._parallelism[uid]:
                planner.slot_up(slot)

    def slot_down(self, slot: int) -> None:
        """What the slot was reading waits for its next instance."""
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
        pause_ms = self._restarts[uid].on_failure(time.monotonic_ns() // 1_000_000)
        if pause_ms is None:
            self._failed(error)
            return
        logger.warning("%s; it is started again in %d ms", error, pause_ms)
        if not self._closed.wait(pause_ms / 1_000):
            self._planners[uid].start()


def _positions(vertex: JobVertexCalls | None, stream: str) -> Callable[[], dict[str, bytes]]:
    return dict if vertex is None else lambda: vertex.positions(stream)
