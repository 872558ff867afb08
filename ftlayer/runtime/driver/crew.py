"""All slots of a job, and what is said to them."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.runtime.driver.events import JobInstruction, SendTo, SlotUp
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
        return (slot for slot in self.slots if slot.running)

    @property
    def instances(self) -> frozenset[str]:
        """The names of those that are connected."""
        return frozenset(slot.hello.instance for slot in self.slots if slot.hello is not None)

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
