"""A graph with a stream of dead letters: which streams of the vertex it reads."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.config import FTStatus
from ftlayer.errors import UnsupportedError
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import IterableSource, ReaderSource


class Letters:
    def __init__(self, streams: Any) -> None:
        self.streams = list(streams)


def connector_of(env: GraphBuilder, uid: str) -> Any:
    return env.build().node(uid).operator.connector  # type: ignore[union-attr]


def test_letters_are_those_of_the_sources_upstream_by_their_last_names() -> None:
    env = GraphBuilder("shop", open_letters=Letters)
    orders, other = env.source([], "n int"), env.source([], "n int", uid="other")
    mapped = orders.map(abs)
    letters = mapped.dead_letters(uid="letters")
    mapped.union(other).sink(print)
    letters.filter(bool).sink(print)
    letters.dead_letters(uid="of-letters").sink(print)
    orders.uid("orders")
    connector = connector_of(env, "letters")
    assert isinstance(connector, ReaderSource)
    assert connector.reader.streams == ["shop/orders"]
    assert connector_of(env, "of-letters").reader.streams == ["shop/letters"]
    assert env.build().node("letters").parallelism == 1


def test_without_tracking_there_are_none(off: GraphBuilder) -> None:
    source = off.source([], "n int")
    source.sink(print)
    source.dead_letters().sink(print)
    with pytest.raises(
        UnsupportedError, match="'source-1': dead_letters: there are some where records are tracked"
    ):
        job_graph(off.build(), FTStatus.OFF)
    with_letters = GraphBuilder("shop", status=FTStatus.OFF, open_letters=Letters)
    source = with_letters.source([], "n int")
    source.sink(print)
    source.dead_letters(uid="letters").sink(print)
    assert isinstance(connector_of(with_letters, "letters"), IterableSource)
