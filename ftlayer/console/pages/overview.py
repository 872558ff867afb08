"""The overview: how all is, jobs, vertices, the last hour."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.live import Context, LivePage, Visit, shown_hour
from ftlayer.monitor.facts import Facts, overview_facts

router = APIRouter(include_in_schema=False)


def _context(visit: Visit) -> Context:
    watch = visit.console.watch
    views = watch.views()
    overview = overview_facts(views, watch.names(), mask=visit.mask)
    jobs = overview["jobs"]
    over = [job for job in jobs if job["final"] or job["state"] in ("gone", "killed")]
    running = [job for job in jobs if job not in over]
    hours = [
        (f"{view.vertex}, of the records that it stores", shown_hour(watch, view.vertex))
        for view in views
        if view.is_up and view.has_records
    ]
    return {
        "overview": overview,
        "totals": _totals(overview),
        "running": running,
        "gone": over,
        "alive": sum(job["state"] not in ("silent", "no answer") for job in running),
        "hours": hours,
    }


def _totals(overview: Facts) -> Facts | None:
    """Return what all vertices hold together; None where none keeps records."""
    kept = [vertex for vertex in overview["vertices"] if vertex["pending"] is not None]
    if not kept:
        return None
    oldest = [vertex["oldest_seconds"] for vertex in kept if vertex["oldest_seconds"] is not None]
    return {
        # Of jobs that recover or drain too; what is not heard has no rate.
        "in_per_second": sum(job["in_per_second"] or 0.0 for job in overview["jobs"] if not job["final"]),
        **{
            name: sum(vertex[name] for vertex in kept)
            for name in ("pending", "waiting", "in_delivery", "dead")
        },
        "oldest_seconds": max(oldest, default=None),
    }


LIVE = LivePage("/", "overview.html", ("verdict", "jobs", "vertices", "hours"), _context, "/")


@router.get("/")
def overview(request: Request) -> Response:
    return LIVE.respond(request)
