"""Coming to an end: every slot is told, and what does not end by itself is ended by Spark."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.runtime.driver.events import CancelSlot, JobInstruction, Over, SendTo
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.driver.upkeep import CANCEL_GRACE_MS
from ftlayer.runtime.protocol.messages import Cancel

# How long slots have to end by themselves (ms) before their Spark jobs are cancelled.
STOP_GRACE_MS = 5_000
# Cancelling is repeated (ms): a job that was being submitted cannot be cancelled yet.
CANCEL_AGAIN_MS = 1_000


class Stopping:
    """The way to a verdict."""

    def __init__(self, verdict: Over, slots: Sequence[SlotRecord], now_ms: int) -> None:
        self.verdict = verdict
        self.over = False
        self._slots = slots
        self._since_ms = self._cancelled_ms = now_ms

    def begin(self, reason: str) -> list[JobInstruction]:
        """Tell the slots."""
        instructions: list[JobInstruction] = []
        for slot in self._slots:
            if slot.hello is None:
                if slot.submitted:
                    instructions.append(CancelSlot(slot.number, slot.attempt))
            elif not slot.ended:
                instructions.append(SendTo(slot.number, slot.hello.instance, Cancel(reason)))
        return instructions

    def advance(self, now_ms: int) -> list[JobInstruction]:
        """End what has not ended. It is `over` once no Spark job is left, or one cannot be ended."""
        stuck = [slot for slot in self._slots if slot.submitted]
        if not stuck or now_ms - self._since_ms >= STOP_GRACE_MS + CANCEL_GRACE_MS:
            self.over = True
        elif now_ms - self._cancelled_ms >= CANCEL_AGAIN_MS:
            self._cancelled_ms = now_ms
            late = now_ms - self._since_ms >= STOP_GRACE_MS
            return [CancelSlot(slot.number, slot.attempt) for slot in stuck if late or slot.hello is None]
        return []
