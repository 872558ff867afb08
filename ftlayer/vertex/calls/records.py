"""Calls of operators and their tools: what is there, why, and what to do about dead letters.

Every answer is bounded: a call examines `MAX_EXAMINED` records at most, and says how many it did and where to go on.
The vertex looks into payloads for a text alone; conditions on fields are their asker's to check.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pyarrow as pa

from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import MalformedRequestError
from ftlayer.records.failures import READ_AS
from ftlayer.records.ids import Explanation
from ftlayer.vertex.calls.common import (
    MAX_FILE_BYTES,
    MAX_NAME_BYTES,
    AnsweredBy,
    DurableCall,
    MutatingCall,
    ReadingCall,
    Reply,
    Route,
    check_id,
    check_least,
    check_limit,
    check_most,
    check_name,
    check_one_row,
)
from ftlayer.vertex.calls.jobs import HistogramDetails, JobKind

MAX_PAGE = 10_000
"""At most this many records are listed by a call."""

MAX_KEYS = 2_000
"""At most so many keys are in one answer, or in one question."""

LIST_STATES = ("pending", "waiting", "delivery", "dead")


def check_state(state: str, where: str) -> None:
    if state not in LIST_STATES:
        raise MalformedRequestError(f"{where}: expected one of {', '.join(LIST_STATES)}, got {state!r}")


@dataclass(frozen=True, slots=True)
class ListRecords(ReadingCall, AnsweredBy["RecordList"], route=Route.ALL):
    """List records in a ``state`` (`LIST_STATES`). A page may be empty and have more behind it, but of dead letters."""

    state: str
    stream: str = ""  # or its owner; "" for all
    limit: int = 1_000
    after: bytes = b""

    def check_fields(self) -> None:
        check_state(self.state, "ListRecords.state")
        check_limit(self.limit, MAX_PAGE, "ListRecords.limit")


@dataclass(frozen=True, slots=True)
class Attempt:
    """A failed attempt of a record, its ``number``-th failure: of many, those in the middle are not kept.

    Attributes:
        number: counted, in barrier mode, from where the record was requeued last.
        reason: the exception's class and message, up to 1,024 characters.
        operator: the uid of the function that raised it, as far as it is known.
        place: the process in words: the slot, or the Spark task, its host and pid; maybe `READ_AS`, and where in its
            source.
        traceback: up to 4,096 characters; of the first attempt and the last three. Others say that it is not kept.
        requeued_ms, requeued_by: when the record was given its attempts back behind it, and by whom.
    """

    number: int
    at_ms: int
    reason: str
    operator: str = ""
    place: str = ""
    traceback: str = ""
    requeued_ms: int = 0
    requeued_by: str = ""

    @property
    def read_as(self) -> str:
        return self.place.partition(READ_AS)[2]


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
        max_attempts: of its stream, as it is now; None: without end, or not known.
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
    max_attempts: int | None = None

    @property
    def is_final(self) -> bool:
        """Whether its last failure has ruled out the attempts that its stream leaves now."""
        return self.state == "dead" and self.attempt < (self.max_attempts or 0)

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
class RecordList(Reply):
    """Reply to `ListRecords`; ``more`` is the ``after`` of the next page, b"" at the end."""

    records: tuple[RecordInfo, ...]
    more: bytes


@dataclass(frozen=True, slots=True)
class PutCursor(DurableCall, AnsweredBy["Cursor"], route=Route.STREAM):
    """Note that a reader of a stream's dead letters has come to ``position``, the ``after`` of its next page."""

    stream: str
    reader: str
    position: bytes

    def check_fields(self) -> None:
        check_name(self.reader, "PutCursor.reader")
        if len(self.position) > MAX_NAME_BYTES:
            raise MalformedRequestError(f"PutCursor.position: expected {MAX_NAME_BYTES} bytes at most")


@dataclass(frozen=True, slots=True)
class GetCursor(ReadingCall, AnsweredBy["Cursor"], route=Route.STREAM):
    """How far has a reader of a stream's dead letters come?"""

    stream: str
    reader: str

    def check_fields(self) -> None:
        check_name(self.reader, "GetCursor.reader")


@dataclass(frozen=True, slots=True)
class Cursor(Reply):
    """Reply to `PutCursor` and `GetCursor`; b"" before the first note."""

    position: bytes


@dataclass(frozen=True, slots=True)
class Explain(ReadingCall, AnsweredBy["Explained"], route=Route.ALL):
    """What does this root wait for? Refused with `UnsupportedError` by a vertex without ``tracker="exact"``."""

    root: int

    def check_fields(self) -> None:
        check_id(self.root, "Explain.root")


@dataclass(frozen=True, slots=True)
class Explained(Reply):
    """Reply to `Explain`; None for a root that is not pending: done, failed, or never heard of."""

    found: Explanation | None = None


@dataclass(frozen=True, slots=True)
class ChangeDead(DurableCall, AnsweredBy["Changed"]):
    """Something is done about dead letters (by `RecordInfo.key`). ``by``: who does it."""

    keys: tuple[bytes, ...]
    by: str = ""

    def check_fields(self) -> None:
        if self.by:
            check_name(self.by, f"{type(self).__name__}.by")


@dataclass(frozen=True, slots=True)
class Requeue(ChangeDead, route=Route.ALL):
    """Give them their attempts back and deliver them again now."""


@dataclass(frozen=True, slots=True)
class Purge(ChangeDead, route=Route.ALL):
    """Delete them permanently."""


@dataclass(frozen=True, slots=True)
class Changed(Reply):
    """Reply to `Requeue`, `Purge` and `EditAndRequeue`: how many of the keys were there."""

    count: int


@dataclass(frozen=True, slots=True)
class Stats(ReadingCall, AnsweredBy["StatsReply"], route=Route.ALL):
    """Ask for counters and gauges."""


@dataclass(frozen=True, slots=True)
class StatsReply(Reply):
    """Counters since the start of this incarnation, gauges, and circuit breakers by topology or query, and name."""

    values: dict[str, float]
    circuits: dict[str, dict[str, CircuitStatus]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ReportCircuits(MutatingCall, AnsweredBy["CircuitsReported"], route=Route.QUERY):
    """A wrapped query says where its circuit breakers are, for `Stats`; the vertex forgets it with its incarnation."""

    query: str
    circuits: dict[str, CircuitStatus]


@dataclass(frozen=True, slots=True)
class CircuitsReported(Reply):
    """Reply to `ReportCircuits`."""


# Calls of jobs in barrier mode, whose dead letters come from their checkpoints, and go back into them.
#
# A letter lives with the job until its checkpoint is complete; then its driver sends it, file by file. A requeued one
# waits here until the driver has read it and says that a checkpoint holds it.


MAX_LETTERS = 10_000
"""So many letters may a call have."""


@dataclass(frozen=True, slots=True)
class KeptLetter:
    """A record that a job has given up, by name: one row, its failed attempts, oldest first, ``facts`` of the job's."""

    letter: bytes
    facts: bytes
    payload: pa.RecordBatch
    attempts: tuple[Attempt, ...]

    def check(self, where: str) -> None:
        check_one_row(self.payload, where)
        if not self.letter:
            raise MalformedRequestError(f"{where}.letter: it has no name")
        if not self.attempts:
            raise MalformedRequestError(f"{where}.attempts: expected one or more, got none")


@dataclass(frozen=True, slots=True)
class KeepLetters(MutatingCall, AnsweredBy["LettersKept"], route=Route.STREAM):
    """Put letters among the dead of a stream, each ``part`` of a ``file`` once; `ProtocolError` by a full store."""

    stream: str
    file: str
    part: int
    letters: tuple[KeptLetter, ...]
    owner: str = ""

    def check_fields(self) -> None:
        check_name(self.file, "KeepLetters.file", MAX_FILE_BYTES)
        if not 0 <= self.part < 1 << 32:
            raise MalformedRequestError(f"KeepLetters.part: expected 0 to 2^32-1, got {self.part}")
        check_most(self.letters, MAX_LETTERS, "KeepLetters.letters")
        for index, letter in enumerate(self.letters):
            letter.check(f"KeepLetters.letters[{index}]")


@dataclass(frozen=True, slots=True)
class LettersKept(Reply):
    """Reply to `KeepLetters` and `ForgetLetters`: how many letters (parts) that were, 0 for what was done before."""

    count: int


@dataclass(frozen=True, slots=True)
class ForgetLetters(MutatingCall, AnsweredBy["LettersKept"], route=Route.JOB):
    """Forget the name of a file of a job: it will not be sent again."""

    job: str
    file: str
    owner: str = ""

    def check_fields(self) -> None:
        check_name(self.file, "ForgetLetters.file", MAX_FILE_BYTES)


@dataclass(frozen=True, slots=True)
class GetRequeued(ReadingCall, AnsweredBy["RequeuedLetters"], route=Route.JOB):
    """Which letters of a job were requeued? ``after`` pages on; up to ``limit`` of them."""

    job: str
    after: bytes = b""
    limit: int = 500
    owner: str = ""

    def check_fields(self) -> None:
        check_limit(self.limit, MAX_LETTERS, "GetRequeued.limit")


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
class RequeuedLetters(Reply):
    """Reply to `GetRequeued`; ``more`` is the ``after`` of the next page, b"" at the end."""

    letters: tuple[RequeuedLetter, ...]
    more: bytes


@dataclass(frozen=True, slots=True)
class LettersCall(MutatingCall):
    """About requeued letters of a job, by key. Answered by `Changed`."""

    job: str
    keys: tuple[bytes, ...]

    def check_fields(self) -> None:
        check_most(self.keys, MAX_KEYS, f"{type(self).__name__}.keys")


@dataclass(frozen=True, slots=True)
class Readmitted(LettersCall, AnsweredBy["Changed"], route=Route.JOB):
    """A checkpoint of the job holds these: delete them."""

    owner: str = ""


@dataclass(frozen=True, slots=True)
class ReturnLetters(LettersCall, AnsweredBy["Changed"], route=Route.JOB):
    """These cannot go back into the job: they are dead again, with this reason."""

    reason: str
    owner: str = ""


MAX_EXAMINED = 2_000
"""So many records a call looks at, whatever it finds."""

MAX_SELECTED = 500
"""At most so many records are in one answer."""

MAX_SOUGHT = 1_024

MAX_EDITS = 1_000
"""So many letters are edited by a call."""

MAX_PAGE_BYTES = 8 << 20
"""An answer ends with the record with which its payloads come to so many bytes."""


@dataclass(frozen=True, slots=True)
class SelectRecords(ReadingCall, AnsweredBy["RecordPage"], route=Route.ALL):
    """Records in a ``state`` (as `ListRecords`) for which all of the rest holds.

    Attributes:
        stream: their stream, or the owner of their stream; "" for all.
        operator: where the last attempt failed; "" for all.
        group: of dead letters, `DeadGroup.number`, with ``stream``, that of the group; -1 for all.
        since_ms, until_ms: when they failed last (dead), are due (waiting; 0: due since before a restart), or were
            registered (pending; unknown after a restart of the vertex, and taken for 0, as in delivery): from, and
            before; 0 for any time.
        text: in the reason, the operator, or a text or binary value of the record (UTF-8), however deep,
            case-sensitive; "" for all.
        root: the record that has this root or origin; 0 for all.
        keys: these records alone; () for all.
        keys_only: answer with keys in place of records.
        newest: from the latest on, of all shards together; for the dead alone.
        limit: so many at most: `MAX_SELECTED`, with ``keys_only`` `MAX_KEYS`.
        after: where the page before ended, b"" for the first.
    """

    state: str
    stream: str = ""
    operator: str = ""
    group: int = -1
    since_ms: int = 0
    until_ms: int = 0
    text: str = ""
    root: int = 0
    keys: tuple[bytes, ...] = ()
    keys_only: bool = False
    newest: bool = False
    limit: int = 50
    after: bytes = b""

    def check_fields(self) -> None:
        where = "SelectRecords"
        check_state(self.state, f"{where}.state")
        if self.stream:
            check_name(self.stream, f"{where}.stream")
        if self.group != -1:
            if not 0 <= self.group < 1 << 32:
                raise MalformedRequestError(
                    f"{where}.group: expected 0 to 2^32-1, or -1 for any, got {self.group}"
                )
            if self.state != "dead" or not self.stream or self.keys:
                raise MalformedRequestError(f"{where}.group: it needs state 'dead' and a stream, and no keys")
        if self.newest and (self.state != "dead" or self.root or self.keys):
            raise MalformedRequestError(f"{where}.newest: it needs state 'dead', and neither root nor keys")
        check_least(self.since_ms, 0, f"{where}.since_ms")
        check_least(self.until_ms, 0, f"{where}.until_ms")
        check_most(self.operator, MAX_SOUGHT, f"{where}.operator", "characters ")
        check_most(self.text, MAX_SOUGHT, f"{where}.text", "characters ")
        if not 0 <= self.root < 1 << 64:
            raise MalformedRequestError(f"{where}.root: expected an id, or 0 for any, got {self.root}")
        check_limit(self.limit, MAX_KEYS if self.keys_only else MAX_SELECTED, f"{where}.limit")
        check_most(self.keys, MAX_KEYS, f"{where}.keys")


@dataclass(frozen=True, slots=True)
class RecordPage(Reply):
    """What was found among ``examined`` records; ``more`` goes on, b"" at the end, be the page empty or not."""

    records: tuple[RecordInfo, ...]
    keys: tuple[bytes, ...]
    examined: int
    more: bytes


@dataclass(frozen=True, slots=True)
class DeadGroups(ReadingCall, AnsweredBy["GroupList"], route=Route.STREAM):
    """How many dead letters are there of which kind? ``stream`` may be a stream or an owner; "" for all."""

    asks_all: ClassVar[bool] = True

    stream: str = ""


@dataclass(frozen=True, slots=True)
class DeadGroup:
    """Dead letters of one stream whose last attempt failed in one operator for one kind of reason.

    ``number`` names it within its stream and shard. ``kind`` is the reason with quoted text, numbers and ids left out;
    ``example`` is one whole reason. Times are Unix ms, of the last attempts.
    """

    stream: str
    number: int
    operator: str
    kind: str
    example: str
    count: int
    first_seen_ms: int
    last_seen_ms: int


@dataclass(frozen=True, slots=True)
class GroupList(Reply):
    """The largest first, of more than 2,000; ``indexed`` is the share that is counted: below 1 for a while."""

    groups: tuple[DeadGroup, ...]
    indexed: float
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Edit:
    """A dead letter's new payload: one row of the schema that it has."""

    key: bytes
    payload: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class EditAndRequeue(DurableCall, AnsweredBy["Changed"], route=Route.ALL):
    """Give dead letters other payloads, and their attempts back; they are due at once and keep their history.

    Refused with `MalformedRequestError`, naming the column, for another schema than the letter's, or a null where it
    takes none; with `ProtocolError` by a store that takes no records in. Then nothing of it is done on that shard.
    """

    edits: tuple[Edit, ...]
    by: str

    def check_fields(self) -> None:
        check_name(self.by, "EditAndRequeue.by")
        check_most(self.edits, MAX_EDITS, "EditAndRequeue.edits")
        keys: set[bytes] = set()
        for index, edit in enumerate(self.edits):
            where = f"EditAndRequeue.edits[{index}]"
            check_one_row(edit.payload, where)
            if edit.key in keys:
                raise MalformedRequestError(f"{where}.key: it is there twice")
            keys.add(edit.key)


@dataclass(frozen=True, slots=True)
class ListStreams(ReadingCall, AnsweredBy["StreamList"], route=Route.ALL):
    """Which streams are there, and how much is in each?"""


@dataclass(frozen=True, slots=True)
class StreamDetails:
    """What a vertex holds of one stream, and what it has seen of it in this incarnation.

    Attributes:
        stream: its name; ``owner`` the job's or query's, ``title`` what people call that, ``source`` the rest of it.
        pending, waiting, in_delivery, dead: records by state; those that are due count as waiting.
        persisted, completed, failed, died: so far; ``failed`` counts attempts, the others records: those ingested and
            those that a batch has delivered are among them.
        oldest_ms: since when (Unix) the oldest record that is not done has been there, 0 where there is none or it is
            unknown. Known are those in flight and in delivery (after a restart of the vertex: since then, or since
            they were handed out again) and, of those that wait, the one that is due first: since its first failure.
        max_pending: what intake waits at.
        kind: what its owner is; None where it has none, or is no run's of this vertex.
        counters: all that is counted, by the names of `StatsReply.values`.
        completion: how long records took from the registration of the attempt that completed to its completion.
    """

    stream: str
    owner: str
    title: str
    source: str
    pending: int
    waiting: int
    in_delivery: int
    dead: int
    persisted: int
    completed: int
    failed: int
    died: int
    oldest_ms: int
    max_pending: int
    kind: JobKind | None = None
    counters: dict[str, int] = field(default_factory=dict)
    completion: HistogramDetails | None = None


@dataclass(frozen=True, slots=True)
class StreamList(Reply):
    streams: tuple[StreamDetails, ...]
