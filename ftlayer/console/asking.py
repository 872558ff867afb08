"""What can be asked of a job from here, and how an order comes about."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ftlayer.checks import duration_ms
from ftlayer.console.login import Caller
from ftlayer.console.watch import Watch
from ftlayer.errors import ConfigError
from ftlayer.vertex.calls import AnnouncedJob, AskJob, JobDetails, JobKind, JobOrder, OrderAction, OrderRecord

MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Action:
    """Something to ask of a job; ``ends`` says that the job is over then."""

    name: OrderAction
    title: str
    text: str
    ends: bool = True


_SAVEPOINT = Action(
    OrderAction.SAVEPOINT,
    "Savepoint",
    "All state is written to the job's savepoint directory; the job goes on.",
    ends=False,
)
_STOP = Action(
    OrderAction.STOP,
    "Stop with savepoint",
    "All state is written to the job's savepoint directory, and then the job ends. It can be started from there.",
)
_STOP_QUERY = Action(
    OrderAction.STOP,
    "Stop",
    "The query ends at once; its batch that is under way is run again when it is started again. Drain finishes it.",
)
_DRAIN = Action(
    OrderAction.DRAIN, "Drain", "Sources are read no further; the job ends when all that waits is done."
)
_CANCEL = Action(
    OrderAction.CANCEL,
    "Cancel",
    "The job ends now. What is under way is replayed, or read again, when it is started again.",
)


def actions_of(job: JobDetails) -> tuple[Action, ...]:
    """Return what can be asked of a job; the driver has the last word."""
    if job.final:
        return ()
    if job.kind is JobKind.QUERY:
        return _STOP_QUERY, _DRAIN
    return (_SAVEPOINT, _STOP, _CANCEL) if job.mode == "barrier" else (_DRAIN, _CANCEL)


def check_savepoint(job: JobDetails, action: Action) -> None:
    """Raise `ConfigError` where an action would take a savepoint and the job has no directory for it."""
    takes_one = job.mode == "barrier" and action.name in (OrderAction.SAVEPOINT, OrderAction.STOP)
    totals = job.checkpoint_totals
    if takes_one and totals is not None and not totals.savepoint_directory:
        raise ConfigError(
            f"{job.name} has no savepoint directory; set CheckpointConfig(savepoint_directory=…), or name one by "
            f"`ftlayer {action.name} {job.name} --directory URL`"
        )


def split_job(job: str) -> tuple[str, str]:
    """Split ``<vertex>:<owner>``. Raises `ConfigError`."""
    vertex, colon, owner = job.partition(":")
    if not (vertex and colon and owner):
        raise ConfigError(f"job: expected '<vertex>:<owner>', got {job!r}")
    return vertex, owner


@dataclass(frozen=True, slots=True)
class OrderForm:
    """What somebody asks: ``run`` "" is the one that runs now, ``id`` "" a new order."""

    action: str
    run: str = ""
    id: str = ""
    directory: str = ""
    timeout: str = ""
    slot: int = -1


def ask(watch: Watch, job: str, asked: OrderForm, caller: Caller, now_ms: int) -> OrderRecord:
    """Put an order on the board, and return where it is. Raises `ConfigError` for one that makes no sense."""
    vertex, owner = split_job(job)
    announced = watch.job(vertex, owner)
    order = JobOrder(
        id=_checked_id(asked.id),
        owner=owner,
        run=asked.run or announced.job.run,
        action=_checked_action(asked.action),
        by=by(caller),
        asked_ms=now_ms,
        directory=_checked_directory(asked.directory, announced),
        timeout_ms=duration_ms(asked.timeout, "timeout") if asked.timeout else 0,
        slot=asked.slot,
    )
    record = watch.client(vertex).call(AskJob(order))
    assert isinstance(record, OrderRecord)
    watch.refresh()
    return record


def by(caller: Caller) -> str:
    """Return how a user of this console is called in orders and in the audit log."""
    return f"{caller.user.name}@console"


def drawn_id() -> str:
    """Return an id for an order: the same one sent twice is one order."""
    return secrets.token_hex(16)


def _checked_id(given: str) -> str:
    if not given:
        return drawn_id()
    if len(given) > MAX_ID_CHARS or not given.isascii() or not given.isalnum():
        raise ConfigError(f"id: expected up to {MAX_ID_CHARS} letters and digits, got {given!r}")
    return given


def _checked_action(given: str) -> OrderAction:
    try:
        return OrderAction(given)
    except ValueError:
        raise ConfigError(f"action: expected one of {', '.join(OrderAction)}, got {given!r}") from None


def _checked_directory(given: str, announced: AnnouncedJob) -> str:
    """Return a directory below the job's own: any other would let a browser write wherever the driver can."""
    if not given:
        return ""
    totals = announced.job.checkpoint_totals
    own = totals.savepoint_directory.rstrip("/") if totals is not None else ""
    if not own:
        raise ConfigError("directory: the job has no savepoint directory; name one by `ftlayer savepoint`")
    relative = given.removeprefix(f"{own}/")
    if any(name in ("", ".", "..") for name in relative.split("/")) or "\\" in relative:
        raise ConfigError(
            f"directory: a console's savepoints are below {own}; name others by `ftlayer savepoint`"
        )
    return f"{own}/{relative}"
