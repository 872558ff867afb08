from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftlayer.config import FTStatus
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.streams.data_stream import DataStream

ORDERS = "id bigint, user string, ts timestamp, tags map<string, string>"


class Plain(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> Any:
        return [record]


class Timed(Plain):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


class Both(CoProcessFunction):
    def process_left(self, record: Any, ctx: Any) -> Any:
        return [record]

    def process_right(self, record: Any, ctx: Any) -> Any:
        return [record]


class TimedBoth(Both):
    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return None


@pytest.fixture
def env() -> GraphBuilder:
    return GraphBuilder("shop", parallelism=2)


@pytest.fixture
def off() -> GraphBuilder:
    return GraphBuilder("shop", parallelism=2, status=FTStatus.OFF)


@pytest.fixture
def orders() -> Callable[[GraphBuilder], DataStream]:
    """A source of two partitions (as many as `env` has subtasks)."""
    from ftlayer.topology.connectors import partitions

    return lambda builder: builder.source(partitions([], []), ORDERS)


@pytest.fixture
def plain() -> ProcessFunction:
    return Plain()


@pytest.fixture
def timed() -> ProcessFunction:
    return Timed()


@pytest.fixture
def both() -> CoProcessFunction:
    return Both()


@pytest.fixture
def timed_both() -> CoProcessFunction:
    return TimedBoth()
