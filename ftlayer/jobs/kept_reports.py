"""Keeps what is said of jobs beside their checkpoints, every ten seconds and at the end: for when the driver is gone.

It is a board that gives no orders: announced to by a thread of its own, since a file system may be slow.
"""

from __future__ import annotations

import threading

from ftlayer.checkpoint.storage.last_reports import put_report
from ftlayer.errors import UnsupportedError
from ftlayer.jobs.announcer import JobAnnouncer, Telling
from ftlayer.vertex.calls import Announced, AnnounceJob, Call, Reply

EVERY_S = 10.0


class ReportKeeper:
    """Keeps the reports of a program's jobs, each in the checkpoint directory of its run."""

    def __init__(self, *, every_s: float = EVERY_S) -> None:
        """``every_s``: the pause between two reports of a job. Starts nothing."""
        self._lock = threading.Lock()
        self._directories: dict[str, str] = {}
        self._announcer = JobAnnouncer(self, every_s=every_s)

    def add(self, telling: Telling, directory: str) -> None:
        """Keep the reports of a job below ``directory`` from now on, until it is over."""
        with self._lock:
            self._directories[telling.run] = directory
        self._announcer.add(telling)

    def close(self) -> None:
        """Keep all jobs' reports once more, and end."""
        self._announcer.close()

    def call(self, call: Call, *, deadline_ms: int = 0) -> Reply:
        if not isinstance(call, AnnounceJob):
            raise UnsupportedError(f"{type(call).__name__}: reports are kept here, and nothing is asked for")
        job = call.job
        with self._lock:
            directory = self._directories[job.run]
        put_report(directory, job)
        if job.final:
            with self._lock:
                del self._directories[job.run]
        return Announced((), 0, wants_plan=True)


_program = ReportKeeper()


def kept_reports() -> ReportKeeper:
    """Return what keeps the reports of this program's jobs."""
    return _program
