"""A driver whose JVM is gone: no restart strategy can help."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import SparkContext

from ftlayer.common.rules.restart import ExponentialDelay
from ftlayer.errors import QueryError
from ftlayer.spark.query.checkpoint import LogEnds
from ftlayer.spark.query.supervisor import QuerySupervisor
from ftlayer.vertex.calls import QueryStatus


class LostQuery:
    """A Spark query whose connection breaks."""

    def awaitTermination(self) -> None:
        raise ConnectionResetError("Answer from Java side is empty")

    def stop(self) -> None:
        raise ConnectionRefusedError


def test_a_query_whose_jvm_has_ended_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_gateway", SimpleNamespace(proc=SimpleNamespace(poll=lambda: -9)))
    starts: list[Any] = []

    def start(supervisor: QuerySupervisor) -> Any:
        starts.append(supervisor)
        return LostQuery()

    query = QuerySupervisor(
        "q",
        start,
        lambda: QueryStatus(0, 0, 0, 0, 0, -1),
        lambda: LogEnds(-1, -1),
        ExponentialDelay(),
        bounded=True,
    )
    with pytest.raises(QueryError, match="JVM has ended"):
        query.wait_until_ended(600)
    assert len(starts) == 1
