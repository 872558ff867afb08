"""Records that wait for another attempt: a table of the chain's state, and in memory what is due when.

The table is filed under the operator at the chain's head, by the records' keys there, so that a record is restored
where its key goes. Records of a chain without a key lie under numbers that are drawn. An operator that was a head when
a record failed, and has others before it now, has a table of its own: its records enter the chain there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from ftlayer.checkpoint.letters import FailedAttempt, LetterKind
from ftlayer.functions.keyed import Key, MapTable

WAITING_TABLE = "waiting for another attempt"
"""Name of the table. A user's state of that name would be another kind of table, and is refused."""

_ENTRY_BYTES = 256
"""What an entry takes besides its texts and its payload, about."""


@dataclass(frozen=True, slots=True)
class WaitingRecord:
    """A record, or a timer, that failed and is to be tried again.

    Attributes:
        name: random bytes; of the letter, if it becomes one.
        key: in the chain's state.
        kind: a record or a timer.
        input: of the chain.
        payload: an IPC stream with the one row; b"" for a timer.
        event_time_ms: of the record, or the timer's time; None without one.
        watermark_ms: the chain's when the record failed first.
        attempt: the number of the next one.
        due_ms: wall clock.
        first_failed_ms: wall clock.
        attempts: those that failed.
        operator: whose timer it is; "" for a record.
        is_event_timer: a timer of event time, not of processing time.
        enters: uid of the operator that it goes to first; "" for the chain's head.
    """

    name: bytes
    key: Key
    kind: LetterKind
    input: int
    payload: bytes
    event_time_ms: int | None
    watermark_ms: int
    attempt: int
    due_ms: int
    first_failed_ms: int
    attempts: tuple[FailedAttempt, ...]
    operator: str = ""
    is_event_timer: bool = False
    enters: str = ""

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        size = _ENTRY_BYTES + len(self.payload)
        for attempt in self.attempts:
            size += len(attempt.reason) + len(attempt.traceback)
        return size

    def failed(self, attempts: tuple[FailedAttempt, ...], next_attempt: int, due_ms: int) -> WaitingRecord:
        """Return it behind another failed attempt. (`dataclasses.replace` takes several times as long.)"""
        return WaitingRecord(
            self.name,
            self.key,
            self.kind,
            self.input,
            self.payload,
            self.event_time_ms,
            self.watermark_ms,
            next_attempt,
            due_ms,
            self.first_failed_ms,
            attempts,
            self.operator,
            self.is_event_timer,
            self.enters,
        )

    def packed(self) -> tuple[object, ...]:
        """Return it as the table holds it, without name, key and where it enters."""
        attempts = tuple(
            (each.number, each.at_ms, each.reason, each.operator, each.place, each.traceback)
            for each in self.attempts
        )
        return (
            self.kind.value,
            self.input,
            self.payload,
            self.event_time_ms,
            self.watermark_ms,
            self.attempt,
            self.due_ms,
            self.first_failed_ms,
            attempts,
            self.operator,
            self.is_event_timer,
        )

    @classmethod
    def unpacked(cls, name: bytes, key: Key, packed: tuple[object, ...], enters: str = "") -> WaitingRecord:
        """Return what `packed` gave."""
        kind, input, payload, time_ms, watermark_ms, attempt, due_ms, first_ms, attempts, operator, event = (
            packed
        )
        return cls(
            name,
            key,
            LetterKind(str(kind)),
            input,  # type: ignore[arg-type]
            payload,  # type: ignore[arg-type]
            time_ms,  # type: ignore[arg-type]
            watermark_ms,  # type: ignore[arg-type]
            attempt,  # type: ignore[arg-type]
            due_ms,  # type: ignore[arg-type]
            first_ms,  # type: ignore[arg-type]
            tuple(FailedAttempt(*each) for each in attempts),  # type: ignore[attr-defined]
            operator,  # type: ignore[arg-type]
            event,  # type: ignore[arg-type]
            enters,
        )


class WaitingRecords:
    """See the module. Not for several threads.

    Attributes:
        bytes: what all of them take, about.
    """

    def __init__(self, table_of: Callable[[str], MapTable], inside: Iterable[str] = ()) -> None:
        """``table_of(enters)`` gives the table of records that enter there, see `WaitingRecord.enters`.

        ``inside`` are the operators behind the chain's head that have restored ones: `restored` takes those in, too.
        """
        self.bytes = 0
        self._table_of = table_of
        # Restored tables are asked for before functions are open: the state is told as declared by then.
        self._tables = {enters: table_of(enters) for enters in ("", *inside)}
        self._all: dict[bytes, WaitingRecord] = {}
        self._due: list[tuple[int, int, bytes]] = []
        self._added = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[WaitingRecord]:
        return iter(self._all.values())

    def restored(self, latest_ms: int) -> None:
        """Take in what the tables hold, all of it due at ``latest_ms`` or before."""
        for enters, table in self._tables.items():
            for key in list(table.keys()):
                for name, packed in table.items(key).items():
                    found = WaitingRecord.unpacked(name, key, packed, enters)
                    self._take_in(replace(found, due_ms=min(found.due_ms, latest_ms)))

    def put(self, waiting: WaitingRecord) -> None:
        """Have a record wait; one of that name is replaced."""
        old = self._all.get(waiting.name)
        if old is not None:
            self.bytes -= old.size
        if waiting.enters not in self._tables:
            self._tables[waiting.enters] = self._table_of(waiting.enters)
        self._tables[waiting.enters].put(waiting.key, waiting.name, waiting.packed())
        self._take_in(waiting)

    def remove(self, waiting: WaitingRecord) -> None:
        self.bytes -= self._all.pop(waiting.name).size
        self._tables[waiting.enters].remove(waiting.key, waiting.name)

    def no_later_than(self, latest_ms: int) -> None:
        """All that wait now are due at ``latest_ms`` of the wall clock or before."""
        self._due = [(min(due_ms, latest_ms), number, name) for due_ms, number, name in self._due]
        heapq.heapify(self._due)

    @property
    def due_ms(self) -> int | None:
        """Wall time (ms) at which the first is due; None if none waits."""
        while self._due and not self._is_current(self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def take_due(self, now_ms: int, most: int) -> list[WaitingRecord]:
        """Return up to ``most`` that are due, the earliest first. Each has to be `put` again, or to be removed."""
        found: list[WaitingRecord] = []
        while len(found) < most and (due_ms := self.due_ms) is not None and due_ms <= now_ms:
            found.append(self._all[heapq.heappop(self._due)[2]])
        return found

    def _take_in(self, waiting: WaitingRecord) -> None:
        self._all[waiting.name] = waiting
        self.bytes += waiting.size
        self._added += 1
        heapq.heappush(self._due, (waiting.due_ms, self._added, waiting.name))

    def _is_current(self, due: tuple[int, int, bytes]) -> bool:
        return due[2] in self._all
