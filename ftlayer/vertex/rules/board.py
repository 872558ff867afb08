"""The board: which jobs there are, how they fared when their drivers announced them last, and orders to them.

Drivers announce, tools list and ask; no tool reaches a driver. An order goes from its asker over the board to the run
that it names, with the reply to that run's next announcement. It is carried out once or not at all:

- it waits until its run has said that it has taken it; after `ORDER_EXPIRES_MS` without that word it expires, and a
  word that comes later changes nothing;
- a run carries it out when the board has shown that it knows of that word (see `Announced`);
- an id stands for one order. Asked again, it is answered with what has become of it.

What a board says is in memory. It is written down at each change of a job's state, and every `WRITE_EVERY_MS`; orders
and checkpoints that ended at once. Where a store has no room left for reports, they are not written until it has; where
it is full nothing is, orders neither.

A board needs a store and no vertex: a driver that has none keeps one by itself, over a `MemoryStore`. As with
`FTLayerCore`, memory is ahead of the store until a transaction is committed: if it is lost, make a new board.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ftlayer.common.clock import Now
from ftlayer.errors import (
    MalformedRequestError,
    ProtocolError,
    StaleOwnerError,
    StoreDamagedError,
    UnknownJobError,
)
from ftlayer.transport.codec import Codec, plain_codec
from ftlayer.vertex import calls
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.audit import JobHours
from ftlayer.vertex.store.key_value import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.vertex.store.rows import pack, unpack

KEEP_INCIDENTS = 200

_JOB_FORMAT = 1
_DETAILS = plain_codec(calls.JobDetails)
_INCIDENT = plain_codec(calls.Incident)
_CHECKPOINT = plain_codec(calls.CheckpointDetails)
_ORDER = plain_codec(calls.JobOrder)
_ANSWER = plain_codec(calls.OrderAnswer)


@dataclass(slots=True)
class OrderEntry:
    """An order and what has become of it. ``asked_ms`` is by the board's clock."""

    order: calls.JobOrder
    answer: calls.OrderAnswer
    asked_ms: int

    @property
    def ended(self) -> bool:
        return self.answer.state.is_final

    def end(self, state: calls.OrderState, text: str, now_ms: int) -> None:
        self.answer = calls.OrderAnswer(self.order.id, state, text, now_ms)

    def end_with_run(self, now_ms: int) -> None:
        run = self.order.run
        if self.answer.state is calls.OrderState.WAITING:
            self.end(calls.OrderState.EXPIRED, f"run {run} has ended without taking it", now_ms)
        else:
            text = f"run {run} had taken it and has ended without a word of it: it may be carried out or not"
            self.end(calls.OrderState.FAILED, text, now_ms)

    @property
    def record(self) -> calls.OrderRecord:
        return calls.OrderRecord(self.order, self.answer)


@dataclass(slots=True)
class JobEntry:
    """A job.

    Attributes:
        details: as it was announced last, with its plan, and of its checkpoints those under way. Of a job that is gone
            as `listed` has it, and the rest is in the store: then ``is_whole`` is False.
        heard_ms: when it was heard last; ``written_ms`` when it was stored last, -1: this run never was.
        former: the runs before, which have no say any more.
        known: as `Announced.known_checkpoint`.
        died_ms: when the run's count of dead letters rose last, None where it did not.
        checkpoints: keys of those that have ended, by the time of their end.
    """

    details: calls.JobDetails
    is_whole: bool
    is_stored: bool
    heard_ms: int
    written_ms: int
    incidents: tuple[calls.Incident, ...] = ()
    former: tuple[str, ...] = ()
    known: int = 0
    died_ms: int | None = None
    orders: dict[str, OrderEntry] = field(default_factory=dict)
    checkpoints: list[bytes] = field(default_factory=list)

    def add_incidents(self, new: tuple[calls.Incident, ...]) -> None:
        if not set(new) <= set(self.incidents):
            merged = dict.fromkeys((*self.incidents, *new))
            self.incidents = tuple(sorted(merged, key=lambda incident: incident.at_ms))[-KEEP_INCIDENTS:]


def listed(details: calls.JobDetails) -> calls.JobDetails:
    """Return a job as `ListJobs` shows it."""
    return replace(details, plan=None, checkpoints=(), batches=(), histograms={})


# The table ``board`` of a store: jobs as they were announced last, orders to them, and their checkpoints.
#
# Keys begin with what it is and the owner of the job; the owner ends with a NUL, which names do not have. Of a
# checkpoint Unix milliseconds of its end (u64) and its number (u64) follow, big-endian, so that they are in order.
# What cannot be read is a `StoreDamagedError`.


_TABLE = "board"
_JOBS, _ORDERS, _CHECKPOINTS = b"job/", b"order/", b"checkpoint/"
_TIME_BYTES = 8


def put_job(txn: WriteTransaction, job: JobEntry, details: calls.JobDetails) -> None:
    incidents = [_INCIDENT.pack(incident) for incident in job.incidents]
    values = [_JOB_FORMAT, _DETAILS.pack(details), incidents, job.heard_ms, job.former, job.known]
    txn.put(_TABLE, _prefix(_JOBS, details.owner), pack(values))


def stored_details(txn: ReadTransaction, owner: str) -> calls.JobDetails:
    value = txn.get(_TABLE, _prefix(_JOBS, owner))
    if value is None:
        raise StoreDamagedError(f"the store lacks job {owner!r}, which it had")
    details: calls.JobDetails = _unpacked(_DETAILS, unpack(value)[1], f"job {owner!r}")
    return details


def all_jobs(txn: ReadTransaction) -> Iterator[JobEntry]:
    for key, value in txn.scan(_TABLE, _JOBS, _after(_JOBS)):
        what = f"job {_owner_of(key, _JOBS)!r}"
        try:
            version, details, incidents, heard_ms, former, known = unpack(value)
            if version != _JOB_FORMAT:
                raise ValueError(f"format {version}")
            yield JobEntry(
                details=listed(_unpacked(_DETAILS, details, what)),
                is_whole=False,
                is_stored=True,
                heard_ms=int(heard_ms),
                written_ms=int(heard_ms),
                incidents=tuple(_unpacked(_INCIDENT, incident, what) for incident in incidents),
                former=tuple(former),
                known=int(known),
            )
        except (ValueError, TypeError) as error:
            raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error


def put_order(txn: WriteTransaction, entry: OrderEntry) -> None:
    values = [_ORDER.pack(entry.order), _ANSWER.pack(entry.answer), entry.asked_ms]
    txn.put(_TABLE, _order_key(entry), pack(values))


def all_orders(txn: ReadTransaction) -> Iterator[tuple[str, OrderEntry]]:
    for key, value in txn.scan(_TABLE, _ORDERS, _after(_ORDERS)):
        owner = _owner_of(key, _ORDERS)
        what = f"an order to job {owner!r}"
        try:
            order, answer, asked_ms = unpack(value)
            order, answer = _unpacked(_ORDER, order, what), _unpacked(_ANSWER, answer, what)
            yield owner, OrderEntry(order, answer, int(asked_ms))
        except (ValueError, TypeError) as error:
            raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error


def delete_order(txn: WriteTransaction, entry: OrderEntry) -> None:
    txn.delete(_TABLE, _order_key(entry))


def checkpoint_key(owner: str, ended_ms: int, number: int) -> bytes:
    tail = ended_ms.to_bytes(_TIME_BYTES, "big") + number.to_bytes(_TIME_BYTES, "big")
    return _prefix(_CHECKPOINTS, owner) + tail


def checkpoint_keys(txn: ReadTransaction) -> Iterator[tuple[str, bytes]]:
    """Iterate over the owners and keys of all checkpoints, of one owner by the time of their end."""
    for key, _ in txn.scan(_TABLE, _CHECKPOINTS, _after(_CHECKPOINTS)):
        yield _owner_of(key, _CHECKPOINTS), bytes(key)


def checkpoints(txn: ReadTransaction, owner: str, since_ms: int) -> Iterator[calls.CheckpointDetails]:
    prefix, what = _prefix(_CHECKPOINTS, owner), f"a checkpoint of job {owner!r}"
    for _, value in txn.scan(_TABLE, prefix + since_ms.to_bytes(_TIME_BYTES, "big"), _after(prefix)):
        yield _unpacked(_CHECKPOINT, unpack(value)[0], what)


def forget(txn: WriteTransaction, owner: str) -> None:
    for kind in (_JOBS, _ORDERS, _CHECKPOINTS):
        prefix = _prefix(kind, owner)
        for key, _ in txn.scan(_TABLE, prefix, _after(prefix)):
            txn.delete(_TABLE, key)


def _prefix(kind: bytes, owner: str) -> bytes:
    return kind + owner.encode() + b"\0"


def _order_key(entry: OrderEntry) -> bytes:
    return _prefix(_ORDERS, entry.order.owner) + entry.order.id.encode()


def _owner_of(key: bytes, kind: bytes) -> str:
    try:
        return key[len(kind) : key.index(b"\0", len(kind))].decode()
    except ValueError as error:
        raise StoreDamagedError(f"key {key.hex()} of the store is no job's: {error}") from error


def _after(prefix: bytes) -> bytes:
    """Return the end of the keys that begin with ``prefix``, whose last byte is below 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def _unpacked(codec: Codec, value: Any, what: str) -> Any:
    try:
        return codec.unpack(value, what)
    except MalformedRequestError as error:
        raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error


MAX_ORDERS = 100
KEEP_ORDERS_MS = 600_000
"""An order that has come to its end is known for so long at least."""

# Above 0.95 a store on disk takes deletes alone, and memory would be lost with each announcement.
_FULL_SHARE = 0.94
_NEVER_MS = 1 << 62


class BoardOrders:
    """The orders of all jobs. They are entries of their jobs; times are Unix ms."""

    def __init__(self, store: KeyValueStore, started_ms: int) -> None:
        """No job could take an order before ``started_ms``, since there was no board."""
        self._store = store
        self._started_ms = started_ms
        # Jobs with orders that have not come to their end, and perhaps some more. What there is to do is asked often.
        self._asked: dict[str, JobEntry] = {}

    def recover(self, job: JobEntry) -> None:
        if job.orders:
            job.orders = dict(sorted(job.orders.items(), key=lambda item: item[1].asked_ms))
            self._asked[job.details.owner] = job

    def forget(self, owner: str) -> None:
        self._asked.pop(owner, None)

    def known(
        self, txn: WriteTransaction, job: JobEntry, order: calls.JobOrder, now: Now
    ) -> calls.OrderRecord | None:
        """Return what has become of an order, None for a new one. `ProtocolError` for an id that another one has."""
        entry = job.orders.get(order.id)
        if entry is None:
            return None
        if entry.order != order:
            raise ProtocolError(f"order {order.id!r} of {order.owner!r} is another one: draw a new id")
        self._expire(txn, job, now)
        return entry.record

    def ask(self, txn: WriteTransaction, job: JobEntry, order: calls.JobOrder, now: Now) -> calls.OrderRecord:
        """Take a new order; `UnknownJobError` for a job that has ended, `ProtocolError` for too many young ones."""
        if job.details.final:
            raise UnknownJobError(
                f"job {order.owner!r} has ended ({job.details.state}): nothing can be asked of it"
            )
        self._make_room(txn, job, now)
        entry = OrderEntry(
            order, calls.OrderAnswer(order.id, calls.OrderState.WAITING, "", now.wall_ms), now.wall_ms
        )
        if order.run != job.details.run:
            text = f"it is for run {order.run}, and run {job.details.run} is what {order.owner!r} is now"
            entry.end(calls.OrderState.REFUSED, text, now.wall_ms)
        job.orders[order.id] = entry
        self._asked[order.owner] = job
        self._write(txn, job, entry, now)
        return entry.record

    def take_answers(
        self, txn: WriteTransaction, job: JobEntry, answers: tuple[calls.OrderAnswer, ...], now: Now
    ) -> None:
        """Take what a run says of its orders; those that have come to their end stay as they are."""
        self._expire(txn, job, now)
        for answer in answers:
            entry = job.orders.get(answer.id)
            if entry is None or entry.ended or entry.answer.state is answer.state:
                continue
            entry.answer = answer
            self._write(txn, job, entry, now)

    def under_way(self, txn: WriteTransaction, job: JobEntry, now: Now) -> tuple[calls.JobOrder, ...]:
        self._expire(txn, job, now)
        return tuple(entry.order for entry in job.orders.values() if not entry.ended)

    def end_run(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        """Bring all orders of a job to their end, since another run takes its place."""
        for entry in job.orders.values():
            if not entry.ended:
                entry.end_with_run(now.wall_ms)
                self._write(txn, job, entry, now)

    def tick(self, txn: WriteTransaction, now: Now) -> None:
        for job in list(self._asked.values()):
            self._expire(txn, job, now)

    def next_tick_ms(self) -> int:
        """Return when (Unix ms) `tick` has something to do."""
        return min(
            (
                self._deadline_ms(job, entry)
                for job in self._asked.values()
                for entry in job.orders.values()
                if not entry.ended
            ),
            default=_NEVER_MS,
        )

    def _expire(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        """End the orders of a job whose time is over: no run has taken them, or the run that had has ended since."""
        for entry in job.orders.values():
            if entry.ended or now.wall_ms < self._deadline_ms(job, entry):
                continue
            if entry.answer.state is calls.OrderState.TAKEN or job.details.final:
                entry.end_with_run(now.wall_ms)
            else:
                text = f"its run has not taken it within {calls.ORDER_EXPIRES_MS // 1_000} s"
                entry.end(calls.OrderState.EXPIRED, text, now.wall_ms)
            self._write(txn, job, entry, now)
        if all(entry.ended for entry in job.orders.values()):
            self._asked.pop(job.details.owner, None)

    def _deadline_ms(self, job: JobEntry, entry: OrderEntry) -> int:
        since_ms = max(entry.asked_ms, self._started_ms)
        if entry.answer.state is calls.OrderState.WAITING:
            return job.heard_ms if job.details.final else since_ms + calls.ORDER_EXPIRES_MS
        if not job.details.final:
            return _NEVER_MS  # a savepoint may take an hour, and its driver be away for some of it
        return max(since_ms, job.heard_ms) + calls.ORDER_EXPIRES_MS

    def _make_room(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        if len(job.orders) < MAX_ORDERS:
            return
        for entry in job.orders.values():
            if entry.ended and now.wall_ms - entry.asked_ms >= KEEP_ORDERS_MS:
                del job.orders[entry.order.id]
                delete_order(txn, entry)
                return
        raise ProtocolError(
            f"job {job.details.owner!r} was given {MAX_ORDERS} orders within {KEEP_ORDERS_MS // 60_000} minutes: "
            "wait until some of them are older"
        )

    def _write(self, txn: WriteTransaction, job: JobEntry, entry: OrderEntry, now: Now) -> None:
        """Store an order, and write its line of the audit log where it was asked just now or has come to its end."""
        if is_full(self._store) or not job.is_stored:
            return
        order, answer = entry.order, entry.answer
        put_order(txn, entry)
        if answer.state is calls.OrderState.TAKEN:
            return
        state = "asked" if answer.state is calls.OrderState.WAITING else str(answer.state)
        audit.note(
            txn,
            now,
            who=order.by,
            what=str(order.action),
            which=f"{order.owner}, run {order.run}",
            count=1,
            outcome=f"{state}: {answer.text}" if answer.text else state,
        )


def is_full(store: KeyValueStore) -> bool:
    """Whether a store may soon take deletes alone: then what is said of jobs stays in memory."""
    return store.used_share >= _FULL_SHARE


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
        self._store = store
        self._hours = JobHours()
        # Jobs were not heard while there was no board to hear them.
        self._started_ms = self._trimmed_ms = now.wall_ms
        self._orders = BoardOrders(store, now.wall_ms)
        self._jobs = {job.details.owner: job for job in all_jobs(txn)}
        for owner, order in all_orders(txn):
            self._known_job(owner).orders[order.order.id] = order
        for owner, key in checkpoint_keys(txn):
            self._known_job(owner).checkpoints.append(key)
        for job in self._jobs.values():
            self._orders.recover(job)

    def announce(
        self, txn: WriteTransaction, call: calls.AnnounceJob, owner_run: str, now: Now
    ) -> calls.Announced:
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
            return calls.Announced((), job.known, False)
        changed = job.written_ms < 0 or (job.details.state, job.details.final) != (
            details.state,
            details.final,
        )
        self._orders.take_answers(txn, job, call.answers, now)
        ended = [point for point in details.checkpoints if point.ended_ms]
        under_way = tuple(point for point in details.checkpoints if not point.ended_ms)
        if details.dead > job.details.dead:
            job.died_ms = now.wall_ms
        plan = details.plan or job.details.plan
        job.details = replace(details, plan=plan, checkpoints=under_way)
        job.is_whole = True
        job.heard_ms = now.wall_ms
        self._hours.note(details, now)
        job.add_incidents(details.incidents)
        self._keep_checkpoints(txn, job, ended)
        if changed or (now.wall_ms - job.written_ms >= WRITE_EVERY_MS and self._has_room()):
            self._write(txn, job, now)
        return calls.Announced(self._orders.under_way(txn, job, now), job.known, plan is None)

    @calls.handles(calls.AskJob)
    def ask(self, txn: WriteTransaction, call: calls.AskJob, now: Now) -> calls.OrderRecord:
        """Take an order, or say what has become of it. Raises as `BoardOrders`, `UnknownJobError` without the job."""
        order = call.order
        job = self._of(order.owner)
        return self._orders.known(txn, job, order, now) or self._orders.ask(txn, job, order, now)

    def jobs(self, now: Now) -> calls.JobList:
        latest_first = sorted(self._jobs.values(), key=lambda job: job.details.since_ms, reverse=True)
        return calls.JobList(tuple(self._announced(job, listed(job.details), now) for job in latest_first))

    @calls.handles(calls.GetJob)
    def job(self, txn: ReadTransaction, call: calls.GetJob, now: Now) -> calls.AnnouncedJob:
        job = self._of(call.owner)
        details = job.details if job.is_whole else stored_details(txn, call.owner)
        ended = checkpoints(txn, call.owner, call.checkpoints_since_ms)
        announced = self._announced(job, replace(details, checkpoints=(*ended, *details.checkpoints)), now)
        orders = tuple(order.record for order in job.orders.values())
        return replace(announced, orders=orders[-SHOWN_ORDERS:])

    def hour(self, owner: str, now: Now) -> calls.Hour:
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
        next_ms = min(self._trimmed_ms + TRIM_EVERY_MS, self._orders.next_tick_ms())
        return now.mono_ms + max(next_ms - now.wall_ms, 0)

    def _check_run(self, details: calls.JobDetails, job: JobEntry | None, owner_run: str) -> None:
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
        self, txn: WriteTransaction, details: calls.JobDetails, before: JobEntry | None, now: Now
    ) -> JobEntry:
        if before is None:
            job = JobEntry(replace(details, plan=None), True, False, now.wall_ms, -1)
            self._jobs[details.owner] = job
            return job
        self._orders.end_run(txn, before, now)
        before.former = (*before.former, before.details.run)[-KEEP_RUNS:]
        before.details = replace(details, plan=None)
        before.written_ms, before.known, before.died_ms = -1, 0, None
        return before

    def _keep_checkpoints(
        self, txn: WriteTransaction, job: JobEntry, ended: list[calls.CheckpointDetails]
    ) -> None:
        """Store checkpoints that have ended; without room they stay unknown, and are announced again."""
        new = [point for point in ended if point.number > job.known]
        if not new or not self._has_room():
            return
        for point in new:
            key = checkpoint_key(job.details.owner, point.ended_ms, point.number)
            if key not in job.checkpoints:
                txn.put(_TABLE, key, pack([_CHECKPOINT.pack(point)]))
                insort(job.checkpoints, key)
        self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS)
        # One that is under way may end behind those that were triggered later.
        ended_up_to = max(point.number for point in new)
        under_way = min((point.number for point in job.details.checkpoints), default=ended_up_to + 1)
        job.known = max(job.known, min(ended_up_to, under_way - 1))

    def _drop_checkpoints(self, txn: WriteTransaction, job: JobEntry, keep: int) -> None:
        for key in job.checkpoints[:-keep]:
            txn.delete(_TABLE, key)
        del job.checkpoints[:-keep]

    def _has_room(self) -> bool:
        """Whether the store has room for what could be left out. The rest of it is for records."""
        return self._store.used_share < INTAKE_SHARE

    def _write(self, txn: WriteTransaction, job: JobEntry, now: Now) -> None:
        if is_full(self._store):
            return
        job.written_ms, job.is_stored = now.wall_ms, True
        details = job.details if self._has_room() else listed(job.details)
        put_job(txn, job, details)

    def _trim(self, txn: WriteTransaction, now: Now) -> None:
        gone = [job for job in self._jobs.values() if job.details.final or self._is_silent(job, now)]
        gone.sort(key=lambda job: job.heard_ms, reverse=True)
        for place, job in enumerate(gone):
            if place >= KEEP_GONE or now.wall_ms - job.heard_ms >= KEEP_GONE_MS:
                del self._jobs[job.details.owner]
                self._orders.forget(job.details.owner)
                self._hours.forget(job.details.owner)
                forget(txn, job.details.owner)
            elif job.is_whole and self._has_room():
                self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS_GONE)
                self._write(txn, job, now)
                job.details, job.is_whole = listed(job.details), False

    def _is_silent(self, job: JobEntry, now: Now) -> bool:
        since_ms = max(job.heard_ms, self._started_ms)
        return not job.details.final and now.wall_ms - since_ms >= SILENT_MS

    def _announced(self, job: JobEntry, details: calls.JobDetails, now: Now) -> calls.AnnouncedJob:
        heard_ago_ms = max(now.wall_ms - job.heard_ms, 0)
        died_ago_ms = -1 if job.died_ms is None else max(now.wall_ms - job.died_ms, 0)
        return calls.AnnouncedJob(
            details, heard_ago_ms, self._is_silent(job, now), job.incidents, died_ago_ms=died_ago_ms
        )

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
