"""A job: its graph or its batches, slots, incidents, checkpoints; and what is asked of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from markupsafe import Markup

from ftlayer.errors import ConfigError
from ftlayer.monitor.console import asking, charts, formats
from ftlayer.monitor.console.asking import Operator, PostedForm, split_job
from ftlayer.monitor.console.charts import GraphEdge, GraphNode, draw
from ftlayer.monitor.console.guard import Caller
from ftlayer.monitor.console.live import Context, LivePage, Visit, known_hour, shown_hours
from ftlayer.monitor.console.rendering import console_of, go_to, page, say
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.works import job_href
from ftlayer.monitor.rules.facts import Facts, job_facts
from ftlayer.vertex.calls import AnnouncedJob, OrderAction

PHASES = ("run", "verdict", "seal", "sink", "commit")
SHOWN_BATCHES, LISTED_BATCHES, SHOWN_INCIDENTS, SHOWN_CHECKPOINTS = 60, 20, 50, 50

router = APIRouter(include_in_schema=False)


def _job(visit: Visit) -> Context:
    announced, facts = shown_job(visit.console, visit.caller, visit.params["job"])
    offered = (
        asking.actions_of(announced.job) if visit.caller.user.is_operator and not announced.is_silent else ()
    )
    is_up = visit.console.watch.is_up(facts["vertex"])
    return {"job": facts, "actions": offered if is_up else (), "tab": "job", "is_up": is_up}


def _graph_page(visit: Visit) -> Context:
    context = _job(visit)
    facts = context["job"]
    vertex, owner = split_job(visit.params["job"])
    hours = shown_hours(visit, [(facts["name"], vertex, owner)])
    shown = facts["batches"][-SHOWN_BATCHES:]
    return context | {
        "drawing": drawing_of(facts),
        "hours": hours,
        "orders": facts["orders"][::-1],
        "incidents": facts["incidents"][::-1][:SHOWN_INCIDENTS],
        "phases": PHASES,
        "batch_chart": batch_chart(shown),
        "longest_batch": max((batch["duration_seconds"] for batch in shown), default=None),
        "latest_batches": facts["batches"][::-1][:LISTED_BATCHES],
    }


def _checkpoint_page(visit: Visit) -> Context:
    context = _job(visit) | {"tab": "checkpoints"}
    checkpoints = context["job"]["checkpoints"]
    items = [] if checkpoints is None else checkpoints["items"][:SHOWN_CHECKPOINTS]
    ended = [item for item in items[::-1] if item["ended"]]
    bars = []
    for item in ended:
        title = f"{item['kind']} {item['checkpoint']}: {formats.seconds(item['duration_seconds'])}"
        bars.append(charts.Bar((item["duration_seconds"],), title))
    chart = charts.stack(bars, "How long the last checkpoints took") if bars else ""
    located = [item["location"] for item in items if item["location"] and item["state"] == "completed"]
    if not located and checkpoints is not None:
        # Of a job that is gone the history may not be known: what it retained is, the oldest first.
        located = [location for location in checkpoints["retained"][::-1] if location]
    restore = f"env.execute(restore_from={located[0]!r})" if located else ""
    return context | {
        "checkpoints": checkpoints,
        "items": items,
        "chart": chart,
        "longest": max((item["duration_seconds"] for item in ended), default=None),
        "restore": restore,
    }


_OF_A_JOB = ("graph", "operators", "latencies", "slots", "batches", "hours", "orders", "incidents")
_OF_CHECKPOINTS = ("job_title", "checkpoint_totals", "checkpoints")
GRAPH_PAGE = LivePage("/jobs/{job}", "job.html", ("job_title", "job_verdict", *_OF_A_JOB), _graph_page, "/")
CHECKPOINT_PAGE = LivePage(
    "/jobs/{job}/checkpoints", "job_checkpoints.html", _OF_CHECKPOINTS, _checkpoint_page, "/"
)


@router.get("/jobs/{job}")
def job_page(request: Request, job: str) -> Response:
    return GRAPH_PAGE.respond(request)


@router.get("/jobs/{job}/checkpoints")
def checkpoint_page(request: Request, job: str) -> Response:
    return CHECKPOINT_PAGE.respond(request)


@router.get("/jobs/{job}/ask/{action}")
def ask_page(request: Request, job: str, action: str, caller: Operator) -> Response:
    announced, facts = shown_job(console_of(request), caller, job)
    wanted = next((offered for offered in asking.actions_of(announced.job) if offered.name == action), None)
    if wanted is None:
        raise ConfigError(
            f"{action}: this cannot be asked of {announced.job.name}, which is {announced.job.state}"
        )
    asking.check_savepoint(announced.job, wanted)
    # The form has the id of its order: sent twice, it is one order.
    return page(request, "ask.html", here="/", job=facts, action=wanted, order_id=asking.drawn_id())


@router.post("/jobs/{job}/orders")
def order(request: Request, job: str, caller: Operator, form: PostedForm) -> Response:
    console = console_of(request)
    slot = form.text("slot")
    if slot and not slot.isdecimal():
        raise ConfigError(f"slot: expected a number, got {slot!r}")
    texts = {name: form.text(name) for name in ("action", "run", "id", "timeout")}
    asked = asking.OrderForm(**texts, slot=int(slot) if slot else -1)
    record = asking.ask(console.watch, job, asked, caller, console.clock().wall_ms)
    if record.order.action != "stack":
        say(request, f"Asked for: {record.order.action}. What becomes of it stands under “Asked of it”.")
    return go_to(job_href(job))


def shown_job(console: Console, caller: Caller, job: str) -> tuple[AnnouncedJob, Facts]:
    """Return a job, and its facts as far as the caller may see them: a stack has lines of the program.

    Raises `ConfigError`, `UnknownJobError`, and what the vertex raises.
    """
    vertex, owner = split_job(job)
    watch, mask = console.watch, console.options.mask_payloads
    announced, hour = watch.job(vertex, owner), known_hour(watch, vertex, owner)
    view = next(view for view in watch.views() if view.vertex == vertex)
    facts = job_facts(view, announced, watch.names(), hour=hour, mask=mask)
    facts["orders"] = [shown_order(order, caller) for order in facts["orders"]]
    return announced, facts


def shown_order(order: Facts, caller: Caller) -> Facts:
    if order["action"] == OrderAction.STACK and not caller.user.is_operator:
        return order | {"text": ""}
    return order


def drawing_of(job: Facts) -> Markup | None:
    """Draw the graph of a job as its facts have it; None where its plan is not known."""
    plan = job["plan"]
    if plan is None:
        return None
    fares = {operator["uid"]: operator for operator in job["operators"] if operator["subtasks"]}
    limits = job["bottleneck"]["operator"] if job["bottleneck"] else None
    queued = {(edge["source"], edge["target"]): edge for edge in job["edges"]}
    sources = Counter(edge["source"] for edge in plan["edges"])
    targets = Counter(edge["target"] for edge in plan["edges"])
    nodes = []
    for node in plan["nodes"]:
        uid, names = node["uid"], tuple(node["names"])
        is_source, is_sink, fare = not targets[uid], not sources[uid], fares.get(uid)
        what = "source" if is_source else "sink" if is_sink else "operator"
        about = " → ".join(names) if names and names != (uid,) else what
        drawn = GraphNode(uid, names, node["parallelism"], about=about, is_bottleneck=uid == limits)
        if fare is not None:
            drawn = replace(
                drawn,
                in_per_s=None if is_source else fare["in_per_second"],
                out_per_s=None if is_sink else fare["out_per_second"],
                busy=fare["busy_ratio"],
                back_pressured=fare["back_pressured_ratio"],
            )
        nodes.append(drawn)
    edges = []
    for edge in plan["edges"]:
        source, target = edge["source"], edge["target"]
        # What several edges share is known of their end alone.
        per_s = None
        if sources[source] == 1 and source in fares:
            per_s = fares[source]["out_per_second"]
        elif targets[target] == 1 and target in fares:
            per_s = fares[target]["in_per_second"]
        edges.append(_edge(edge, queued.get((source, target)), per_s))
    return draw(nodes, edges, f"The graph of {job['name']}: {len(nodes)} chains, {len(edges)} edges")


def _edge(edge: Mapping[str, Any], queued: Mapping[str, Any] | None, per_s: float | None) -> GraphEdge:
    how = ", ".join(filter(None, (edge["partitioner"], edge["tag"] and f"side output {edge['tag']}")))
    note = f"{edge['source']} → {edge['target']}" + (f" ({how})" if how else "")
    if queued is not None:
        note += f": {formats.count(queued['queued_rows'])} rows wait, {formats.size(queued['queued_bytes'])}"
    size = 0 if queued is None else queued["queued_bytes"]
    return GraphEdge(edge["source"], edge["target"], size, edge["feedback"], note, per_s)


def batch_chart(batches: Sequence[Facts]) -> Markup:
    bars = []
    for batch in batches:
        rows, took = formats.count(batch["rows"]), formats.seconds(batch["duration_seconds"])
        title = f"batch {batch['batch']}: {rows} rows in {took}, {batch['failed']} failed"
        bars.append(charts.Bar(tuple(batch["phases_seconds"].get(phase, 0.0) for phase in PHASES), title))
    return charts.stack(bars, f"How long the last {len(bars)} batches took, by phase")
