from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
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


def _load(name: str) -> None:
    """Load a module of this directory, which is no package, under its own name."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


_load("refusing")
