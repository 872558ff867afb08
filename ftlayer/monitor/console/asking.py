"""What callers ask of a console: forms, payloads that they edit, orders to jobs and how these come about."""

from __future__ import annotations

import hmac
import json
import secrets
from dataclasses import dataclass
from typing import Annotated

import pyarrow as pa
from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.datastructures import FormData, UploadFile

from ftlayer.common.checks import Duration, check_known, duration_ms
from ftlayer.errors import ConfigError
from ftlayer.monitor.console.guard import Caller
from ftlayer.monitor.console.rendering import caller_of
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.watch import Watch
from ftlayer.monitor.rules.plans import check_way_back
from ftlayer.monitor.rules.row_json import row_of_json
from ftlayer.vertex import calls

MAX_ID_CHARS = 64


@dataclass(frozen=True, slots=True)
class Action:
    """Something to ask of a job; ``ends`` says that the job is over then."""

    name: calls.OrderAction
    title: str
    text: str
    ends: bool = True


_SAVEPOINT = Action(
    calls.OrderAction.SAVEPOINT,
    "Savepoint",
    "All state is written to the job's savepoint directory; the job goes on.",
    ends=False,
)
_STOP = Action(
    calls.OrderAction.STOP,
    "Stop with savepoint",
    "All state is written to the job's savepoint directory, and then the job ends. It can be started from there.",
)
_STOP_QUERY = Action(
    calls.OrderAction.STOP,
    "Stop",
    "The query ends at once; its batch that is under way is run again when it is started again. Drain finishes it.",
)
_DRAIN = Action(
    calls.OrderAction.DRAIN, "Drain", "Sources are read no further; the job ends when all that waits is done."
)
_CANCEL = Action(
    calls.OrderAction.CANCEL,
    "Cancel",
    "The job ends now. What is under way is replayed, or read again, when it is started again.",
)


def actions_of(job: calls.JobDetails) -> tuple[Action, ...]:
    if job.final:
        return ()
    if job.kind is calls.JobKind.QUERY:
        return _STOP_QUERY, _DRAIN
    return (_SAVEPOINT, _STOP, _CANCEL) if job.mode == "barrier" else (_DRAIN, _CANCEL)


def check_savepoint(job: calls.JobDetails, action: Action) -> None:
    """Raise `ConfigError` where an action would take a savepoint and the job has no directory for it."""
    takes_one = job.mode == "barrier" and action.name in (calls.OrderAction.SAVEPOINT, calls.OrderAction.STOP)
    totals = job.checkpoint_totals
    if takes_one and totals is not None and not totals.savepoint_directory:
        raise ConfigError(
            f"{job.name} has no savepoint directory; set CheckpointConfig(savepoint_directory=…), or name one by "
            f"`ftlayer {action.name} {job.name} --directory URL`"
        )


def split_job(job: str) -> tuple[str, str]:
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
    timeout: Duration = ""
    slot: int = -1


def ask(watch: Watch, job: str, asked: OrderForm, caller: Caller, now_ms: int) -> calls.OrderRecord:
    """Put an order on the board, and return where it is. Raises `ConfigError` for one that makes no sense."""
    vertex, owner = split_job(job)
    announced = watch.job(vertex, owner)
    order = calls.JobOrder(
        id=_checked_id(asked.id),
        owner=owner,
        run=asked.run or announced.job.run,
        action=_checked_action(asked.action),
        by=by(caller),
        asked_ms=now_ms,
        directory=_checked_directory(asked.directory, announced),
        timeout_ms=0 if asked.timeout == "" else duration_ms(asked.timeout, "timeout"),
        slot=asked.slot,
    )
    record = watch.client(vertex).call(calls.AskJob(order))
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


def _checked_action(given: str) -> calls.OrderAction:
    try:
        return calls.OrderAction(given)
    except ValueError:
        raise ConfigError(f"action: expected one of {', '.join(calls.OrderAction)}, got {given!r}") from None


def _checked_directory(given: str, announced: calls.AnnouncedJob) -> str:
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


def check_editable(console: Console, vertex: str, info: calls.RecordInfo) -> None:
    """Raise `ConfigError` where payloads are masked, and `UnsupportedError` for a record that cannot be edited."""
    check_unmasked(console)
    check_way_back(console.watch.view(vertex), info, edited=True)


def check_unmasked(console: Console) -> None:
    if console.options.mask_payloads:
        raise ConfigError("this console masks payloads: it edits none")


def parsed_payload(text: str, before: pa.RecordBatch) -> pa.RecordBatch:
    """Read what is to take the place of ``before``. Raises `ConfigError` that says where it is wrong."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"payload: this is not JSON: {error}") from None
    return row_of_json(values, before.schema, before)


def requeue_edited(
    console: Console, caller: Caller, vertex: str, info: calls.RecordInfo, payload: pa.RecordBatch
) -> bool:
    """Give a letter this payload, and its attempts back; False where it was gone. Raises what the vertex raises."""
    call = calls.EditAndRequeue((calls.Edit(info.key, payload),), by(caller))
    changed = console.watch.client(vertex).call(call)
    console.watch.refresh()
    return changed.count == 1


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
