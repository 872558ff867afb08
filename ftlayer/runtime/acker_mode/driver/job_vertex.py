"""A job's calls of the vertex, by a thread of its own: a vertex that is down holds up nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from ftlayer.errors import FTLayerError, JobError, StaleIncarnationError, StaleOwnerError
from ftlayer.runtime.connectors.offset_reader import RangeProgress, pack_range, progress_of
from ftlayer.runtime.driver.rules.planner_rules import (
    KeptRanges,
    OpenKeeper,
    PlannedRange,
    PositionKeeper,
    RangeKeeper,
)
from ftlayer.runtime.worker import Worker
from ftlayer.topology.job_graph import JobGraph, reads_again
from ftlayer.topology.operators import Source
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient

logger = logging.getLogger(__name__)


class FloorKeeper(RangeKeeper[NoReturn]):
    """Of a reader source with ``replay="source"``.

    The vertex has the floors of its partitions, and the ranges from the first one on of which a row is not done. The
    reader commits a range once all of its rows are done or stored, and not when they are read: what is in flight has
    to be there still if a slot is lost.
    """

    reads_again = True

    def __init__(self) -> None:
        self._passed: str | None = None
        self._committed: str | None = None

    def begun(self, at: str, number: int) -> None:
        if not number:
            self._committed = at

    def moved(self, end: str) -> None: ...

    def passed(self, end: str) -> None:
        self._passed = end

    def to_commit(self, complete: str | None) -> str | None:
        return None if self._passed == self._committed else self._passed

    def committed(self, end: str) -> None:
        self._committed = end


# A call in a vertex that is up takes milliseconds (s).
CLOSE_TIMEOUT_S = 2.0

OnError = Callable[[FTLayerError], None]


class JobVertexCalls:
    """Claims a job, opens its streams, recalls them, and asks how much is left.

    Once another run has claimed the job, every call ends with `StaleOwnerError`.
    """

    def __init__(
        self, client: VertexClient, job: str, run: str, options: Mapping[str, calls.StreamOptions]
    ) -> None:
        """``job``: the topology's name. ``run``: unique id of this execution."""
        self.client = client
        self._job, self._run = job, run
        self._options = dict(options)
        self.streams = tuple(self._options)
        self._worker = Worker("job-vertex", self._lost_error)
        self._incarnation = 0

    def claim(self) -> None:
        """Take the job over from whichever run has it. To be called once, first."""
        reply = self.client.call(calls.ClaimJob(self._job, self._run))
        if reply.previous:
            logger.info("topology %r: %s takes over from %s", self._job, self._run, reply.previous)

    def open(self) -> None:
        for stream in self.streams:
            self._incarnation = self._open(stream).incarnation

    def progress(self, uid: str, stream: str) -> tuple[RangeProgress, ...]:
        opened = self._open(stream)
        return progress_of(uid, opened.positions, opened.planned)

    def note(self, stream: str, planned: PlannedRange, first: int) -> None:
        note = pack_range(planned.range)
        self.client.call(calls.NoteRange(stream, planned.number, note, first, self._run))

    def recall(self, done: Callable[[int], None], failed: OnError) -> None:
        """Make everything pending due; then ``done(rows)``, or ``failed(error)``, in another thread."""

        def work() -> None:
            done(self._recall())

        self._do(work, failed)

    def condemn(self, failure: calls.Failure, done: Callable[[], None], failed: OnError) -> None:
        """End a record's attempt; then ``done()``, or ``failed(error)``, in another thread.

        A vertex that has restarted does not know the attempt any more: the record is as it was before.
        """

        def work() -> None:
            try:
                self.client.call(calls.Fail((failure,), self._incarnation))
            except StaleIncarnationError:
                self.open()
            done()

        self._do(work, failed)

    def status(self, answer: Callable[[calls.StreamStatus], None], failed: OnError) -> None:
        """Ask what is left; then ``answer(status)``, or ``failed(error)``, in another thread."""

        def work() -> None:
            answer(self.client.call(calls.StreamStatusCall(self.streams, self._run)))

        self._do(work, failed)

    def close(self) -> None:
        """End the thread behind what it does; waits a little for it: the client may be closed next."""
        self._worker.stop()
        self._worker.join(CLOSE_TIMEOUT_S)

    def _open(self, stream: str) -> calls.StreamOpened:
        return self.client.call(calls.OpenStream(stream, self._options[stream], self._run))

    def _recall(self) -> int:
        while True:
            try:
                return self.client.call(calls.Recall(self.streams, self._incarnation, self._run)).rows
            except StaleIncarnationError:
                # The vertex has restarted. What it made due then may have been taken since: ask the new one.
                self.open()

    def _do(self, work: Callable[[], None], failed: OnError) -> None:
        def guarded() -> None:
            try:
                work()
            except StaleOwnerError as error:
                failed(error)
            except FTLayerError as error:
                failed(JobError(f"the vertex does not do its part: {error}"))

        self._worker.do(guarded)

    def _lost_error(self, error: BaseException) -> None:
        logger.error("a call of the vertex failed in a way it never should", exc_info=error)


def vertex_keepers(vertex: JobVertexCalls, graph: JobGraph) -> OpenKeeper:
    """Return what opens the keepers of a graph's reader sources: the vertex has their positions."""

    def opened(source: Source, happened: Callable[[Any], None]) -> KeptRanges:
        stream = graph.stream_of(source.uid)
        progress = partial(vertex.progress, source.uid, stream)
        if reads_again(source):
            return KeptRanges(FloorKeeper(), progress, partial(vertex.note, stream))
        return KeptRanges(PositionKeeper(), progress)

    return opened
