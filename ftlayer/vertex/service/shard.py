"""The shell around one shard's rules: its thread, its clock, its transactions.

Calls that touch the store go to one thread, the *writer*: all intake calls that wait become one transaction
(one sync), all other changing ones another (see `ftlayer.vertex.rules.layer` for why). `Xor`, `Touch`,
`Register` and `AskRanges` change memory alone; they run on the thread that brings them, also while the writer syncs. A
`Register` for which there is no room waits with the intake.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import cast

from ftlayer.common.clock import Now, system_now
from ftlayer.common.printable import described
from ftlayer.errors import (
    FTLayerError,
    IntakeTimeoutError,
    MalformedRequestError,
    ProtocolError,
    StaleIncarnationError,
    StaleOwnerError,
    StoreFullError,
    UnknownJobError,
    VertexError,
    VertexUnavailableError,
)
from ftlayer.vertex import calls
from ftlayer.vertex.rules.followed import EndedAttempt
from ftlayer.vertex.rules.layer import CallOutcome, FTLayerCore
from ftlayer.vertex.rules.operating import ShardPulse
from ftlayer.vertex.store.key_value import KeyValueStore, WriteTransaction

logger = logging.getLogger(__name__)


Answer = Callable[[calls.Reply | FTLayerError], None]

REFUSALS = (MalformedRequestError, ProtocolError, StaleIncarnationError, StaleOwnerError, UnknownJobError)
"""What the rules raise for a call that has changed and staged nothing; the rest of its group goes on."""


@dataclass(frozen=True)
class ShardParts:
    """What a shard is made of, and made again of after its memory was lost.

    ``sync_every_ms`` None: the store syncs by itself. ``flush_ms``: how long completions stay unwritten.
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

    call: calls.Call
    envelope: calls.Envelope | None
    answer: Answer
    since_ms: int
    not_before_ms: int = 0
    reason: str = ""


def shard_closed() -> VertexUnavailableError:
    """Return the answer to calls that come too late; clients send them to the vertex that comes next."""
    return VertexUnavailableError("the vertex is stopping")


def internal_fault(error: Exception) -> FTLayerError:
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
        self.now = parts.now
        self.lost = False
        """Whether memory is ahead of the store, so that only new rules from the store can go on."""
        self._changes_memory = False
        self.store = parts.open_store()
        try:
            self._layer = parts.make_layer(self.store, parts.now())
        except BaseException:
            self.store.close()
            raise

    @property
    def incarnation(self) -> int:
        return self._layer.incarnation

    @property
    def exact(self) -> bool:
        return self._layer.exact

    def in_memory(self, call: calls.MemoryCall, envelope: calls.Envelope | None) -> calls.Reply | None:
        """Run a call that needs no store; None if it has to wait for room. Raises as the rules, and when lost."""
        with self._staging() as layer:
            if isinstance(call, calls.Register) and layer.intake_blocked(call, self.now()) is not None:
                return None
            outcome = layer.apply(None, call, envelope, self.now())
            outcome.after()
            return outcome.reply

    def read(self, call: calls.ReadingCall) -> calls.Reply:
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
        with self._staging() as layer:
            return layer.next_tick_ms(self.now())

    @contextmanager
    def staging(self, *, changes_memory: bool) -> Iterator[FTLayerCore]:
        """Lend the layer for one transaction; `confirm` or `abandon` follows, which loses memory that was changed."""
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
            self.lost = self.lost or self._changes_memory
            if not self.lost:
                self._layer.lost()

    @contextmanager
    def _staging(self) -> Iterator[FTLayerCore]:
        with self._lock:
            if self.lost:
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


WaitingCall = calls.Persist | calls.Ingest | calls.Seal | calls.Reseal | calls.Register

# Bounds the time that one sync takes, and with it the wait of the calls behind it.
GROUP_BYTES = 16 << 20
# A call that does not fit into the store is staged anew each time it is tried.
FULL_STORE_PAUSE_MS = 100


@dataclass(slots=True)
class _CallGroup:
    applied: list[tuple[Waiting, CallOutcome]] = field(default_factory=list)
    refused: list[tuple[Waiting, calls.Reply | FTLayerError]] = field(default_factory=list)
    current: Waiting | None = None
    size: int = 0

    def tried(self) -> list[Waiting]:
        return [waiting for waiting, _ in self.applied] + ([self.current] if self.current else [])


class Intake:
    """The intake calls of a shard that wait. For the writer's thread alone.

    Calls of one stream (of one query, for verdicts) keep their order; others overtake them when they are held back.
    """

    def __init__(self, persist_timeout_ms: int) -> None:
        self._timeout_ms = persist_timeout_ms
        self._waiting: list[Waiting] = []
        self._one_by_one = 0
        self._found_full = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waits_for(self) -> str:
        """Why the call waits that has waited longest; "" while none waits. Another thread may look."""
        return next((waiting.reason or "the vertex is busy" for waiting in tuple(self._waiting)), "")

    @property
    def is_full(self) -> bool:
        """Whether calls wait for room in the store, or on its disk."""
        return self._found_full and bool(self._waiting)

    def add(self, waiting: Waiting) -> None:
        self._waiting.append(waiting)

    def run(self, rules: Rules) -> bool:
        """Write one group of what may go on now; return whether to go on with the next one at once."""
        if not self._waiting:
            return False
        group = _CallGroup()
        try:
            with rules.store.write(intake=True) as txn, rules.staging(changes_memory=False) as layer:
                self._apply(layer, txn, group, rules)
        except StoreFullError as error:
            rules.abandon()
            self._hold_back(group, error, rules)
        except FTLayerError as error:
            rules.abandon()
            self._fail(group, error)
        except Exception as error:
            logger.exception("fault in the rules")
            rules.lost = True
            at_fault = [group.current] if group.current else group.tried()
            self._answer([(waiting, internal_fault(error)) for waiting in at_fault])
        else:
            rules.confirm(outcome for _, outcome in group.applied)
            if group.applied and self._found_full:
                self._found_full = False
                logger.warning("the store takes records again")
            self._one_by_one = max(self._one_by_one - 1, 0)
            self._answer([(waiting, outcome.reply) for waiting, outcome in group.applied])
        self._answer(group.refused)
        moved = bool(group.applied or group.refused) or self._one_by_one > 0
        self._fail_overdue(rules.now().mono_ms)
        return moved and bool(self._waiting) and not rules.lost

    def fail_all(self) -> None:
        for waiting in self._waiting:
            waiting.answer(shard_closed())
        self._waiting.clear()

    def _apply(self, layer: FTLayerCore, txn: WriteTransaction, group: _CallGroup, rules: Rules) -> None:
        held: set[str] = set()
        now = rules.now()
        for waiting in self._waiting:
            if group.size >= GROUP_BYTES or (group.applied and self._one_by_one):
                return
            call = _intake_call(waiting)
            owner = call.query if isinstance(call, (calls.Seal, calls.Reseal)) else call.stream
            if owner in held:
                continue
            reason = (
                waiting.reason if waiting.not_before_ms > now.mono_ms else layer.intake_blocked(call, now)
            )
            if reason:
                waiting.reason = reason
                held.add(owner)
                continue
            group.current = waiting
            try:
                group.applied.append((waiting, layer.apply(txn, call, waiting.envelope, now)))
            except REFUSALS as error:
                group.refused.append((waiting, error))
            group.current = None
            group.size += _size_of(call)

    def _hold_back(self, group: _CallGroup, error: StoreFullError, rules: Rules) -> None:
        """What does not fit together may fit one by one; what does not fit alone waits."""
        tried = group.tried()
        if len(tried) > 1:
            self._one_by_one = len(tried)
            return
        self._one_by_one = max(self._one_by_one - 1, 0)
        if not self._found_full:
            self._found_full = True
            logger.warning("intake waits until there is room: %s", error)
        for waiting in tried or self._waiting:
            waiting.reason = str(error)
            waiting.not_before_ms = rules.now().mono_ms + FULL_STORE_PAUSE_MS

    def _fail(self, group: _CallGroup, error: FTLayerError) -> None:
        """Answer the calls of a lost transaction; if it did not even begin, all have to wait."""
        self._answer([(waiting, error) for waiting in group.tried()])
        if not group.tried():
            for waiting in self._waiting:
                waiting.reason = str(error)

    def _answer(self, answers: list[tuple[Waiting, calls.Reply | FTLayerError]]) -> None:
        gone = {waiting for waiting, _ in answers}
        self._waiting = [waiting for waiting in self._waiting if waiting not in gone]
        for waiting, answer in answers:
            waiting.answer(answer)

    def _fail_overdue(self, now_ms: int) -> None:
        overdue = [waiting for waiting in self._waiting if waiting.since_ms + self._timeout_ms <= now_ms]
        self._answer([(waiting, self._overdue(waiting)) for waiting in overdue])

    def _overdue(self, waiting: Waiting) -> IntakeTimeoutError:
        return IntakeTimeoutError(
            f"{type(waiting.call).__name__} waited {self._timeout_ms} ms (persist_timeout) for room: "
            f"{waiting.reason or 'the vertex is busy'}; nothing was stored"
        )


def _intake_call(waiting: Waiting) -> WaitingCall:
    assert isinstance(waiting.call, (calls.Persist, calls.Ingest, calls.Seal, calls.Reseal, calls.Register))
    return waiting.call


def _size_of(call: WaitingCall) -> int:
    if isinstance(call, calls.Register):
        return 16 * len(call.roots)
    if isinstance(call, (calls.Persist, calls.Ingest)):
        return int(call.payload.get_total_buffer_size())
    payloads = [part.payload for part in call.failed] + [part.payload for part in call.emitted]
    return sum(int(payload.get_total_buffer_size()) for payload in payloads if payload is not None)


# Completions are written down by ticks, and `Xor` does not wake the writer: it looks this often.
LONGEST_SLEEP_MS = 50
MAX_RECOVERIES = 5
RECOVERIES_WITHIN_MS = 60_000


class Shard:
    """One shard. Any thread may submit calls.

    Rules whose memory was lost (a transaction failed that had changed it, or a fault) are made anew from
    the store, as after a crash. ``on_fatal`` is called once if that fails; nothing is served from then on.
    """

    def __init__(self, parts: ShardParts, name: str, on_fatal: Callable[[Exception], None]) -> None:
        self._parts = parts
        self._on_fatal = on_fatal
        self._changed = threading.Condition()  # guards the queue and _closing
        self._queue: deque[Waiting] = deque()
        self._closing = False
        self._queued_registers: dict[str, int] = {}
        self._intake = Intake(parts.persist_timeout_ms)
        self._intake_is_held = False
        self._recoveries: list[int] = []
        # What questions of tools take, every Persist and Xor waits: records' own reading is not among it.
        self._reading_s = 0.0
        self._rules = Rules(parts)
        self._is_recovering = False
        self._next_tick_ms = self._synced_ms = self._turned_ms = parts.now().mono_ms
        self._thread = threading.Thread(target=self._run, name=f"ftlayer-{name}", daemon=True)
        self._thread.start()

    @property
    def incarnation(self) -> int:
        """The incarnation of the rules; it changes when they are made anew."""
        return self._rules.incarnation

    @property
    def exact(self) -> bool:
        return self._rules.exact

    def pulse(self) -> ShardPulse:
        """Return how the writer is, without waiting for it."""
        return ShardPulse(
            self._turned_ms,
            self._is_recovering,
            not self._thread.is_alive(),
            self._intake.waits_for,
            self._rules.store.used_share,
        )

    def submit(self, call: calls.Call, envelope: calls.Envelope | None, answer: Answer) -> None:
        """Run ``call``; ``answer`` gets the reply or the error, on this thread or on the writer's."""
        if isinstance(call, calls.MemoryCall) and not self._has_to_queue(call):
            reply = self._apply_in_memory(call, envelope)
            if reply is not None:
                answer(reply)
                return
        with self._changed:
            if not self._closing:
                answer = self._queued(call, answer)
                self._queue.append(Waiting(call, envelope, answer, self._parts.now().mono_ms))
                self._changed.notify()
                return
        answer(shard_closed())

    def close(self) -> None:
        """Run what was submitted, refuse what comes, write down what completed, close the store."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _has_to_queue(self, call: calls.MemoryCall) -> bool:
        return isinstance(call, calls.Register) and self._queued_registers.get(call.stream, 0) > 0

    def _queued(self, call: calls.Call, answer: Answer) -> Answer:
        """Count a `Register` that waits for room, until it is answered. Under `_changed`."""
        if not isinstance(call, calls.Register):
            return answer
        stream = call.stream
        self._queued_registers[stream] = self._queued_registers.get(stream, 0) + 1

        def answered(reply: calls.Reply | FTLayerError) -> None:
            with self._changed:
                self._queued_registers[stream] -= 1
            answer(reply)

        return answered

    def _apply_in_memory(
        self, call: calls.MemoryCall, envelope: calls.Envelope | None
    ) -> calls.Reply | FTLayerError | None:
        if self._closing:
            return shard_closed()
        try:
            reply = self._rules.in_memory(call, envelope)
        except FTLayerError as error:
            return error
        except Exception as error:
            logger.exception("fault in the rules")
            self._rules.lost = True
            return internal_fault(error)
        if self._intake_is_held:
            with self._changed:
                self._changed.notify()
        return reply

    def _run(self) -> None:
        try:
            while self._wait():
                self._step()
            self._finish()
        except Exception as error:
            logger.exception("the shard has failed")
            self._refuse_everything()
            self._on_fatal(error)

    def _wait(self) -> bool:
        with self._changed:
            if not self._queue and not self._closing:
                pause_ms = min(self._next_tick_ms - self._parts.now().mono_ms, LONGEST_SLEEP_MS)
                self._changed.wait(max(pause_ms, 0) / 1_000)
            return bool(self._queue) or not self._closing

    def _step(self) -> None:
        while True:
            self._take_arrived()
            goes_on = self._intake.run(self._rules)
            self._keep_time()
            if self._rules.lost:
                self._recover()
            if not goes_on:
                break
        self._intake_is_held = len(self._intake) > 0

    def _take_arrived(self) -> None:
        with self._changed:
            arrived, self._queue = self._queue, deque()
        changing: list[Waiting] = []
        for waiting in arrived:
            if isinstance(waiting.call, (calls.IntakeCall, calls.Register)):
                self._intake.add(waiting)
            elif isinstance(waiting.call, calls.ReadingCall):
                waiting.answer(self._read(waiting.call))
            else:
                changing.append(waiting)
        if changing:
            write_changes(changing, self._rules)

    def _read(self, call: calls.ReadingCall) -> calls.Reply | FTLayerError:
        began = time.perf_counter()
        reply = self._answer_to(call)
        self._turned_ms = self._parts.now().mono_ms
        if not isinstance(call, calls.ReadDeliveries):
            self._reading_s += time.perf_counter() - began
        if isinstance(reply, calls.StatsReply):
            reply.values["reading_seconds"] = self._reading_s
            reply.values["shards_full"] = int(self._intake.is_full)
        return reply

    def _answer_to(self, call: calls.ReadingCall) -> calls.Reply | FTLayerError:
        try:
            return self._rules.read(call)
        except FTLayerError as error:
            return error
        except Exception as error:
            logger.exception("fault in the rules")
            return internal_fault(error)

    def _keep_time(self) -> None:
        now_ms = self._turned_ms = self._parts.now().mono_ms
        due_ms = self._tick(now_ms)
        self._next_tick_ms = now_ms + LONGEST_SLEEP_MS if due_ms is None else due_ms
        sync_every_ms = self._parts.sync_every_ms
        if sync_every_ms is not None:
            if now_ms - self._synced_ms >= sync_every_ms:
                self._rules.store.sync()
                self._synced_ms = now_ms
            self._next_tick_ms = min(self._next_tick_ms, self._synced_ms + sync_every_ms)

    def _tick(self, now_ms: int) -> int | None:
        if self._rules.lost:
            return None
        due_ms = self._rules.next_tick_ms()
        if due_ms is None or due_ms > now_ms:
            return due_ms
        try:
            return self._rules.tick()
        except FTLayerError as error:
            logger.error("a tick failed: %s", error)
            return None

    def _recover(self) -> None:
        now_ms = self._parts.now().mono_ms
        self._recoveries = [when for when in self._recoveries if when > now_ms - RECOVERIES_WITHIN_MS] + [
            now_ms
        ]
        if len(self._recoveries) > MAX_RECOVERIES:
            raise VertexError(f"memory was lost {len(self._recoveries)} times in a minute; the log tells why")
        logger.warning("memory was lost with a transaction; recovering from the store")
        self._is_recovering = True
        self._rules.store.close()
        self._rules = Rules(self._parts)
        self._turned_ms = self._parts.now().mono_ms
        self._is_recovering = False

    def _finish(self) -> None:
        self._intake.fail_all()
        # Completions are written down when they are this old: sooner would be forgotten, and replayed.
        time.sleep((self._parts.flush_ms + 1) / 1_000)
        self._rules.tick()
        self._rules.store.close()

    def _refuse_everything(self) -> None:
        with self._changed:
            self._closing = True
            left, self._queue = self._queue, deque()
        for waiting in left:
            waiting.answer(shard_closed())
        self._intake.fail_all()


def write_changes(group: list[Waiting], rules: Rules) -> None:
    """Run the calls of ``group`` in one transaction, in order, and answer them.

    If it is lost, so is memory (`Rules.lost`). A fault in the rules is the answer to the call that met it; the
    others are for the rules that come next, and their clients send them again.
    """
    applied: list[tuple[Waiting, CallOutcome]] = []
    refused: list[tuple[Waiting, FTLayerError]] = []
    left = group.copy()
    try:
        with rules.store.write(intake=False) as txn, rules.staging(changes_memory=True) as layer:
            for waiting in group:
                call = cast(calls.MutatingCall, waiting.call)
                try:
                    applied.append((waiting, layer.apply(txn, call, waiting.envelope, rules.now())))
                except REFUSALS as error:
                    refused.append((waiting, error))
                left.remove(waiting)
    except FTLayerError as error:
        rules.abandon()
        refused += [(waiting, error) for waiting in [*(waiting for waiting, _ in applied), *left]]
    except Exception as error:
        logger.exception("fault in the rules")
        rules.lost = True
        refused += [
            (waiting, shard_closed()) for waiting in [*(waiting for waiting, _ in applied), *left[1:]]
        ]
        refused += [(waiting, internal_fault(error)) for waiting in left[:1]]
    else:
        rules.confirm(outcome for _, outcome in applied)
        for waiting, outcome in applied:
            waiting.answer(outcome.reply)
    for waiting, refusal in refused:
        waiting.answer(refusal)
