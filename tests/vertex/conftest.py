"""Vertices to talk to: one in this process, one in a child process, and stores with faults."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.config import MIB, VertexOptions
from ftlayer.errors import StoreError
from ftlayer.transport.address import Address
from ftlayer.transport.tls import Certificate
from ftlayer.vertex.calls import OpenStream, Persist, StreamOptions, Xor
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.service.serve import VertexServer, open_vertex
from ftlayer.vertex.service.shard import ShardParts
from ftlayer.vertex.service.vertex import Vertex
from ftlayer.vertex.store.memory import MemoryStore

STREAM = "job/source"
DEADLINE_MS = 20_000


@dataclass
class Running:
    """A vertex that serves in this process."""

    vertex: Vertex
    server: VertexServer
    token: str
    certificate: Certificate | None
    faults: list[Exception]
    clients: list[VertexClient] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.server.address)

    def client(self, **options: Any) -> VertexClient:
        arguments: dict[str, Any] = {"deadline_ms": DEADLINE_MS} | options
        token = arguments.pop("token", self.token)
        roots = arguments.pop("root_certs", self.certificate.cert if self.certificate else None)
        client = VertexClient(self.address, token, root_certs=roots, **arguments)
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.vertex.close()
        # Streams that a test has left open end with their clients.
        self.server.stop(0.0)


@contextmanager
def serving(
    path: Path,
    certificate: Certificate | None = None,
    max_message_bytes: int = 64 * MIB,
    client_ca: bytes | None = None,
    **options: Any,
) -> Iterator[Running]:
    """Serve a vertex with an LMDB store in this process."""
    faults: list[Exception] = []
    vertex = open_vertex(VertexOptions(path, **options), faults.append)
    token = secrets.token_urlsafe()
    server = VertexServer(
        vertex,
        listen=Address("127.0.0.1"),
        token=token,
        max_message_bytes=max_message_bytes,
        certificate=None if certificate is None else (certificate.cert, certificate.key),
        client_ca=client_ca,
    )
    running = Running(vertex, server, token, certificate, faults)
    try:
        yield running
    finally:
        running.close()


@pytest.fixture(name="serving", scope="session")
def serving_fixture() -> Callable[..., Any]:
    return serving


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with serving(tmp_path / "vertex", max_message_bytes=4 * MIB) as it:
        yield it


@pytest.fixture
def client(running: Running) -> VertexClient:
    return running.client()


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex")) as vertex:
        yield vertex


class Batches:
    """Makes calls with records of their own."""

    def __init__(self, seed: int = 7) -> None:
        self._rng = np.random.default_rng(seed)

    def ids(self, rows: int) -> np.ndarray:
        return self._rng.integers(1, 2**63, rows, dtype=np.uint64)

    def persist(self, rows: int = 10, stream: str = STREAM, **fields: Any) -> Persist:
        texts = [f"record {number}" for number in range(rows)]
        payload = pa.record_batch({"text": pa.array(texts, pa.string())})
        return Persist(stream, payload, self.ids(rows), self.ids(rows), **fields)

    def xor(self, persist: Persist, incarnation: int) -> Xor:
        return Xor(persist.roots, persist.values, incarnation)


@pytest.fixture
def batches() -> Batches:
    return Batches()


@pytest.fixture
def open_stream() -> Callable[..., OpenStream]:
    return lambda stream=STREAM, **options: OpenStream(stream, StreamOptions(**options))


class FaultyStore(MemoryStore):
    """A store whose commits can be held up, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.may_commit = threading.Event()
        self.may_commit.set()
        self.commits_waiting = threading.Semaphore(0)
        self.fail_next = 0
        self.incarnation = 0

    @contextmanager
    def write(self, *, intake: bool) -> Iterator[Any]:
        with super().write(intake=intake) as txn:
            yield txn
            self.commits_waiting.release()
            assert self.may_commit.wait(600)
            if self.fail_next:
                self.fail_next -= 1
                raise StoreError("the disk is gone")

    def close(self) -> None:
        """Stay usable: the shard opens it again."""


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore()


@pytest.fixture
def parts(store: FaultyStore) -> ShardParts:
    def open_store() -> FaultyStore:
        store.incarnation += 1
        return store

    return ShardParts(
        open_store=open_store,
        make_layer=lambda opened, now: FTLayerCore(opened, LayerOptions(flush_ms=1), now),
        persist_timeout_ms=300,
        flush_ms=1,
    )
