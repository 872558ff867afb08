"""Facts of jobs: all that their drivers announced, orders to them, and how they are judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ftlayer.monitor.rules.facts.common import (
    Facts,
    circuit_facts,
    event_time,
    finite,
    iso,
    judgement_facts,
    latency_facts,
    masked_failure,
    seconds,
)
from ftlayer.monitor.rules.health import bottleneck, job_health, overall_health, vertex_health
from ftlayer.monitor.rules.names import JobNames, VertexView, pace_of, state_of
from ftlayer.vertex import calls


def plan_facts(job: calls.JobDetails) -> Facts:
    assert job.plan is not None
    return {
        "nodes": [
            {"uid": node.uid, "names": list(node.names), "parallelism": node.parallelism}
            for node in job.plan.nodes
        ],
        "edges": [
            {
                "source": edge.source,
                "target": edge.target,
                "partitioner": edge.partitioner,
                "tag": edge.tag,
                "feedback": edge.feedback,
            }
            for edge in job.plan.edges
        ],
    }


def operator_facts(job: calls.JobDetails) -> list[Facts]:
    """Return the chains with their subtasks: totals of the run, the busiest one's shares, the least watermark.

    A subtask counts from 0 again when its slot is started again, and is not there any more when the job has ended.
    """
    found: dict[str, list[calls.SubtaskDetails]] = {}
    for subtask in job.subtasks:
        found.setdefault(subtask.uid, []).append(subtask)
    names = {} if job.plan is None else {node.uid: list(node.names) for node in job.plan.nodes}
    order = list(names) + [uid for uid in found if uid not in names]
    return [_operator(uid, names.get(uid, []), found.get(uid, []), job) for uid in order]


def _operator(
    uid: str, names: list[str], subtasks: list[calls.SubtaskDetails], job: calls.JobDetails
) -> Facts:
    def total(name: str) -> int:
        counted: int = sum(getattr(subtask, name) for subtask in subtasks)
        return job.counters.get(f"{name}/{uid}", counted)

    marks = [subtask.watermark_ms for subtask in subtasks if subtask.watermark_ms is not None]
    mark = min(marks, default=None)
    return {
        "uid": uid,
        "names": names,
        "parallelism": len(subtasks),
        "records_in": total("records_in"),
        "records_out": total("records_out"),
        "in_per_second": sum(subtask.in_per_s for subtask in subtasks),
        "out_per_second": sum(subtask.out_per_s for subtask in subtasks),
        "busy_ratio": max((subtask.busy for subtask in subtasks), default=0.0),
        "back_pressured_ratio": max((subtask.back_pressured for subtask in subtasks), default=0.0),
        "watermark": None if mark is None else event_time(mark),
        "watermark_lag_seconds": None if mark is None else seconds(job.at_ms - mark),
        "late": total("late"),
        "source_lag_records": job.counters.get(f"lag/{uid}"),
        **{name: job.counters.get(f"{name}/{uid}", 0) for name in calls.FAILING},
        "subtasks": [
            {
                "slot": subtask.slot,
                "records_in": subtask.records_in,
                "records_out": subtask.records_out,
                "in_per_second": subtask.in_per_s,
                "out_per_second": subtask.out_per_s,
                "busy_ratio": subtask.busy,
                "back_pressured_ratio": subtask.back_pressured,
                "watermark": None if subtask.watermark_ms is None else event_time(subtask.watermark_ms),
                "late": subtask.late,
            }
            for subtask in sorted(subtasks, key=lambda subtask: subtask.slot)
        ],
    }


def slot_facts(job: calls.JobDetails, *, mask: bool = False) -> list[Facts]:
    return [
        {
            "slot": slot.slot,
            "state": slot.state,
            "host": slot.host,
            "pid": slot.pid,
            "heartbeat_age_seconds": None if slot.heartbeat_age_ms < 0 else seconds(slot.heartbeat_age_ms),
            "busy": slot.busy,
            "busy_seconds": seconds(slot.busy_ms),
            "function": slot.function,
            "restarts": slot.restarts,
            "failure": masked_failure(slot.failure) if mask else slot.failure,
        }
        for slot in job.slots
    ]


def edge_facts(job: calls.JobDetails) -> list[Facts]:
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for edge in job.edges:
        queued, rows = found.get((edge.source, edge.target), (0, 0))
        found[edge.source, edge.target] = queued + edge.queued_bytes, rows + edge.queued_rows
    return [
        {"source": source, "target": target, "queued_bytes": queued, "queued_rows": rows}
        for (source, target), (queued, rows) in found.items()
    ]


def checkpoints_facts(job: calls.JobDetails, *, mask: bool = False) -> Facts | None:
    """Return the totals of a job's checkpoints and those that are known, the latest first; null if it takes none."""
    if job.checkpoint_totals is None:
        return None
    latest = sorted(job.checkpoints, key=lambda checkpoint: -checkpoint.number)
    return {
        **_checkpoint_totals(job.checkpoint_totals),
        "items": [checkpoint_facts(checkpoint, mask=mask) for checkpoint in latest],
    }


def _checkpoint_totals(totals: calls.CheckpointTotals) -> Facts:
    return {
        "triggered": totals.triggered,
        "in_progress": totals.in_progress,
        "completed": totals.completed,
        "failed": totals.failed,
        "restored": totals.restored,
        "failures_in_a_row": totals.failures_in_a_row,
        "tolerable_failures": None if totals.tolerable_failures < 0 else totals.tolerable_failures,
        "interval_seconds": seconds(totals.interval_ms) if totals.interval_ms else None,
        "last_completed": iso(totals.last_completed_ms),
        "directory": totals.directory,
        "savepoint_directory": totals.savepoint_directory,
        "retained": list(totals.retained),
    }


def checkpoint_facts(checkpoint: calls.CheckpointDetails, *, mask: bool = False) -> Facts:
    """Return a checkpoint: its sums and longest parts, by operator, and all of its subtasks."""
    return {
        "checkpoint": checkpoint.number,
        "kind": checkpoint.kind,
        "state": checkpoint.state,
        "final": checkpoint.final,
        "triggered": iso(checkpoint.triggered_ms),
        "ended": iso(checkpoint.ended_ms),
        "duration_seconds": seconds(checkpoint.duration_ms),
        "acked": len(checkpoint.subtasks),
        "expected": checkpoint.expected,
        "location": checkpoint.location,
        "failure": masked_failure(checkpoint.failure) if mask else checkpoint.failure,
        **_part_facts(checkpoint.total),
        "operators": [{"operator": uid, **_part_facts(parts)} for uid, parts in checkpoint.chains.items()],
        "subtasks": [
            {"operator": part.uid, "subtask": part.subtask, **_part_facts(part)}
            for part in checkpoint.subtasks
        ],
    }


def _part_facts(part: calls.SubtaskCheckpointDetails | calls.CheckpointSums) -> Facts:
    return {
        "start_delay_seconds": seconds(part.start_delay_ms),
        "alignment_seconds": seconds(part.alignment_ms),
        "sync_seconds": seconds(part.sync_ms),
        "async_seconds": seconds(part.async_ms),
        "written_bytes": part.written_bytes,
        "state_bytes": part.state_bytes,
        "in_flight_bytes": part.in_flight_bytes,
        "unaligned": part.unaligned,
    }


def job_summary_facts(
    view: VertexView, announced: calls.AnnouncedJob, names: JobNames, *, mask: bool = False
) -> Facts:
    """Return a job in a few fields, as lists of jobs have it."""
    job, vertex = announced.job, view.vertex
    return {
        "job": f"{vertex}:{job.owner}",
        "vertex": vertex,
        "owner": job.owner,
        "name": names.label(vertex, job.owner),
        "kind": str(job.kind),
        "mode": job.mode or None,
        "run": job.run,
        "state": state_of(view, announced),
        "final": job.final,
        "silent": announced.is_silent,
        "heard_ago_seconds": seconds(view.heard_ago_ms(announced)),
        "as_of": iso(job.at_ms),
        "since": iso(job.since_ms),
        "ended": iso(job.ended_ms),
        "uptime_seconds": seconds(max((job.ended_ms or job.at_ms) - job.since_ms, 0)),
        "host": job.host,
        "pid": job.pid,
        "version": job.version or None,
        "line": _line(view, announced, mask=mask),
        "in_per_second": pace_of(view, announced),
        "restarts": job.restarts,
        "last_failure": masked_failure(job.last_failure) if mask else job.last_failure,
        **judgement_facts(job_health(view, announced), mask=mask),
    }


def _line(view: VertexView, announced: calls.AnnouncedJob, *, mask: bool) -> str:
    """Return what a job says of itself in a line; of one that is not heard any more, that it said so last."""
    job = announced.job
    line = masked_failure(job.line) if mask else job.line
    is_heard = job.final or state_of(view, announced) == job.state
    return line if is_heard or not line else f"said last: {line}"


def job_facts(
    view: VertexView,
    announced: calls.AnnouncedJob,
    names: JobNames,
    *,
    hour: calls.Hour | None = None,
    mask: bool = False,
) -> Facts:
    """Return all that is known of a job; with ``hour`` it is judged by this too."""
    job = announced.job
    found = bottleneck(job)
    return {
        **job_summary_facts(view, announced, names, mask=mask),
        **judgement_facts(job_health(view, announced, hour), mask=mask),
        "checkpoint_location": job.checkpoint_location,
        "bottleneck": None
        if found is None
        else {"operator": found.uid, "slot": found.slot, "text": found.text},
        "plan": None if job.plan is None else plan_facts(job),
        "operators": operator_facts(job),
        "slots": slot_facts(job, mask=mask),
        "edges": edge_facts(job),
        "counters": {name: value for name, value in job.counters.items() if "/" not in name},
        "rates": dict(job.rates),
        "latencies": latency_facts(job),
        "histograms": histogram_facts(job.histograms),
        "incidents": [incident_facts(incident, mask=mask) for incident in announced.incidents],
        "checkpoints": checkpoints_facts(job, mask=mask),
        "circuits": {name: circuit_facts(status) for name, status in job.circuits.items()},
        "batches": [batch_facts(batch) for batch in job.batches],
        "orders": [order_facts(order, mask=mask) for order in announced.orders],
        "links": dict(job.links),
    }


def incident_facts(incident: calls.Incident, *, mask: bool = False) -> Facts:
    return {
        "at": iso(incident.at_ms),
        "kind": incident.kind,
        "slot": None if incident.slot < 0 else incident.slot,
        "text": masked_failure(incident.text) if mask else incident.text,
    }


def histogram_facts(histograms: Mapping[str, calls.HistogramDetails]) -> list[Facts]:
    """Return histograms: how many observations are at most each bound, the last count those above all."""
    found = []
    for name, histogram in sorted(histograms.items()):
        metric, _, operator = name.partition("|")
        facts = {"metric": metric, "operator": operator, "bounds": list(histogram.bounds)}
        found.append({**facts, "counts": list(histogram.counts), "total_seconds": histogram.total})
    return found


def batch_facts(batch: calls.BatchDetails) -> Facts:
    return {
        "batch": batch.batch,
        "at": iso(batch.at_ms),
        "rows": batch.rows_in,
        "delivered": batch.delivered,
        "failed": batch.failed,
        "dead": batch.dead,
        "duration_seconds": seconds(batch.duration_ms),
        "phases_seconds": {name: seconds(phase) for name, phase in batch.phases_ms.items()},
    }


def order_facts(record: calls.OrderRecord, *, mask: bool = False) -> Facts:
    order, answer = record.order, record.answer
    return {
        "id": order.id,
        "action": str(order.action),
        "by": order.by,
        "asked": iso(order.asked_ms),
        "directory": order.directory,
        "timeout_seconds": seconds(order.timeout_ms) if order.timeout_ms else None,
        "slot": None if order.slot < 0 else order.slot,
        "state": str(answer.state),
        "text": masked_failure(answer.text) if mask else answer.text,
        "at": iso(answer.at_ms),
    }


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


def stream_facts(vertex: str, stream: calls.StreamDetails, names: JobNames, now_ms: int) -> Facts:
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
