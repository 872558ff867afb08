"""Intake calls: written in groups, held back at ``max_pending`` and by a full store, failed when too late."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from ftlayer.errors import FTLayerError, IntakeTimeoutError, StoreFullError
from ftlayer.store.kv import WriteTransaction
from ftlayer.vertex.calls import Ingest, Persist, Register, Reply, Reseal, Seal
from ftlayer.vertex.rules.layer import CallOutcome, FTLayerCore
from ftlayer.vertex.service.rules import REFUSALS, Rules, Waiting, internal_fault, shard_closed

IntakeCall = Persist | Ingest | Seal | Reseal | Register

# Bounds the time that one sync takes, and with it the wait of the calls behind it.
GROUP_BYTES = 16 << 20
# A call that does not fit into the store is staged anew each time it is tried.
FULL_STORE_PAUSE_MS = 100

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _CallGroup:
    """The calls of one transaction; ``current`` is the one the rules are at."""

    applied: list[tuple[Waiting, CallOutcome]] = field(default_factory=list)
    refused: list[tuple[Waiting, Reply | FTLayerError]] = field(default_factory=list)
    current: Waiting | None = None
    size: int = 0

    def calls(self) -> list[Waiting]:
        return [waiting for waiting, _ in self.applied] + ([self.current] if self.current else [])


class Intake:
    """The intake calls of a shard that wait. For the writer's thread alone.

    Calls of one stream (of one query, for verdicts) go in the order they came; those of others overtake
    them when they are held back.
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
        """Let a call wait for its turn."""
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
            rules.lose()
            at_fault = [group.current] if group.current else group.calls()
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
        """Answer everything that waits: the vertex is stopping."""
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
            owner = call.query if isinstance(call, (Seal, Reseal)) else call.stream
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
        calls = group.calls()
        if len(calls) > 1:
            self._one_by_one = len(calls)
            return
        self._one_by_one = max(self._one_by_one - 1, 0)
        if not self._found_full:
            self._found_full = True
            logger.warning("intake waits until there is room: %s", error)
        for waiting in calls or self._waiting:
            waiting.reason = str(error)
            waiting.not_before_ms = rules.now().mono_ms + FULL_STORE_PAUSE_MS

    def _fail(self, group: _CallGroup, error: FTLayerError) -> None:
        """Answer the calls of a lost transaction; if it did not even begin, all have to wait."""
        self._answer([(waiting, error) for waiting in group.calls()])
        if not group.calls():
            for waiting in self._waiting:
                waiting.reason = str(error)

    def _answer(self, answers: list[tuple[Waiting, Reply | FTLayerError]]) -> None:
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


def _intake_call(waiting: Waiting) -> IntakeCall:
    assert isinstance(waiting.call, (Persist, Ingest, Seal, Reseal, Register))
    return waiting.call


def _size_of(call: IntakeCall) -> int:
    if isinstance(call, Register):
        return 16 * len(call.roots)
    if isinstance(call, (Persist, Ingest)):
        return int(call.payload.get_total_buffer_size())
    payloads = [part.payload for part in call.failed] + [part.payload for part in call.emitted]
    return sum(int(payload.get_total_buffer_size()) for payload in payloads if payload is not None)
