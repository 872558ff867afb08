"""The last hour as small charts: which series are shown, and what they are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ftlayer.console import formats
from ftlayer.console.watch import Watch
from ftlayer.errors import UnknownJobError, UnsupportedError, VertexUnavailableError
from ftlayer.vertex.calls.jobs import Hour

FEWEST_POINTS = 6
"""Of what began a moment ago so many points are shown."""


@dataclass(frozen=True, slots=True)
class Series:
    """A series of `Hour`, what it is called, and how its values are written."""

    key: str
    name: str
    written: Callable[[float | None], str]


@dataclass(frozen=True, slots=True)
class Shown:
    """A chart: its values, and in words the last and the largest of them."""

    name: str
    values: Sequence[float]
    now: str
    largest: str
    since: str
    label: str


SERIES = (
    Series("in_per_second", "Records in", formats.rate),
    Series("out_per_second", "Records out", formats.rate),
    Series("done_per_second", "Done", formats.rate),
    Series("failed_per_second", "Failed attempts", formats.rate),
    Series("pending", "Pending", formats.short),
    Series("waiting", "Waiting", formats.short),
    Series("dead", "Dead letters", formats.short),
    Series("oldest_seconds", "Oldest record", formats.seconds),
    Series("used_share", "Store used", formats.share),
    Series("busy", "Busiest subtask", formats.share),
    Series("back_pressured", "Most back-pressured", formats.share),
    Series("watermark_lag_seconds", "Watermark lag", formats.seconds),
    Series("queued_bytes", "Queued", formats.size),
    Series("checkpoint_seconds", "Checkpoint", formats.seconds),
    Series("batch_seconds", "Batch", formats.seconds),
)
"""Those of vertices and of jobs, in the order in which they are shown; each has some of them."""


def known_hour(watch: Watch, vertex: str, owner: str) -> Hour | None:
    """Return an hour; None where there is none: a vertex does not answer, keeps none, or does not know the job."""
    try:
        return watch.hour(vertex, owner)
    except (UnknownJobError, UnsupportedError, VertexUnavailableError):
        return None


def shown_hour(watch: Watch, vertex: str, owner: str = "") -> list[Shown]:
    """Return the charts of a job, or with ``owner`` "" of a vertex, that there are values for.

    There are none while a vertex does not answer, which its health says.
    """
    hour = known_hour(watch, vertex, owner)
    if hour is None:
        return []
    found = []
    shown = _points(hour)
    for each in SERIES:
        values = hour.series.get(each.key, ())[-shown:]
        known = [value for value in values if math.isfinite(value)]
        if known:
            last = values[-1] if math.isfinite(values[-1]) else None
            now, largest = each.written(last), each.written(max(known))
            since = formats.seconds(shown * hour.step_ms / 1_000)
            label = f"{each.name} in the last {since}: now {now}, at most {largest}"
            found.append(Shown(each.name, values, now, largest, f"{since} ago", label))
    return found


def _points(hour: Hour) -> int:
    """Return how many points are shown: an hour's, or, of what began lately, those since then."""
    known = [
        len(values) - place
        for values in hour.series.values()
        for place in [
            next((place for place, value in enumerate(values) if math.isfinite(value)), len(values))
        ]
    ]
    return max([*known, FEWEST_POINTS])
