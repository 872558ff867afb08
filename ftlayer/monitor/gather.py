"""Asking vertices, all at once, and remembering what each of them said last.

One that gives no answer keeps its last one, with when that was: a page still shows what there was.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Protocol

import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, attempts_of, payload_of
from ftlayer.checkpoint.storage.dead_letters import StoredLetters, stored_letters
from ftlayer.checkpoint.storage.layout import last_name, normal
from ftlayer.checkpoint.storage.loading import check_directory
from ftlayer.checkpoint.storage.report import LastReport, find_reports
from ftlayer.common.clock import Now, system_now
from ftlayer.common.printable import shown_url
from ftlayer.errors import (
    CheckpointError,
    ConfigError,
    FTLayerError,
    UnknownJobError,
    UnreadableReplyError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.monitor.rules.health import LATELY_MS
from ftlayer.monitor.rules.names import JobNames, VertexView, marked
from ftlayer.monitor.rules.plans import DEAD, WAITING, check_way_back
from ftlayer.monitor.sources import VertexSource, short_name
from ftlayer.records.ipc import as_stream, says
from ftlayer.vertex import calls
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.rules.grouping import kind_of
from ftlayer.vertex.rules.operating import as_stored
from ftlayer.vertex.store import LmdbStore

logger = logging.getLogger(__name__)


# What drivers that are gone have said last of their jobs: beside checkpoints, with the dead letters of jobs without a
# vertex, or in the store of their vertex. Directories with checkpoints are looked at as boards are.

_NEVER_MS = (1 << 63) - 1


class BrokenFiles:
    """Files below a directory that cannot be read, beside others that can: they are named in the log, each once."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._found: list[CheckpointError] = []

    def take(self, error: CheckpointError) -> None:
        self._found.append(error)

    def name(self, *, others: bool) -> None:
        """Name those that were taken since the last call; without ``others`` that can be read, raise the first."""
        found, self._found = self._found, []
        if found and not others:
            raise found[0]
        for error in found:
            if str(error) not in self._named:
                self._named.add(str(error))
                logger.warning("%s. What else there is is shown without it", error)


@dataclass(frozen=True, slots=True)
class _Shown:
    """A letter of a job; ``place`` is its position in the order of deaths."""

    info: calls.RecordInfo
    place: bytes
    died_ms: int


_ABOUT_LETTERS = (
    *(calls.Stats, calls.ListStreams, calls.DeadGroups, calls.SelectRecords, calls.ListRecords),
    *(calls.Purge, calls.Requeue, calls.EditAndRequeue),
)


class LetterReader:
    """Answers as a vertex does that has only dead letters. A key is the name of its letter.

    What is requeued is an order beside the letters, which the job's driver carries out: such a letter is *waiting*.
    """

    def __init__(
        self, url: str, key: bytes | None = None, jobs: Callable[[], tuple[calls.AnnouncedJob, ...]] = tuple
    ) -> None:
        """``key`` is `CheckpointConfig.key` of the jobs; None: the one that is kept with their checkpoints.

        ``jobs`` says what their drivers have said last.
        """
        self._url = url
        self._key = key
        self._jobs = jobs
        self._read: tuple[object, list[_Shown]] = (), []
        self._broken = BrokenFiles()

    @property
    def has_some(self) -> bool:
        """Whether there are letters, or were. Errors as `answer`."""
        return bool(stored_letters(self._url, self._key, self._broken.take))

    def answer(self, call: calls.Call) -> calls.Reply | None:
        """Answer a call; None for one about something else, and where there are no letters and never were.

        Raises `CheckpointError` for files that cannot be read where there are no others, and for letters that cannot
        go back `UnsupportedError`: then nothing is changed.
        """
        if not isinstance(call, _ABOUT_LETTERS):
            return None
        jobs = stored_letters(self._url, self._key, self._broken.take)
        self._broken.name(others=bool(jobs))
        return self._of_jobs(call, jobs) if jobs else None

    def _of_jobs(self, call: calls.Call, jobs: list[StoredLetters]) -> calls.Reply:
        if isinstance(call, calls.Purge):
            purged = sum(len(job.purge(frozenset(call.keys), self._broken.take)) for job in jobs)
            self._broken.name(others=bool(purged))
            return calls.Changed(purged)
        if isinstance(call, calls.Requeue):
            return self._requeue(dict.fromkeys(call.keys), jobs)
        if isinstance(call, calls.EditAndRequeue):
            return self._requeue({edit.key: edit.payload for edit in call.edits}, jobs)
        if isinstance(call, calls.ListRecords):
            wanted = calls.SelectRecords(call.state, call.stream, limit=call.limit, after=call.after)
            return calls.RecordList((page := _page(wanted, self._letters(jobs))).records, page.more)
        letters = self._letters(jobs)
        if isinstance(call, calls.SelectRecords):
            return _page(call, letters)
        if isinstance(call, calls.Stats):
            states = Counter(each.info.state for each in letters)
            return calls.StatsReply({"dead_letters": float(states[DEAD]), "waiting": float(states[WAITING])})
        if isinstance(call, calls.ListStreams):
            return _streams(letters)
        assert isinstance(call, calls.DeadGroups)
        return _groups(call, letters)

    def _requeue(
        self, payloads: Mapping[bytes, pa.RecordBatch | None], jobs: list[StoredLetters]
    ) -> calls.Changed:
        meant: dict[str, dict[bytes, bytes | None]] = {}
        view = VertexView("", self._url, is_stored=True, jobs=self._jobs())
        for each in self._letters(jobs):
            info = each.info
            if info.state == DEAD and info.key in payloads:
                payload = payloads[info.key]
                check_way_back(view, info, edited=payload is not None)
                if payload is not None:
                    payload = as_stored(payload, info.payload.schema, f"the record of {info.key.hex()}")
                new = None if payload is None else as_stream(payload).to_pybytes()
                meant.setdefault(info.title, {})[info.key] = new
        changed = sum(len(job.requeue(meant[job.job], self._broken.take)) for job in jobs if job.job in meant)
        self._broken.name(others=True)
        return calls.Changed(changed)

    def _letters(self, jobs: list[StoredLetters]) -> list[_Shown]:
        """Return all letters; the files are read again once they have changed."""
        status = [(job.job, job.status()) for job in jobs]
        if status != self._read[0]:
            letters = _in_order(jobs, self._broken)
            self._broken.name(others=bool(letters))
            self._read = status, letters
        return self._read[1]


def _in_order(jobs: Iterable[StoredLetters], broken: BrokenFiles) -> list[_Shown]:
    # A job that went back to an older checkpoint may have written a letter twice.
    found = {}
    for job in jobs:
        for _, letter in job.letters(broken.take):
            found[job.job, letter.letter] = _shown(job.job, letter, DEAD)
        for order in job.orders(broken=broken.take):
            found |= {(job.job, each.letter): _shown(job.job, each, WAITING) for each in order.letters}
    return sorted(found.values(), key=lambda shown: shown.place)


def _shown(job: str, letter: ChainLetter, state: str) -> _Shown:
    attempts = attempts_of(letter)
    # Tools know records by numbers of 64 bits, and none of 0.
    root = int.from_bytes(letter.letter[:8], "big") or 1
    info = calls.RecordInfo(
        key=letter.letter,
        stream=f"{job}/{letter.chain}",
        state=state,
        root=root,
        origin=root,
        attempt=attempts[-1].number,
        not_before_ms=0,
        history=attempts,
        payload=payload_of(letter),
        title=job,
        source=letter.chain,
    )
    return _Shown(info, letter.died_ms.to_bytes(8, "big") + letter.letter, letter.died_ms)


def _page(call: calls.SelectRecords, letters: list[_Shown]) -> calls.RecordPage:
    letters = [each for each in letters if each.info.state == call.state]
    if call.newest:
        letters = letters[::-1]
        behind = [each for each in letters if not call.after or each.place < call.after]
    else:
        behind = [each for each in letters if each.place > call.after]
    found: list[calls.RecordInfo] = []
    size, examined, more = 0, len(behind), b""
    for place, each in enumerate(behind):
        if len(found) == call.limit or size >= calls.MAX_PAGE_BYTES:
            examined, more = place, behind[place - 1].place
            break
        if _is_wanted(call, each):
            found.append(each.info)
            if not call.keys_only:
                size += each.info.payload.nbytes + sum(len(one.traceback) for one in each.info.history)
    keys = tuple(info.key for info in found)
    return calls.RecordPage(() if call.keys_only else tuple(found), keys, examined, more)


def _is_wanted(call: calls.SelectRecords, shown: _Shown) -> bool:
    info = shown.info
    return (
        call.stream in ("", info.stream, info.title)
        and (call.group == -1 or call.group == _number(info))
        and call.operator in ("", info.operator)
        and call.since_ms <= shown.died_ms < (call.until_ms or _NEVER_MS)
        and call.root in (0, info.root)
        and (not call.keys or info.key in call.keys)
        and (
            not call.text
            or call.text in info.reason
            or call.text in info.operator
            or says(info.payload, call.text.encode())
        )
    )


def _streams(letters: list[_Shown]) -> calls.StreamList:
    infos = [each.info for each in letters]
    counts = Counter((info.stream, info.title, info.source, info.state) for info in infos)
    found = [
        calls.StreamDetails(
            stream=stream,
            owner=job,
            title=job,
            source=chain,
            pending=0,
            waiting=counts[stream, job, chain, WAITING],
            in_delivery=0,
            dead=counts[stream, job, chain, DEAD],
            persisted=0,
            completed=0,
            failed=0,
            died=0,
            oldest_ms=0,
            max_pending=0,
            kind=calls.JobKind.TOPOLOGY,
        )
        for stream, job, chain in sorted({name[:3] for name in counts})
    ]
    return calls.StreamList(tuple(found))


def _groups(call: calls.DeadGroups, letters: list[_Shown]) -> calls.GroupList:
    groups: dict[tuple[str, int], list[_Shown]] = {}
    for each in letters:
        if each.info.state == DEAD and call.stream in ("", each.info.stream, each.info.title):
            groups.setdefault((each.info.stream, _number(each.info)), []).append(each)
    found = []
    for (stream, number), some in groups.items():
        operator, reason = some[0].info.operator, some[0].info.reason
        counts = len(some), some[0].died_ms, some[-1].died_ms
        found.append(calls.DeadGroup(stream, number, operator, kind_of(reason), reason, *counts))
    return calls.GroupList(tuple(sorted(found, key=lambda group: -group.count)), 1.0)


def _number(info: calls.RecordInfo) -> int:
    """Return the number of a letter's group: the same whenever the files are read."""
    return zlib.crc32(f"{info.operator}\0{kind_of(info.reason)}".encode())


SILENT_MS = 30_000
"""Drivers keep what they say every ten seconds."""

_STEP_MS = 10_000


@dataclass(frozen=True, slots=True)
class StoredReports:
    """A directory that has checkpoints somewhere below it, as a source; ``url`` is a path, or a URL of fsspec's.

    ``key`` is `CheckpointConfig.key` of the jobs; None: the one that is kept with their checkpoints.
    """

    url: str
    key: bytes | None = None
    left: ClassVar[str] = ""
    path: ClassVar[str] = ""
    killed: ClassVar[None] = None

    @property
    def name(self) -> str:
        return short_name(last_name(self.address))

    @property
    def address(self) -> str:
        return normal(self.url)

    identity = address

    def refreshed(self) -> StoredReports:
        return self

    def client(self, clock: Callable[[], Now]) -> ReportReader:
        return ReportReader(self.address, clock, self.key)


class ReportReader:
    """Answers as a board does, from the files of a directory."""

    def __init__(self, url: str, clock: Callable[[], Now], key: bytes | None = None) -> None:
        self._url = url
        self._clock = clock
        self._letters = LetterReader(url, key, self._jobs)
        self._broken = BrokenFiles()

    def call(self, call: calls.AnsweredBy[calls.R], *, deadline_ms: int | None = None) -> calls.R:
        """Answer a call.

        Raises `ConfigError` for a directory that is not there, `CheckpointError` where nothing in it can be read,
        `UnknownJobError`, and `UnsupportedError` for what takes a driver or a vertex.
        """
        return call.expected(self._answer(call))

    def _answer(self, call: calls.Call) -> calls.Reply:
        match call:
            case calls.ListJobs():
                return calls.JobList(self._jobs())
            case calls.GetJob():
                found = next((job for job in self._jobs() if job.job.owner == call.owner), None)
                if found is None:
                    raise UnknownJobError(
                        f"nothing is kept of job {call.owner!r} below {shown_url(self._url)}"
                    )
                return found
            case calls.GetHour():
                return calls.Hour(_STEP_MS, self._clock().wall_ms, {})
            case calls.ListAudit():
                return calls.AuditPage((), b"")
            case _:
                answer = self._letters.answer(call)
                if answer is None:
                    raise UnsupportedError(
                        f"{type(call).__name__}: {shown_url(self._url)} has what drivers have said last. To ask "
                        "something of a job, start its program"
                    )
                return answer

    def close(self) -> None:
        pass

    def _jobs(self) -> tuple[calls.AnnouncedJob, ...]:
        check_directory(self._url)
        now_ms = self._clock().wall_ms
        # A directory that was copied has a run twice.
        latest: dict[str, LastReport] = {}
        for report in find_reports(self._url, self._broken.take):
            latest.setdefault(report.job.owner, report)
        # Letters may be all that there is to see.
        self._broken.name(others=bool(latest) or self._letters.has_some)
        return tuple(_announced(report, now_ms) for report in latest.values())


def jobs_in_store(path: str, now: Now) -> tuple[calls.AnnouncedJob, ...]:
    """Return what the board of a vertex that is not there any more has in its store, the latest job first.

    Raises what opening and reading the store does.
    """
    jobs: list[calls.AnnouncedJob] = []
    for shard in sorted(Path(path).glob("shard-*")):
        store = LmdbStore.open(shard, read_only=True)
        try:
            with store.read() as txn:
                jobs += Board(store, txn, now).jobs(now).jobs
        finally:
            store.close()
    return tuple(sorted(jobs, key=lambda announced: announced.job.since_ms, reverse=True))


def _announced(report: LastReport, now_ms: int) -> calls.AnnouncedJob:
    job = report.job
    ago_ms = max(now_ms - job.at_ms, 0)
    is_gone = not job.final and _has_ended(job)
    is_silent = is_gone or (not job.final and ago_ms >= SILENT_MS)
    return calls.AnnouncedJob(job, ago_ms, is_silent, job.incidents, is_gone=is_gone)


def _has_ended(job: calls.JobDetails) -> bool:
    if job.pid and job.host == socket.gethostname():
        try:
            os.kill(job.pid, 0)
        except ProcessLookupError:
            return True
        except (PermissionError, OverflowError):
            pass  # another user's: it may be the driver
    return False


DEADLINE_MS = 3_000
"""So long a vertex may take to say how it is; it answers in a millisecond, or hangs."""

DIED = "died_per_second"
"""The series of `Hour` that says how many records of a vertex die."""

KEEP_GONE = 100
"""So many vertices are remembered whose program is there no more, those that were heard last."""

_AT_ONCE = 16


class Client(Protocol):
    """What a vertex is asked by; `ftlayer.vertex.client.client.VertexClient` is one."""

    def call(self, call: calls.AnsweredBy[calls.R], *, deadline_ms: int | None = None) -> calls.R:
        """Make one call and return its reply."""

    def close(self) -> None:
        """Give the connection up."""


@dataclass
class _Vertex:
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
        """``look`` is asked before each gathering, ``label`` names clients in logs, a vertex has ``deadline_ms``."""
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
        """Return what is remembered, by name; asks nothing. What has ended comes last.

        What runs is not among what was stored last.
        """
        with self._lock:
            views = [self._vertices[name].view for name in sorted(self._vertices)]
        views.sort(key=lambda view: view.is_gone or view.is_killed)
        there = {each.job.run for view in views if not view.is_stored for each in view.jobs}
        for place, view in enumerate(views):
            if view.is_stored:
                jobs = tuple(each for each in view.jobs if each.job.run not in there)
                views[place] = replace(view, jobs=jobs)
        return tuple(views)

    def names(self) -> JobNames:
        return JobNames(self.views())

    def client(self, vertex: str) -> Client:
        """Return what asks a vertex; `ConfigError` for a name that none has."""
        return self._named(vertex).client

    def error(self, vertex: str) -> FTLayerError | None:
        """Return why a vertex gave no answer when it was asked last, None if it did or has ended in order."""
        return self._named(vertex).error

    def job(self, vertex: str, owner: str, checkpoints_since_ms: int = 0) -> calls.AnnouncedJob:
        """Return all that a vertex knows of a job; of one that is gone what it said last, without what lists leave out.

        Raises `UnknownJobError`, and what its client does.
        """
        view = self._named(vertex).view
        if view.is_gone or view.is_killed:
            last = next((announced for announced in view.jobs if announced.job.owner == owner), None)
            if last is not None:
                return last
            raise UnknownJobError(f"job {owner!r} is not known of vertex {vertex}, whose program has ended")
        return self.client(vertex).call(calls.GetJob(owner, checkpoints_since_ms))

    def hour(self, vertex: str, owner: str = "") -> calls.Hour:
        """Return the last hour of a job, or of the vertex. Raises `UnknownJobError`, and what its client does."""
        view = self._named(vertex).view
        if view.is_gone or view.is_killed:
            raise VertexUnavailableError(f"vertex {vertex} has ended with its program")
        return self.client(vertex).call(calls.GetHour(owner))

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
                name = source.name if alike[source.name] == 1 else marked(source.name, source.identity)
                self._names[source.identity] = name
                is_stored = isinstance(source, StoredReports)
                view = VertexView(name, source.address, source.path, is_stored=is_stored, left=source.left)
                self._vertices[name] = _Vertex(source, self._connected(source), view)

    def _forget_some(self) -> None:
        with self._lock:
            gone = [each for each in self._vertices.values() if each.view.is_gone or each.view.is_killed]
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
            failure = vertex.source.killed or error  # it may have been killed while it was asked
            told = self._without_answer if failure is error else self._killed
            is_unreadable = isinstance(failure, UnreadableReplyError)
            view = replace(told(vertex.view, str(failure)), is_unreadable=is_unreadable)
        with self._lock:
            vertex.error = failure
            vertex.view = view

    def _looked_at(self, vertex: _Vertex) -> tuple[VertexView, FTLayerError | None]:
        before, source = vertex.view, vertex.source.refreshed()
        if source is None and not before.is_killed:
            return replace(self._without_answer(before, "its program has ended"), is_gone=True), None
        killed = vertex.error if source is None else source.killed
        if source is None or killed is not None:
            if before.is_killed:
                return replace(self._without_answer(before, before.failure), is_killed=True), killed
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
        return replace(self._without_answer(before, failure), is_killed=True, jobs=jobs)

    def _without_answer(self, before: VertexView, failure: str) -> VertexView:
        view = replace(before, is_up=False, is_gone=False, is_killed=False, is_unreadable=False)
        return replace(view, asked_ms=self._clock().wall_ms, failure=failure)

    def _follow(self, vertex: _Vertex, source: VertexSource | StoredReports) -> None:
        with self._lock:
            if vertex.source != source:
                vertex.client.close()
                vertex.source, vertex.client = source, self._connected(source)

    def _asked(self, call: calls.Asked, before: VertexView) -> VertexView:
        jobs = call(calls.ListJobs()).jobs
        view = self._without_answer(before, "")
        view = replace(view, is_up=True, as_of_ms=view.asked_ms, jobs=jobs)
        try:
            stats = call(calls.Stats())
        except UnsupportedError:
            return replace(view, has_records=False)
        streams = call(calls.ListStreams()).streams
        view = replace(view, has_records=True, stats=stats.values, circuits=stats.circuits, streams=streams)
        if not stats.values.get("dead_letters"):
            return replace(view, groups=(), indexed=1.0, died_lately=None)
        groups = call(calls.DeadGroups())
        died = _died_lately(call(calls.GetHour()))
        return replace(view, groups=groups.groups, indexed=groups.indexed, died_lately=died)


def _died_lately(hour: calls.Hour) -> int | None:
    """Return how many records died in the last minutes; None where some of them are not known."""
    points = hour.series.get(DIED, ())[-LATELY_MS // hour.step_ms :]
    if len(points) * hour.step_ms < LATELY_MS or any(map(math.isnan, points)):
        return None
    return round(sum(points) * hour.step_ms / 1_000)
