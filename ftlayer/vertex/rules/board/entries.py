"""What a board knows of a job and of an order, and how that is stored."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ftlayer.errors import MalformedRequestError, StoreDamagedError
from ftlayer.transport.codec import Codec, plain_codec
from ftlayer.vertex.calls import (
    CheckpointDetails,
    Incident,
    JobDetails,
    JobOrder,
    OrderAnswer,
    OrderRecord,
    OrderState,
)

KEEP_INCIDENTS = 200

_JOB_FORMAT = 1
_DETAILS = plain_codec(JobDetails)
_INCIDENT = plain_codec(Incident)
_CHECKPOINT = plain_codec(CheckpointDetails)
_ORDER = plain_codec(JobOrder)
_ANSWER = plain_codec(OrderAnswer)


@dataclass(slots=True)
class OrderEntry:
    """An order and what has become of it. ``asked_ms`` is by the board's clock."""

    order: JobOrder
    answer: OrderAnswer
    asked_ms: int

    @property
    def ended(self) -> bool:
        """Whether it has come to its end."""
        return self.answer.state.is_final

    def end(self, state: OrderState, text: str, now_ms: int) -> None:
        self.answer = OrderAnswer(self.order.id, state, text, now_ms)

    @property
    def record(self) -> OrderRecord:
        return OrderRecord(self.order, self.answer)


@dataclass(slots=True)
class JobEntry:
    """A job.

    Attributes:
        details: as it was announced last, with its plan, and of its checkpoints those under way. Of a job that is gone
            as `listed` has it, and the rest is in the store: then ``is_whole`` is False.
        heard_ms: when it was heard last; ``written_ms`` when it was stored last, -1: this run never was.
        former: the runs before, which have no say any more.
        known: as `Announced.known_checkpoint`.
        checkpoints: keys of those that have ended, by the time of their end.
    """

    details: JobDetails
    is_whole: bool
    is_stored: bool
    heard_ms: int
    written_ms: int
    incidents: tuple[Incident, ...] = ()
    former: tuple[str, ...] = ()
    known: int = 0
    orders: dict[str, OrderEntry] = field(default_factory=dict)
    checkpoints: list[bytes] = field(default_factory=list)

    def add_incidents(self, new: tuple[Incident, ...]) -> None:
        """Keep the last incidents of all runs, each once, oldest first."""
        if not set(new) <= set(self.incidents):
            merged = dict.fromkeys((*self.incidents, *new))
            self.incidents = tuple(sorted(merged, key=lambda incident: incident.at_ms))[-KEEP_INCIDENTS:]


def listed(details: JobDetails) -> JobDetails:
    """Return a job as `ListJobs` shows it."""
    return replace(details, plan=None, checkpoints=(), batches=(), histograms={})


# ---------------------------------------------------------------- as they are stored


def job_values(job: JobEntry, details: JobDetails) -> list[Any]:
    """Return a job as it is stored, with these ``details``."""
    incidents = [_INCIDENT.pack(incident) for incident in job.incidents]
    return [_JOB_FORMAT, _DETAILS.pack(details), incidents, job.heard_ms, job.former, job.known]


def read_job(owner: str, values: list[Any]) -> JobEntry:
    """Return a job from what is stored. Raises `StoreDamagedError`."""
    what = f"job {owner!r}"
    try:
        version, details, incidents, heard_ms, former, known = values
        if version != _JOB_FORMAT:
            raise ValueError(f"format {version}")
        return JobEntry(
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


def read_details(owner: str, values: list[Any]) -> JobDetails:
    """Return the details of a job, all of them, from what is stored. Raises `StoreDamagedError`."""
    details: JobDetails = _unpacked(_DETAILS, values[1], f"job {owner!r}")
    return details


def order_values(entry: OrderEntry) -> list[Any]:
    """Return an order as it is stored."""
    return [_ORDER.pack(entry.order), _ANSWER.pack(entry.answer), entry.asked_ms]


def read_order(owner: str, values: list[Any]) -> OrderEntry:
    """Return an order from what is stored. Raises `StoreDamagedError`."""
    what = f"an order to job {owner!r}"
    try:
        order, answer, asked_ms = values
        return OrderEntry(_unpacked(_ORDER, order, what), _unpacked(_ANSWER, answer, what), int(asked_ms))
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error


def checkpoint_values(checkpoint: CheckpointDetails) -> list[Any]:
    """Return a checkpoint as it is stored."""
    return [_CHECKPOINT.pack(checkpoint)]


def read_checkpoint(owner: str, values: list[Any]) -> CheckpointDetails:
    """Return a checkpoint from what is stored. Raises `StoreDamagedError`."""
    checkpoint: CheckpointDetails = _unpacked(_CHECKPOINT, values[0], f"a checkpoint of job {owner!r}")
    return checkpoint


def _unpacked(codec: Codec, value: Any, what: str) -> Any:
    try:
        return codec.unpack(value, what)
    except MalformedRequestError as error:
        raise StoreDamagedError(f"{what} of the store cannot be read: {error}") from error
