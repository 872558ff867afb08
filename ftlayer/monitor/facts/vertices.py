"""Facts of vertices and of what they hold, and of how all is."""

from __future__ import annotations

from collections.abc import Iterable

from ftlayer.monitor.facts.common import Facts, circuit_facts, finite, iso, judgement_facts, seconds
from ftlayer.monitor.facts.jobs import job_summary_facts
from ftlayer.monitor.health import overall_health, vertex_health
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.views import VertexView
from ftlayer.vertex.calls.records import StreamDetails


def overview_facts(views: Iterable[VertexView], names: JobNames, *, mask: bool = False) -> Facts:
    """Return how all is: health with its reasons, vertices, jobs."""
    views = tuple(views)
    return {
        **judgement_facts(overall_health(views), mask=mask),
        "vertices": [vertex_facts(view, mask=mask) for view in views],
        "jobs": [job_summary_facts(view, job, names, mask=mask) for view in views for job in view.jobs],
    }


def vertex_facts(view: VertexView, *, mask: bool = False) -> Facts:
    """Return how a vertex is; its figures are null where it keeps no records, or has never answered."""
    oldest_ms = min((stream.oldest_ms for stream in view.streams if stream.oldest_ms), default=0)
    known = view.has_records and bool(view.as_of_ms)

    def figure(name: str) -> int | None:
        return int(view.stats.get(name, 0)) if known else None

    return {
        "vertex": view.vertex,
        "address": view.address,
        "path": view.path,
        "state": view.state,
        "failure": view.failure,
        "as_of": iso(view.as_of_ms),
        **judgement_facts(vertex_health(view), mask=mask),
        "pending": figure("pending"),
        "waiting": figure("waiting"),
        "in_delivery": figure("in_delivery"),
        "dead": figure("dead_letters"),
        "oldest_seconds": seconds(max(view.as_of_ms - oldest_ms, 0)) if oldest_ms else None,
        "store_used_bytes": figure("used_bytes"),
        "store_used_ratio": round(view.stats.get("used_share", 0.0), 6) if known else None,
        "incarnation": figure("incarnation"),
        "counters": {name: finite(value) for name, value in sorted(view.stats.items())},
        "circuits": {
            owner: {name: circuit_facts(status) for name, status in circuits.items()}
            for owner, circuits in view.circuits.items()
        },
    }


def stream_facts(vertex: str, stream: StreamDetails, names: JobNames, now_ms: int) -> Facts:
    """Return what a vertex holds of a stream."""
    return {
        "vertex": vertex,
        "stream": names.stream(vertex, stream.stream),
        "stream_id": stream.stream,
        "owner": stream.owner,
        "name": names.label(vertex, stream.owner),
        "source": stream.source,
        **{
            name: getattr(stream, name)
            for name in (
                *("pending", "waiting", "in_delivery", "dead"),
                *("persisted", "completed", "failed", "died", "max_pending"),
            )
        },
        "oldest": iso(stream.oldest_ms),
        "oldest_seconds": seconds(max(now_ms - stream.oldest_ms, 0)) if stream.oldest_ms else None,
    }
