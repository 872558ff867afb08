"""A vertex shard under a manual clock, over a store in memory that can be reopened and can fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.clock import Now
from ftlayer.errors import StoreFullError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Envelope
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.store import MemoryStore


class Store:
    """A `MemoryStore` whose incarnation counts its openings, and whose next commit can be made to fail."""

    def __init__(self) -> None:
        self.inner = MemoryStore()
        self.incarnation = 1
        self.fail_next_commit = False
        self.share: float | None = None

    @contextmanager
    def write(self, *, intake: bool) -> Iterator[Any]:
        with self.inner.write(intake=intake) as txn:
            yield txn
            if self.fail_next_commit:
                self.fail_next_commit = False
                raise StoreFullError("the disk is full (a test)")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def used_share(self) -> float:
        return self.inner.used_share if self.share is None else self.share


class Vertex:
    """What a service does around an `FTLayerCore`, one call a transaction unless told otherwise."""

    def __init__(self, **options: Any) -> None:
        self.store = Store()
        self.options = LayerOptions(**options)
        self.mono = 1_000_000
        self.wall = 1_700_000_000_000
        self.layer = FTLayerCore(self.store, self.options, self.now)
        self._sequence = 0

    @property
    def now(self) -> Now:
        return Now(self.mono, self.wall)

    def restart(self) -> None:
        self.store.incarnation += 1
        self.layer = FTLayerCore(self.store, self.options, self.now)

    def advance(self, ms: int, *, ticks: int = 1) -> None:
        """Let time pass, ticking along the way."""
        for _ in range(ticks):
            self.mono += ms // ticks
            self.wall += ms // ticks
            self.tick()

    def tick(self) -> int | None:
        with self.store.write(intake=False) as txn:
            return self.layer.tick(txn, self.now)

    def group(self, *items: Any) -> list[Any]:
        """Apply calls (or (call, envelope) pairs) in one transaction; return the replies."""
        pairs = [item if isinstance(item, tuple) else (item, None) for item in items]
        with self.store.write(intake=all(isinstance(call, calls.IntakeCall) for call, _ in pairs)) as txn:
            outcomes = [self.layer.apply(txn, call, envelope, self.now) for call, envelope in pairs]
        for outcome in outcomes:
            outcome.after()
        return [outcome.reply for outcome in outcomes]

    def call(self, call: Any, envelope: Envelope | None = None) -> Any:
        """Send a call; reading ones too."""
        if isinstance(call, calls.ReadingCall):
            with self.store.read() as txn:
                return self.layer.read(txn, call, self.now)
        return self.group((call, envelope))[0]

    def stored(self, table: str) -> dict[bytes, bytes]:
        """Return what the store holds in a table."""
        with self.store.read() as txn:
            return {bytes(key): bytes(value) for key, value in txn.scan(table)}

    def stats(self) -> dict[str, float]:
        return self.call(calls.Stats()).values

    # ------------------------------------------------------------ shorthands

    def open(self, stream: str = "s", **options: Any) -> Any:
        options = {"timeout_ms": 1_000, "backoff_ms": (100,), "jitter": 0.0, **options}
        return self.call(calls.OpenStream(stream, calls.StreamOptions(**options)))

    def persist(
        self, roots: list[int], values: list[int] | None = None, stream: str = "s", **more: Any
    ) -> Any:
        return self.call(persist_call(roots, values, stream, **more))

    def xor(self, *pairs: tuple[int, int], hold: bool = False, envelope: Envelope | None = None) -> Any:
        roots, values = zip(*pairs, strict=True)
        call = calls.Xor(u64(roots), u64(values), self.layer.incarnation, hold)
        return self.call(call, envelope)

    def fail(self, *roots: int, fatal: bool = False, traceback: str = "") -> Any:
        failures = tuple(calls.Failure(root, "broken", "op", traceback, fatal) for root in roots)
        return self.call(calls.Fail(failures, self.layer.incarnation))

    def take(self, limit: int = 1_000, stream: str = "s") -> list[tuple[int, int, int, str]]:
        """Take replays: (root, origin, attempt, payload)."""
        return flat(self.call(calls.TakeReplays(stream, limit)))

    def recall(self, *streams: str) -> int:
        return self.call(calls.Recall(streams or ("s",), self.layer.incarnation)).rows

    def list(self, state: str, stream: str = "") -> list[calls.RecordInfo]:
        found: list[calls.RecordInfo] = []
        after = b""
        while True:
            page = self.call(calls.ListRecords(state, stream, 7, after))
            found += page.records
            after = page.more
            if not after:
                return found

    def counts(self) -> dict[str, int]:
        return {state: len(self.list(state)) for state in ("pending", "waiting", "delivery", "dead")}


def u64(values: Any) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(list(values), np.uint64)


def payload(texts: list[str]) -> pa.RecordBatch:
    return pa.record_batch({"v": pa.array(texts, pa.string())})


def persist_call(roots: list[int], values: list[int] | None = None, stream: str = "s", **more: Any) -> Any:
    values = roots if values is None else values
    return calls.Persist(stream, payload([f"row {r}" for r in roots]), u64(roots), u64(values), **more)


def flat(reply: Any) -> list[tuple[int, int, int, str]]:
    return [
        (root, origin, attempt, text)
        for part in reply.batches
        for root, origin, attempt, text in zip(
            part.roots.tolist(),
            part.origins.tolist(),
            part.attempts.tolist(),
            part.payload.column(0).to_pylist(),
            strict=True,
        )
    ]


@pytest.fixture
def vertex() -> Vertex:
    return Vertex()


@pytest.fixture
def kit() -> SimpleNamespace:
    """Everything tests build calls with."""
    return SimpleNamespace(
        Vertex=Vertex, Store=Store, u64=u64, payload=payload, persist_call=persist_call, flat=flat
    )
