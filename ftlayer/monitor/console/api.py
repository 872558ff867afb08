"""The JSON API, ``/api/v1``: all that the pages do, in the same fields; OpenAPI at ``/api/v1/openapi.json``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from ftlayer.monitor.console.asking import (
    AnyCaller,
    ApiOperator,
    OrderForm,
    ask,
    check_editable,
    only_known,
    requeue_edited,
    split_job,
)
from ftlayer.monitor.console.pages.dead import begin_change, begin_work, export, known_work
from ftlayer.monitor.console.pages.jobs import shown_job, shown_order
from ftlayer.monitor.console.pages.overview import ENTRIES, MOST_ENTRIES, audit_of, stored_checkpoints
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
from ftlayer.monitor.rules.facts import (
    Facts,
    hour_facts,
    iso,
    job_summary_facts,
    letter_group_facts,
    order_facts,
    overview_facts,
    record_facts,
    stream_facts,
    vertex_facts,
)
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.row_json import row_of_json

job_routes = APIRouter(prefix="/api/v1", tags=["jobs"], dependencies=[Depends(only_known)])
record_routes = APIRouter(prefix="/api/v1", tags=["records"], dependencies=[Depends(only_known)])


class OrderBody(BaseModel):
    """What is asked of a job. ``id``: the same order sent again is the same order; drawn where it is "".

    ``run`` "" is the one that runs now. ``directory`` of a savepoint is below the job's own. ``timeout`` of a drain is
    like "5m", or a number of seconds. ``slot`` is for a stack.
    """

    model_config = ConfigDict(extra="forbid")

    action: str
    id: str = ""
    run: str = ""
    directory: str = ""
    timeout: str | float = ""
    slot: Annotated[int, Field(ge=-1, le=1_000_000)] = -1


@job_routes.get("/overview")
def overview(request: Request, caller: AnyCaller) -> Facts:
    """How all is: health with its reasons, vertices, jobs."""
    console = console_of(request)
    return overview_facts(console.watch.views(), console.watch.names(), mask=console.options.mask_payloads)


@job_routes.get("/vertices")
def vertices(request: Request, caller: AnyCaller) -> Facts:
    """The vertices, and what they hold of each stream."""
    console = console_of(request)
    names, now_ms = console.watch.names(), console.clock().wall_ms
    items = [
        vertex_facts(view, mask=console.options.mask_payloads)
        | {"streams": [stream_facts(view.vertex, stream, names, now_ms) for stream in view.streams]}
        for view in console.watch.views()
    ]
    return {"items": items}


@job_routes.get("/vertices/{vertex}/hour")
def vertex_hour(request: Request, vertex: str, caller: AnyCaller) -> Facts:
    """The last hour of a vertex."""
    return hour_facts(console_of(request).watch.hour(vertex))


@job_routes.get("/jobs")
def jobs(request: Request, caller: AnyCaller) -> Facts:
    """All jobs that are known, those that have ended included."""
    console = console_of(request)
    names, mask = console.watch.names(), console.options.mask_payloads
    views = console.watch.views()
    return {"items": [job_summary_facts(view, job, names, mask=mask) for view in views for job in view.jobs]}


@job_routes.get("/jobs/{job}")
def job(request: Request, job: str, caller: AnyCaller) -> Facts:
    """All that is known of a job, ``<vertex>:<owner>``."""
    return shown_job(console_of(request), caller, job)[1]


@job_routes.get("/jobs/{job}/hour")
def job_hour(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The last hour of a job."""
    return hour_facts(console_of(request).watch.hour(*split_job(job)))


@job_routes.get("/jobs/{job}/graph")
def graph(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The graph of a topology: what it is made of, how its operators fare, what waits on its edges."""
    facts = shown_job(console_of(request), caller, job)[1]
    return {name: facts[name] for name in ("plan", "operators", "edges", "bottleneck")}


@job_routes.get("/jobs/{job}/incidents")
def incidents(request: Request, job: str, caller: AnyCaller) -> Facts:
    """What happened to a job, oldest first."""
    return {"items": shown_job(console_of(request), caller, job)[1]["incidents"]}


@job_routes.get("/jobs/{job}/batches")
def batches(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The last micro-batches of a query, oldest first."""
    return {"items": shown_job(console_of(request), caller, job)[1]["batches"]}


@job_routes.get("/jobs/{job}/checkpoints")
def checkpoints(request: Request, job: str, caller: AnyCaller) -> Facts:
    """Totals of a job's checkpoints, and the last of them, latest first."""
    return shown_job(console_of(request), caller, job)[1]["checkpoints"] or {"items": []}


@job_routes.get("/jobs/{job}/checkpoints/{number}")
def checkpoint(
    request: Request, job: str, number: int, caller: AnyCaller, kind: Annotated[str, Query()] = ""
) -> Facts:
    """One checkpoint by operator and subtask."""
    for item in checkpoints(request, job, caller)["items"]:
        if item["checkpoint"] == number and kind in ("", item["kind"]):
            return dict(item)
    raise HTTPException(404, f"checkpoint {number} of {job} is not known (any more)")


@job_routes.post("/jobs/{job}/orders", status_code=202)
def post_order(request: Request, job: str, body: OrderBody, caller: ApiOperator) -> Facts:
    """Ask something of a job: savepoint, stop, drain, cancel, stack. What becomes of it is at ``orders/{id}``."""
    console = console_of(request)
    asked = OrderForm(body.action, body.run, body.id, body.directory, body.timeout, body.slot)
    return order_facts(ask(console.watch, job, asked, caller, console.clock().wall_ms))


@job_routes.get("/jobs/{job}/orders/{order}")
def get_order(request: Request, job: str, order: str, caller: AnyCaller) -> Facts:
    """Where an order is, and what has become of it."""
    vertex, owner = split_job(job)
    console = console_of(request)
    for record in console.watch.job(vertex, owner).orders:
        if record.order.id == order:
            return shown_order(order_facts(record, mask=console.options.mask_payloads), caller)
    raise HTTPException(404, f"order {order} of {job} is not known (any more)")


@job_routes.get("/checkpoints")
def stored(request: Request, caller: AnyCaller) -> Facts:
    """Checkpoints in the directories that the console was given, the latest of each first."""
    found = stored_checkpoints(console_of(request).options.checkpoints)
    return {"items": [{"url": place.url, "failure": place.failure, "items": place.items} for place in found]}


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


@record_routes.get("/records")
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


@record_routes.get("/records/{vertex}/{key}")
def record(request: Request, vertex: str, key: str, caller: AnyCaller) -> Facts:
    """One record with all of its attempts."""
    console = console_of(request)
    info = known_record(console, vertex, key)
    return record_facts(vertex, info, console.watch.names(), mask=console.options.mask_payloads)


@record_routes.get("/records/{vertex}/{key}/explain")
def explain(request: Request, vertex: str, key: str, caller: AnyCaller) -> Facts:
    """Which ids a pending record waits for, and which operator owes them."""
    console = console_of(request)
    return explanation_of(console, vertex, known_record(console, vertex, key))


@record_routes.put("/records/{vertex}/{key}/payload")
def edit(
    request: Request, vertex: str, key: str, body: Annotated[dict[str, Any], Body()], caller: ApiOperator
) -> Facts:
    """Give a dead letter this payload, a field a column, and requeue it; ``changed`` is 0 where it was gone."""
    console = console_of(request)
    info = known_record(console, vertex, key)
    check_editable(console, vertex, info)
    payload = row_of_json(body, info.payload.schema, info.payload)
    return {"changed": int(requeue_edited(console, caller, vertex, info, payload))}


@record_routes.get("/audit")
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


@record_routes.get("/dead/groups")
def groups(
    request: Request, caller: AnyCaller, vertex: str = "", job: str = "", stream: str = "", operator: str = ""
) -> Facts:
    """Dead letters by stream, operator and kind of reason, the largest group first."""
    console = console_of(request)
    wanted = {"vertex": vertex, "job": job, "stream": stream, "operator": operator}
    found = dead_groups(console.watch, **wanted, mask=console.options.mask_payloads)
    total = sum(group["count"] for group in found.groups)
    return {"items": found.groups, "total": total, "troubles": found.troubles}


@record_routes.post("/dead/plans", status_code=201)
def make_plan(request: Request, body: PlanBody, caller: ApiOperator) -> Facts:
    """Count letters: a dry run. Nothing happens to them before the plan is carried out."""
    console = console_of(request)
    chosen = tuple(ChosenGroup(group.vertex, group.group, group.stream) for group in body.groups)
    wanted = RecordFilter() if body.all else None
    if body.filter is not None:
        wanted = RecordFilter(**body.filter.model_dump())
    choice = Choice(chosen, choice_of((), tuple(body.keys)).keys, wanted, body.all)
    return plan_facts(console, begin_work(console, caller.user.name, body.action, choice, body.function))


@record_routes.get("/dead/plans/{plan}")
def get_plan(request: Request, plan: str, caller: ApiOperator) -> Facts:
    """How far a plan is."""
    console = console_of(request)
    return plan_facts(console, known_work(console, plan, caller.user.name))


@record_routes.post("/dead/plans/{plan}/{action}", status_code=202)
def carry_out(request: Request, plan: str, action: Wanted, caller: ApiOperator) -> Facts:
    """Requeue, purge or edit what was counted; once, however often it is asked."""
    console = console_of(request)
    return plan_facts(console, begin_change(console, plan, action, caller))


@record_routes.get("/dead/plans/{plan}/export", response_class=Response)
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
