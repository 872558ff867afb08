"""Graphs that are refused, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.functions.steps import Map
from ftlayer.records.partitioning import HashByKey
from ftlayer.records.traced import KeySelector
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.checks import check_graph
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.operators import FunctionSink as Function
from ftlayer.topology.operators import IterableSource, Sink, Source
from ftlayer.topology.streams.data_stream import DataStream

Orders = Callable[[GraphBuilder], DataStream]
SCHEMA = pa.schema([("n", pa.int32()), ("word", pa.string())])
JOINED: dict[str, Any] = {"lower": 0, "upper": "1s", "function": lambda a, b: 1, "schema": "n int"}


def same(record: Any) -> Any:
    return record


def source(uid: str = "in", parallelism: int = 2) -> StreamNode:
    return StreamNode(Source(uid, IterableSource((list,)), SCHEMA), parallelism)


def mapped(uid: str, parallelism: int = 2) -> StreamNode:
    return StreamNode(Map(uid, same, SCHEMA), parallelism)


def sink(uid: str = "out") -> StreamNode:
    return StreamNode(Sink(uid, Function(print), SCHEMA), 2)


def graph(nodes: list[StreamNode], *edges: StreamEdge, name: str = "shop") -> StreamGraph:
    return StreamGraph(name, tuple(nodes), edges)


def refused(
    error: type[Exception], *says: str, of: StreamGraph | Callable[[], Any], tracked: bool = True
) -> None:
    attempt = (lambda: check_graph(of, tracked=tracked)) if isinstance(of, StreamGraph) else of
    with pytest.raises(error) as caught:
        attempt()
    for part in says:
        assert part in str(caught.value)


def by_hash(*columns: str) -> Any:

    return HashByKey(KeySelector(columns))
