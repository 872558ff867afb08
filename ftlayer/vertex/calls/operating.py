"""Calls of operators and their tools: what is there, why, and what to do about dead letters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from ftlayer.circuit import CircuitStatus

MAX_PAGE = 10_000
"""At most this many records are listed by a call."""


@dataclass(frozen=True, slots=True)
class ListRecords:
    """List records in a ``state``: "pending", "waiting", "delivery" or "dead". ``after`` pages on.

    ``limit`` is `MAX_PAGE` at most; a page ends before it as one of `SelectRecords` does, so it may be empty and have
    more behind it, though not one of dead letters.
    """

    state: str
    stream: str = ""  # or its owner; "" for all
    limit: int = 1_000
    after: bytes = b""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failed attempt of a record, its ``number``-th failure: of many, those in the middle are not kept.

    Attributes:
        at_ms: when it failed, Unix time.
        reason: the exception's class and message, up to 1,024 characters.
        operator: the uid of the function that raised it, as far as it is known.
        place: which process that was, in words: the slot, or the Spark task, its host and pid; "" if not known.
        traceback: up to 4,096 characters; of the first attempt and the last three. Others say that it is not kept.
    """

    number: int
    at_ms: int
    reason: str
    operator: str = ""
    place: str = ""
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """One record as `ListRecords` and `SelectRecords` show it.

    Attributes:
        history: its failed attempts, the oldest first.
        reason, operator, traceback: of the last of them; "" where none has failed.
        payload: one row.
        title, source: the query or topology, as people call it, and its source.
        registered_ms: of a pending record when its attempt began; 0 where that is not known.
        edited_ms, edited_by: when its payload was changed last, and by whom; 0 and "" if it was not.
    """

    key: bytes
    stream: str
    state: str
    root: int
    origin: int
    attempt: int
    not_before_ms: int
    history: tuple[Attempt, ...]
    payload: pa.RecordBatch
    title: str = ""
    source: str = ""
    registered_ms: int = 0
    edited_ms: int = 0
    edited_by: str = ""

    @property
    def reason(self) -> str:
        return self.history[-1].reason if self.history else ""

    @property
    def operator(self) -> str:
        return self.history[-1].operator if self.history else ""

    @property
    def traceback(self) -> str:
        return self.history[-1].traceback if self.history else ""


@dataclass(frozen=True, slots=True)
class RecordList:
    """Reply to `ListRecords`; ``more`` is the ``after`` of the next page, b"" at the end."""

    records: tuple[RecordInfo, ...]
    more: bytes


@dataclass(frozen=True, slots=True)
class PutCursor:
    """Note that a reader of a stream's dead letters has come to ``position``, the ``after`` of its next page."""

    stream: str
    reader: str
    position: bytes


@dataclass(frozen=True, slots=True)
class GetCursor:
    """How far has a reader of a stream's dead letters come?"""

    stream: str
    reader: str


@dataclass(frozen=True, slots=True)
class Cursor:
    """Reply to `PutCursor` and `GetCursor`; b"" before the first note."""

    position: bytes


@dataclass(frozen=True, slots=True)
class Explain:
    """What does this root wait for? Refused with `UnsupportedError` by a vertex without ``tracker="exact"``."""

    root: int


@dataclass(frozen=True, slots=True)
class OwedId:
    """An id that a root waits for.

    ``emitted``: it was emitted to ``operator``, which has not acknowledged it. Otherwise it was acknowledged,
    and no event has told of its emission yet. ``operator`` is "" where no event named one.
    """

    record_id: int
    operator: str
    emitted: bool


@dataclass(frozen=True, slots=True)
class Explained:
    """Reply to `Explain`; all fields are empty for a root that is not ``known``: done, failed, or never heard of.

    Not ``registered``: events are held for a registration that has not come. ``value`` is the root's XOR.
    ``ids_known`` False: some of its events came without `EventIds`, so ``owed`` does not say it all.
    """

    known: bool
    registered: bool = False
    value: int = 0
    ids_known: bool = False
    owed: tuple[OwedId, ...] = ()


@dataclass(frozen=True, slots=True)
class Requeue:
    """Give dead letters (by `RecordInfo.key`) their attempts back and deliver them again now. ``by``: who does it."""

    keys: tuple[bytes, ...]
    by: str = ""


@dataclass(frozen=True, slots=True)
class Purge:
    """Delete dead letters permanently. ``by``: who does it."""

    keys: tuple[bytes, ...]
    by: str = ""


@dataclass(frozen=True, slots=True)
class Changed:
    """Reply to `Requeue`, `Purge` and `EditAndRequeue`: how many of the keys were there."""

    count: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for counters and gauges."""


@dataclass(frozen=True, slots=True)
class StatsReply:
    """Counters since the start of this incarnation, and gauges (``used_share``, ``pending``, ``waiting``
    …). ``circuits`` has by topology or query the circuit breakers by name.
    """

    values: dict[str, float]
    circuits: dict[str, dict[str, CircuitStatus]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportCircuits:
    """A wrapped query says where its circuit breakers are, for `Stats`; the vertex forgets it with its incarnation."""

    query: str
    circuits: dict[str, CircuitStatus]


@dataclass(frozen=True, slots=True)
class CircuitsReported:
    """Reply to `ReportCircuits`."""


# Calls of jobs in barrier mode, whose dead letters come from their checkpoints, and go back into them.
#
# A letter lives with the job until its checkpoint is complete; then its driver sends it, file by file. A requeued one
# waits here until the driver has read it and says that a checkpoint holds it.


MAX_LETTERS = 10_000
"""So many letters may a call have."""


@dataclass(frozen=True, slots=True)
class KeptLetter:
    """A record that a job has given up: one row, and its failed attempts, one or more, the oldest first.

    ``letter`` names it. ``facts`` is what else the job wants back with it: the vertex does not look into that.
    """

    letter: bytes
    facts: bytes
    payload: pa.RecordBatch
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class KeepLetters:
    """Put letters among the dead ones of a stream, unless this ``part`` of this ``file`` of its job was kept before.

    The name of the file is remembered until `ForgetLetters`. Refused with `ProtocolError` by a store that takes no
    records in.
    """

    stream: str
    file: str
    part: int
    letters: tuple[KeptLetter, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class LettersKept:
    """Reply to `KeepLetters` and `ForgetLetters`: how many letters (parts) that were, 0 for what was done before."""

    count: int


@dataclass(frozen=True, slots=True)
class ForgetLetters:
    """Forget the name of a file of a job: it will not be sent again."""

    job: str
    file: str
    owner: str = ""


@dataclass(frozen=True, slots=True)
class GetRequeued:
    """Which letters of a job were requeued? ``after`` pages on; up to ``limit`` of them."""

    job: str
    after: bytes = b""
    limit: int = 500
    owner: str = ""


@dataclass(frozen=True, slots=True)
class RequeuedLetter:
    """A letter on its way back: see `KeptLetter`; ``key`` names it in the vertex. ``edited``: its payload was."""

    key: bytes
    stream: str
    letter: bytes
    facts: bytes
    payload: pa.RecordBatch
    attempts: tuple[Attempt, ...]
    edited: bool = False


@dataclass(frozen=True, slots=True)
class RequeuedLetters:
    """Reply to `GetRequeued`; ``more`` is the ``after`` of the next page, b"" at the end."""

    letters: tuple[RequeuedLetter, ...]
    more: bytes


@dataclass(frozen=True, slots=True)
class Readmitted:
    """A checkpoint of the job holds these requeued letters (by key): delete them. Answered by `Changed`."""

    job: str
    keys: tuple[bytes, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ReturnLetters:
    """These requeued letters (by key) cannot go back into the job: they are dead again, with this reason.

    Answered by `Changed`.
    """

    job: str
    keys: tuple[bytes, ...]
    reason: str
    owner: str = ""
