"""Facts that stand in many places: times, ids and numbers, judgements, circuit breakers, series."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from ftlayer.common.failures import PermanentFailure
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import ConfigError, ResultRowError
from ftlayer.monitor.rules.health import Judgement
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.plans import LetterGroup
from ftlayer.monitor.rules.row_json import json_of_column, json_of_row
from ftlayer.records.ids import Explanation
from ftlayer.records.ipc import is_string
from ftlayer.vertex.calls import AuditEntry, RecordInfo
from ftlayer.vertex.calls.jobs import Hour, JobDetails
from ftlayer.vertex.calls.records import DeadGroup

# Hiding what records say where only how they fare may be shown.
#
# Values become their type and length. Reasons and tracebacks quote values: of a reason the exception's class is left,
# of a traceback the places that it went through. What was free text is gone; keys, operators, times and counts stay.


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


def circuit_facts(status: CircuitStatus) -> Facts:
    return {
        "state": str(status.state),
        "opened": status.opened,
        "records": status.records,
        "failed": status.failed,
        "next_trial_in_seconds": seconds(status.next_trial_in_ms),
    }


def hour_facts(hour: Hour) -> Facts:
    return {
        "step_seconds": seconds(hour.step_ms),
        "end": iso(hour.end_ms),
        "series": {name: [finite(value) for value in points] for name, points in hour.series.items()},
    }


END_TO_END = "end_to_end"
"""What such histograms are called in `JobDetails.histograms`; ``|<source>|<sink>`` follows."""


def latency_facts(job: JobDetails) -> list[Facts]:
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


def group_facts(vertex: str, group: DeadGroup, names: JobNames, *, mask: bool = False) -> Facts:
    return {
        **_group(vertex, group, names, mask=mask),
        "group": group.number,
        "example": masked_reason(group.example) if mask else group.example,
    }


def letter_group_facts(group: LetterGroup, names: JobNames, *, mask: bool = False) -> Facts:
    return _group(group.vertex, group, names, mask=mask)


def _group(vertex: str, group: DeadGroup | LetterGroup, names: JobNames, *, mask: bool) -> Facts:
    return {
        "vertex": vertex,
        "stream": names.stream(vertex, group.stream),
        "stream_id": group.stream,
        "operator": group.operator,
        "reason": masked_reason(group.kind) if mask else group.kind,
        "count": group.count,
        "first_seen": iso(group.first_seen_ms),
        "last_seen": iso(group.last_seen_ms),
    }


def final_of(info: RecordInfo) -> str:
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


def record_facts(vertex: str, info: RecordInfo, names: JobNames, *, mask: bool = False) -> Facts:
    reason = masked_reason(info.reason) if mask else info.reason
    return {
        "key": info.key.hex(),
        "vertex": vertex,
        "state": info.state,
        "stream": record_stream(vertex, info, names),
        "stream_id": info.stream,
        "name": info.title,
        "source": info.source,
        "came_from": came_from(info, mask=mask) or None,
        "root": root_text(info.root),
        "origin": root_text(info.origin),
        "attempt": info.attempt,
        "max_attempts": info.max_attempts,
        "final": final_of(info) or None,
        "operator": info.operator,
        "reason": reason,
        "next_due": iso(info.not_before_ms),
        "registered": iso(info.registered_ms),
        "failed_at": iso(info.history[-1].at_ms) if info.history else None,
        "attempts": _attempts(info, mask=mask),
        "edited": iso(info.edited_ms),
        "edited_by": info.edited_by or None,
        "record": _payload(info.payload, mask=mask),
        "types": {field.name: str(field.type) for field in info.payload.schema},
    }


def record_stream(vertex: str, info: RecordInfo, names: JobNames) -> str:
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


def came_from(info: RecordInfo, *, mask: bool = False) -> str:
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


def _attempts(info: RecordInfo, *, mask: bool) -> list[Facts]:
    return [
        {
            "number": attempt.number,
            "at": iso(attempt.at_ms),
            "reason": masked_reason(attempt.reason) if mask else attempt.reason,
            "operator": attempt.operator,
            "place": attempt.place,
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


def _payload(payload: pa.RecordBatch, *, mask: bool = False) -> Facts:
    """Return the one row of ``payload`` by columns, as `ftlayer.monitor.rules.row_json` reads it again."""
    record = json_of_row(payload)
    if mask:
        return {
            name: masked_value(value, str(payload.schema.field(name).type)) for name, value in record.items()
        }
    return record


def audit_facts(entry: AuditEntry) -> Facts:
    return {
        "at": iso(entry.at_ms),
        "who": entry.who,
        "what": entry.what,
        "which": entry.which,
        "count": entry.count,
        "outcome": entry.outcome,
    }
