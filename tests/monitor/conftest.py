"""Jobs and vertices made by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.monitor.rules.names import VertexView
from ftlayer.vertex.calls import Attempt, RecordInfo
from ftlayer.vertex.calls.jobs import AnnouncedJob, JobDetails, JobKind
from ftlayer.vertex.calls.records import DeadGroup, StreamDetails

NOW_MS = 1_800_000_000_000


def a_job(
    owner: str = "orders", heard_ago_ms: int = 500, is_silent: bool = False, **fields: Any
) -> AnnouncedJob:
    outside = {name: fields.pop(name) for name in ("incidents", "orders", "died_ago_ms") if name in fields}
    given: dict[str, Any] = {
        "name": owner,
        "kind": JobKind.TOPOLOGY,
        "run": "run-1",
        "mode": "acker",
        "state": "running",
        "final": False,
        "since_ms": NOW_MS - 3_600_000,
        "at_ms": NOW_MS,
    }
    return AnnouncedJob(JobDetails(owner, **given | fields), heard_ago_ms, is_silent, **outside)


def a_stream(stream: str = "orders/lines", title: str = "", **fields: Any) -> StreamDetails:
    owner, _, source = stream.partition("/")
    counts = (
        "pending",
        "waiting",
        "in_delivery",
        "dead",
        "persisted",
        "completed",
        "failed",
        "died",
        "oldest_ms",
    )
    given = dict.fromkeys((*counts, "max_pending"), 0)
    return StreamDetails(stream, owner, title or owner, source, **given | fields)


def a_group(stream: str = "orders/lines", operator: str = "parse", **fields: Any) -> DeadGroup:
    given: dict[str, Any] = {
        "number": 1,
        "kind": "ValueError: …",
        "example": "ValueError: no number: '12,5'",
        "count": 12,
        "first_seen_ms": NOW_MS - 60_000,
        "last_seen_ms": NOW_MS - 1_000,
    }
    return DeadGroup(stream=stream, operator=operator, **given | fields)


def a_view(vertex: str = "local", **fields: Any) -> VertexView:
    given: dict[str, Any] = {
        "address": "grpc://127.0.0.1:7077",
        "is_up": True,
        "asked_ms": NOW_MS,
        "as_of_ms": NOW_MS,
        "stats": {"used_share": 0.01},
    }
    return VertexView(vertex, **given | fields)


def a_letter(price: int) -> RecordInfo:
    return RecordInfo(
        key=price.to_bytes(2, "big"),
        stream="orders/lines",
        state="dead",
        root=price,
        origin=price,
        attempt=1,
        not_before_ms=0,
        history=(Attempt(1, NOW_MS - 1_000, "ValueError: no number", "parse"),),
        payload=pa.record_batch({"price": [price]}),
    )


class Made:
    """What tests make by hand, with what does not matter filled in."""

    now_ms = NOW_MS
    job: Callable[..., AnnouncedJob] = staticmethod(a_job)
    stream: Callable[..., StreamDetails] = staticmethod(a_stream)
    group: Callable[..., DeadGroup] = staticmethod(a_group)
    view: Callable[..., VertexView] = staticmethod(a_view)
    letter: Callable[[int], RecordInfo] = staticmethod(a_letter)


@pytest.fixture
def made() -> type[Made]:
    return Made
