"""Keeping a slot's Spark job submitted: after which pause, how often, and when to give up."""

from __future__ import annotations

import copy

from ftlayer.config import TopologyOptions
from ftlayer.errors import FTLayerError, JobStartError, SlotLostError
from ftlayer.recovery import lasting_in_text
from ftlayer.restart import RestartStrategy, note_success
from ftlayer.runtime.driver.events import CancelSlot, JobInstruction, SparkJobEnded, SubmitSlot
from ftlayer.runtime.driver.reasons import with_spark_error
from ftlayer.runtime.driver.slot_record import SlotRecord

# A slot that has never come up is tried a few times: its reason is the machine's or the plan's.
START_ATTEMPTS = 2
# How long a cancelled Spark job may take to end (ms): Spark kills a Python worker after 2 s.
CANCEL_GRACE_MS = 10_000


class Upkeep:
    """Submits slots that have neither a Spark job nor an instance."""

    def __init__(self, options: TopologyOptions, restart: RestartStrategy) -> None:
        self._options = options
        self._restart = restart
        self._fresh = copy.deepcopy(restart)

    def forgive(self) -> None:
        """Begin the restart strategy afresh: the losses so far were a record's doing."""
        self._restart = copy.deepcopy(self._fresh)

    def works(self) -> None:
        """A slot takes records."""
        note_success(self._restart)

    def submit(self, slot: SlotRecord, now_ms: int) -> list[JobInstruction]:
        """Start a Spark job for the slot."""
        slot.attempt += 1
        slot.submitted, slot.cancelled, slot.submit_at_ms, slot.lost_ms = True, False, None, None
        slot.patience_ms = now_ms + self._options.start_timeout_ms
        return [SubmitSlot(slot.number, slot.attempt)]

    def cancel(self, slot: SlotRecord, now_ms: int) -> list[JobInstruction]:
        """End the slot's Spark job, whatever it does."""
        slot.cancelled = True
        slot.patience_ms = now_ms + CANCEL_GRACE_MS
        return [CancelSlot(slot.number, slot.attempt)] if slot.submitted else []

    def ended(self, slot: SlotRecord, event: SparkJobEnded) -> FTLayerError | None:
        """The slot's Spark job has ended; return an error if there is no use in another one."""
        slot.submitted = slot.cancelled = False
        slot.spark_error = event.error
        if slot.hello is None and event.error is not None:
            slot.failure = with_spark_error(slot.failure or f"slot {slot.number}", event.error)
            final = lasting_in_text(event.error)
            if final is not None:
                return type(final)(f"{event.needed_by}: {final}") if event.needed_by else final
        if slot.greeted:
            return None
        slot.failed_starts += 1
        if slot.failed_starts < START_ATTEMPTS:
            return None
        reason = slot.failure or (
            f"slot {slot.number}: its process ended before it had reached the driver; the log of the executor "
            "has its last words"
        )
        return JobStartError(f"a slot cannot start, {START_ATTEMPTS} attempts failed. {reason}")

    def keep_up(self, slot: SlotRecord, now_ms: int) -> list[JobInstruction] | FTLayerError:
        """Return what is due for a slot without an instance, or an error if it is given up."""
        if slot.submitted:
            if now_ms < slot.patience_ms:
                return []
            if not slot.cancelled:
                return self.cancel(slot, now_ms)
            slot.submitted = False  # it does not answer; its successor fences it
        if slot.submit_at_ms is None:
            pause = 0 if slot.revived or slot.excused else self._restart.on_failure(now_ms)
            if pause is None:
                return SlotLostError(f"the restart strategy has given up. Last failure: {slot.failure}")
            slot.revived = slot.excused = False
            slot.start_again()
            # Spark takes its time to say that a job has ended whose process is gone: part of the pause is over.
            slot.submit_at_ms = (now_ms if slot.lost_ms is None else slot.lost_ms) + pause
        return self.submit(slot, now_ms) if now_ms >= slot.submit_at_ms else []
