"""What is no source and no sink is refused where it is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from refusing import SCHEMA, Orders, graph, refused, same, sink

from ftlayer.errors import ConfigError, InvalidTopologyError, UnhashableKeyError
from ftlayer.sources import RedisSource, TailSource
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.job_graph import StreamEdge, StreamNode
from ftlayer.topology.job_graph_generator import job_graph
from ftlayer.topology.operators import PushSource, Source
from ftlayer.vertex.calls import StreamOptions

# ---------------------------------------------------------------- what is no source


def numbers() -> Iterator[int]:
    yield 1


def needs(argument: int) -> list[int]:
    return [argument]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (numbers(), "a generator can be gone through just once"),
        (iter([1]), "a list_iterator can be gone through just once"),
        (map(same, [1]), "the generator function itself"),
        (needs, "needs needs arguments (argument"),
        ("path.csv", "got a str"),
        (b"x", "got a bytes"),
        ({"n": 1}, "got a dict"),
        (7, "expected an iterable of records"),
        (None, "got a NoneType"),
    ],
)
def test_what_is_no_source(wrong: Any, says: str, env: GraphBuilder) -> None:
    refused(ConfigError, "source", says, of=lambda: env.source(wrong, "n int"))


@pytest.mark.parametrize("wrong", ["path", 7, None])
def test_what_is_no_sink(wrong: Any, env: GraphBuilder, orders: Orders) -> None:
    refused(ConfigError, "sink", f"got a {type(wrong).__name__}", of=lambda: orders(env).sink(wrong))


def test_options_of_a_sink(env: GraphBuilder, orders: Orders) -> None:
    stream = orders(env)
    refused(ConfigError, "sink: every", of=lambda: stream.sink(print, every="0s"))
    refused(ConfigError, "max_rows", of=lambda: stream.sink(print, max_rows=0))
    refused(ConfigError, "options are for", of=lambda: stream.sink(print, options={}))


def test_with_checkpoints_a_source_has_to_rewind() -> None:
    pushed = StreamNode(Source("calls", PushSource(print), SCHEMA), 2)
    of = graph([pushed, sink()], StreamEdge("calls", "out"))
    refused(
        InvalidTopologyError,
        "source 'calls'",
        "layer.ingest(…).reader(name)",
        of=lambda: job_graph(of, max_parallelism=8),
    )


@pytest.mark.parametrize("kind", ["array<bigint>", "struct<x: bigint>"])
def test_state_by_a_key_that_python_cannot_hash(kind: str) -> None:
    """Records may be dealt out by such a key; state cannot be looked up by it."""
    env = GraphBuilder("keys", parallelism=2)
    by_key = env.source([], f"k {kind}, n bigint", uid="rows").key_by("k")
    by_key.map(lambda record: record).sink(print)
    by_key.reduce(lambda one, other: other, volatile_state=True, uid="latest").sink(print)
    with pytest.raises(
        UnhashableKeyError, match=r"'latest': key column 'k' is .*values that Python can hash"
    ):
        env.build()


@pytest.mark.parametrize("given", ["push", "file", "queue"])
def test_a_source_that_cannot_be_read_again_is_not_replayed_from(given: str) -> None:
    sources: dict[str, Any] = {
        "push": lambda: PushSource(lambda push: None),
        "file": lambda: TailSource("/var/log/*.log"),
        "queue": lambda: RedisSource("redis://127.0.0.1", "s", "g"),
    }
    with pytest.raises(
        ConfigError, match=r"source: replay: 'source' is for iterables and stream readers.*use replay='store'"
    ):
        GraphBuilder("job").source(sources[given](), "n bigint", replay="source")


def test_replay_is_store_or_source() -> None:
    with pytest.raises(ConfigError, match="source: replay: expected one of store, source, got 'disk'"):
        GraphBuilder("job").source([1], "n bigint", replay="disk")
    with pytest.raises(ConfigError, match="source: retry: replay is not to be given: use replay="):
        GraphBuilder("job").source([1], "n bigint", retry=StreamOptions(replay="source"))
