"""Messages to users when slots do not start, or are lost."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.errors import FTLayerError, JobStartError, SlotLostError
from ftlayer.runtime.driver.events import TaskCounts
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.deaths import Conviction, Death
from ftlayer.runtime.protocol.messages import SlotFailed
from ftlayer.vertex.calls import Failure

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


def not_up(slots: Sequence[SlotRecord], start_timeout_ms: int, counts: TaskCounts | None) -> JobStartError:
    """Return the error for slots that are not there after the start timeout.

    ``counts``: what Spark says of their tasks, None if it does not.
    """
    missing = [slot for slot in slots if slot.hello is None]
    failures = sorted({slot.failure for slot in missing if slot.failure})
    return JobStartError(
        f"{_named(missing)} of {len(slots)} were not up within {start_timeout_ms} ms (start_timeout_ms). "
        + " ".join(_why_not_up([slot.number for slot in missing], counts))
        + "".join(f"; {failure}" for failure in failures)
    )


def _why_not_up(missing: Sequence[int], counts: TaskCounts | None) -> list[str]:
    """Return what is known of slots that are not up, and what to do about it."""
    longer = "give them longer with TopologyOptions(start_timeout_ms=…)"
    if counts is None:
        return [
            "Spark does not tell whether it has started their tasks. Each needs a task slot of its own for as long as "
            f"the job runs: other Spark jobs may hold them. On a machine that is slow or busy {longer}"
        ]
    started = [number for number in missing if number in counts.started]
    waiting = [number for number in missing if number not in counts.started]
    said = []
    if started:
        said.append(
            f"Spark has started the tasks of {_numbers(started)}: their Python processes still start and import what "
            f"they need, which takes its time on a machine that is slow or busy; {longer}."
        )
    if waiting:
        free = max(0, counts.total - counts.busy)
        slots = f"of {counts.total} task slots {counts.busy} are busy and {free} free"
        if not counts.total:
            why = f"there is no executor yet: see that the application gets some, or {longer}."
        elif free >= len(waiting):
            why = f"{slots}, so it is about to: {longer}."
        else:
            why = (
                f"{slots}, and each slot of a topology needs one of its own for as long as the job runs: end the "
                "other Spark jobs that hold them, or start Spark with more (master local[N], or more executors)."
            )
        said.append(f"Spark has not started the tasks of {_numbers(waiting)}: {why}")
    return said


def _named(slots: Sequence[SlotRecord]) -> str:
    return _numbers([slot.number for slot in slots])


def _numbers(slots: Sequence[int]) -> str:
    return f"slot{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


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
        place=f"slot {slot.number}",
    )


def convicted_by_deaths(death: Death) -> Conviction:
    """Return what becomes of a record over which two processes have ended themselves, this one last."""
    return Conviction(
        death.chain,
        death.digest,
        f"the process of a slot ended while it ran this record and no other, twice: {death.cause}",
        death.stack,
        f"slot {death.slot}",
    )


def died(death: Death) -> str:
    """Return what became of a slot's process."""
    in_hand = f", with a record of {death.chain!r} in hand" if death.digest else ""
    stack = f"\n{death.stack}" if death.stack else ""
    return f"slot {death.slot}: its process ended itself{in_hand}: {death.cause}{stack}"


def given_up(error: FTLayerError, quick_losses: int) -> FTLayerError:
    """Return why a slot is given up; says so if a record may end the processes that work on it."""
    if quick_losses < SUSPICIOUS_LOSSES:
        return error
    return SlotLostError(
        f"{quick_losses} times in a row a slot was lost within {SOON_MS // 1_000} s of the replay of what was "
        "pending. What ends slots may be outside (the machine, its memory, Spark), or a record that ends the process "
        "that works on it: it is in the vertex then, among what FTLayer.pending and FTLayer.waiting list, if they "
        f"list any. {error}"
    )
