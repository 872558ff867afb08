"""Facts of records: one with its attempts, groups of dead ones, what a root waits for, who changed what."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.monitor.facts.common import Facts, iso, masked_reason, masked_traceback, masked_value, root_text
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.plans import LetterGroup
from ftlayer.monitor.row_json import json_of_row
from ftlayer.vertex.calls import AuditEntry, Explained, RecordInfo
from ftlayer.vertex.calls.records import DeadGroup


def group_facts(vertex: str, group: DeadGroup, names: JobNames, *, mask: bool = False) -> Facts:
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
    """Return a record with all of its failed attempts that are kept."""
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
        "failed_at": iso(info.history[-1].at_ms) if info.history else None,
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
    return [
        {
            "number": attempt.number,
            "at": iso(attempt.at_ms),
            "reason": masked_reason(attempt.reason) if mask else attempt.reason,
            "operator": attempt.operator,
            "place": attempt.place,
            "traceback": masked_traceback(attempt.traceback) if mask else attempt.traceback,
        }
        for attempt in info.history
    ]


def explained_facts(root: int, explained: Explained) -> Facts:
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
    """Return the one row of ``payload`` by columns, as `ftlayer.monitor.row_json` reads it again."""
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
