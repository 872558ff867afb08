"""Calls about jobs: drivers announce what they run, tools list it and give orders.

A *job* is a topology or a wrapped query; its *owner* is what its streams begin with (`ftlayer.vertex.rules.streams`).
Its driver announces it about once a second, and gets with the answer what tools have asked of it: no tool connects to a
driver. Times are Unix ms, durations ms, shares 0 to 1.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar

from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.common.rules.histogram import Exemplar, Histogram
from ftlayer.errors import ConfigError, MalformedRequestError
from ftlayer.vertex.calls.common import (
    MAX_RUN_BYTES,
    AnsweredBy,
    MutatingCall,
    ReadingCall,
    Reply,
    Route,
    check_least,
    check_limit,
    check_name,
)
from ftlayer.vertex.calls.streams import BatchState

ORDER_EXPIRES_MS = 60_000
"""An order that its driver has not taken for so long is not carried out any more."""


class JobKind(StrEnum):
    TOPOLOGY = "topology"
    QUERY = "query"


@dataclass(frozen=True, slots=True)
class PlanNode:
    """A chain of the graph: its ``uid``, its operators' names in their order, and how many subtasks it has."""

    uid: str
    names: tuple[str, ...]
    parallelism: int


@dataclass(frozen=True, slots=True)
class PlanEdge:
    """Records from one chain to another; ``tag``: a side output; ``feedback``: back to an iteration's head."""

    source: str
    target: str
    partitioner: str = ""
    tag: str = ""
    feedback: bool = False


@dataclass(frozen=True, slots=True)
class JobPlan:
    nodes: tuple[PlanNode, ...]
    edges: tuple[PlanEdge, ...]


@dataclass(frozen=True, slots=True)
class SlotDetails:
    """One slot of a topology. ``host``, ``pid`` and ``instance`` are "" and 0 while no process runs it.

    Attributes:
        heartbeat_age_ms: -1 before the first.
        busy: the chain whose function runs now, and has for ``busy_ms``.
        function: the user's function, with file, line and the record that it works on, if that is long.
        restarts: processes (in barrier mode also instances within one) that took the place of one that ran.
    """

    slot: int
    state: str
    host: str = ""
    pid: int = 0
    heartbeat_age_ms: int = -1
    busy: str = ""
    busy_ms: int = 0
    function: str = ""
    restarts: int = 0
    failure: str = ""
    instance: str = ""


@dataclass(frozen=True, slots=True)
class SubtaskDetails:
    """One subtask of a chain, in the last second.

    Attributes:
        records_in, records_out, late: totals since its process began.
        busy: share of the time in which it ran; those of one slot share a thread, and come to 1 at most.
        back_pressured: share of the looks, ten a second, at which it could not send what it had, or would read.
        watermark_ms: the event time that it has come to; None where it has none.
    """

    uid: str
    slot: int
    records_in: int = 0
    records_out: int = 0
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    busy: float = 0.0
    back_pressured: float = 0.0
    watermark_ms: int | None = None
    late: int = 0


@dataclass(frozen=True, slots=True)
class EdgeDetails:
    """What waits at the end of an edge, of all its channels that end in ``slot``."""

    source: str
    target: str
    slot: int
    queued_bytes: int
    queued_rows: int


@dataclass(frozen=True, slots=True)
class Incident:
    """Something that happened to a job: a ``"state"``, ``"loss"``, ``"restart"``, ``"restore"`` or ``"checkpoint"``."""

    at_ms: int
    kind: str
    text: str
    slot: int = -1


@dataclass(frozen=True, slots=True)
class SubtaskCheckpointDetails:
    """One subtask's part of a checkpoint; ``unaligned``: ahead of records, which are in it.

    Attributes:
        start_delay_ms: from the trigger to the first barrier; ``alignment_ms``: to the last.
        sync_ms, async_ms: what the two parts of the snapshot took.
        written_bytes: new bytes in the storage.
        state_bytes: all that the checkpoint refers to.
        in_flight_bytes: records that the barrier has overtaken.
    """

    uid: str
    subtask: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    async_ms: float
    written_bytes: int
    state_bytes: int
    in_flight_bytes: int
    unaligned: bool


@dataclass(frozen=True, slots=True)
class CheckpointSums:
    """Sums of bytes of ``acked`` parts of a checkpoint, the longest time of any, and whether any is ``unaligned``."""

    acked: int
    start_delay_ms: int
    alignment_ms: int
    sync_ms: float
    async_ms: float
    written_bytes: int
    state_bytes: int
    in_flight_bytes: int
    unaligned: bool


def _together(parts: Collection[SubtaskCheckpointDetails]) -> CheckpointSums:
    return CheckpointSums(
        acked=len(parts),
        start_delay_ms=max((part.start_delay_ms for part in parts), default=0),
        alignment_ms=max((part.alignment_ms for part in parts), default=0),
        sync_ms=max((part.sync_ms for part in parts), default=0.0),
        async_ms=max((part.async_ms for part in parts), default=0.0),
        written_bytes=sum(part.written_bytes for part in parts),
        state_bytes=sum(part.state_bytes for part in parts),
        in_flight_bytes=sum(part.in_flight_bytes for part in parts),
        unaligned=any(part.unaligned for part in parts),
    )


@dataclass(frozen=True, slots=True)
class CheckpointDetails:
    """One checkpoint or savepoint.

    Attributes:
        kind: ``"checkpoint"`` or ``"savepoint"``.
        state: ``"in-progress"``, ``"completed"`` or ``"failed"``.
        final: whether the job was to end with it.
        ended_ms: completed, sinks committed, or given up; 0 while it is under way.
        duration_ms: up to ``ended_ms``, or to now.
        expected: how many parts there have to be.
        location: where a completed one lies; "" in the driver's memory.
    """

    number: int
    kind: str
    state: str
    final: bool
    triggered_ms: int
    ended_ms: int
    duration_ms: int
    expected: int
    subtasks: tuple[SubtaskCheckpointDetails, ...] = ()
    location: str = ""
    failure: str = ""

    @property
    def total(self) -> CheckpointSums:
        """Sums and longest times of all parts that are there."""
        return _together(self.subtasks)

    @property
    def chains(self) -> dict[str, CheckpointSums]:
        """The parts of each chain that are there, by its uid."""
        uids = dict.fromkeys(part.uid for part in self.subtasks)
        return {uid: _together([part for part in self.subtasks if part.uid == uid]) for uid in uids}


@dataclass(frozen=True, slots=True)
class CheckpointTotals:
    """Checkpoints of a run, savepoints included, and what holds for them all.

    Attributes:
        restored: restores of regions of the job from a checkpoint, that at the start included.
        failures_in_a_row: what ``tolerable_failures`` bounds; that is -1 where any number is tolerated.
        interval_ms: 0 where none are taken by themselves.
        directory, savepoint_directory: where they lie, "" in the driver's memory; ``retained`` are the locations that
            the job may go back to, the oldest first. All without user and password.
        last_completed_ms: when the last one was complete, 0 before the first of this run.
    """

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    restored: int = 0
    failures_in_a_row: int = 0
    tolerable_failures: int = 0
    interval_ms: int = 0
    directory: str = ""
    savepoint_directory: str = ""
    retained: tuple[str, ...] = ()
    last_completed_ms: int = 0


@dataclass(frozen=True, slots=True)
class BatchDetails:
    """One micro-batch of a wrapped query.

    Attributes:
        at_ms: when it was through.
        delivered: those of its ``rows_in`` that came from the vertex, replays and ingested ones: not what reached the
            sink.
        failed: records that failed: of these ``dead`` are dead letters, and ``waiting`` wait for their next attempt.
        duration_ms: from its begin to its report; of that ``phases_ms`` has ``run``, ``verdict``, ``seal``, ``sink``
            and ``commit``, and nothing where the batch was committed before.
        state: what the vertex knew of it at the start.
        differs: a record that had passed when the batch was sealed failed in the run again; it is replayed, and a sink
            that skips known batch ids may see it twice.
        held: runs, and calls of the sink, that were given up because more records failed than `max_failing` allows.
    """

    batch: int
    at_ms: int = 0
    rows_in: int = 0
    delivered: int = 0
    failed: int = 0
    dead: int = 0
    duration_ms: float = 0.0
    phases_ms: dict[str, float] = field(default_factory=dict)
    rows_out: int = 0
    waiting: int = 0
    state: BatchState = BatchState.NEW
    differs: bool = False
    held: int = 0
    query: str = ""


@dataclass(frozen=True, slots=True)
class HistogramDetails:
    """Observations, in seconds, since the run began: how many are at most each bound, the last count those above all.

    ``counts`` are not cumulative; ``exemplars``, None where there is none, are as long, or ().
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float
    exemplars: tuple[Exemplar | None, ...] = ()

    def __post_init__(self) -> None:
        buckets = len(self.bounds) + 1
        if len(self.counts) != buckets or len(self.exemplars) not in (0, buckets):
            raise ConfigError(
                f"counts, exemplars: expected {buckets}, one more than bounds (exemplars may be empty), got "
                f"{len(self.counts)} and {len(self.exemplars)}"
            )
        if any(not below < above for below, above in pairwise(self.bounds)) or min(self.counts) < 0:
            raise ConfigError("bounds, counts: expected bounds that ascend, and no count below 0")

    @classmethod
    def of(cls, histogram: Histogram) -> HistogramDetails:
        """Return what a histogram has now; without any exemplar ``exemplars`` is ()."""
        exemplars = tuple(histogram.exemplars) if any(histogram.exemplars) else ()
        return cls(histogram.bounds, tuple(histogram.counts), histogram.total, exemplars)

    def histogram(self) -> Histogram:
        made = Histogram(self.bounds)
        made.counts = list(self.counts)
        made.total = self.total
        made.exemplars = list(self.exemplars) or [None] * len(self.counts)
        return made


FAILING = ("retried", "waiting", "dead", "paused")
"""What is counted of records that fail, by chain (``waiting/<uid>``).

Those that wait are those of now; ``paused`` are subtasks that take no input now, since too many fail or wait.
"""


@dataclass(frozen=True, slots=True)
class JobDetails:
    """A job at one moment, as its driver sees it.

    Attributes:
        owner: what its streams begin with: a topology's name, a query's drawn name.
        name: what people call it.
        run: this execution; another one of the same owner takes its place.
        state: ``"running"`` and so on, as `JobState` says; of a query ``"running"``, ``"restarting"``, ``"ended"``,
            ``"failed"``.
        final: it has come to its end, and this is the last that is heard of the run.
        mode: ``"acker"``, ``"barrier"`` or ``"off"``; a wrapped query that is tracked is in none.
        since_ms: when the run began; ``ended_ms`` is 0 before its end.
        at_ms: the moment, by the driver's clock.
        version: of the ftlayer that its driver runs, "" where that is not known.
        line: all of it in one line, without its name.
        restarts: how often something of it was started again; ``last_failure`` is why.
        checkpoint_location: where a query keeps Spark's checkpoint, "" for a topology.
        plan: what it is made of; a board that knows it already asks for none, and it is None.
        counters: totals of the run by name, and of each chain ``records_in/<uid>``, ``records_out/<uid>`` and
            ``late/<uid>``, of one with a policy for records that fail `FAILING` too, and of a source whose system
            can tell ``lag/<source>``: records that were not read when it was asked last; ``away/<source>``: for how
            many ms the system cannot be read, 0 while it can; ``rates`` are those without a uid per second.
        histograms: by ``"<metric>|<part>"``, the part an operator, ``"<source>|<sink>"``, or "" where there is none.
        checkpoints: those under way, and those that ended since what the board says that it knows.
        links: what else there is to look at, by name (``"Spark UI"``).
    """

    owner: str
    name: str
    kind: JobKind
    run: str
    mode: str
    state: str
    final: bool
    since_ms: int
    at_ms: int
    ended_ms: int = 0
    host: str = ""
    pid: int = 0
    line: str = ""
    restarts: int = 0
    last_failure: str = ""
    checkpoint_location: str = ""
    plan: JobPlan | None = None
    slots: tuple[SlotDetails, ...] = ()
    subtasks: tuple[SubtaskDetails, ...] = ()
    edges: tuple[EdgeDetails, ...] = ()
    counters: dict[str, int] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    histograms: dict[str, HistogramDetails] = field(default_factory=dict)
    incidents: tuple[Incident, ...] = ()
    checkpoint_totals: CheckpointTotals | None = None
    checkpoints: tuple[CheckpointDetails, ...] = ()
    circuits: dict[str, CircuitStatus] = field(default_factory=dict)
    batches: tuple[BatchDetails, ...] = ()
    links: dict[str, str] = field(default_factory=dict)
    version: str = ""

    @property
    def kept_in(self) -> str:
        """Where its checkpoints are: the directory of a topology's, or a query's location; "" where it has none."""
        return self.checkpoint_totals.directory if self.checkpoint_totals else self.checkpoint_location

    @property
    def dead(self) -> int:
        """How many dead letters its chains have made in this run; 0 in acker mode, where the vertex counts them."""
        return sum(count for name, count in self.counters.items() if name.startswith("dead/"))


class OrderAction(StrEnum):
    """What a driver can be asked to do: ``stop`` (with a savepoint; not in acker mode), a ``stack``."""

    SAVEPOINT = "savepoint"
    STOP = "stop"
    DRAIN = "drain"
    CANCEL = "cancel"
    STACK = "stack"


class OrderState(StrEnum):
    """Where an order is. The last four are final."""

    WAITING = "waiting"
    TAKEN = "taken"
    DONE = "done"
    FAILED = "failed"
    REFUSED = "refused"
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self not in (OrderState.WAITING, OrderState.TAKEN)


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What somebody (``by``) asks of one run of a job.

    Attributes:
        id: drawn by the one who asks: the same order asked again is the same order, and is carried out once.
        run: only this execution carries it out.
        directory: of a savepoint; "": the job's own.
        timeout_ms: of a drain; 0: as the job has it.
        slot: of a stack; -1 otherwise.
    """

    id: str
    owner: str
    run: str
    action: OrderAction
    by: str
    asked_ms: int
    directory: str = ""
    timeout_ms: int = 0
    slot: int = -1


@dataclass(frozen=True, slots=True)
class OrderAnswer:
    """What has become of an order. ``text``: where the savepoint is, the stack, why it was refused or failed."""

    id: str
    state: OrderState
    text: str
    at_ms: int


@dataclass(frozen=True, slots=True)
class OrderRecord(Reply):
    order: JobOrder
    answer: OrderAnswer


@dataclass(frozen=True, slots=True)
class AnnounceJob(MutatingCall, AnsweredBy["Announced"], route=Route.OWNER):
    """Say how a job fares and what has become of its orders, and take new ones. Saying it again does no harm.

    `StaleOwnerError` for a topology, or a query, that another run has taken over.
    """

    enveloped: ClassVar[bool] = False

    job: JobDetails
    answers: tuple[OrderAnswer, ...] = ()

    @property
    def owner(self) -> str:
        return self.job.owner

    def check(self) -> None:
        _check_plain(self, "AnnounceJob")
        job, where = self.job, "AnnounceJob.job"
        check_name(job.owner, f"{where}.owner")
        check_name(job.name, f"{where}.name")
        check_name(job.run, f"{where}.run", MAX_RUN_BYTES)
        for index, checkpoint in enumerate(job.checkpoints):
            check_least(checkpoint.number, 1, f"{where}.checkpoints[{index}].number")
            check_least(checkpoint.ended_ms, 0, f"{where}.checkpoints[{index}].ended_ms")
        for index, answer in enumerate(self.answers):
            where = f"AnnounceJob.answers[{index}]"
            check_name(answer.id, f"{where}.id")
            if answer.state is OrderState.WAITING:
                raise MalformedRequestError(f"{where}.state: an answer to an order is never {answer.state}")


@dataclass(frozen=True, slots=True)
class Announced(Reply):
    """Reply to `AnnounceJob`.

    Attributes:
        orders: all of this run that have not come to an end: those that wait, and those that it has taken. A driver
            that finds a new one announces that it has taken it, and carries it out when the reply to that still has
            it: so what is called expired was not carried out.
        known_checkpoint: up to this number all checkpoints of the run are known to have ended, 0 for none.
        wants_plan: the plan of this run is not known yet.
    """

    orders: tuple[JobOrder, ...]
    known_checkpoint: int
    wants_plan: bool


@dataclass(frozen=True, slots=True)
class ListJobs(ReadingCall, AnsweredBy["JobList"], route=Route.ALL):
    """Which jobs are there, and which were?"""


@dataclass(frozen=True, slots=True)
class AnnouncedJob(Reply):
    """A job as it was announced last, ``heard_ago_ms`` ago by the vertex's clock.

    Attributes:
        is_silent: its driver has not been heard for 30 s, and said no last word.
        is_gone: and its process is there no more; False where that is not known.
        incidents: of all its runs that are known, oldest first.
        orders: the last ones.
        died_ago_ms: how long ago its run's count of dead letters rose last, -1 where it did not: of a job in barrier
            mode, which keeps them itself.
    """

    job: JobDetails
    heard_ago_ms: int
    is_silent: bool
    incidents: tuple[Incident, ...] = ()
    orders: tuple[OrderRecord, ...] = ()
    died_ago_ms: int = -1
    is_gone: bool = False


@dataclass(frozen=True, slots=True)
class JobList(Reply):
    """Reply to `ListJobs`: the latest first, without plans, checkpoints, batches, histograms and orders."""

    jobs: tuple[AnnouncedJob, ...]


@dataclass(frozen=True, slots=True)
class GetJob(ReadingCall, AnsweredBy["AnnouncedJob"], route=Route.OWNER):
    """All that is known of a job, with the checkpoints under way and those that ended from a moment on.

    `UnknownJobError` where nothing is known. A checkpoint that has ended never changes.
    """

    owner: str
    checkpoints_since_ms: int = 0

    def check_fields(self) -> None:
        check_least(self.checkpoints_since_ms, 0, "GetJob.checkpoints_since_ms")


@dataclass(frozen=True, slots=True)
class GetHour(ReadingCall, AnsweredBy["Hour"], route=Route.OWNER):
    """The last hour of a job, or with ``owner`` "" of the vertex itself."""

    asks_all: ClassVar[bool] = True

    owner: str = ""


@dataclass(frozen=True, slots=True)
class Hour(Reply):
    """Series of points, all as long, one every ``step_ms``, the last at ``end_ms`` (Unix); NaN: nothing was heard."""

    step_ms: int
    end_ms: int
    series: dict[str, tuple[float, ...]]


@dataclass(frozen=True, slots=True)
class AskJob(MutatingCall, AnsweredBy["OrderRecord"], route=Route.OWNER):
    """Ask something of a job's driver, or what has become of it: the reply, an `OrderRecord`, is the state now.

    `UnknownJobError` where no such job is alive; an order for another run is refused in the reply. `ProtocolError`
    for an id that another order has, and for the 101st order of a job within ten minutes.
    """

    enveloped: ClassVar[bool] = False

    order: JobOrder

    @property
    def owner(self) -> str:
        return self.order.owner

    def check(self) -> None:
        _check_plain(self, "AskJob")
        order, where = self.order, "AskJob.order"
        check_name(order.id, f"{where}.id")
        check_name(order.owner, f"{where}.owner")
        check_name(order.run, f"{where}.run", MAX_RUN_BYTES)
        check_name(order.by, f"{where}.by")
        check_least(order.asked_ms, 0, f"{where}.asked_ms")
        check_least(order.timeout_ms, 0, f"{where}.timeout_ms")
        check_least(order.slot, 0 if order.action is OrderAction.STACK else -1, f"{where}.slot")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """``who`` did ``what`` to ``which``, ``count`` of them, with what ``outcome``; an order has two."""

    at_ms: int
    who: str
    what: str
    which: str
    count: int
    outcome: str
    key: bytes = b""


@dataclass(frozen=True, slots=True)
class ListAudit(ReadingCall, AnsweredBy["AuditPage"], route=Route.ALL):
    """Who has changed what? The latest first; ``limit`` is 500 at most. A shard keeps 100,000 entries, 90 days."""

    after: bytes = b""
    limit: int = 100

    def check_fields(self) -> None:
        check_limit(self.limit, 500, "ListAudit.limit")


@dataclass(frozen=True, slots=True)
class AuditPage(Reply):
    """Reply to `ListAudit`; ``more`` is the ``after`` of the next page, b"" at the end."""

    entries: tuple[AuditEntry, ...]
    more: bytes


# An announcement is kept, listed and drawn: its texts and lists are bounded, and its numbers are finite.


MAX_TEXT = 65_536
"""Characters of a stack, of a failure with its traceback, of any other text."""

MAX_KEY = 512
"""Characters of a key of a map: a metric's name with an operator's."""

# Lists by the name of their field. A job has so many subtasks and edges at most; of the rest it says the latest.
_MOST = {
    "answers": 200,
    "nodes": 2_000,
    "names": 2_000,
    "slots": 2_000,
    "subtasks": 20_000,
    "edges": 20_000,
    "counters": 5_000,
    "rates": 5_000,
    "histograms": 5_000,
    "bounds": 64,
    "counts": 65,
    "exemplars": 65,
    "incidents": 200,
    "checkpoints": 100,
    "retained": 1_000,
    "circuits": 1_000,
    "batches": 200,
    "phases_ms": 20,
    "links": 20,
}


def _check_plain(call: AnnounceJob | AskJob, where: str) -> None:
    fault = _fault_in(call)
    if fault is not None:
        raise MalformedRequestError(where + fault)


def _fault_in(value: Any) -> str | None:
    """Look at each text, number and list in ``value``, however deep; return the first fault behind its path."""
    kind = type(value)
    if kind is int or kind is bool or value is None:
        return None
    if kind is float:
        return None if math.isfinite(value) else f": expected a finite number, got {value}"
    if isinstance(value, str):
        return (
            None if len(value) <= MAX_TEXT else f": expected {MAX_TEXT} characters at most, got {len(value)}"
        )
    if kind is tuple:
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif kind is dict:
        too_long = next((key for key in value if len(key) > MAX_KEY), None)
        if too_long is not None:
            return f": expected keys of {MAX_KEY} characters at most, got {len(too_long)}"
        parts = value.items()
    else:
        return _fault_in_fields(value)
    for at, part in parts:
        fault = _fault_in(part)
        if fault is not None:
            return f"[{at!r}]{fault}"
    return None


def _fault_in_fields(value: Any) -> str | None:
    kind: type = type(value)
    for name in _fields(kind):
        part = getattr(value, name)
        if name in _MOST and len(part) > _MOST[name]:
            return f".{name}: expected {_MOST[name]} items at most, got {len(part)}"
        fault = _fault_in(part)
        if fault is not None:
            return f".{name}{fault}"
    return None


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
