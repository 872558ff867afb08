"""All slots of a job, and what is said to them."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.runtime.driver.events import JobInstruction, RecallStreams, SendTo, SlotUp
from ftlayer.runtime.driver.slot_record import SlotRecord
from ftlayer.runtime.protocol.messages import Deploy, StopSources, ToSlot


class Crew:
    """The slots of a job.

    Attributes:
        slots: what is known of each.
        draining: whether their sources were told to end.
    """

    def __init__(self, slots: int, start_timeout_ms: int) -> None:
        """``start_timeout_ms``: how long the next instance of a slot is waited for."""
        self.slots = [SlotRecord(number) for number in range(slots)]
        self.draining = False
        self._start_timeout_ms = start_timeout_ms

    @property
    def running(self) -> Iterator[SlotRecord]:
        """Those that run their tasks."""
        return (slot for slot in self.slots if slot.running)

    @property
    def all_deployed(self) -> bool:
        """Whether none is missing."""
        return all(slot.deployed for slot in self.slots)

    @property
    def all_started(self) -> bool:
        """Whether the tasks of all run, or have ended."""
        return all(slot.started or slot.ended for slot in self.slots)

    def tell(self, slot: SlotRecord, message: ToSlot) -> list[JobInstruction]:
        """Tell the instance of a slot, which there must be."""
        assert slot.hello is not None
        return [SendTo(slot.number, slot.hello.instance, message)]

    def tell_running(self, message: ToSlot) -> list[JobInstruction]:
        """Tell all that run their tasks."""
        return [each for slot in self.running for each in self.tell(slot, message)]

    def deploy(self, slot: SlotRecord, deploy: Deploy, now_ms: int) -> list[JobInstruction]:
        """Tell the instance of a slot to start its tasks; their sources end at once in a job that drains."""
        slot.deployed, slot.heard_ms = True, now_ms
        stop = self.tell(slot, StopSources()) if self.draining else []
        return [*self.tell(slot, deploy), *stop, SlotUp(slot.number)]

    def drop(self, slot: SlotRecord, now_ms: int) -> None:
        """The instance of a slot is gone, or not to be listened to any more: another one is waited for."""
        slot.disconnect(now_ms + self._start_timeout_ms)

    def drain(self) -> list[JobInstruction]:
        """End the sources, those of later instances too."""
        if self.draining:
            return []
        self.draining = True
        return self.tell_running(StopSources())

    def validate(self) -> None:
        """Raise `AssertionError` if what is known does not fit together; for tests."""
        for slot in self.slots:
            slot.validate()


class Recalls:
    """Whether the vertex has recalled what was pending at the last loss.

    `ask` is for when everything is ready to go on. What a lost slot held is not touched until then, and would
    use up an attempt if it timed out: `meanwhile` has it recalled at once, for its time not to run. Once is not enough.
    Slots that have not heard of the loss yet go on to send to the lost one; and calls that the lost one has made may
    reach the vertex late, such as records that had to wait for room there, which the first recall has made.
    """

    def __init__(self, done: bool, timeout_ms: int) -> None:
        """``timeout_ms``: nothing that is pending times out before."""
        self._number = 0
        # As often as slots touch what they hold.
        self._every_ms = max(1, timeout_ms // 3)
        self.is_done = done
        self._asked = False
        self._meanwhile: tuple[int, bool] | None = None
        self._meanwhile_ms = 0

    def forget(self) -> None:
        """More may have to be recalled since."""
        self.is_done = self._asked = False

    def ask(self) -> list[JobInstruction]:
        """Have it done, if that is not under way."""
        if self._asked:
            return []
        self._asked = True
        return self._recall()

    def is_due(self, epoch: int, all_know: bool, now_ms: int) -> bool:
        """Whether it is time for `meanwhile`: of a loss, when all others know of it, and again and again."""
        return self._meanwhile != (epoch, all_know) or now_ms - self._meanwhile_ms >= self._every_ms

    def meanwhile(self, epoch: int, all_know: bool, now_ms: int) -> list[JobInstruction]:
        """Have done what can be done while a slot is away."""
        self._meanwhile, self._meanwhile_ms = (epoch, all_know), now_ms
        return self._recall()

    def at_the_end(self) -> list[JobInstruction]:
        """Have it done for the next instance, without waiting for it."""
        return self._recall()

    def _recall(self) -> list[JobInstruction]:
        self._number += 1
        return [RecallStreams(self._number)]

    def answered(self, number: int) -> None:
        """Take an answer; only the one to the last question makes it done."""
        if number == self._number and self._asked:
            self._asked, self.is_done = False, True
