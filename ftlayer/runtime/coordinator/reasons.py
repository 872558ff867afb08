"""What a user is told when slots do not start, or are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.errors import FTLayerError, JobStartError, SlotLostError
from ftlayer.layer.calls import Failure
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.messages import SlotFailed

# A slot lost so soon (ms) after it was given what was pending …
SOON_MS = 10_000
# … so many times in a row, may have been ended by one of the records, which is looked for then.
SUSPICIOUS_LOSSES = 2


_SPARK_SAYS = "; Spark says: "


def with_spark_error(reason: str, spark_error: str | None) -> str:
    """Return a reason with what Spark said of it last, if it said anything."""
    # A slot may be tried many times for one reason.
    return f"{reason.partition(_SPARK_SAYS)[0]}{_SPARK_SAYS}{spark_error}" if spark_error else reason


def reason_of(failed: SlotFailed) -> str:
    """Return what a slot said of its own failure."""
    where = f" in {failed.operator}" if failed.operator else ""
    trace = f"\n{failed.traceback}" if failed.traceback else ""
    return f"it failed{where}: {failed.reason}{trace}"


def not_up(slots: Sequence[SlotRecord], start_timeout_ms: int) -> JobStartError:
    """Return the error for slots that are not there after the start timeout."""
    missing = [slot for slot in slots if slot.hello is None]
    failures = sorted({slot.failure for slot in missing if slot.failure})
    return JobStartError(
        f"slots {', '.join(str(slot.number) for slot in missing)} of {len(slots)} were not up within "
        f"{start_timeout_ms} ms (start_timeout_ms). Each needs a task slot of its own for as long as the job runs: "
        "other Spark jobs may hold them, or executors were not there yet"
        + "".join(f"; {failure}" for failure in failures)
    )


def never_works(slot: int, failed: SlotFailed) -> JobStartError:
    """Return the error for what another attempt would not mend."""
    return JobStartError(f"slot {slot} cannot do its part: {failed.reason}")


def untracked(failure: str) -> SlotLostError:
    """Return the error for a slot that was lost with FTStatus.OFF."""
    return SlotLostError(
        f"{failure}. With FTStatus.OFF nothing says which records it held, so the job ends; with FTStatus.ON they "
        "would be replayed"
    )


def conviction(root: int, slot: SlotRecord) -> Failure:
    """Return what becomes of a record that ended the process of ``slot``, alone, twice."""
    return Failure(
        root,
        f"the process of slot {slot.number} ended while it ran this record and no other, twice: "
        + slot.loss.removeprefix(f"slot {slot.number}: ").partition("\n")[0],
        slot.loss_in,
        slot.loss,
        fatal=True,
    )


def given_up(error: FTLayerError, quick_losses: int) -> FTLayerError:
    """Return why a slot is given up; says so if a record may end the processes that work on it."""
    if quick_losses < SUSPICIOUS_LOSSES:
        return error
    return SlotLostError(
        f"{quick_losses} times in a row a slot was lost within {SOON_MS // 1_000} s of the replay of what was "
        "pending: one of these records may end the process that works on it (they are still in the vertex; "
        f"FTLayer.pending and FTLayer.waiting list them). {error}"
    )
