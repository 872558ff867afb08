"""Plain values of what is known, as JSON has them: the same fields for pages, the API and ``--json``.

Times are ISO 8601 in UTC with milliseconds, null where there is none; durations are seconds; shares 0 to 1; roots and
origins 16 hexadecimal digits, keys hexadecimal. With ``mask`` nothing that a record says is in them
(`ftlayer.monitor.masking`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from ftlayer.circuit import CircuitStatus
from ftlayer.monitor.bottleneck import bottleneck
from ftlayer.monitor.editing import json_of_row
from ftlayer.monitor.grouped import LetterGroup
from ftlayer.monitor.health import Judgement, job_health, together, vertex_health
from ftlayer.monitor.masking import masked_failure, masked_reason, masked_traceback, masked_value
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.views import VertexView
from ftlayer.vertex.calls import Explained, RecordInfo
from ftlayer.vertex.calls.jobs import (
    AnnouncedJob,
    AuditEntry,
    BatchDetails,
    CheckpointDetails,
    CheckpointTotals,
    HistogramDetails,
    Hour,
    Incident,
    JobDetails,
    OrderRecord,
    SubtaskDetails,
)
from ftlayer.vertex.calls.records import DeadGroup, StreamDetails

Facts = dict[str, Any]


def iso(wall_ms: int) -> str | None:
    """Return a time, null for 0."""
    if not wall_ms:
        return None
    at = datetime.fromtimestamp(wall_ms / 1_000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds(milliseconds: float) -> float:
    """Return a duration."""
    return round(milliseconds / 1_000, 6)


def root_text(root: int) -> str:
    """Return a root or origin."""
    return f"{root:016x}"


# ---------------------------------------------------------------- vertices


def overview_facts(views: Iterable[VertexView], names: JobNames, *, mask: bool = False) -> Facts:
    """Return how all is: health with its reasons, vertices, jobs."""
    views = tuple(views)
    judged = together(
        [*map(vertex_health, views), *(job_health(v.vertex, job) for v in views for job in v.jobs)]
    )
    return {
        **judgement_facts(judged, mask=mask),
        "vertices": [vertex_facts(view, mask=mask) for view in views],
        "jobs": [
            job_summary_facts(view.vertex, job, names, mask=mask, view=view)
            for view in views
            for job in view.jobs
        ],
    }


def judgement_facts(judgement: Judgement, *, mask: bool = False) -> Facts:
    """Return a judgement; a reason's place says where to go."""
    return {
        "health": str(judgement.health),
        "reasons": [
            {
                "health": str(finding.health),
                "text": masked_failure(finding.text) if mask else finding.text,
                "place": {
                    "page": str(finding.place.page),
                    "vertex": finding.place.vertex,
                    "owner": finding.place.owner,
                    "stream": finding.place.stream,
                    "operator": finding.place.operator,
                },
            }
            for finding in judgement.findings
        ],
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
        "state": "gone" if view.is_gone else "up" if view.is_up else "down",
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


def circuit_facts(status: CircuitStatus) -> Facts:
    """Return where a circuit breaker is."""
    return {
        "state": str(status.state),
        "opened": status.opened,
        "records": status.records,
        "failed": status.failed,
        "next_trial_in_seconds": seconds(status.next_trial_in_ms),
    }


def hour_facts(hour: Hour) -> Facts:
    """Return series of points; null where nothing was heard."""
    return {
        "step_seconds": seconds(hour.step_ms),
        "end": iso(hour.end_ms),
        "series": {name: [finite(value) for value in points] for name, points in hour.series.items()},
    }


def finite(value: float) -> float | int | None:
    """Return a number as JSON has it: whole ones without a point, null for none."""
    if math.isnan(value) or math.isinf(value):
        return None
    return int(value) if value == int(value) else value


# ---------------------------------------------------------------- jobs


def job_summary_facts(
    vertex: str,
    announced: AnnouncedJob,
    names: JobNames,
    *,
    mask: bool = False,
    view: VertexView | None = None,
) -> Facts:
    """Return a job in a few fields, as lists of jobs have it; with ``view`` it is judged by its records too."""
    job = announced.job
    return {
        "job": f"{vertex}:{job.owner}",
        "vertex": vertex,
        "owner": job.owner,
        "name": names.label(vertex, job.owner),
        "kind": str(job.kind),
        "mode": job.mode,
        "run": job.run,
        "state": job.state,
        "final": job.final,
        "silent": announced.is_silent,
        "heard_ago_seconds": seconds(announced.heard_ago_ms),
        "as_of": iso(job.at_ms),
        "since": iso(job.since_ms),
        "ended": iso(job.ended_ms),
        "uptime_seconds": seconds(max((job.ended_ms or job.at_ms) - job.since_ms, 0)),
        "host": job.host,
        "pid": job.pid,
        "line": masked_failure(job.line) if mask else job.line,
        "in_per_second": job.rates.get("records_in"),
        "restarts": job.restarts,
        "last_failure": masked_failure(job.last_failure) if mask else job.last_failure,
        **judgement_facts(job_health(vertex, announced, view=view), mask=mask),
    }


def job_facts(
    vertex: str,
    announced: AnnouncedJob,
    names: JobNames,
    *,
    hour: Hour | None = None,
    mask: bool = False,
    view: VertexView | None = None,
) -> Facts:
    """Return all that is known of a job; with ``hour`` and ``view`` it is judged by these too."""
    job = announced.job
    found = bottleneck(job)
    return {
        **job_summary_facts(vertex, announced, names, mask=mask, view=view),
        **judgement_facts(job_health(vertex, announced, hour, view), mask=mask),
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
        "histograms": histogram_facts(job.histograms),
        "incidents": [incident_facts(incident, mask=mask) for incident in announced.incidents],
        "checkpoints": checkpoints_facts(job, mask=mask),
        "circuits": {name: circuit_facts(status) for name, status in job.circuits.items()},
        "batches": [batch_facts(batch) for batch in job.batches],
        "orders": [order_facts(order, mask=mask) for order in announced.orders],
        "links": dict(job.links),
    }


def plan_facts(job: JobDetails) -> Facts:
    """Return the graph of a job whose plan is known."""
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


def operator_facts(job: JobDetails) -> list[Facts]:
    """Return the chains with their subtasks: totals of the run, the busiest one's shares, the least watermark.

    A subtask counts from 0 again when its slot is started again, and is not there any more when the job has ended.
    """
    found: dict[str, list[SubtaskDetails]] = {}
    for subtask in job.subtasks:
        found.setdefault(subtask.uid, []).append(subtask)
    names = {} if job.plan is None else {node.uid: list(node.names) for node in job.plan.nodes}
    order = list(names) + [uid for uid in found if uid not in names]
    return [_operator(uid, names.get(uid, []), found.get(uid, []), job) for uid in order]


def _operator(uid: str, names: list[str], subtasks: list[SubtaskDetails], job: JobDetails) -> Facts:
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
        "watermark": None if mark is None else _event_time(mark),
        "watermark_lag_seconds": None if mark is None else seconds(job.at_ms - mark),
        "late": total("late"),
        "subtasks": [
            {
                "slot": subtask.slot,
                "records_in": subtask.records_in,
                "records_out": subtask.records_out,
                "in_per_second": subtask.in_per_s,
                "out_per_second": subtask.out_per_s,
                "busy_ratio": subtask.busy,
                "back_pressured_ratio": subtask.back_pressured,
                "watermark": None if subtask.watermark_ms is None else _event_time(subtask.watermark_ms),
                "late": subtask.late,
            }
            for subtask in sorted(subtasks, key=lambda subtask: subtask.slot)
        ],
    }


def _event_time(wall_ms: int) -> str:
    """Return an event time, which may be any: as milliseconds where no calendar has it."""
    try:
        return iso(wall_ms) or "1970-01-01T00:00:00.000Z"
    except (ValueError, OverflowError, OSError):
        return f"{wall_ms} ms"


def slot_facts(job: JobDetails, *, mask: bool = False) -> list[Facts]:
    """Return the slots of a topology."""
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


def edge_facts(job: JobDetails) -> list[Facts]:
    """Return what is queued on each edge, of all slots."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for edge in job.edges:
        queued, rows = found.get((edge.source, edge.target), (0, 0))
        found[edge.source, edge.target] = queued + edge.queued_bytes, rows + edge.queued_rows
    return [
        {"source": source, "target": target, "queued_bytes": queued, "queued_rows": rows}
        for (source, target), (queued, rows) in found.items()
    ]


def incident_facts(incident: Incident, *, mask: bool = False) -> Facts:
    """Return something that happened to a job."""
    return {
        "at": iso(incident.at_ms),
        "kind": incident.kind,
        "slot": None if incident.slot < 0 else incident.slot,
        "text": masked_failure(incident.text) if mask else incident.text,
    }


def histogram_facts(histograms: Mapping[str, HistogramDetails]) -> list[Facts]:
    """Return histograms: how many observations are at most each bound, the last count those above all."""
    found = []
    for name, histogram in sorted(histograms.items()):
        metric, _, operator = name.partition("|")
        facts = {"metric": metric, "operator": operator, "bounds": list(histogram.bounds)}
        found.append({**facts, "counts": list(histogram.counts), "total_seconds": histogram.total})
    return found


def checkpoints_facts(job: JobDetails, *, mask: bool = False) -> Facts | None:
    """Return the totals of a job's checkpoints and those that are known, the latest first; null if it takes none."""
    if job.checkpoint_totals is None:
        return None
    latest = sorted(job.checkpoints, key=lambda checkpoint: -checkpoint.number)
    return {
        **_checkpoint_totals(job.checkpoint_totals),
        "items": [checkpoint_facts(checkpoint, mask=mask) for checkpoint in latest],
    }


def _checkpoint_totals(totals: CheckpointTotals) -> Facts:
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


def checkpoint_facts(checkpoint: CheckpointDetails, *, mask: bool = False) -> Facts:
    """Return a checkpoint: its sums and longest parts, by operator, and all of its subtasks."""
    uids = dict.fromkeys(part.uid for part in checkpoint.subtasks)
    parts = [
        {
            "operator": part.uid,
            "subtask": part.subtask,
            "start_delay_seconds": seconds(part.start_delay_ms),
            "alignment_seconds": seconds(part.alignment_ms),
            "sync_seconds": seconds(part.sync_ms),
            "async_seconds": seconds(part.async_ms),
            "written_bytes": part.written_bytes,
            "state_bytes": part.state_bytes,
            "in_flight_bytes": part.in_flight_bytes,
            "unaligned": part.unaligned,
        }
        for part in checkpoint.subtasks
    ]
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
        **_summed(parts),
        "operators": [
            {"operator": uid, **_summed([part for part in parts if part["operator"] == uid])} for uid in uids
        ],
        "subtasks": parts,
    }


def _summed(parts: list[Facts]) -> Facts:
    """Return parts of a checkpoint together: bytes added up, the longest of each duration."""
    durations = ("start_delay_seconds", "alignment_seconds", "sync_seconds", "async_seconds")
    sizes = ("written_bytes", "state_bytes", "in_flight_bytes")
    return {
        **{name: max((part[name] for part in parts), default=0.0) for name in durations},
        **{name: sum(part[name] for part in parts) for name in sizes},
        "unaligned": any(part["unaligned"] for part in parts),
    }


def batch_facts(batch: BatchDetails) -> Facts:
    """Return a micro-batch of a query."""
    return {
        "batch": batch.batch,
        "at": iso(batch.at_ms),
        "rows": batch.rows,
        "delivered": batch.delivered,
        "failed": batch.failed,
        "dead": batch.dead,
        "duration_seconds": seconds(batch.duration_ms),
        "phases_seconds": {name: seconds(phase) for name, phase in batch.phases_ms.items()},
    }


def order_facts(record: OrderRecord, *, mask: bool = False) -> Facts:
    """Return an order and what has become of it."""
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


def audit_facts(entry: AuditEntry) -> Facts:
    """Return a change that somebody made."""
    return {
        "at": iso(entry.at_ms),
        "who": entry.who,
        "what": entry.what,
        "which": entry.which,
        "count": entry.count,
        "outcome": entry.outcome,
    }


# ---------------------------------------------------------------- records


def group_facts(vertex: str, group: DeadGroup, names: JobNames, *, mask: bool = False) -> Facts:
    """Return a group of dead letters."""
    return {
        "vertex": vertex,
        "stream": names.stream(vertex, group.stream),
        "stream_id": group.stream,
        "group": group.number,
        "operator": group.operator,
        "reason": masked_reason(group.kind) if mask else group.kind,
        "example": masked_reason(group.example) if mask else group.example,
        "count": group.count,
        "first_seen": iso(group.first_seen_ms),
        "last_seen": iso(group.last_seen_ms),
    }


def letter_group_facts(group: LetterGroup, names: JobNames, *, mask: bool = False) -> Facts:
    """Return dead letters that were counted together."""
    return {
        "vertex": group.vertex,
        "stream": names.stream(group.vertex, group.stream),
        "stream_id": group.stream,
        "operator": group.operator,
        "reason": masked_reason(group.kind) if mask else group.kind,
        "count": group.count,
        "first_seen": iso(group.first_seen_ms),
        "last_seen": iso(group.last_seen_ms),
    }


def record_facts(vertex: str, info: RecordInfo, names: JobNames, *, mask: bool = False) -> Facts:
    """Return a record with all of its attempts, the last one's traceback included."""
    reason = masked_reason(info.reason) if mask else info.reason
    return {
        "key": info.key.hex(),
        "vertex": vertex,
        "state": info.state,
        "stream": record_stream(vertex, info, names),
        "stream_id": info.stream,
        "name": info.title,
        "source": info.source,
        "root": root_text(info.root),
        "origin": root_text(info.origin),
        "attempt": info.attempt,
        "operator": info.operator,
        "reason": reason,
        "next_due": iso(info.not_before_ms),
        "registered": iso(info.registered_ms),
        "failed_at": iso(info.history[-1][0]) if info.history else None,
        "attempts": _attempts(info, mask=mask),
        "edited": iso(info.edited_ms),
        "edited_by": info.edited_by or None,
        "record": payload_facts(info.payload, mask=mask),
        "types": {field.name: str(field.type) for field in info.payload.schema},
    }


def record_stream(vertex: str, info: RecordInfo, names: JobNames) -> str:
    """Return a record's stream as people call it; by what the record's vertex says where ``names`` lacks it."""
    known = names.stream(vertex, info.stream)
    return f"{info.title}/{info.source}" if known == info.stream and info.title else known


def _attempts(info: RecordInfo, *, mask: bool) -> list[Facts]:
    attempts = [
        {
            "number": number,
            "at": iso(at_ms),
            "reason": masked_reason(reason) if mask else reason,
            "operator": operator,
            "traceback": "",
        }
        for number, (at_ms, reason, operator) in enumerate(info.history, 1)
    ]
    if attempts:
        attempts[-1]["traceback"] = masked_traceback(info.traceback) if mask else info.traceback
    return attempts


def explained_facts(root: int, explained: Explained) -> Facts:
    """Return what a root waits for."""
    return {
        "root": root_text(root),
        "known": explained.known,
        "registered": explained.registered,
        "value": root_text(explained.value),
        "ids_known": explained.ids_known,
        "owed": [
            {
                "id": root_text(owed.record_id),
                "operator": owed.operator,
                "missing": "acknowledgement" if owed.emitted else "emission",
            }
            for owed in explained.owed
        ],
    }


def payload_facts(payload: pa.RecordBatch, *, mask: bool = False) -> Facts:
    """Return the one row of ``payload`` by columns, as `ftlayer.monitor.editing` reads it again."""
    record = json_of_row(payload)
    if mask:
        return {
            name: masked_value(value, str(payload.schema.field(name).type)) for name, value in record.items()
        }
    return record
