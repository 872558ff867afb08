from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.errors import VertexUnavailableError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore

STREAM = "job/source"


class Vertex:
    """A shard under a manual clock that answers as a client does; it can be restarted, and be away."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.incarnation = 1
        self.wall = 1_700_000_000_000
        self.away = 0
        self._root = 0
        self._open()

    def _open(self) -> None:
        vertex = self

        class Store:
            incarnation = vertex.incarnation

            def __getattr__(self, name: str) -> Any:
                return getattr(vertex.store, name)

        self.layer = FTLayerCore(Store(), LayerOptions(), self.now)  # type: ignore[arg-type]
        self.call(calls.OpenStream(STREAM, calls.StreamOptions(max_attempts=1)))

    @property
    def now(self) -> Now:
        return Now(0, self.wall)

    def restart(self) -> None:
        self.incarnation += 1
        self._open()

    def call(self, call: Any, envelope: Envelope | None = None) -> Any:
        if self.away:
            self.away -= 1
            raise VertexUnavailableError("away")
        if isinstance(call, calls.ReadingCall):
            with self.store.read() as txn:
                return self.layer.read(txn, call, self.now)
        with self.store.write(intake=isinstance(call, calls.IntakeCall)) as txn:
            outcome = self.layer.apply(txn, call, envelope, self.now)
        outcome.after()
        return outcome.reply

    def die(self, text: str) -> None:
        """Let a record be a dead letter."""
        self._root += 1
        roots = np.array([self._root], np.uint64)
        payload = pa.record_batch([[text]], ["text"])
        self.call(calls.Persist(STREAM, payload, roots, roots))
        self.call(calls.Fail((calls.Failure(self._root, f"no {text}", "op"),), self.layer.incarnation))

    def keys(self) -> list[bytes]:
        return [info.key for info in self.call(calls.ListRecords("dead", STREAM)).records]

    def close(self) -> None:
        pass


@pytest.fixture
def kit() -> SimpleNamespace:
    return SimpleNamespace(Vertex=Vertex, STREAM=STREAM)
