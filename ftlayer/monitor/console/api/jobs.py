"""The API of jobs and vertices: how they are, and orders to them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from ftlayer.monitor.console.asking import AnyCaller, ApiOperator, OrderForm, ask, only_known, split_job
from ftlayer.monitor.console.pages.jobs import shown_job, shown_order
from ftlayer.monitor.console.pages.overview import stored_checkpoints
from ftlayer.monitor.console.rendering import console_of
from ftlayer.monitor.rules.facts import (
    Facts,
    hour_facts,
    job_summary_facts,
    order_facts,
    overview_facts,
    stream_facts,
    vertex_facts,
)

router = APIRouter(prefix="/api/v1", tags=["jobs"], dependencies=[Depends(only_known)])


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


@router.get("/overview")
def overview(request: Request, caller: AnyCaller) -> Facts:
    """How all is: health with its reasons, vertices, jobs."""
    console = console_of(request)
    return overview_facts(console.watch.views(), console.watch.names(), mask=console.options.mask_payloads)


@router.get("/vertices")
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


@router.get("/vertices/{vertex}/hour")
def vertex_hour(request: Request, vertex: str, caller: AnyCaller) -> Facts:
    """The last hour of a vertex."""
    return hour_facts(console_of(request).watch.hour(vertex))


@router.get("/jobs")
def jobs(request: Request, caller: AnyCaller) -> Facts:
    """All jobs that are known, those that have ended included."""
    console = console_of(request)
    names, mask = console.watch.names(), console.options.mask_payloads
    views = console.watch.views()
    return {"items": [job_summary_facts(view, job, names, mask=mask) for view in views for job in view.jobs]}


@router.get("/jobs/{job}")
def job(request: Request, job: str, caller: AnyCaller) -> Facts:
    """All that is known of a job, ``<vertex>:<owner>``."""
    return shown_job(console_of(request), caller, job)[1]


@router.get("/jobs/{job}/hour")
def job_hour(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The last hour of a job."""
    return hour_facts(console_of(request).watch.hour(*split_job(job)))


@router.get("/jobs/{job}/graph")
def graph(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The graph of a topology: what it is made of, how its operators fare, what waits on its edges."""
    facts = shown_job(console_of(request), caller, job)[1]
    return {name: facts[name] for name in ("plan", "operators", "edges", "bottleneck")}


@router.get("/jobs/{job}/incidents")
def incidents(request: Request, job: str, caller: AnyCaller) -> Facts:
    """What happened to a job, oldest first."""
    return {"items": shown_job(console_of(request), caller, job)[1]["incidents"]}


@router.get("/jobs/{job}/batches")
def batches(request: Request, job: str, caller: AnyCaller) -> Facts:
    """The last micro-batches of a query, oldest first."""
    return {"items": shown_job(console_of(request), caller, job)[1]["batches"]}


@router.get("/jobs/{job}/checkpoints")
def checkpoints(request: Request, job: str, caller: AnyCaller) -> Facts:
    """Totals of a job's checkpoints, and the last of them, latest first."""
    return _checkpoints(request, job, caller)


@router.get("/jobs/{job}/checkpoints/{number}")
def checkpoint(
    request: Request, job: str, number: int, caller: AnyCaller, kind: Annotated[str, Query()] = ""
) -> Facts:
    """One checkpoint by operator and subtask."""
    for item in _checkpoints(request, job, caller)["items"]:
        if item["checkpoint"] == number and kind in ("", item["kind"]):
            return dict(item)
    raise HTTPException(404, f"checkpoint {number} of {job} is not known (any more)")


def _checkpoints(request: Request, job: str, caller: AnyCaller) -> dict[str, Any]:
    facts = shown_job(console_of(request), caller, job)[1]
    return facts["checkpoints"] or {"items": []}


@router.post("/jobs/{job}/orders", status_code=202)
def post_order(request: Request, job: str, body: OrderBody, caller: ApiOperator) -> Facts:
    """Ask something of a job: savepoint, stop, drain, cancel, stack. What becomes of it is at ``orders/{id}``."""
    console = console_of(request)
    asked = OrderForm(body.action, body.run, body.id, body.directory, body.timeout, body.slot)
    return order_facts(ask(console.watch, job, asked, caller, console.clock().wall_ms))


@router.get("/jobs/{job}/orders/{order}")
def get_order(request: Request, job: str, order: str, caller: AnyCaller) -> Facts:
    """Where an order is, and what has become of it."""
    vertex, owner = split_job(job)
    console = console_of(request)
    for record in console.watch.job(vertex, owner).orders:
        if record.order.id == order:
            return shown_order(order_facts(record, mask=console.options.mask_payloads), caller)
    raise HTTPException(404, f"order {order} of {job} is not known (any more)")


@router.get("/checkpoints")
def stored(request: Request, caller: AnyCaller) -> Facts:
    """Checkpoints in the directories that the console was given, the latest of each first."""
    found = stored_checkpoints(console_of(request).options.checkpoints)
    return {"items": [{"url": place.url, "failure": place.failure, "items": place.items} for place in found]}
