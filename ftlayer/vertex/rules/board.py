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
from dataclasses import dataclass, field, replace
from typing import Any

from ftlayer.clock import Now
from ftlayer.errors import (
    MalformedRequestError,
    ProtocolError,
    StaleOwnerError,
    StoreDamagedError,
    UnknownJobError,
)
from ftlayer.store import board as tables
from ftlayer.store.kv import INTAKE_SHARE, KeyValueStore, ReadTransaction, WriteTransaction
from ftlayer.transport.codec import Codec, plain_codec
from ftlayer.vertex.calls import (
    ORDER_EXPIRES_MS,
    Announced,
    AnnouncedJob,
    AnnounceJob,
    AskJob,
    CheckpointDetails,
    GetJob,
    Hour,
    Incident,
    JobDetails,
    JobList,
    JobOrder,
    OrderAnswer,
    OrderRecord,
    OrderState,
)
from ftlayer.vertex.rules import audit
from ftlayer.vertex.rules.hour import JobHours

SILENT_MS = 30_000
"""A driver that was not heard for so long is called silent."""

WRITE_EVERY_MS = 10_000
TRIM_EVERY_MS = 60_000

KEEP_GONE = 200
KEEP_GONE_MS = 7 * 24 * 3_600_000
KEEP_INCIDENTS = 200
KEEP_CHECKPOINTS = 100
KEEP_CHECKPOINTS_GONE = 20
KEEP_RUNS = 16
MAX_ORDERS = 100
KEEP_ORDERS_MS = 600_000
"""An order that has come to its end is known for so long at least."""

SHOWN_ORDERS = 20

_NEVER_MS = 1 << 62
_NOT_TAKEN = "run {} has ended without taking it"
_UNKNOWN = "run {} had taken it and has ended without a word of it: it may be carried out or not"

# Above 0.95 a store on disk takes deletes alone, and memory would be lost with each announcement.
_FULL_SHARE = 0.94

_OUTCOMES = {OrderState.WAITING: "asked"}

_JOB_FORMAT = 1
_DETAILS = plain_codec(JobDetails)
_INCIDENT = plain_codec(Incident)
_CHECKPOINT = plain_codec(CheckpointDetails)
_ORDER = plain_codec(JobOrder)
_ANSWER = plain_codec(OrderAnswer)


@dataclass(slots=True)
class _Order:
    order: JobOrder
    answer: OrderAnswer
    asked_ms: int  # by the board's clock

    @property
    def ended(self) -> bool:
        return self.answer.state.is_final

    def end(self, state: OrderState, text: str, now_ms: int) -> None:
        self.answer = OrderAnswer(self.order.id, state, text, now_ms)

    @property
    def record(self) -> OrderRecord:
        return OrderRecord(self.order, self.answer)


@dataclass(slots=True)
class _Job:
    """A job. ``details`` have its plan, and of its checkpoints those under way.

    Of a job that is gone they are as they are listed, and the rest is in the store. ``former`` are the runs before,
    which have no say any more. ``known`` as `Announced.known_checkpoint`.
    """

    details: JobDetails
    is_whole: bool
    is_stored: bool
    heard_ms: int
    written_ms: int
    incidents: tuple[Incident, ...] = ()
    former: tuple[str, ...] = ()
    known: int = 0
    orders: dict[str, _Order] = field(default_factory=dict)
    checkpoints: list[bytes] = field(default_factory=list)  # keys, by the time of their end


class Board:
    """See the module. Times are Unix ms; what has passed is told by the wall clock, which outlives a restart."""

    def __init__(self, store: KeyValueStore, txn: ReadTransaction, now: Now) -> None:
        """Read what the store has. Raises `StoreDamagedError`."""
        self._store = store
        self._jobs: dict[str, _Job] = {}
        self._hours = JobHours()
        # Jobs were not heard while there was no board to hear them, and could not take orders.
        self._started_ms = self._trimmed_ms = now.wall_ms
        for owner, values in tables.all_jobs(txn):
            self._jobs[owner] = _read_job(owner, values)
        for owner, values in tables.all_orders(txn):
            order = _read_order(owner, values)
            self._known_job(owner).orders[order.order.id] = order
        for owner, key in tables.checkpoint_keys(txn):
            self._known_job(owner).checkpoints.append(key)
        for job in self._jobs.values():
            job.orders = dict(sorted(job.orders.items(), key=lambda item: item[1].asked_ms))
        # Jobs with orders that have not come to their end, and perhaps some more. What there is to do is asked often.
        self._asked = {owner: job for owner, job in self._jobs.items() if job.orders}

    def announce(self, txn: WriteTransaction, call: AnnounceJob, owner_run: str, now: Now) -> Announced:
        """Take an announcement; ``owner_run`` is the run that the job belongs to, "" where that is not known.

        Raises `StaleOwnerError` for a run that another one has followed.
        """
        details = call.job
        job = self._jobs.get(details.owner)
        self._check_run(details, job, owner_run)
        if job is None or job.details.run != details.run:
            job = self._begin_run(txn, details, job, now)
        changed = job.written_ms < 0 or (job.details.state, job.details.final) != (
            details.state,
            details.final,
        )
        self._take_answers(txn, job, call.answers, now)
        ended = [point for point in details.checkpoints if point.ended_ms]
        under_way = tuple(point for point in details.checkpoints if not point.ended_ms)
        plan = details.plan or job.details.plan
        job.details = replace(details, plan=plan, checkpoints=under_way)
        job.is_whole = True
        job.heard_ms = now.wall_ms
        self._hours.note(details, now)
        job.incidents = _merged(job.incidents, details.incidents)
        self._keep_checkpoints(txn, job, ended)
        if changed or (now.wall_ms - job.written_ms >= WRITE_EVERY_MS and self._has_room()):
            self._write(txn, job, now)
        self._expire(txn, job, now)
        orders = tuple(order.order for order in job.orders.values() if not order.ended)
        return Announced(orders, job.known, plan is None)

    def ask(self, txn: WriteTransaction, call: AskJob, now: Now) -> OrderRecord:
        """Take an order, or say what has become of it.

        Raises `UnknownJobError` unless its job is alive, `ProtocolError` for an id that another order has, and where
        the job has `MAX_ORDERS` younger than `KEEP_ORDERS_MS`.
        """
        order = call.order
        job = self._jobs.get(order.owner)
        known = None if job is None else job.orders.get(order.id)
        if job is not None and known is not None:
            if known.order != order:
                raise ProtocolError(f"order {order.id!r} of {order.owner!r} is another one: draw a new id")
            self._expire(txn, job, now)
            return known.record
        if job is None:
            raise UnknownJobError(
                f"no job {order.owner!r} has announced itself: see which there are (ListJobs)"
            )
        if job.details.final:
            raise UnknownJobError(
                f"job {order.owner!r} has ended ({job.details.state}): nothing can be asked of it"
            )
        self._make_room(txn, job, now)
        asked = _Order(order, OrderAnswer(order.id, OrderState.WAITING, "", now.wall_ms), now.wall_ms)
        if order.run != job.details.run:
            text = f"it is for run {order.run}, and run {job.details.run} is what {order.owner!r} is now"
            asked.end(OrderState.REFUSED, text, now.wall_ms)
        job.orders[order.id] = asked
        self._asked[order.owner] = job
        self._write_order(txn, asked, now)
        return asked.record

    def jobs(self, now: Now) -> JobList:
        """Return all jobs, the latest first."""
        latest_first = sorted(self._jobs.values(), key=lambda job: job.details.since_ms, reverse=True)
        return JobList(tuple(self._announced(job, _listed(job.details), now) for job in latest_first))

    def job(self, txn: ReadTransaction, call: GetJob, now: Now) -> AnnouncedJob:
        """Return one job; `UnknownJobError` where none of that owner is known."""
        job = self._of(call.owner)
        details = job.details if job.is_whole else self._stored_details(txn, call.owner)
        ended = tuple(
            _unpacked(_CHECKPOINT, values[0], f"a checkpoint of job {call.owner!r}")
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
        for job in list(self._asked.values()):
            self._expire(txn, job, now)
        if now.wall_ms - self._trimmed_ms >= TRIM_EVERY_MS:
            self._trimmed_ms = now.wall_ms
            self._trim(txn, now)
            audit.trim(txn, now)

    def next_tick_ms(self, now: Now) -> int:
        """Return the monotone time (ms) at which `tick` has something to do."""
        times = [self._trimmed_ms + TRIM_EVERY_MS]
        for job in self._asked.values():
            times += [self._deadline_ms(job, order) for order in job.orders.values() if not order.ended]
        return now.mono_ms + max(min(times) - now.wall_ms, 0)

    # ------------------------------------------------------------ runs

    def _check_run(self, details: JobDetails, job: _Job | None, owner_run: str) -> None:
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

    def _begin_run(self, txn: WriteTransaction, details: JobDetails, before: _Job | None, now: Now) -> _Job:
        """Take a new run; orders to the one before have come to their end."""
        if before is None:
            job = _Job(replace(details, plan=None), True, False, now.wall_ms, -1)
            self._jobs[details.owner] = job
            return job
        for order in before.orders.values():
            if order.answer.state is OrderState.WAITING:
                order.end(OrderState.EXPIRED, _NOT_TAKEN.format(order.order.run), now.wall_ms)
                self._write_order(txn, order, now)
            elif order.answer.state is OrderState.TAKEN:
                order.end(OrderState.FAILED, _UNKNOWN.format(order.order.run), now.wall_ms)
                self._write_order(txn, order, now)
        before.former = (*before.former, before.details.run)[-KEEP_RUNS:]
        before.details = replace(details, plan=None)
        before.written_ms, before.known = -1, 0
        return before

    # ------------------------------------------------------------ orders

    def _take_answers(
        self, txn: WriteTransaction, job: _Job, answers: tuple[OrderAnswer, ...], now: Now
    ) -> None:
        self._expire(txn, job, now)
        for answer in answers:
            order = job.orders.get(answer.id)
            if order is None or order.ended or order.answer.state is answer.state:
                continue
            order.answer = answer
            self._write_order(txn, order, now)

    def _expire(self, txn: WriteTransaction, job: _Job, now: Now) -> None:
        """End orders whose time is over: nobody has taken them, or the run that had has ended since."""
        for order in job.orders.values():
            if order.ended or now.wall_ms < self._deadline_ms(job, order):
                continue
            if order.answer.state is OrderState.TAKEN:
                order.end(OrderState.FAILED, _UNKNOWN.format(order.order.run), now.wall_ms)
            elif job.details.final:
                order.end(OrderState.EXPIRED, _NOT_TAKEN.format(order.order.run), now.wall_ms)
            else:
                seconds = ORDER_EXPIRES_MS // 1_000
                order.end(OrderState.EXPIRED, f"its run has not taken it within {seconds} s", now.wall_ms)
            self._write_order(txn, order, now)
        if all(order.ended for order in job.orders.values()):
            self._asked.pop(job.details.owner, None)

    def _deadline_ms(self, job: _Job, order: _Order) -> int:
        since_ms = max(order.asked_ms, self._started_ms)
        if order.answer.state is OrderState.WAITING:
            return job.heard_ms if job.details.final else since_ms + ORDER_EXPIRES_MS
        if not job.details.final:
            return _NEVER_MS  # a savepoint may take an hour, and its driver be away for some of it
        return max(since_ms, job.heard_ms) + ORDER_EXPIRES_MS

    def _make_room(self, txn: WriteTransaction, job: _Job, now: Now) -> None:
        """Forget the oldest order that has ended, if there are too many for one more."""
        if len(job.orders) < MAX_ORDERS:
            return
        for order in job.orders.values():
            if order.ended and now.wall_ms - order.asked_ms >= KEEP_ORDERS_MS:
                del job.orders[order.order.id]
                tables.delete_order(txn, order.order.owner, order.order.id)
                return
        raise ProtocolError(
            f"job {job.details.owner!r} was given {MAX_ORDERS} orders within {KEEP_ORDERS_MS // 60_000} minutes: "
            "wait until some of them are older"
        )

    def _write_order(self, txn: WriteTransaction, order: _Order, now: Now) -> None:
        """Store an order, and write its line of the audit log where it was asked just now or has come to its end."""
        owner = order.order.owner
        if self._is_full() or not self._jobs[owner].is_stored:
            return
        values: list[Any] = [_ORDER.pack(order.order), _ANSWER.pack(order.answer), order.asked_ms]
        tables.put_order(txn, owner, order.order.id, values)
        if order.answer.state is not OrderState.TAKEN:
            outcome = f"{_OUTCOMES.get(order.answer.state, order.answer.state)}: {order.answer.text}"
            audit.note(
                txn,
                now,
                who=order.order.by,
                what=str(order.order.action),
                which=f"{owner}, run {order.order.run}",
                count=1,
                outcome=outcome.removesuffix(": "),
            )

    # ------------------------------------------------------------ what is kept

    def _keep_checkpoints(self, txn: WriteTransaction, job: _Job, ended: list[CheckpointDetails]) -> None:
        """Store checkpoints that have ended; without room they stay unknown, and are announced again."""
        new = [point for point in ended if point.number > job.known]
        if not new or not self._has_room():
            return
        for point in new:
            key = tables.checkpoint_key(job.details.owner, point.ended_ms, point.number)
            if key not in job.checkpoints:
                tables.put_checkpoint(txn, key, [_CHECKPOINT.pack(point)])
                insort(job.checkpoints, key)
        self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS)
        # One that is under way may end behind those that were triggered later.
        ended_up_to = max(point.number for point in new)
        under_way = min((point.number for point in job.details.checkpoints), default=ended_up_to + 1)
        job.known = max(job.known, min(ended_up_to, under_way - 1))

    def _drop_checkpoints(self, txn: WriteTransaction, job: _Job, keep: int) -> None:
        for key in job.checkpoints[:-keep]:
            tables.delete_checkpoint(txn, key)
        del job.checkpoints[:-keep]

    def _has_room(self) -> bool:
        """Whether the store has room for what could be left out. The rest of it is for records."""
        return self._store.used_share < INTAKE_SHARE

    def _is_full(self) -> bool:
        """Whether the store may soon take deletes alone: then what is said of jobs stays in memory."""
        return self._store.used_share >= _FULL_SHARE

    def _write(self, txn: WriteTransaction, job: _Job, now: Now) -> None:
        if self._is_full():
            return
        job.written_ms, job.is_stored = now.wall_ms, True
        details = job.details if self._has_room() else _listed(job.details)
        incidents = [_INCIDENT.pack(incident) for incident in job.incidents]
        values = [_JOB_FORMAT, _DETAILS.pack(details), incidents, job.heard_ms, job.former, job.known]
        tables.put_job(txn, job.details.owner, values)

    def _trim(self, txn: WriteTransaction, now: Now) -> None:
        gone = [job for job in self._jobs.values() if self._is_gone(job, now)]
        gone.sort(key=lambda job: job.heard_ms, reverse=True)
        for place, job in enumerate(gone):
            if place >= KEEP_GONE or now.wall_ms - job.heard_ms >= KEEP_GONE_MS:
                del self._jobs[job.details.owner]
                self._asked.pop(job.details.owner, None)
                self._hours.forget(job.details.owner)
                tables.forget(txn, job.details.owner)
            elif job.is_whole and self._has_room():
                self._drop_checkpoints(txn, job, KEEP_CHECKPOINTS_GONE)
                self._write(txn, job, now)
                job.details, job.is_whole = _listed(job.details), False

    def _is_gone(self, job: _Job, now: Now) -> bool:
        return job.details.final or self._is_silent(job, now)

    def _is_silent(self, job: _Job, now: Now) -> bool:
        since_ms = max(job.heard_ms, self._started_ms)
        return not job.details.final and now.wall_ms - since_ms >= SILENT_MS

    def _announced(self, job: _Job, details: JobDetails, now: Now) -> AnnouncedJob:
        heard_ago_ms = max(now.wall_ms - job.heard_ms, 0)
        return AnnouncedJob(details, heard_ago_ms, self._is_silent(job, now), job.incidents)

    def _stored_details(self, txn: ReadTransaction, owner: str) -> JobDetails:
        values = tables.get_job(txn, owner)
        if values is None:
            raise StoreDamagedError(f"the store lacks job {owner!r}, which it had")
        details: JobDetails = _unpacked(_DETAILS, values[1], f"job {owner!r}")
        return details

    def _of(self, owner: str) -> _Job:
        job = self._jobs.get(owner)
        if job is None:
            raise UnknownJobError(f"no job {owner!r} has announced itself: see which there are (ListJobs)")
        return job

    def _known_job(self, owner: str) -> _Job:
        job = self._jobs.get(owner)
        if job is None:
            raise StoreDamagedError(f"the store has orders or checkpoints of job {owner!r} and no such job")
        return job


def _merged(before: tuple[Incident, ...], new: tuple[Incident, ...]) -> tuple[Incident, ...]:
    """Return incidents of all runs, each once, oldest first."""
    if set(new) <= set(before):
        return before
    merged = dict.fromkeys((*before, *new))
    return tuple(sorted(merged, key=lambda incident: incident.at_ms))[-KEEP_INCIDENTS:]


def _listed(details: JobDetails) -> JobDetails:
    """Return a job as `ListJobs` shows it."""
    return replace(details, plan=None, checkpoints=(), batches=(), histograms={})


# ---------------------------------------------------------------- as they are stored


def _read_order(owner: str, values: list[Any]) -> _Order:
    what = f"an order to job {owner!r}"
    try:
        order, answer, asked_ms = values
        return _Order(_unpacked(_ORDER, order, what), _unpacked(_ANSWER, answer, what), int(asked_ms))
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error


def _read_job(owner: str, values: list[Any]) -> _Job:
    what = f"job {owner!r}"
    try:
        version, details, incidents, heard_ms, former, known = values
        if version != _JOB_FORMAT:
            raise ValueError(f"format {version}")
        return _Job(
            details=_listed(_unpacked(_DETAILS, details, what)),
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


def _unpacked(codec: Codec, value: Any, what: str) -> Any:
    try:
        return codec.unpack(value, what)
    except MalformedRequestError as error:
        raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error
