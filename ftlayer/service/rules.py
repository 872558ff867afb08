"""One shard's store and its rules, behind a lock: what the shard's threads share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from ftlayer.errors import FTLayerError, VertexUnavailableError
from ftlayer.layer.calls import Call, Envelope, MutatingCall, Now, ReadingCall, Reply, Touch, Xor
from ftlayer.layer.layer import FTLayer, Outcome
from ftlayer.store.kv import KeyValueStore, WriteTransaction

Answer = Callable[[Reply | FTLayerError], None]


def system_now() -> Now:
    """Return the time by the system's clocks."""
    return Now(time.monotonic_ns() // 1_000_000, time.time_ns() // 1_000_000)


@dataclass(frozen=True)
class ShardParts:
    """What a shard is made of, and made again of after its memory was lost.

    ``sync_every_ms`` None: syncing is the store's own business. ``flush_ms``: how long completions stay
    unwritten, as the layer was told.
    """

    open_store: Callable[[], KeyValueStore]
    make_layer: Callable[[KeyValueStore, Now], FTLayer]
    persist_timeout_ms: int
    sync_every_ms: int | None = None
    flush_ms: int = 100
    now: Callable[[], Now] = system_now


@dataclass(slots=True, eq=False)
class Waiting:
    """A call in the writer's queue; ``reason`` says why intake was held back."""

    call: Call
    envelope: Envelope | None
    answer: Answer
    since_ms: int
    not_before_ms: int = 0
    reason: str = ""


def shard_closed() -> VertexUnavailableError:
    """Return the answer to calls that come too late; clients send them to the vertex that comes next."""
    return VertexUnavailableError("the vertex is stopping")


class Rules:
    """The layer and its store. The writer's methods are for one thread; `in_memory` is for any.

    The lock is held while the rules run and never while the store syncs. What runs in between (`in_memory`)
    changes memory alone, and is told to the layer as part of the transaction that is open: any other one
    would tell it that that transaction is over.
    """

    def __init__(self, parts: ShardParts) -> None:
        """Open the store and recover what it holds; raises what these raise."""
        self._parts = parts
        self._lock = threading.Lock()
        self._transaction: WriteTransaction | None = None
        self._lost = False
        self.store = parts.open_store()
        try:
            self._layer = parts.make_layer(self.store, parts.now())
        except BaseException:
            self.store.close()
            raise

    @property
    def incarnation(self) -> int:
        """The incarnation that calls about pending roots must name."""
        return self._layer.incarnation

    @property
    def lost(self) -> bool:
        """Whether memory is ahead of the store, so that only new rules from the store can go on."""
        return self._lost

    def lose(self) -> None:
        """Declare memory lost."""
        self._lost = True

    def now(self) -> Now:
        """Return the time."""
        return self._parts.now()

    def in_memory(self, call: Xor | Touch, envelope: Envelope | None) -> Reply:
        """Run a call that needs no store. Raises what the rules raise, `VertexUnavailableError` when lost."""
        with self._lock:
            self._check()
            transaction = cast(WriteTransaction, self._transaction)
            outcome = self._layer.apply(transaction, call, envelope, self.now())
            outcome.after()
            return outcome.reply

    # ------------------------------------------------------------ the writer's

    def read(self, call: ReadingCall) -> Reply:
        """Answer a call that changes nothing, in a snapshot of the store."""
        with self.store.read() as txn, self._lock:
            self._check()
            return self._layer.read(txn, call, self.now())

    def run_alone(self, call: MutatingCall, envelope: Envelope | None) -> Reply:
        """Run a call that is no intake in a transaction of its own.

        Its rules change memory before the commit: if that fails, memory is lost.
        """
        outcome: Outcome | None = None
        try:
            with self.store.write(intake=False) as txn, self._staging(txn):
                outcome = self._layer.apply(txn, call, envelope, self.now())
        except BaseException:
            self.abandon(memory_changed=outcome is not None)
            raise
        self.confirm([outcome])
        return outcome.reply

    def tick(self) -> int | None:
        """Do what time brings; return the monotone time (ms) of the next tick, None when there is none."""
        ran = False
        try:
            with self.store.write(intake=False) as txn, self._staging(txn):
                ran = True
                next_ms = self._layer.tick(txn, self.now())
        except BaseException:
            self.abandon(memory_changed=ran)
            raise
        self.confirm([])
        return next_ms

    @contextmanager
    def staging(self, txn: WriteTransaction) -> Iterator[FTLayer]:
        """Lend the layer for applying calls in ``txn``; `confirm` or `abandon` has to follow."""
        with self._staging(txn):
            yield self._layer

    def confirm(self, outcomes: list[Outcome]) -> None:
        """Tell that the transaction was committed."""
        with self._lock:
            for outcome in outcomes:
                outcome.after()
            self._transaction = None

    def abandon(self, *, memory_changed: bool) -> None:
        """Tell that the transaction was not committed; ``memory_changed`` if one of its calls did that."""
        with self._lock:
            self._transaction = None
            if memory_changed:
                self._lost = True
            else:
                self._layer.lost()

    def next_tick_ms(self) -> int | None:
        """Return when `tick` has something to do, as things are."""
        with self._lock:
            return self._layer.next_tick_ms(self.now())

    @contextmanager
    def _staging(self, txn: WriteTransaction) -> Iterator[None]:
        with self._lock:
            self._check()
            self._transaction = txn
            yield

    def _check(self) -> None:
        if self._lost:
            raise shard_closed()
