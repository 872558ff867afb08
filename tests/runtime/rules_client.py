"""A vertex without a process of its own: its rules, on a store in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ftlayer.common.clock import Now, system_now
from ftlayer.errors import VertexUnavailableError
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore


class RulesClient:
    """`ftlayer.vertex.client.client.VertexClient` of such a vertex, which may be away."""

    def __init__(self, clock: Callable[[], Now] = system_now) -> None:
        self._clock = clock
        self.store = MemoryStore()
        self.is_away = False
        self.asked: list[str] = []
        self._lock = threading.Lock()
        self.layer = FTLayerCore(self.store, LayerOptions(), clock())

    def call(self, call: Any) -> Any:
        """Do a call."""
        with self._lock:
            self.asked.append(type(call).__name__)
            if self.is_away:
                raise VertexUnavailableError("the vertex gives no answer")
            if isinstance(call, calls.ReadingCall):
                with self.store.read() as txn:
                    return self.layer.read(txn, call, self._clock())
            with self.store.write(intake=False) as txn:
                outcome = self.layer.apply(txn, call, None, self._clock())
            outcome.after()
            return outcome.reply

    def dead(self) -> list[calls.RecordInfo]:
        """Return the dead letters."""
        return list(self.call(calls.ListRecords("dead")).records)
