"""Coming to an end: every slot is told, and what does not end by itself is ended by Spark."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.runtime.driver.events import CancelSlot, Decision, Over, SendTo
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.driver.upkeep import CANCEL_GRACE_MS
from ftlayer.runtime.protocol.messages import Cancel

# How long slots have to end by themselves (ms) before their Spark jobs are cancelled.
STOP_GRACE_MS = 5_000
# Cancelling is repeated (ms): a job that was being submitted cannot be cancelled yet.
CANCEL_AGAIN_MS = 1_000


class Stopping:
    """The way to a verdict. Decisions are added to ``out``."""

    def __init__(self, verdict: Over, slots: Sequence[SlotRecord], out: list[Decision], now_ms: int) -> None:
        self.verdict = verdict
        self.over = False
        self._slots = slots
        self._out = out
        self._since_ms = self._cancelled_ms = now_ms

    def begin(self, reason: str) -> None:
        """Tell the slots."""
        for slot in self._slots:
            if slot.hello is None:
                if slot.submitted:
                    self._out.append(CancelSlot(slot.number, slot.attempt))
            elif not slot.ended:
                self._out.append(SendTo(slot.number, slot.hello.instance, Cancel(reason)))

    def advance(self, now_ms: int) -> bool:
        """Return whether it is over: no Spark job is left, or one cannot be ended."""
        stuck = [slot for slot in self._slots if slot.submitted]
        if not stuck or now_ms - self._since_ms >= STOP_GRACE_MS + CANCEL_GRACE_MS:
            self.over = True
        elif now_ms - self._cancelled_ms >= CANCEL_AGAIN_MS:
            self._cancelled_ms = now_ms
            late = now_ms - self._since_ms >= STOP_GRACE_MS
            self._out.extend(
                CancelSlot(slot.number, slot.attempt) for slot in stuck if late or slot.hello is None
            )
        return self.over
