"""One shard's store and its rules, behind a lock: what the shard's threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ftlayer.clock import Now, system_now
from ftlayer.errors import (
    FTLayerError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    StaleOwnerError,
    UnknownJobError,
    VertexUnavailableError,
)
from ftlayer.printable import described
from ftlayer.store.kept import KeyValueStore
from ftlayer.vertex.calls import Call, Envelope, ReadingCall, Register, Reply
from ftlayer.vertex.rules.followed import EndedAttempt
from ftlayer.vertex.rules.layer import CallOutcome, FTLayerCore, MemoryCall

Answer = Callable[[Reply | FTLayerError], None]

REFUSALS = (MalformedRequestError, ProtocolError, StaleIncarnationError, StaleOwnerError, UnknownJobError)
"""What the rules raise for a call that has changed and staged nothing; the rest of its group goes on."""


@dataclass(frozen=True)
class ShardParts:
    """What a shard is made of, and made again of after its memory was lost.

    ``sync_every_ms`` None: syncing is the store's own business. ``flush_ms``: how long completions stay
    unwritten, as the layer was told. ``trace`` gets the attempts that the layer follows, when they have ended.
    """

    open_store: Callable[[], KeyValueStore]
    make_layer: Callable[[KeyValueStore, Now], FTLayerCore]
    persist_timeout_ms: int
    sync_every_ms: int | None = None
    flush_ms: int = 100
    now: Callable[[], Now] = system_now
    trace: Callable[[EndedAttempt], None] | None = None


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


def internal_fault(error: Exception) -> FTLayerError:
    """Return the answer to a call that hit a fault in the vertex itself."""
    return FTLayerError(f"fault in the vertex, see its log: {described(error)}")


class Rules:
    """The layer and its store. The writer's methods are for one thread; `in_memory` is for any.

    The lock is held while the rules run and never while the store syncs. What runs in between (`in_memory`)
    changes memory alone and is part of no transaction.
    """

    def __init__(self, parts: ShardParts) -> None:
        """Open the store and recover what it holds; raises what these raise."""
        self._parts = parts
        self._lock = threading.Lock()
        self._lost = False
        self._changes_memory = False
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
    def exact(self) -> bool:
        return self._layer.exact

    @property
    def lost(self) -> bool:
        """Whether memory is ahead of the store, so that only new rules from the store can go on."""
        return self._lost

    def lose(self) -> None:
        self._lost = True

    def now(self) -> Now:
        return self._parts.now()

    def in_memory(self, call: MemoryCall, envelope: Envelope | None) -> Reply | None:
        """Run a call that needs no store; None if it has to wait for room.

        Raises what the rules raise, `VertexUnavailableError` when lost.
        """
        with self._staging() as layer:
            if isinstance(call, Register) and layer.intake_blocked(call, self.now()) is not None:
                return None
            outcome = layer.apply(None, call, envelope, self.now())
            outcome.after()
            return outcome.reply

    # ------------------------------------------------------------ the writer's

    def read(self, call: ReadingCall) -> Reply:
        """Answer a call that changes nothing, in a snapshot of the store."""
        with self.store.read() as txn, self._staging() as layer:
            return layer.read(txn, call, self.now())

    def tick(self) -> int | None:
        """Do what time brings; return the monotone time (ms) of the next tick, None when there is none."""
        try:
            with self.store.write(intake=False) as txn, self.staging(changes_memory=True) as layer:
                next_ms = layer.tick(txn, self.now())
        except BaseException:
            self.abandon()
            raise
        self.confirm([])
        return next_ms

    def next_tick_ms(self) -> int | None:
        """Return when `tick` has something to do, as things are."""
        with self._staging() as layer:
            return layer.next_tick_ms(self.now())

    @contextmanager
    def staging(self, *, changes_memory: bool) -> Iterator[FTLayerCore]:
        """Lend the layer for the calls of one transaction; `confirm` or `abandon` has to follow.

        ``changes_memory``: the calls change memory before the commit, so that memory is lost without it.
        """
        with self._staging() as layer:
            self._changes_memory = changes_memory
            yield layer

    def confirm(self, outcomes: Iterable[CallOutcome]) -> None:
        with self._lock:
            for outcome in outcomes:
                outcome.after()
            self._changes_memory = False
            ended = self._ended()
        self._trace(ended)

    def abandon(self) -> None:
        with self._lock:
            self._lost = self._lost or self._changes_memory
            if not self._lost:
                self._layer.lost()

    @contextmanager
    def _staging(self) -> Iterator[FTLayerCore]:
        with self._lock:
            if self._lost:
                raise shard_closed()
            yield self._layer
            ended = self._ended()
        self._trace(ended)

    def _ended(self) -> list[EndedAttempt]:
        return [] if self._parts.trace is None else self._layer.take_attempts()

    def _trace(self, ended: list[EndedAttempt]) -> None:
        if self._parts.trace is not None:
            for attempt in ended:
                self._parts.trace(attempt)
