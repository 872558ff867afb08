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
from collections.abc import Callable
from typing import cast

from ftlayer.errors import FTLayerError, VertexError
from ftlayer.vertex.calls import (
    Call,
    Envelope,
    MutatingCall,
    ReadDeliveries,
    ReadingCall,
    Register,
    Reply,
    StatsReply,
)
from ftlayer.vertex.rules.layer import INTAKE, MEMORY_ONLY, CallOutcome, MemoryCall
from ftlayer.vertex.rules.probes import ShardPulse
from ftlayer.vertex.service.intake import Intake
from ftlayer.vertex.service.rules import (
    REFUSALS,
    Answer,
    Rules,
    ShardParts,
    Waiting,
    internal_fault,
    shard_closed,
)
from ftlayer.vertex.wire.frames import READING

# Completions are written down by ticks, and `Xor` does not wake the writer: it looks this often.
LONGEST_SLEEP_MS = 50
MAX_RECOVERIES = 5
RECOVERIES_WITHIN_MS = 60_000

logger = logging.getLogger(__name__)


class Shard:
    """One shard. Any thread may submit calls.

    Rules whose memory was lost (a transaction failed that had changed it, or a fault) are made anew from
    the store, as after a crash. ``on_fatal`` is called once if that fails; nothing is served from then on.
    """

    def __init__(self, parts: ShardParts, name: str, on_fatal: Callable[[Exception], None]) -> None:
        """Open the store and recover what it holds; raises what these raise."""
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
        """Whether every id is kept."""
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

    def submit(self, call: Call, envelope: Envelope | None, answer: Answer) -> None:
        """Run ``call``; ``answer`` gets the reply or the error, on this thread or on the writer's."""
        if isinstance(call, MEMORY_ONLY) and not self._has_to_queue(call):
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

    def _has_to_queue(self, call: MemoryCall) -> bool:
        """Whether a call has to wait behind others of its stream that wait for room."""
        return isinstance(call, Register) and self._queued_registers.get(call.stream, 0) > 0

    def _queued(self, call: Call, answer: Answer) -> Answer:
        """Count a `Register` that waits for room, until it is answered. Under `_changed`."""
        if not isinstance(call, Register):
            return answer
        stream = call.stream
        self._queued_registers[stream] = self._queued_registers.get(stream, 0) + 1

        def answered(reply: Reply | FTLayerError) -> None:
            with self._changed:
                self._queued_registers[stream] -= 1
            answer(reply)

        return answered

    def _apply_in_memory(self, call: MemoryCall, envelope: Envelope | None) -> Reply | FTLayerError | None:
        """Return the answer; None if the call has to wait for room."""
        if self._closing:
            return shard_closed()
        try:
            reply = self._rules.in_memory(call, envelope)
        except FTLayerError as error:
            return error
        except Exception as error:
            logger.exception("fault in the rules")
            self._rules.lose()
            return internal_fault(error)
        if self._intake_is_held:
            with self._changed:
                self._changed.notify()
        return reply

    # ------------------------------------------------------------ the writer

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
        """Wait for a call or the time of a tick; return whether to go on."""
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
            if isinstance(waiting.call, (*INTAKE, Register)):
                self._intake.add(waiting)
            elif isinstance(waiting.call, READING):
                waiting.answer(self._read(waiting.call))
            else:
                changing.append(waiting)
        if changing:
            write_changes(changing, self._rules)

    def _read(self, call: ReadingCall) -> Reply | FTLayerError:
        began = time.perf_counter()
        reply = self._answer_to(call)
        self._turned_ms = self._parts.now().mono_ms
        if not isinstance(call, ReadDeliveries):
            self._reading_s += time.perf_counter() - began
        if isinstance(reply, StatsReply):
            reply.values["reading_seconds"] = self._reading_s
            reply.values["shards_full"] = int(self._intake.is_full)
        return reply

    def _answer_to(self, call: ReadingCall) -> Reply | FTLayerError:
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
                call = cast(MutatingCall, waiting.call)
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
        rules.lose()
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
