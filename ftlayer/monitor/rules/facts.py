"""Plain values of what is known, as JSON has them: the same fields for pages, the API and ``--json``.

Times are ISO 8601 in UTC with milliseconds, null where there is none; durations are seconds; shares 0 to 1; roots and
origins 16 hexadecimal digits, keys hexadecimal. With ``mask`` nothing that a record says is in them (`masked_reason`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from ftlayer.common.failures import PermanentFailure
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import ConfigError, ResultRowError
from ftlayer.monitor.rules.health import Judgement, bottleneck, job_health, overall_health, vertex_health
from ftlayer.monitor.rules.names import JobNames, VertexView, pace_of, state_of
from ftlayer.monitor.rules.plans import LetterGroup
from ftlayer.monitor.rules.row_json import json_of_column, json_of_row
from ftlayer.records.ids import Explanation
from ftlayer.records.ipc import is_string
from ftlayer.vertex import calls

# Hiding what records say where only how they fare may be shown.
# Values become their type and length. Of a reason the exception's class is left, of a traceback the places that it
# went through: both quote values. What was free text is gone; keys, operators, times and counts stay.


_CLASS = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Failure|Interrupt|Rejected|Later|Warning)(?=\W|$)")
_PLACE = re.compile(r"  File \".*\", line \d+(?:, in \S+)?")
_TITLE = "Traceback (most recent call last):"
HIDDEN = "…"


def masked_reason(reason: str) -> str:
    """Return the exception's class that a record's reason begins with, and nothing that follows."""
    found = _CLASS.match(reason)
    return f"{found[0]}: {HIDDEN}" if found else HIDDEN if reason else ""


def masked_failure(text: str) -> str:
    """Return the text about a job up to the class of an exception in it, since its words may quote a record."""
    found = _CLASS.search(text)
    return f"{text[: found.end()]}: {HIDDEN}" if found else text


def masked_traceback(traceback: str) -> str:
    """Return the places of a traceback, without lines of programs and without words of exceptions.

    Words begin with the first line that is not indented, and go on to the next title: they may look like places.
    """
    shown: list[str] = []
    within = False
    for line in traceback.splitlines():
        within = line == _TITLE or (within and line.startswith("  "))
        if within and (line == _TITLE or _PLACE.fullmatch(line)):
            shown.append(line)
    return "\n".join(shown)


def masked_value(value: object, kind: str) -> str | None:
    """Return a value's type, and its length if it has one; null stays null."""
    if value is None:
        return None
    if isinstance(value, str | bytes | list | tuple | dict):
        what = "characters" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else "items"
        return f"{kind}, {len(value):,} {what}"
    return kind


Facts = dict[str, Any]


def _same(record: object, *names: str) -> Facts:
    """Return fields of a record that facts have as they are, under their own names."""
    return {name: getattr(record, name) for name in names}


def iso(wall_ms: int) -> str | None:
    if not wall_ms:
        return None
    at = datetime.fromtimestamp(wall_ms / 1_000, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def event_time(wall_ms: int) -> str:
    """Return an event time, which may be any: as milliseconds where no calendar has it."""
    try:
        return iso(wall_ms) or "1970-01-01T00:00:00.000Z"
    except (ValueError, OverflowError, OSError):
        return f"{wall_ms} ms"


def seconds(milliseconds: float) -> float:
    return round(milliseconds / 1_000, 6)


def root_text(root: int) -> str:
    return f"{root:016x}"


def finite(value: float) -> float | int | None:
    """Return a number as JSON has it: whole ones without a point, null for none."""
    if math.isnan(value) or math.isinf(value):
        return None
    return int(value) if value == int(value) else value


def judgement_facts(judgement: Judgement, *, mask: bool = False) -> Facts:
    return {
        "health": str(judgement.health),
        "reasons": [
            {
                "health": str(finding.health),
                "text": masked_failure(finding.text) if mask else finding.text,
                "place": _same(finding.place, "page", "vertex", "owner", "stream", "operator"),
            }
            for finding in judgement.findings
        ],
    }


def circuit_facts(status: CircuitStatus) -> Facts:
    return {
        "state": str(status.state),
        **_same(status, "opened", "records", "failed"),
        "next_trial_in_seconds": seconds(status.next_trial_in_ms),
    }


def hour_facts(hour: calls.Hour) -> Facts:
    return {
        "step_seconds": seconds(hour.step_ms),
        "end": iso(hour.end_ms),
        "series": {name: [finite(value) for value in points] for name, points in hour.series.items()},
    }


END_TO_END = "end_to_end"
"""What such histograms are called in `JobDetails.histograms`; ``|<source>|<sink>`` follows."""


def latency_facts(job: calls.JobDetails) -> list[Facts]:
    """Return for each source and sink how many markers came in this run, and in what time half and 99 % of them did.

    Durations are in seconds; quantiles are as exact as the histogram's buckets.
    """
    found = []
    for name, details in sorted(job.histograms.items()):
        metric, *parts = name.split("|")
        if metric != END_TO_END or len(parts) != 2 or not any(details.counts):
            continue
        histogram = details.histogram()
        facts: Facts = {"source": parts[0], "sink": parts[1], "count": histogram.count}
        facts["mean_seconds"] = histogram.total / histogram.count
        facts |= {f"p{share}_seconds": histogram.quantile(share / 100) for share in (50, 99)}
        found.append(facts)
    return found


def group_facts(vertex: str, group: calls.DeadGroup, names: JobNames, *, mask: bool = False) -> Facts:
    return {
        **_group(vertex, group, names, mask=mask),
        "group": group.number,
        "example": masked_reason(group.example) if mask else group.example,
    }


def letter_group_facts(group: LetterGroup, names: JobNames, *, mask: bool = False) -> Facts:
    return _group(group.vertex, group, names, mask=mask)


def _group(vertex: str, group: calls.DeadGroup | LetterGroup, names: JobNames, *, mask: bool) -> Facts:
    return {
        "vertex": vertex,
        "stream": names.stream(vertex, group.stream),
        "stream_id": group.stream,
        "reason": masked_reason(group.kind) if mask else group.kind,
        **_same(group, "operator", "count"),
        "first_seen": iso(group.first_seen_ms),
        "last_seen": iso(group.last_seen_ms),
    }


def final_of(info: calls.RecordInfo) -> str:
    """Return why a record's last failure has ruled out further attempts; "" where it has not.

    By what is kept of it: its traceback ends with the exception's class, as a reason begins, but for a `FailException`.
    """
    kind = re.match(r"\w+", info.reason)
    if not info.is_final:
        return ""
    if re.match(r"killed the process it ran in \(|the process of (a slot|slot \d+) ended while", info.reason):
        why = "it ended its process"
    elif not info.traceback:
        why = "its row does not fit"
    elif re.search(rf"^{PermanentFailure.__module__}.PermanentFailure\b", info.traceback, re.M):
        why = "it is a PermanentFailure"
    elif kind is None or re.search(rf"^([\w.]+\.)?{kind[0]}(:|$)", info.traceback, re.M) is None:
        why = "dead_on names its exception, retry_on does not, or it is a PermanentFailure"
    elif kind[0] in (ResultRowError.__name__, ConfigError.__name__):
        why = "the same function would fail alike"
    else:
        why = f"dead_on names {kind[0]}, or retry_on does not"
    return f"no further attempt, unless max_attempts was less then: {why}"


def record_facts(vertex: str, info: calls.RecordInfo, names: JobNames, *, mask: bool = False) -> Facts:
    record = json_of_row(info.payload)
    types = {field.name: str(field.type) for field in info.payload.schema}
    return {
        "key": info.key.hex(),
        "vertex": vertex,
        **_same(info, "state", "source"),
        "stream": record_stream(vertex, info, names),
        "stream_id": info.stream,
        "name": info.title,
        "came_from": came_from(info, mask=mask) or None,
        "root": root_text(info.root),
        "origin": root_text(info.origin),
        **_same(info, "attempt", "max_attempts", "operator"),
        "final": final_of(info) or None,
        "reason": masked_reason(info.reason) if mask else info.reason,
        "next_due": iso(info.not_before_ms),
        "registered": iso(info.registered_ms),
        "failed_at": iso(info.history[-1].at_ms) if info.history else None,
        "attempts": _attempts(info, mask=mask),
        "edited": iso(info.edited_ms),
        "edited_by": info.edited_by or None,
        "record": {name: masked_value(record[name], types[name]) for name in record} if mask else record,
        "types": types,
    }


def record_stream(vertex: str, info: calls.RecordInfo, names: JobNames) -> str:
    """Return a record's stream as people call it; by what the record's vertex says where ``names`` lacks it."""
    known = names.stream(vertex, info.stream)
    return f"{info.title}/{info.source}" if known == info.stream and info.title else known


_KINDS = (is_string, pa.types.is_integer, pa.types.is_timestamp)
_PLACES: tuple[tuple[str, tuple[str, ...], tuple[str, ...], tuple[str, ...]], ...] = (
    ("topic {topic}, partition {partition}, offset {offset}", ("topic",), ("partition", "offset"), ()),
    ("{path}, offset {offset}", ("path",), ("offset",), ()),
    ("subject {subject}, message {sequence}", ("subject",), ("sequence",), ()),
    (
        "LSN {lsn}, change {_sequence} of transaction {_transaction}",
        ("_operation",),
        ("_lsn", "_sequence", "_transaction"),
        (),
    ),
    ("routing key {routing_key}, message {message_id}", ("routing_key", "message_id"), (), ("timestamp",)),
    ("routing key {routing_key}", ("routing_key",), (), ("timestamp",)),
    ("topic {topic}, received {received}", ("topic",), ("qos",), ("received",)),
    ("request {id} to {path}", ("id", "path"), (), ("time",)),
    ("message {id}", ("id",), (), ("time",)),
)
"""The words for where a row of a ready-made source is from, and its columns: texts, whole numbers, times."""


def came_from(info: calls.RecordInfo, *, mask: bool = False) -> str:
    """Return where a record was in its source, in words: as its columns say it, or its first attempt; "" if none does.

    With ``mask`` columns say nothing.
    """
    schema = info.payload.schema
    for words, *columns in () if mask else _PLACES:
        named = [(name, is_kind) for names, is_kind in zip(columns, _KINDS, strict=True) for name in names]
        if all(name in schema.names and is_kind(schema.field(name).type) for name, is_kind in named):
            values = {name: json_of_column(info.payload, name) for name, _ in named if f"{{{name}" in words}
            if "{lsn}" in words:
                lsn = json_of_column(info.payload, "_lsn")
                values["lsn"] = None if lsn is None else f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
            if None not in values.values():
                return words.format_map(values)
    return info.history[0].read_as if info.history else ""


def _attempts(info: calls.RecordInfo, *, mask: bool) -> list[Facts]:
    return [
        {
            **_same(attempt, "number", "operator", "place"),
            "at": iso(attempt.at_ms),
            "reason": masked_reason(attempt.reason) if mask else attempt.reason,
            "traceback": masked_traceback(attempt.traceback) if mask else attempt.traceback,
            "requeued": iso(attempt.requeued_ms),
            "requeued_by": attempt.requeued_by or None,
        }
        for attempt in info.history
    ]


def explained_facts(root: int, found: Explanation | None) -> Facts:
    explained = found or Explanation()
    return {
        "root": root_text(root),
        "known": found is not None,
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


def audit_facts(entry: calls.AuditEntry) -> Facts:
    return {"at": iso(entry.at_ms), **_same(entry, "who", "what", "which", "count", "outcome")}


def plan_facts(job: calls.JobDetails) -> Facts:
    assert job.plan is not None
    return {
        "nodes": [
            {"uid": node.uid, "names": list(node.names), "parallelism": node.parallelism}
            for node in job.plan.nodes
        ],
        "edges": [
            _same(edge, "source", "target", "partitioner", "tag", "feedback") for edge in job.plan.edges
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
                **_same(subtask, "slot", "records_in", "records_out"),
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
            **_same(slot, "slot", "state", "host", "pid"),
            "heartbeat_age_seconds": None if slot.heartbeat_age_ms < 0 else seconds(slot.heartbeat_age_ms),
            "busy_seconds": seconds(slot.busy_ms),
            **_same(slot, "busy", "function", "restarts"),
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
    if (totals := job.checkpoint_totals) is None:
        return None
    latest = sorted(job.checkpoints, key=lambda checkpoint: -checkpoint.number)
    return {
        **_same(totals, "triggered", "in_progress", "completed", "failed", "restored", "failures_in_a_row"),
        "tolerable_failures": None if totals.tolerable_failures < 0 else totals.tolerable_failures,
        "interval_seconds": seconds(totals.interval_ms) if totals.interval_ms else None,
        "last_completed": iso(totals.last_completed_ms),
        **_same(totals, "directory", "savepoint_directory"),
        "retained": list(totals.retained),
        "items": [checkpoint_facts(checkpoint, mask=mask) for checkpoint in latest],
    }


def checkpoint_facts(checkpoint: calls.CheckpointDetails, *, mask: bool = False) -> Facts:
    return {
        "checkpoint": checkpoint.number,
        **_same(checkpoint, "kind", "state", "final", "expected", "location"),
        "triggered": iso(checkpoint.triggered_ms),
        "ended": iso(checkpoint.ended_ms),
        "duration_seconds": seconds(checkpoint.duration_ms),
        "acked": len(checkpoint.subtasks),
        "failure": masked_failure(checkpoint.failure) if mask else checkpoint.failure,
        **_part_facts(checkpoint.total),
        "operators": [{"operator": uid, **_part_facts(parts)} for uid, parts in checkpoint.chains.items()],
        "subtasks": [
            {"operator": part.uid, "subtask": part.subtask, **_part_facts(part)}
            for part in checkpoint.subtasks
        ],
    }


def _part_facts(part: calls.SubtaskCheckpointDetails | calls.CheckpointSums) -> Facts:
    phases = ("start_delay", "alignment", "sync", "async")
    times = {f"{name}_seconds": seconds(getattr(part, f"{name}_ms")) for name in phases}
    return times | _same(part, "written_bytes", "state_bytes", "in_flight_bytes", "unaligned")


def job_summary_facts(
    view: VertexView, announced: calls.AnnouncedJob, names: JobNames, *, mask: bool = False
) -> Facts:
    job, vertex = announced.job, view.vertex
    line = masked_failure(job.line) if mask else job.line
    is_heard = job.final or state_of(view, announced) == job.state
    return {
        "job": f"{vertex}:{job.owner}",
        "vertex": vertex,
        "owner": job.owner,
        "name": names.label(vertex, job.owner),
        "kind": str(job.kind),
        "mode": job.mode or None,
        "state": state_of(view, announced),
        **_same(job, "run", "final", "host", "pid", "restarts"),
        "silent": announced.is_silent,
        "heard_ago_seconds": seconds(view.heard_ago_ms(announced)),
        "as_of": iso(job.at_ms),
        "since": iso(job.since_ms),
        "ended": iso(job.ended_ms),
        "uptime_seconds": seconds(max((job.ended_ms or job.at_ms) - job.since_ms, 0)),
        "version": job.version or None,
        "line": line if is_heard or not line else f"said last: {line}",
        "in_per_second": pace_of(view, announced),
        "last_failure": masked_failure(job.last_failure) if mask else job.last_failure,
        **judgement_facts(job_health(view, announced), mask=mask),
    }


def job_facts(
    view: VertexView,
    announced: calls.AnnouncedJob,
    names: JobNames,
    *,
    hour: calls.Hour | None = None,
    mask: bool = False,
) -> Facts:
    job = announced.job
    found = bottleneck(job)
    return {
        **job_summary_facts(view, announced, names, mask=mask),
        **judgement_facts(job_health(view, announced, hour), mask=mask),
        "checkpoint_location": job.checkpoint_location,
        "bottleneck": found and {"operator": found.uid, "slot": found.slot, "text": found.text},
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
        **_same(batch, "batch", "delivered", "failed", "dead"),
        "at": iso(batch.at_ms),
        "rows": batch.rows_in,
        "duration_seconds": seconds(batch.duration_ms),
        "phases_seconds": {name: seconds(phase) for name, phase in batch.phases_ms.items()},
    }


def order_facts(record: calls.OrderRecord, *, mask: bool = False) -> Facts:
    order, answer = record.order, record.answer
    return {
        **_same(order, "id", "action", "by", "directory"),
        "asked": iso(order.asked_ms),
        "timeout_seconds": seconds(order.timeout_ms) if order.timeout_ms else None,
        "slot": None if order.slot < 0 else order.slot,
        "state": str(answer.state),
        "text": masked_failure(answer.text) if mask else answer.text,
        "at": iso(answer.at_ms),
    }


def overview_facts(views: Iterable[VertexView], names: JobNames, *, mask: bool = False) -> Facts:
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
        **_same(view, "vertex", "address", "path", "state", "failure"),
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
        "name": names.label(vertex, stream.owner),
        **_same(stream, "owner", "source", "pending", "waiting", "in_delivery", "dead"),
        **_same(stream, "persisted", "completed", "failed", "died", "max_pending"),
        "oldest": iso(stream.oldest_ms),
        "oldest_seconds": seconds(max(now_ms - stream.oldest_ms, 0)) if stream.oldest_ms else None,
    }
