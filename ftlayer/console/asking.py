"""What callers ask of a console: forms, payloads that they edit, orders to jobs and how these come about."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import pyarrow as pa
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile

from ftlayer.checks import check_known, duration_ms
from ftlayer.console.guard import Caller
from ftlayer.console.rendering import caller_of
from ftlayer.console.searching import Console
from ftlayer.console.watch import Watch
from ftlayer.errors import ConfigError
from ftlayer.monitor.plans import DEAD
from ftlayer.monitor.row_json import row_of_json
from ftlayer.vertex.calls import (
    AnnouncedJob,
    AskJob,
    Changed,
    Edit,
    EditAndRequeue,
    JobDetails,
    JobKind,
    JobOrder,
    OrderAction,
    OrderRecord,
    RecordInfo,
)

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


def check_editable(console: Console, info: RecordInfo) -> None:
    """Raise `ConfigError` for a record that is no dead letter, or whose payload is masked."""
    if console.options.mask_payloads:
        raise ConfigError("this console masks payloads: it edits none")
    if info.state != DEAD:
        raise ConfigError(f"this record is {info.state}: only dead letters are edited")


def parsed_payload(text: str, schema: pa.Schema) -> pa.RecordBatch:
    """Read a payload as a form gives it. Raises `ConfigError` that says where it is wrong."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"payload: this is not JSON: {error}") from None
    return row_of_json(values, schema)


def requeue_edited(
    console: Console, caller: Caller, vertex: str, info: RecordInfo, payload: pa.RecordBatch
) -> bool:
    """Give a letter this payload, and its attempts back; False where it was gone. Raises what the vertex raises."""
    call = EditAndRequeue((Edit(info.key, payload),), by(caller))
    changed = console.watch.client(vertex).call(call)
    assert isinstance(changed, Changed)
    console.watch.refresh()
    return changed.count == 1


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the columns that differ: name, what was there, what will be."""
    return [
        (name, json.dumps(before.get(name), ensure_ascii=False), json.dumps(value, ensure_ascii=False))
        for name, value in after.items()
        if before.get(name) != value
    ]


CSRF_HEADER = "x-csrf-token"


class RefusedError(Exception):
    """A request that its maker may not make."""


class SubmittedForm:
    def __init__(self, data: FormData) -> None:
        self._data = data

    def text(self, name: str) -> str:
        value = self._data.get(name, "")
        return "" if isinstance(value, UploadFile) else value

    def texts(self, name: str) -> tuple[str, ...]:
        return tuple(value for value in self._data.getlist(name) if isinstance(value, str))


async def _form(request: Request) -> SubmittedForm:
    data = await request.form(max_files=0, max_fields=2_000)
    form = SubmittedForm(data)
    _check_csrf(caller_of(request), form.text("csrf"))
    return form


def checked_caller(request: Request) -> Caller:
    caller = caller_of(request)
    assert caller is not None, "the guard lets nobody through without one"
    return caller


def _operator(request: Request) -> Caller:
    caller = checked_caller(request)
    if not caller.user.is_operator:
        raise RefusedError(f"{caller.user.name} is a reader, and readers change nothing; ask an operator")
    return caller


def _api_operator(request: Request) -> Caller:
    """Return an operator who calls the API; one with a cookie has to bring the token of the forms as a header."""
    caller = _operator(request)
    if request.method != "GET":
        _check_csrf(caller, request.headers.get(CSRF_HEADER, ""))
    return caller


def _check_csrf(caller: Caller | None, given: str) -> None:
    if caller is None or caller.session is None:
        return
    if not hmac.compare_digest(caller.session.csrf.encode(), given.encode("utf-8", "replace")):
        raise RefusedError(
            "this form is not from one of the console's pages, or an earlier session's; load it again"
        )


def only_known(request: Request) -> None:
    """Raise `ConfigError` for a parameter of the query that the path does not have: one misspelled would list all.

    A dependency of routers.
    """
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [field.alias for field in route.dependant.query_params]
    check_known(request.query_params, known, f"{request.method} {route.path}")


PostedForm = Annotated[SubmittedForm, Depends(_form)]
AnyCaller = Annotated[Caller, Depends(checked_caller)]
Operator = Annotated[Caller, Depends(_operator)]
ApiOperator = Annotated[Caller, Depends(_api_operator)]
