"""What drivers that are gone have said last of their jobs: beside checkpoints, or in the store of their vertex.

The dead letters of jobs without a vertex are beside their checkpoints, too.

Directories with checkpoints are looked at as boards are. Nothing can be asked of a job there.
"""

from __future__ import annotations

import logging
import os
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.letters_for_tools import attempts_of, payload_of
from ftlayer.checkpoint.storage.dead_letters import StoredLetters, stored_letters
from ftlayer.checkpoint.storage.last_reports import LastReport, find_reports
from ftlayer.checkpoint.storage.layout import last_name, normal
from ftlayer.checkpoint.storage.loading import check_directory
from ftlayer.clock import Now
from ftlayer.errors import CheckpointError, UnknownJobError, UnsupportedError, VertexUnavailableError
from ftlayer.monitor.sources import short_name
from ftlayer.printable import shown_url
from ftlayer.records.sought import says
from ftlayer.store import LmdbStore
from ftlayer.vertex.calls import (
    MAX_PAGE_BYTES,
    AnnouncedJob,
    AuditPage,
    Call,
    Changed,
    DeadGroup,
    DeadGroups,
    EditAndRequeue,
    GetHour,
    GetJob,
    GroupList,
    Hour,
    JobDetails,
    JobKind,
    JobList,
    ListAudit,
    ListJobs,
    ListRecords,
    ListStreams,
    Purge,
    RecordInfo,
    RecordList,
    RecordPage,
    Reply,
    Requeue,
    SelectRecords,
    Stats,
    StatsReply,
    StreamDetails,
    StreamList,
)
from ftlayer.vertex.rules.board import Board
from ftlayer.vertex.rules.grouping import kind_of

logger = logging.getLogger(__name__)


_NEVER_MS = (1 << 63) - 1


class BrokenFiles:
    """Files below a directory that cannot be read, beside others that can: they are named in the log, each once."""

    def __init__(self) -> None:
        self._named: set[str] = set()
        self._found: list[CheckpointError] = []

    def take(self, error: CheckpointError) -> None:
        """One cannot be read, as the error says."""
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

    info: RecordInfo
    place: bytes
    died_ms: int


class LetterReader:
    """Answers as a vertex does that has only dead letters. A key is the name of its letter."""

    def __init__(self, url: str, key: bytes | None = None) -> None:
        """``key`` is `CheckpointConfig.key` of the jobs; None: the one that is kept with their checkpoints."""
        self._url = url
        self._key = key
        self._read: tuple[object, list[_Shown]] = (), []
        self._broken = BrokenFiles()

    @property
    def has_some(self) -> bool:
        """Whether there are letters, or were. Errors as `answer`."""
        return bool(stored_letters(self._url, self._key, self._broken.take))

    def answer(self, call: Call) -> Reply | None:
        """Answer a call; None for one about something else, and where there are no letters and never were.

        Raises `CheckpointError` for files that cannot be read where there are no others, and `UnsupportedError` for
        what takes a vertex.
        """
        match call:
            case Requeue() | EditAndRequeue():
                raise UnsupportedError(
                    f"the letters in {shown_url(self._url)} are of jobs without a vertex, so there is nothing to "
                    "requeue them with: give the job's environment one (board=FTLayer.connect(…)) and start it "
                    "again; it sends them there, and a requeued one goes back into the job"
                )
            case Stats() | ListStreams() | DeadGroups() | SelectRecords() | ListRecords() | Purge():
                jobs = stored_letters(self._url, self._key, self._broken.take)
                self._broken.name(others=bool(jobs))
                return self._of_jobs(call, jobs) if jobs else None
        return None

    def _of_jobs(self, call: Call, jobs: list[StoredLetters]) -> Reply:
        if isinstance(call, Purge):
            purged = sum(len(job.purge(frozenset(call.keys), self._broken.take)) for job in jobs)
            self._broken.name(others=bool(purged))
            return Changed(purged)
        if isinstance(call, ListRecords):
            wanted = SelectRecords(call.state, call.stream, limit=call.limit, after=call.after)
            page = _page(wanted, self._letters(jobs))
            return RecordList(page.records, page.more)
        letters = self._letters(jobs)
        if isinstance(call, SelectRecords):
            return _page(call, letters)
        if isinstance(call, Stats):
            return StatsReply({"dead_letters": float(len(letters))})
        if isinstance(call, ListStreams):
            return _streams(letters)
        assert isinstance(call, DeadGroups)
        return _groups(call, letters)

    def _letters(self, jobs: list[StoredLetters]) -> list[_Shown]:
        """Return all letters; the files are read again once they have changed."""
        status = [(job.job, job.status()) for job in jobs]
        if status != self._read[0]:
            letters = _in_order(jobs, self._broken)
            self._broken.name(others=bool(letters))
            self._read = status, letters
        return self._read[1]


def _in_order(jobs: Iterable[StoredLetters], broken: BrokenFiles) -> list[_Shown]:
    """Return all letters, in the order of their deaths; ``broken`` is told of files that cannot be read."""
    # A job that went back to an older checkpoint may have written a letter twice.
    found = {
        (job.job, letter.letter): _shown(job.job, letter)
        for job in jobs
        for _, letter in job.letters(broken.take)
    }
    return sorted(found.values(), key=lambda shown: shown.place)


def _shown(job: str, letter: ChainLetter) -> _Shown:
    attempts = attempts_of(letter)
    # Tools know records by numbers of 64 bits, and none of 0.
    root = int.from_bytes(letter.letter[:8], "big") or 1
    info = RecordInfo(
        key=letter.letter,
        stream=f"{job}/{letter.chain}",
        state="dead",
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


def _page(call: SelectRecords, letters: list[_Shown]) -> RecordPage:
    if call.state != "dead":
        return RecordPage((), (), 0, b"")
    if call.newest:
        letters = letters[::-1]
        behind = [each for each in letters if not call.after or each.place < call.after]
    else:
        behind = [each for each in letters if each.place > call.after]
    found: list[_Shown] = []
    size = 0
    for examined, each in enumerate(behind):
        if len(found) == call.limit or size >= MAX_PAGE_BYTES:
            return _page_of(call, found, examined, behind[examined - 1].place)
        if _is_wanted(call, each):
            found.append(each)
            if not call.keys_only:
                size += each.info.payload.nbytes + sum(len(one.traceback) for one in each.info.history)
    return _page_of(call, found, len(behind), b"")


def _page_of(call: SelectRecords, found: list[_Shown], examined: int, more: bytes) -> RecordPage:
    infos = () if call.keys_only else tuple(each.info for each in found)
    return RecordPage(infos, tuple(each.info.key for each in found), examined, more)


def _is_wanted(call: SelectRecords, shown: _Shown) -> bool:
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


def _streams(letters: list[_Shown]) -> StreamList:
    counts = Counter((each.info.stream, each.info.title, each.info.source) for each in letters)
    return StreamList(
        tuple(
            StreamDetails(
                stream=stream,
                owner=job,
                title=job,
                source=chain,
                pending=0,
                waiting=0,
                in_delivery=0,
                dead=count,
                persisted=0,
                completed=0,
                failed=0,
                died=0,
                oldest_ms=0,
                max_pending=0,
                kind=JobKind.TOPOLOGY,
            )
            for (stream, job, chain), count in sorted(counts.items())
        )
    )


def _groups(call: DeadGroups, letters: list[_Shown]) -> GroupList:
    groups: dict[tuple[str, int], list[_Shown]] = {}
    for each in letters:
        if call.stream in ("", each.info.stream, each.info.title):
            groups.setdefault((each.info.stream, _number(each.info)), []).append(each)
    found = [
        DeadGroup(
            stream,
            number,
            some[0].info.operator,
            kind_of(some[0].info.reason),
            some[0].info.reason,
            len(some),
            some[0].died_ms,
            some[-1].died_ms,
        )
        for (stream, number), some in groups.items()
    ]
    return GroupList(tuple(sorted(found, key=lambda group: -group.count)), 1.0)


def _number(info: RecordInfo) -> int:
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

    @property
    def name(self) -> str:
        return short_name(last_name(normal(self.url)))

    @property
    def address(self) -> str:
        return normal(self.url)

    @property
    def path(self) -> str:
        return ""

    @property
    def identity(self) -> str:
        return self.address

    @property
    def killed(self) -> VertexUnavailableError | None:
        """Nothing serves it."""
        return None

    def refreshed(self) -> StoredReports:
        """Return it: it stays where it is."""
        return self

    def client(self, clock: Callable[[], Now]) -> ReportReader:
        return ReportReader(self.address, clock, self.key)


class ReportReader:
    """Answers as a board does, from the files of a directory."""

    def __init__(self, url: str, clock: Callable[[], Now], key: bytes | None = None) -> None:
        self._url = url
        self._clock = clock
        self._letters = LetterReader(url, key)
        self._broken = BrokenFiles()

    def call(self, call: Call, *, deadline_ms: int | None = None) -> Reply:
        """Answer a call.

        Raises `ConfigError` for a directory that is not there, `CheckpointError` where nothing in it can be read,
        `UnknownJobError`, and `UnsupportedError` for what takes a driver or a vertex.
        """
        match call:
            case ListJobs():
                return JobList(self._jobs())
            case GetJob():
                found = next((job for job in self._jobs() if job.job.owner == call.owner), None)
                if found is None:
                    raise UnknownJobError(
                        f"nothing is kept of job {call.owner!r} below {shown_url(self._url)}"
                    )
                return found
            case GetHour():
                return Hour(_STEP_MS, self._clock().wall_ms, {})
            case ListAudit():
                return AuditPage((), b"")
            case _:
                answer = self._letters.answer(call)
                if answer is None:
                    raise UnsupportedError(
                        f"{type(call).__name__}: {shown_url(self._url)} has what drivers have said last. To ask "
                        "something of a job, start its program"
                    )
                return answer

    def close(self) -> None:
        """Nothing is open."""

    def _jobs(self) -> tuple[AnnouncedJob, ...]:
        check_directory(self._url)
        now_ms = self._clock().wall_ms
        # A directory that was copied has a run twice.
        latest: dict[str, LastReport] = {}
        for report in find_reports(self._url, self._broken.take):
            latest.setdefault(report.job.owner, report)
        # Letters may be all that there is to see.
        self._broken.name(others=bool(latest) or self._letters.has_some)
        return tuple(_announced(report, now_ms) for report in latest.values())


def jobs_in_store(path: str, now: Now) -> tuple[AnnouncedJob, ...]:
    """Return what the board of a vertex that is not there any more has in its store, the latest job first.

    Raises what opening and reading the store does.
    """
    jobs: list[AnnouncedJob] = []
    for shard in sorted(Path(path).glob("shard-*")):
        store = LmdbStore.open(shard, read_only=True)
        try:
            with store.read() as txn:
                jobs += Board(store, txn, now).jobs(now).jobs
        finally:
            store.close()
    return tuple(sorted(jobs, key=lambda announced: announced.job.since_ms, reverse=True))


def _announced(report: LastReport, now_ms: int) -> AnnouncedJob:
    job = report.job
    ago_ms = max(now_ms - job.at_ms, 0)
    is_silent = not job.final and (ago_ms >= SILENT_MS or _has_ended(job))
    return AnnouncedJob(job, ago_ms, is_silent, job.incidents)


def _has_ended(job: JobDetails) -> bool:
    """Whether the driver of a job was on this machine and is not there any more."""
    if not job.pid or job.host != socket.gethostname():
        return False
    try:
        os.kill(job.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # another user's: it may be the driver
        return False
    return False
