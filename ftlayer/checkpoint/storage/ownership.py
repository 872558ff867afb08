"""Which driver a job's directory belongs to: the one that has claimed it last. Earlier ones are fenced.

Each start of a job claims the next *epoch*, a small file of that number in ``_owners``, and looks for claims that came
meanwhile: a higher one, and it has lost; lower ones, and it removes them. It looks for checkpoints only then. An owner
checks before and after it publishes a checkpoint, before it commits one, and before it removes anything, that its own
claim stands and there is no next one. Nothing has to time out: a new driver takes over at once, whatever has become of
the driver before.

This rests on storage that shows later readers and listings what was written, as object stores do; no exclusive creation
is needed, and a listing may take its time. Where two claim one epoch in the same moment, one of the files is left, and
the owner of the other finds out.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.layout import OWNERS, job_directory, join
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, StaleOwnerError
from ftlayer.printable import shown_url

MOST_TRIES = 100
"""So often a driver claims: others may claim in the same moment, and a listing may take its time."""


class Ownership:
    """The claim of one execution of a job. For several threads at once."""

    def __init__(self, files: Files, job: str, run: str) -> None:
        """Take the directory over. Raises `CheckpointStorageError`, and `StaleOwnerError` if another one just has."""
        self._files = files
        self._job = job
        claim = {
            "run": run,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "at_ms": int(time.time() * 1_000),
        }
        self._claim = json.dumps(claim).encode()
        self._epoch = self._take()

    @property
    def epoch(self) -> int:
        """Grows with each start of the job."""
        return self._epoch

    def check(self) -> None:
        """Raise `StaleOwnerError` if another driver has taken over; `CheckpointStorageError` if that is unknown.

        It is unknown where there is no claim at all, as in a directory that was removed, or is not mounted: what is
        there in its place has to say nothing of this job, and may not be written to.
        """
        own = None
        if self._files.size(_path(self._epoch + 1)) is None:
            own = self._read(self._epoch)
            if own == self._claim:
                return
        # Who takes over claims first, and removes older claims then: one that is gone has followers.
        if own is None and not self._epochs():
            raise CheckpointStorageError(
                f"{shown_url(self._files.url)}: the claim of topology {self._job!r}, {_path(self._epoch)}, is not "
                "there, nor one of another driver: the directory was removed, or is not mounted. No checkpoint is "
                "completed until it is there again; if it is lost, start the topology again"
            )
        raise self._stale()

    def _stale(self) -> StaleOwnerError:
        return StaleOwnerError(
            f"topology {self._job!r} was started by another driver{self._by_whom()}, which goes on with its "
            f"checkpoints in {shown_url(self._files.url)}: this one ends, and commits nothing any more. Run one of "
            "them, or give each a name or a directory of its own"
        )

    def _take(self) -> int:
        epoch = 0
        for _ in range(MOST_TRIES):
            epoch = 1 + max(self._epochs(), default=0)
            self._files.put_new(_path(epoch), self._claim)
            # Of two that do not wait for each other one at least sees the other's claim behind its own: then it is
            # refused, or removes that one.
            there = self._epochs()
            if max(there, default=0) > epoch:
                raise self._stale()
            if self._read(epoch) == self._claim:
                # In their order: an owner whose claim is left has to find the next one.
                for old in sorted(set(there) - {epoch}):
                    self._files.delete(_path(old))
                return epoch
        raise CheckpointStorageError(
            f"{shown_url(self._files.url)}: topology {self._job!r} cannot be claimed: its claims, {_path(epoch)} "
            f"is the last of {MOST_TRIES}, are not listed, or not read as they were written. Two drivers could have "
            "one job on such a storage; see what ftlayer.checkpoint.storage.conformance says of it"
        )

    def _epochs(self) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._files.walk(OWNERS))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, epoch: int) -> bytes | None:
        try:
            return self._files.read(_path(epoch))
        except CheckpointDamagedError:
            # It is not there.
            return None

    def _by_whom(self) -> str:
        try:
            data = self._read(max(self._epochs(), default=0))
            claim: dict[str, Any] = json.loads(data or b"{}")
        except (CheckpointStorageError, ValueError):
            return ""
        return f" (run {claim['run']} on {claim['host']}, process {claim['pid']})" if claim.get("run") else ""


def take_over(directory: str | None, job: str, run: str) -> Ownership | None:
    """Claim a job's directory; None for driver memory, which no other driver reaches."""
    return None if directory is None else Ownership(open_files(job_directory(directory, job)), job, run)


def _path(epoch: int) -> str:
    return join(OWNERS, str(epoch))
