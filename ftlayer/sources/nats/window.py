"""Which messages of a stream come a second time, and which may be acknowledged. Rules alone.

A message is known by its sequence number in the stream. A stream that was made anew, or has lost its last messages in
a crash, gives the same numbers to others: those are later than all that was fetched before, and so it is noticed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ftlayer.sources.nats.sequences import Sequences

MOST_RANGES = 10_000
"""Of numbers that are remembered: with several subtasks each has but some of the stream's."""

_BEFORE = 0
"""The turn of what a reader was opened with."""


class StreamDelivery(NamedTuple):
    """A message as it was delivered.

    Attributes:
        sequence: its number in the stream.
        consumer_sequence: how many deliveries the consumer had made by then, this one included.
        time_ns: when it was stored.
        delivered: how often it has been delivered, 1 for the first time.
        reply: the subject that acknowledges it.
    """

    sequence: int
    consumer_sequence: int
    time_ns: int
    delivered: int
    reply: str


class SequenceWindow:
    """The messages that were fetched, and those of them that are not acknowledged.

    A delivery waits for a *turn*, the number of a fetch: it is acknowledged when that fetch is durable.
    """

    def __init__(self, known: Sequences, until_ns: int, subjects: str = "", *, stored: bool) -> None:
        """Begin behind what an earlier reader fetched.

        Args:
            known: numbers of the messages that it fetched, and of those that its consumer passed over.
            until_ns: when the last of them was stored.
            subjects: which ones the consumer gets; "": none was fetched.
            stored: whether they are durable.
        """
        self._subjects = subjects
        self.known = known
        self.until_ns = until_ns
        self._turn = _BEFORE
        self._durable = _BEFORE if stored else _BEFORE - 1
        self._held: dict[int, tuple[int, str]] = {}
        self._turns: deque[tuple[int, list[int]]] = deque()
        self._again: list[str] = []
        self._last: StreamDelivery | None = None
        self.beginnings = 0
        """How often the stream was found to be another than before."""

    @property
    def turn(self) -> int:
        """The number of the last fetch: the receipt for it."""
        return self._turn

    @property
    def unacknowledged(self) -> int:
        """How many messages were fetched and are not acknowledged."""
        return len(self._held)

    @property
    def subjects(self) -> str:
        return self._subjects

    def reads(self, subjects: str) -> None:
        """There is a new connection, and the consumer gets these subjects.

        If it got others, what it passed over may be delivered now. It may be another one of the same name, too, whose
        deliveries do not follow those before.
        """
        self._last = None
        if self._subjects not in ("", subjects):
            self._begin_anew()
        self._subjects = subjects

    def take(self, deliveries: Sequence[StreamDelivery]) -> list[bool]:
        """Number a fetch; return which of its deliveries are new."""
        self._turn += 1
        numbers: list[int] = []
        self._turns.append((self._turn, numbers))
        are_new = [self._take(delivery, numbers) for delivery in deliveries]
        self._forget()
        return are_new

    def _take(self, delivery: StreamDelivery, numbers: list[int]) -> bool:
        sequence, known = delivery.sequence, self.known
        if sequence <= known.last and sequence in known:
            if delivery.time_ns <= self.until_ns:
                self._take_again(delivery)
                return False
            self._begin_anew()
        known.add(self._first_of_run(delivery), sequence)
        self.until_ns = max(self.until_ns, delivery.time_ns)
        self._held[sequence] = (self._turn, delivery.reply)
        numbers.append(sequence)
        self._last = delivery
        return True

    def _first_of_run(self, delivery: StreamDelivery) -> int:
        """Return from which number on there are no others up to this: the consumer passes over some.

        First deliveries come in the order of the stream. So between two that follow each other in the consumer there is
        nothing for it.
        """
        last = self._last
        if (
            last is not None
            and last.delivered == delivery.delivered == 1
            and last.consumer_sequence + 1 == delivery.consumer_sequence
            and last.sequence < delivery.sequence
        ):
            return last.sequence + 1
        return delivery.sequence

    def _take_again(self, delivery: StreamDelivery) -> None:
        held = self._held.get(delivery.sequence)
        if held is not None:
            self._held[delivery.sequence] = (held[0], delivery.reply)
        elif self._durable >= _BEFORE:
            self._again.append(delivery.reply)
        else:
            self._held[delivery.sequence] = (_BEFORE, delivery.reply)
            self._turns.appendleft((_BEFORE, [delivery.sequence]))

    def _begin_anew(self) -> None:
        self.beginnings += 1
        self.known.clear()
        self._held.clear()
        for _, numbers in self._turns:
            numbers.clear()
        self._last = None

    def durable(self, turns: Iterable[int]) -> None:
        """These fetches are durable, and those before them."""
        self._durable = max([self._durable, *turns])

    def to_acknowledge(self) -> list[str]:
        """Return the replies to what may be acknowledged, and take them out."""
        found, self._again = self._again, []
        while self._turns and self._turns[0][0] <= self._durable:
            _, numbers = self._turns.popleft()
            found += [self._held.pop(number)[1] for number in numbers if number in self._held]
        return found

    def replies(self) -> list[str]:
        """Return the replies to what is not acknowledged."""
        return [reply for _, reply in self._held.values()]

    def settled(self, first: int, last: int) -> list[int]:
        """Return the numbers of this range that were durable before, and perhaps not acknowledged."""
        if self._durable < _BEFORE:
            return []
        return [number for number in self.known.between(first, last) if number not in self._held]

    def _forget(self) -> None:
        if len(self.known) > 2 * MOST_RANGES:
            self.known.forget_first(len(self.known) - MOST_RANGES, min(self._held, default=self.known.last))
