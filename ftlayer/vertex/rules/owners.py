"""Which run a topology's streams belong to: the one that has claimed it last. Earlier ones are fenced.

Nothing has to time out: a new driver takes over at once, whatever has become of the run before. What that one has
under way when it is recalled has roots that are no longer known, and what it adds later is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from ftlayer.common.clock import Now
from ftlayer.errors import ProtocolError, StaleOwnerError
from ftlayer.vertex.calls import ClaimJob, JobClaimed, handles
from ftlayer.vertex.store.key_value import ReadTransaction, WriteTransaction
from ftlayer.vertex.store.meta import all_jobs, put_job

INGEST = "ingest/"


def owner_of(stream: str) -> str:
    """Return what a stream belongs to: its query or job, or the whole name of an ingest."""
    return stream if stream.startswith(INGEST) else stream.split("/", 1)[0]


class Owners:
    """The runs that have claimed the topologies of one shard."""

    def __init__(self) -> None:
        self._runs: dict[str, str] = {}

    def recover(self, txn: ReadTransaction) -> None:
        self._runs = dict(all_jobs(txn))

    @handles(ClaimJob)
    def claim(self, txn: WriteTransaction, call: ClaimJob, now: Now) -> JobClaimed:
        previous = self._runs.get(call.job, "")
        put_job(txn, call.job, call.run)
        self._runs[call.job] = call.run
        return JobClaimed(previous)

    def run_of(self, job: str) -> str:
        """Return the run that has claimed a job, "" if none has."""
        return self._runs.get(job, "")

    def check(self, streams: Iterable[str], owner: str) -> None:
        """Raise `StaleOwnerError` if a job of ``streams`` belongs to another run than ``owner`` ("": any)."""
        if not owner:
            return
        for job in {owner_of(stream) for stream in streams}:
            run = self._runs.get(job)
            if run is None:
                raise ProtocolError(f"run {owner} has not claimed job {job!r}: begin with ClaimJob")
            if run != owner:
                raise StaleOwnerError(
                    f"topology {job!r} was started again by another driver, as run {run}, which goes on with its "
                    f"records: this one, {owner}, ends, and the vertex takes nothing of it any more. Run one of them, "
                    "or give each a name of its own"
                )
