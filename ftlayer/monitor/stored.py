"""What drivers that are gone have said last of their jobs: beside checkpoints, or in the store of their vertex.

The dead letters of jobs without a vertex are beside their checkpoints, too.

Directories with checkpoints are looked at as boards are. Nothing can be asked of a job there.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ftlayer.checkpoint.storage.last_reports import LastReport, find_reports
from ftlayer.checkpoint.storage.layout import last_name, normal
from ftlayer.checkpoint.storage.loading import check_directory
from ftlayer.clock import Now
from ftlayer.errors import UnknownJobError, UnsupportedError, VertexUnavailableError
from ftlayer.monitor.sources import short_name
from ftlayer.monitor.stored_letters import BrokenFiles, LetterReader
from ftlayer.printable import shown_url
from ftlayer.store import LmdbStore
from ftlayer.vertex.calls import (
    AnnouncedJob,
    AuditPage,
    Call,
    GetHour,
    GetJob,
    Hour,
    JobDetails,
    JobList,
    ListAudit,
    ListJobs,
    Reply,
)
from ftlayer.vertex.rules.board import Board

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
        """A short word for it."""
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
