"""What a closed layer answers: an error at once, whatever is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql.types import LongType, StructType

from ftlayer.config import FTStatus
from ftlayer.errors import FTLayerError, LayerClosedError, VertexUnavailableError
from ftlayer.functions.retry_rules import NO_RULES
from ftlayer.spark.connection import FTLayerEngine
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.facade import FTLayer
from ftlayer.vertex.calls import OpenStream, StreamOptions
from ftlayer.vertex.client.client import VertexClient, VertexConnection

SCHEMA = StructType().add("a", LongType())
NO_SESSION = object()

CALLS: dict[str, Callable[[FTLayer], object]] = {
    "stats": lambda layer: layer.stats(),
    "list_dead": lambda layer: layer.list_dead(),
    "pending": lambda layer: layer.pending(NO_SESSION),
    "waiting": lambda layer: layer.waiting(NO_SESSION),
    "deliveries": lambda layer: layer.deliveries(NO_SESSION),
    "dead_letters": lambda layer: layer.dead_letters(NO_SESSION),
    "requeue": lambda layer: layer.requeue([]),
    "purge": lambda layer: layer.purge([]),
    "ingest": lambda layer: layer.ingest("c", SCHEMA),
    "source": lambda layer: layer.source(NO_SESSION, name="c"),
    "resume": lambda layer: layer.resume(NO_SESSION, name="c"),
    "watch_dead": lambda layer: layer.watch_dead("q/c"),
    "address": lambda layer: layer.address,
    "token": lambda layer: layer.token,
    "client": lambda layer: layer.client,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("status", FTStatus)
def test_every_call_says_that_the_layer_is_closed(
    tmp_path: Path, status: FTStatus, call: Callable[[FTLayer], object]
) -> None:
    layer = FTLayer.embedded(tmp_path / "ft", status=status)
    layer.close()
    layer.close()
    with pytest.raises(LayerClosedError, match="the layer is closed"):
        call(layer)
    # It starts no vertex for it.
    assert layer.vertex is None


def a_remote_layer() -> FTLayerEngine:
    client = VertexClient("grpc://127.0.0.1:1", "x" * 16)
    return FTLayerEngine(
        client,
        StreamOptions(),
        status=FTStatus.ON,
        strict=True,
        max_rows=1,
        rules=NO_RULES,
        on_dead=None,
        limit=None,
    )


def test_what_a_layer_gave_out_is_closed_with_it() -> None:
    layer = a_remote_layer()
    ingest = IngestStream("c", SCHEMA, layer.client)
    own = ingest.reader("topology")
    another = layer._another_client(layer.client, "dead-letters")
    layer.close()
    with pytest.raises(LayerClosedError):
        ingest.put({"a": 1})
    with pytest.raises(LayerClosedError):
        own.initialOffset()
    with pytest.raises(LayerClosedError):
        another.health()


def test_a_call_that_waits_for_the_vertex_ends_when_the_layer_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = FTLayer.connect("grpc://127.0.0.1:1", token="x" * 16)
    client = layer.client
    attempted = threading.Event()
    connect = VertexConnection.client

    def seen(connection: VertexConnection) -> object:
        attempted.set()
        return connect(connection)

    monkeypatch.setattr(VertexConnection, "client", seen)
    raised: list[FTLayerError] = []

    def wait() -> None:
        try:
            client.call(OpenStream("s", StreamOptions(1_000)), deadline_ms=3_600_000)
        except FTLayerError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert attempted.wait(60)
    layer.close()
    waiting.join(60)
    assert [type(error) for error in raised] == [LayerClosedError]


def test_a_client_that_is_only_given_up_connects_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FTLayer.connect("grpc://127.0.0.1:1", token="x" * 16)
    connected: list[object] = []
    connect = VertexConnection.client

    def seen(connection: VertexConnection) -> object:
        connected.append(connect(connection))
        return connected[-1]

    monkeypatch.setattr(VertexConnection, "client", seen)
    layer.client.close()
    with pytest.raises(VertexUnavailableError):
        layer.client.health(deadline_ms=1)
    assert connected[0] is not None
