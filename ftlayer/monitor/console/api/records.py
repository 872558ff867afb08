"""The API of records: search, one of them, groups of dead letters, and what is done to them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from ftlayer.monitor.console.asking import AnyCaller, ApiOperator, check_editable, only_known, requeue_edited
from ftlayer.monitor.console.pages.dead import begin_change, begin_work, export, known_work
from ftlayer.monitor.console.pages.overview import ENTRIES, MOST_ENTRIES, audit_of
from ftlayer.monitor.console.pages.records import check_masking, explanation_of, known_record
from ftlayer.monitor.console.rendering import console_of
from ftlayer.monitor.console.searching import (
    MOST,
    PAGE,
    Choice,
    ChosenGroup,
    Console,
    RecordFilter,
    choice_of,
    search,
)
from ftlayer.monitor.console.works import Wanted, Work, dead_groups
from ftlayer.monitor.rules.facts import Facts, iso, letter_group_facts, record_facts
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.row_json import row_of_json

router = APIRouter(prefix="/api/v1", tags=["records"], dependencies=[Depends(only_known)])

MAX_CHOSEN = 10_000


class FilterBody(BaseModel):
    """Which dead letters: all that is given has to hold; "" is all."""

    model_config = ConfigDict(extra="forbid")

    vertex: str = ""
    job: str = ""
    stream: str = ""
    operator: str = ""
    q: str = ""
    where: str = ""


class GroupBody(BaseModel):
    """A group of dead letters, as ``/dead/groups`` lists it: ``stream`` is its ``stream_id``."""

    model_config = ConfigDict(extra="forbid")

    vertex: str
    group: Annotated[int, Field(ge=0, lt=1 << 31)]
    stream: str


class PlanBody(BaseModel):
    """What is to be done (requeue, purge, edit, export) to which letters: groups, ``vertex:key``, or a filter.

    ``function`` edits them, as ``module:function``: one of those that the console was started with.
    A filter without any condition is refused unless ``all`` says that it is meant.
    """

    model_config = ConfigDict(extra="forbid")

    action: str
    function: str = ""
    groups: Annotated[list[GroupBody], Field(max_length=MAX_CHOSEN)] = []
    keys: Annotated[list[str], Field(max_length=MAX_CHOSEN)] = []
    filter: FilterBody | None = None
    all: bool = False


@router.get("/records")
def records(
    request: Request,
    caller: AnyCaller,
    state: str = "dead",
    vertex: str = "",
    job: str = "",
    stream: str = "",
    operator: str = "",
    group: Annotated[int, Query(ge=-1, lt=1 << 31)] = -1,
    q: str = "",
    root: str = "",
    where: str = "",
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=MOST)] = PAGE,
) -> Facts:
    """Records in a state: ``next`` is the ``after`` of the next page. A page may be empty and have more behind it."""
    console = console_of(request)
    wanted = RecordFilter(state, vertex, job, stream, operator, group, q, root, where)
    check_masking(console, wanted)
    found = search(console.watch, wanted, after=after, limit=limit, clock=console.clock)
    names, mask = console.watch.names(), console.options.mask_payloads
    return {
        "items": [record_facts(at, info, names, mask=mask) for at, info in found.records],
        "next": found.next,
        "examined": found.examined,
        "troubles": list(found.troubles),
    }


@router.get("/records/{vertex}/{key}")
def record(request: Request, vertex: str, key: str, caller: AnyCaller) -> Facts:
    """One record with all of its attempts."""
    console = console_of(request)
    info = known_record(console, vertex, key)
    return record_facts(vertex, info, console.watch.names(), mask=console.options.mask_payloads)


@router.get("/records/{vertex}/{key}/explain")
def explain(request: Request, vertex: str, key: str, caller: AnyCaller) -> Facts:
    """Which ids a pending record waits for, and which operator owes them."""
    console = console_of(request)
    return explanation_of(console, vertex, known_record(console, vertex, key))


@router.put("/records/{vertex}/{key}/payload")
def edit(
    request: Request, vertex: str, key: str, body: Annotated[dict[str, Any], Body()], caller: ApiOperator
) -> Facts:
    """Give a dead letter this payload, a field a column, and requeue it; ``changed`` is 0 where it was gone."""
    console = console_of(request)
    info = known_record(console, vertex, key)
    check_editable(console, vertex, info)
    payload = row_of_json(body, info.payload.schema, info.payload)
    return {"changed": int(requeue_edited(console, caller, vertex, info, payload))}


@router.get("/audit")
def audit(
    request: Request,
    caller: AnyCaller,
    vertex: str = "",
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=MOST_ENTRIES)] = ENTRIES,
) -> Facts:
    """Who has changed what, the latest first. Of several vertices, say which to page on."""
    found = audit_of(console_of(request).watch, vertex=vertex, after=after, limit=limit)
    return {"items": found.entries, "next": found.next, "troubles": found.troubles}


@router.get("/dead/groups")
def groups(
    request: Request, caller: AnyCaller, vertex: str = "", job: str = "", stream: str = "", operator: str = ""
) -> Facts:
    """Dead letters by stream, operator and kind of reason, the largest group first."""
    console = console_of(request)
    found = dead_groups(
        console.watch,
        vertex=vertex,
        job=job,
        stream=stream,
        operator=operator,
        mask=console.options.mask_payloads,
    )
    return {
        "items": found.groups,
        "total": sum(group["count"] for group in found.groups),
        "troubles": found.troubles,
    }


@router.post("/dead/plans", status_code=201)
def make_plan(request: Request, body: PlanBody, caller: ApiOperator) -> Facts:
    """Count letters: a dry run. Nothing happens to them before the plan is carried out."""
    console = console_of(request)
    chosen = tuple(ChosenGroup(group.vertex, group.group, group.stream) for group in body.groups)
    wanted = None if body.filter is None else RecordFilter(**body.filter.model_dump())
    if body.all and wanted is None:
        wanted = RecordFilter()
    choice = Choice(chosen, choice_of((), tuple(body.keys)).keys, wanted, body.all)
    return plan_facts(console, begin_work(console, caller.user.name, body.action, choice, body.function))


@router.get("/dead/plans/{plan}")
def get_plan(request: Request, plan: str, caller: ApiOperator) -> Facts:
    """How far a plan is."""
    console = console_of(request)
    return plan_facts(console, known_work(console, plan, caller.user.name))


@router.post("/dead/plans/{plan}/{action}", status_code=202)
def carry_out(request: Request, plan: str, action: Wanted, caller: ApiOperator) -> Facts:
    """Requeue, purge or edit what was counted; once, however often it is asked."""
    console = console_of(request)
    return plan_facts(console, begin_change(console, plan, action, caller))


@router.get("/dead/plans/{plan}/export", response_class=Response)
def export_plan(
    request: Request, plan: str, caller: ApiOperator, format: ExportFormat = ExportFormat.JSONL
) -> Response:
    """What was counted, as lines of JSON or as Parquet."""
    console = console_of(request)
    return export(console, known_work(console, plan, caller.user.name), format)


def plan_facts(console: Console, work: Work) -> Facts:
    names, mask = console.watch.names(), console.options.mask_payloads
    return {
        "plan": work.id,
        "action": str(work.action),
        "state": str(work.state),
        "count": work.count,
        "examined": work.letters.examined,
        "until": iso(work.letters.until_ms),
        "groups": [letter_group_facts(group, names, mask=mask) for group in work.groups],
        "sent": work.sent,
        "changed": work.changed,
        "failure": work.failure,
        **(work.editing.facts() if work.editing is not None and work.ready.is_set() else {}),
    }
