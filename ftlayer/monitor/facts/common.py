"""Facts that stand in many places: times, ids and numbers, judgements, circuit breakers, series."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from ftlayer.circuit import CircuitStatus
from ftlayer.monitor.health import Judgement
from ftlayer.vertex.calls.jobs import Hour, JobDetails

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


END_TO_END = "end_to_end"
"""What such histograms are called in `JobDetails.histograms`; ``|<source>|<sink>`` follows."""


def latency_facts(job: JobDetails) -> list[Facts]:
    """Return for each source and sink how many markers came in this run, and in what time half and 99 % of them did.

    Durations are in seconds; quantiles are as exact as the histogram's buckets.
    """
    return list(_latencies(job))


def _latencies(job: JobDetails) -> Iterator[Facts]:
    for name, details in sorted(job.histograms.items()):
        metric, *parts = name.split("|")
        if metric != END_TO_END or len(parts) != 2 or not any(details.counts):
            continue
        histogram = details.histogram()
        yield {
            "source": parts[0],
            "sink": parts[1],
            "count": histogram.count,
            "mean_seconds": histogram.total / histogram.count,
            "p50_seconds": histogram.quantile(0.5),
            "p99_seconds": histogram.quantile(0.99),
        }
