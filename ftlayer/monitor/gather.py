"""Asking vertices, all at once, and remembering what each of them said last.

One that gives no answer keeps its last one, with when that was: a page still shows what there was.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

from ftlayer.clock import Now, system_now
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    UnknownJobError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.monitor.health import LATELY_MS
from ftlayer.monitor.sources import VertexSource
from ftlayer.monitor.stored import StoredReports, jobs_in_store
from ftlayer.monitor.views import VertexView
from ftlayer.vertex.calls import (
    AnnouncedJob,
    Call,
    DeadGroups,
    GetHour,
    GetJob,
    GroupList,
    Hour,
    JobList,
    ListJobs,
    ListStreams,
    Reply,
    Stats,
    StatsReply,
    StreamList,
)

DEADLINE_MS = 3_000
"""So long a vertex may take to say how it is; it answers in a millisecond, or hangs."""

DIED = "died_per_second"
"""The series of `Hour` that says how many records of a vertex die."""

KEEP_GONE = 100
"""So many vertices are remembered whose program is there no more, those that were heard last."""

_AT_ONCE = 16

T = TypeVar("T")


class Client(Protocol):
    """What a vertex is asked by; `ftlayer.vertex.client.client.VertexClient` is one."""

    def call(self, call: Call, *, deadline_ms: int | None = None) -> Reply:
        """Make one call and return its reply."""

    def close(self) -> None:
        """Give the connection up."""


@dataclass
class _Vertex:
    """One vertex: how to reach it, and what it said last."""

    source: VertexSource | StoredReports
    client: Client
    view: VertexView
    error: FTLayerError | None = None


class Gatherer:
    """Asks the vertices that ``look`` finds. Any thread may use it; `close` it at the end.

    A vertex gets a name at first sight and keeps it, also when its driver is started again and when it is gone: that
    of its source, with a mark where others have the same. Of those that are gone the last `KEEP_GONE` are remembered.
    """

    def __init__(
        self,
        look: Callable[[], Sequence[VertexSource | StoredReports]],
        *,
        label: str = "monitor",
        clock: Callable[[], Now] = system_now,
        connect: Callable[[VertexSource, str], Client] = VertexSource.client,
        deadline_ms: int = DEADLINE_MS,
    ) -> None:
        """Ask nothing yet.

        Args:
            look: asked before each gathering for the vertices that there are.
            label: names the clients in logs.
            deadline_ms: how long a vertex may take to say how it is.
        """
        self._look = look
        self._label = label
        self._clock = clock
        self._connect = connect
        self._deadline_ms = deadline_ms
        self._lock = threading.Lock()  # guards what follows
        self._vertices: dict[str, _Vertex] = {}  # by name
        self._names: dict[str, str] = {}  # by identity
        self._threads = ThreadPoolExecutor(_AT_ONCE, "ftlayer-monitor")

    def gather(self) -> tuple[VertexView, ...]:
        """Ask all vertices how they are, and return that of all that are remembered, by name."""
        self._meet(self._look())
        with self._lock:
            names = list(self._vertices)
        for done in [self._threads.submit(self._ask, name) for name in names]:
            done.result()
        self._forget_some()
        return self.views()

    def views(self) -> tuple[VertexView, ...]:
        """Return what is remembered, by name; asks nothing. What runs is not among what was stored last."""
        with self._lock:
            views = [self._vertices[name].view for name in sorted(self._vertices)]
        there = {each.job.run for view in views if not view.is_stored for each in view.jobs}
        return tuple(
            replace(view, jobs=tuple(each for each in view.jobs if each.job.run not in there))
            if view.is_stored
            else view
            for view in views
        )

    def client(self, vertex: str) -> Client:
        """Return the client of a vertex, which stays this gatherer's. `ConfigError` for a name that none has."""
        return self._named(vertex).client

    def error(self, vertex: str) -> FTLayerError | None:
        """Return why a vertex gave no answer when it was asked last, None if it did or has ended in order."""
        return self._named(vertex).error

    def job(self, vertex: str, owner: str, checkpoints_since_ms: int = 0) -> AnnouncedJob:
        """Return all that a vertex knows of a job; of one that is gone what it said last, without what lists leave out.

        Raises `UnknownJobError`, and what its client does.
        """
        view = self._named(vertex).view
        if view.is_gone or view.is_killed:
            last = next((announced for announced in view.jobs if announced.job.owner == owner), None)
            if last is None:
                raise UnknownJobError(
                    f"job {owner!r} is not known of vertex {vertex}, whose program has ended"
                )
            return last
        return _expect(self.client(vertex).call(GetJob(owner, checkpoints_since_ms)), AnnouncedJob)

    def hour(self, vertex: str, owner: str = "") -> Hour:
        """Return the last hour of a job, or of the vertex. Raises `UnknownJobError`, and what its client does."""
        view = self._named(vertex).view
        if view.is_gone or view.is_killed:
            raise VertexUnavailableError(f"vertex {vertex} has ended with its program")
        return _expect(self.client(vertex).call(GetHour(owner)), Hour)

    def close(self) -> None:
        self._threads.shutdown()
        with self._lock:
            for vertex in self._vertices.values():
                vertex.client.close()

    # ------------------------------------------------------------ vertices

    def _named(self, vertex: str) -> _Vertex:
        with self._lock:
            if vertex not in self._vertices:
                there = ", ".join(sorted(self._vertices)) or "none"
                raise ConfigError(f"no vertex is called {vertex!r}; there are: {there}")
            return self._vertices[vertex]

    def _meet(self, sources: Sequence[VertexSource | StoredReports]) -> None:
        with self._lock:
            new = [source for source in sources if source.identity not in self._names]
            alike = Counter([source.name for source in new] + list(self._vertices))
            for source in new:
                # By what it is, and not by a number: the next command gives it the same.
                name = source.name if alike[source.name] == 1 else f"{source.name}-{_mark(source.identity)}"
                self._names[source.identity] = name
                is_stored = isinstance(source, StoredReports)
                view = VertexView(name, source.address, source.path, is_stored=is_stored)
                self._vertices[name] = _Vertex(source, self._connected(source), view)

    def _forget_some(self) -> None:
        with self._lock:
            gone = [
                vertex for vertex in self._vertices.values() if vertex.view.is_gone or vertex.view.is_killed
            ]
            gone.sort(key=lambda vertex: vertex.view.as_of_ms, reverse=True)
            for vertex in gone[KEEP_GONE:]:
                del self._vertices[vertex.view.vertex]
                del self._names[vertex.source.identity]
                vertex.client.close()

    def _connected(self, source: VertexSource | StoredReports) -> Client:
        if isinstance(source, StoredReports):
            return source.client(self._clock)
        return self._connect(source, self._label)

    def _ask(self, name: str) -> None:
        with self._lock:
            vertex = self._vertices.get(name)
        if vertex is None:
            return  # another thread has gathered, and forgotten it
        failure: FTLayerError | None = None
        try:
            view, failure = self._looked_at(vertex)
        except FTLayerError as error:
            failure = error
            view = self._without_answer(vertex.view, str(error))
        with self._lock:
            vertex.error = failure
            vertex.view = view

    def _looked_at(self, vertex: _Vertex) -> tuple[VertexView, FTLayerError | None]:
        """Return a vertex as it is now, and what was wrong where its driver is not there."""
        before, source = vertex.view, vertex.source.refreshed()
        if source is None and not before.is_killed:
            return self._without_answer(before, "its program has ended", is_gone=True), None
        killed = vertex.error if source is None else source.killed
        if source is None or killed is not None:
            if before.is_killed:
                return self._without_answer(before, before.failure, is_killed=True), killed
            return self._killed(before, str(killed)), killed
        self._follow(vertex, source)
        call = partial(vertex.client.call, deadline_ms=self._deadline_ms)
        return self._asked(call, replace(before, address=source.address)), None

    def _killed(self, before: VertexView, failure: str) -> VertexView:
        """Return a vertex whose driver was killed; where it was never asked, with what its store has of jobs."""
        jobs = before.jobs
        if not before.asked_ms and before.path:
            try:
                jobs = jobs_in_store(before.path, self._clock())
            except FTLayerError as error:
                failure = f"{failure}. What it ran is not known: {error}"
        return replace(self._without_answer(before, failure, is_killed=True), jobs=jobs)

    def _without_answer(
        self, before: VertexView, failure: str, *, is_gone: bool = False, is_killed: bool = False
    ) -> VertexView:
        now_ms = self._clock().wall_ms
        return replace(
            before, is_up=False, is_gone=is_gone, is_killed=is_killed, asked_ms=now_ms, failure=failure
        )

    def _follow(self, vertex: _Vertex, source: VertexSource | StoredReports) -> None:
        """Connect anew where the driver was started again: its vertex has another address and token."""
        with self._lock:
            if vertex.source != source:
                vertex.client.close()
                vertex.source, vertex.client = source, self._connected(source)

    def _asked(self, call: Callable[[Call], Reply], before: VertexView) -> VertexView:
        jobs = _expect(call(ListJobs()), JobList).jobs
        now_ms = self._clock().wall_ms
        view = replace(
            before,
            is_up=True,
            is_gone=False,
            is_killed=False,
            asked_ms=now_ms,
            as_of_ms=now_ms,
            failure="",
            jobs=jobs,
        )
        try:
            stats = _expect(call(Stats()), StatsReply)
        except UnsupportedError:
            return replace(view, has_records=False)
        streams = _expect(call(ListStreams()), StreamList).streams
        view = replace(view, has_records=True, stats=stats.values, circuits=stats.circuits, streams=streams)
        if not stats.values.get("dead_letters"):
            return replace(view, groups=(), indexed=1.0, died_lately=None)
        groups = _expect(call(DeadGroups()), GroupList)
        died = _died_lately(_expect(call(GetHour()), Hour))
        return replace(view, groups=groups.groups, indexed=groups.indexed, died_lately=died)


def _died_lately(hour: Hour) -> int | None:
    """Return how many records died in the last minutes; None where some of them are not known."""
    points = hour.series.get(DIED, ())[-LATELY_MS // hour.step_ms :]
    if len(points) * hour.step_ms < LATELY_MS or any(map(math.isnan, points)):
        return None
    return round(sum(points) * hour.step_ms / 1_000)


def _mark(identity: str) -> str:
    """Return a few characters that tell sources of one name apart."""
    return hashlib.sha256(identity.encode()).hexdigest()[:4]


def _expect(reply: Reply, kind: type[T]) -> T:
    assert isinstance(reply, kind)
    return reply
