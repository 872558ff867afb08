"""The board itself: announcements, and what is kept of jobs."""

from __future__ import annotations

from bisect import insort
from dataclasses import replace

from ftlayer.clock import Now
from ftlayer.errors import StaleOwnerError, StoreDamagedError, UnknownJobError
from ftlayer.store import board as tables
from ftlayer.store.kv import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.vertex.calls import (
    Announced,
    AnnouncedJob,
    AnnounceJob,
    AskJob,
    CheckpointDetails,
    GetJob,
    Hour,
    JobDetails,
    JobList,
    OrderRecord,
)
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.board.entries import (
    JobEntry,
    checkpoint_values,
    job_values,
    listed,
    read_checkpoint,
    read_details,
    read_job,
    read_order,
)
from ftlayer.vertex.rules.board.orders import BoardOrders, is_full
from ftlayer.vertex.rules.hour import JobHours

SILENT_MS = 30_000
"""A driver that was not heard for so long is called silent."""

WRITE_EVERY_MS = 10_000
TRIM_EVERY_MS = 60_000

KEEP_GONE = 200
KEEP_GONE_MS = 7 * 24 * 3_600_000
KEEP_CHECKPOINTS = 100
KEEP_CHECKPOINTS_GONE = 20
KEEP_RUNS = 16
SHOWN_ORDERS = 20


class Board:
    """See the module. Times are Unix ms; what has passed is told by the wall clock, which outlives a restart."""

    def __init__(self, store: KeyValueStore, txn: ReadTransaction, now: Now) -> None:
        """Read what the store has. Raises `StoreDamagedError`."""
        self._store = store
        self._jobs: dict[str, JobEntry] = {}
        self._hours = JobHours()
        # Jobs were not heard while there was no board to hear them.
        self._started_ms = self._trimmed_ms = now.wall_ms
        self._orders = BoardOrders(store, now.wall_ms)
        for owner, values in tables.all_jobs(txn):
            self._jobs[owner] = read_job(owner, values)
        for owner, values in tables.all_orders(txn):
            order = read_order(owner, values)
            self._known_job(owner).orders[order.order.id] = order
        for owner, key in tables.checkpoint_keys(txn):
            self._known_job(owner).checkpoints.append(key)
        for job in self._jobs.values():
            self._orders.recover(job)

    def announce(self, txn: WriteTransaction, call: AnnounceJob, owner_run: str, now: Now) -> Announced:
        """Take an announcement; ``owner_run`` is the run that the job belongs to, "" where that is not known.

        What comes behind the last word of its run was said before it, and changes nothing. Raises `StaleOwnerError` for
        a run that another one has followed.
        """
        details = call.job
        job = self._jobs.get(details.owner)
        self._check_run(details, job, owner_run)
        if job is None or job.details.run != details.run:
            job = self._begin_run(txn, details, job, now)
        elif job.details.final and not details.final:
            return Announced((), job.known, False)
        changed = job.written_ms < 0 or (job.details.state, job.details.final) != (
            details.state,
            details.final,
        )
        self._orders.take_answers(txn, job, call.answers, now)
        ended = [point for point in details.checkpoints if point.ended_ms]
        under_way = tuple(point for point in details.checkpoints if not point.ended_ms)
        plan = details.plan or job.details.plan
        job.details = replace(details, plan=plan, checkpoints=under_way)
        job.is_whole = True
        job.heard_ms = now.wall_ms
        self._hours.note(details, now)
        job.add_incidents(details.incidents)
        self._keep_checkpoints(txn, job, ended)
        if changed or (now.wall_ms - job.written_ms >= WRITE_EVERY_MS and self._has_room()):
            self._write(txn, job, now)
        return Announced(self._orders.under_way(txn, job, now), job.known, plan is None)

    def ask(self, txn: WriteTransaction, call: AskJob, now: Now) -> OrderRecord:
        """Take an order, or say what has become of it.

        Raises `UnknownJobError` unless its job is alive, `ProtocolError` for an id that another order has, and where
        the job has `MAX_ORDERS` younger than `KEEP_ORDERS_MS`.
        """
        order = call.order
        job = self._of(order.owner)
        return self._orders.known(txn, job, order, now) or self._orders.ask(txn, job, order, now)

    def jobs(self, now: Now) -> JobList:
        """Return all jobs, the latest first."""
        latest_first = sorted(self._jobs.values(), key=lambda job: job.details.since_ms, reverse=True)
        return JobList(tuple(self._announced(job, listed(job.details), now) for job in latest_first))

    def job(self, txn: ReadTransaction, call: GetJob, now: Now) -> AnnouncedJob:
        """Return one job; `UnknownJobError` where none of that owner is known."""
        job = self._of(call.owner)
        details = job.details if job.is_whole else self._stored_details(txn, call.owner)
        ended = tuple(
            read_checkpoint(call.owner, values)
            for values in tables.checkpoints(txn, call.owner, call.checkpoints_since_ms)
        )
        announced = self._announced(job, replace(details, checkpoints=(*ended, *details.checkpoints)), now)
        orders = tuple(order.record for order in job.orders.values())
        return replace(announced, orders=orders[-SHOWN_ORDERS:])

    def hour(self, owner: str, now: Now) -> Hour:
        """Return a job's last hour; `UnknownJobError` where none of that owner is known."""
        self._of(owner)
        return self._hours.hour(owner, now)

    def tick(self, txn: WriteTransaction, now: Now) -> None:
        """Do what time brings: orders expire, jobs that are gone leave memory, and in the end the store."""
        self._orders.tick(txn, now)
        if now.wall_ms - self._trimmed_ms >= TRIM_EVERY_MS:
            self._trimmed_ms = now.wall_ms
            self._trim(txn, now)
            audit.trim(txn, now)

    def next_tick_ms(self, now: Now) -> int:
        """Return the monotone time (ms) at which `tick` has something to do."""
        next_ms = min(self._trimmed_ms + TRIM_EVERY_MS, self._orders.next_tick_ms())
        return now.mono_ms + max(next_ms - now.wall_ms, 0)

    # ------------------------------------------------------------ runs

    def _check_run(self, details: JobDetails, job: JobEntry | None, owner_run: str) -> None:
        follower = ""
        if owner_run not in ("", details.run):
            follower = owner_run
        elif job is not None and details.run in job.former:
            follower = job.details.run
        if follower:
            raise StaleOwnerError(
                f"{details.kind} {details.name!r} was started again, as run {follower}: this run, {details.run}, is "
                "not shown any more"
            )

    def _begin_run(
        self, txn: WriteTransaction, details: JobDetails, before: JobEntry | None, now: Now
    ) -> JobEntry:
        """Take a new run; orders to the one before have come to their end."""
        if before is None:
            job = JobEntry(replace(details, plan=None), True, False, now.wall_ms, -1)
            self._jobs[details.owner] = job
            return job
        self._orders.end_run(txn, before, now)
        before.former = (*before.former, before.details.run)[-KEEP_RUNS:]
        before.details = replace(details, plan=None)
        before.written_ms, before.known = -1, 0
        return before

    # ------------------------------------------------------------ what is kept

    def _keep_checkpoints(self, txn: WriteTransaction, job: JobEntry, ended: list[CheckpointDetails]) -> None:
        """Store checkpoints that have ended; without room they stay unknown, and are announced again."""
        new = [point for point in ended if point.number > job.known]
        if not new or not self._has_room():
            return
        for point in new:
            key = tables.checkpoint_key(job.details.owner, point.ended_ms, point.number)
            if key not in job.checkpoints:
                tables.put_checkpoint(txn, key, checkpoint_values(point))
                insort(job.checkpoints, key)
        self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS)
        # One that is under way may end behind those that were triggered later.
        ended_up_to = max(point.number for point in new)
        under_way = min((point.number for point in job.details.checkpoints), default=ended_up_to + 1)
        job.known = max(job.known, min(ended_up_to, under_way - 1))

    def _drop_checkpoints(self, txn: WriteTransaction, job: JobEntry, keep: int) -> None:
        for key in job.checkpoints[:-keep]:
            tables.delete_checkpoint(txn, key)
        del job.checkpoints[:-keep]

    def _has_room(self) -> bool:
        """Whether the store has room for what could be left out. The rest of it is for records."""
        return self._store.used_share < INTAKE_SHARE

    def _write(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        if is_full(self._store):
            return
        job.written_ms, job.is_stored = now.wall_ms, True
        details = job.details if self._has_room() else listed(job.details)
        tables.put_job(txn, job.details.owner, job_values(job, details))

    def _trim(self, txn: WriteTransaction, now: Now) -> None:
        gone = [job for job in self._jobs.values() if self._is_gone(job, now)]
        gone.sort(key=lambda job: job.heard_ms, reverse=True)
        for place, job in enumerate(gone):
            if place >= KEEP_GONE or now.wall_ms - job.heard_ms >= KEEP_GONE_MS:
                del self._jobs[job.details.owner]
                self._orders.forget(job.details.owner)
                self._hours.forget(job.details.owner)
                tables.forget(txn, job.details.owner)
            elif job.is_whole and self._has_room():
                self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS_GONE)
                self._write(txn, job, now)
                job.details, job.is_whole = listed(job.details), False

    def _is_gone(self, job: JobEntry, now: Now) -> bool:
        return job.details.final or self._is_silent(job, now)

    def _is_silent(self, job: JobEntry, now: Now) -> bool:
        since_ms = max(job.heard_ms, self._started_ms)
        return not job.details.final and now.wall_ms - since_ms >= SILENT_MS

    def _announced(self, job: JobEntry, details: JobDetails, now: Now) -> AnnouncedJob:
        heard_ago_ms = max(now.wall_ms - job.heard_ms, 0)
        return AnnouncedJob(details, heard_ago_ms, self._is_silent(job, now), job.incidents)

    def _stored_details(self, txn: ReadTransaction, owner: str) -> JobDetails:
        values = tables.get_job(txn, owner)
        if values is None:
            raise StoreDamagedError(f"the store lacks job {owner!r}, which it had")
        return read_details(owner, values)

    def _of(self, owner: str) -> JobEntry:
        job = self._jobs.get(owner)
        if job is None:
            raise UnknownJobError(f"no job {owner!r} has announced itself: see which there are (ListJobs)")
        return job

    def _known_job(self, owner: str) -> JobEntry:
        job = self._jobs.get(owner)
        if job is None:
            raise StoreDamagedError(f"the store has orders or checkpoints of job {owner!r} and no such job")
        return job
