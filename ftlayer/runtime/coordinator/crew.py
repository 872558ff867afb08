"""All slots of a job, and what is said to them."""

from __future__ import annotations

from collections.abc import Iterator

from ftlayer.runtime.coordinator.events import Decision, RecallStreams, SendTo
from ftlayer.runtime.coordinator.slot_record import SlotRecord
from ftlayer.runtime.messages import ToSlot


class Crew:
    """The slots of a job. Decisions are added to ``out``."""

    def __init__(self, slots: int, out: list[Decision]) -> None:
        self.slots = [SlotRecord(number) for number in range(slots)]
        self._out = out

    @property
    def running(self) -> Iterator[SlotRecord]:
        """Those that run their tasks."""
        return (slot for slot in self.slots if slot.running)

    @property
    def all_deployed(self) -> bool:
        """Whether none is missing."""
        return all(slot.deployed for slot in self.slots)

    def tell(self, slot: SlotRecord, message: ToSlot) -> None:
        """Tell the instance of a slot, which there must be."""
        assert slot.hello is not None
        self._out.append(SendTo(slot.number, slot.hello.instance, message))

    def tell_running(self, message: ToSlot) -> None:
        """Tell all that run their tasks."""
        for slot in self.running:
            self.tell(slot, message)


class Recalls:
    """Whether the vertex has recalled what was pending at the last loss. Decisions are added to ``out``."""

    def __init__(self, done: bool, out: list[Decision]) -> None:
        self._number = 0
        self._out = out
        self.is_done = done
        self._asked = False

    def forget(self) -> None:
        """More may have to be recalled since."""
        self.is_done = self._asked = False

    def ask(self) -> None:
        """Have it done, if that is not under way."""
        if not self._asked:
            self._number += 1
            self._asked = True
            self._out.append(RecallStreams(self._number))

    def answered(self, number: int) -> bool:
        """Take an answer; return whether it is the one that is waited for."""
        if number != self._number or not self._asked:
            return False
        self._asked, self.is_done = False, True
        return True
