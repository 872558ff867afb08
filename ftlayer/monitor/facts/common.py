"""Facts that stand in many places: times, ids and numbers, judgements, circuit breakers, series."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from ftlayer.circuit import CircuitStatus
from ftlayer.monitor.facts.masking import masked_failure
from ftlayer.monitor.health import Judgement
from ftlayer.vertex.calls.jobs import Hour

Facts = dict[str, Any]


def iso(wall_ms: int) -> str | None:
    """Return a time, null for 0."""
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


def circuit_facts(status: CircuitStatus) -> Facts:
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
