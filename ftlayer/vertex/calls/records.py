"""Calls about single records: select them by what they are, count the dead by group, change one and send it again.

Every answer is bounded: a call examines `MAX_EXAMINED` records at most, and says how many it did and where to go on.
The vertex looks into payloads for a text alone; conditions on fields are their asker's to check.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from ftlayer.vertex.calls.jobs import HistogramDetails, JobKind
from ftlayer.vertex.calls.operating import RecordInfo

MAX_EXAMINED = 2_000
"""So many records a call looks at, whatever it finds."""

MAX_SELECTED = 500
"""At most so many records are in one answer."""

MAX_KEYS = 2_000
"""At most so many keys are in one answer, or in one question."""

MAX_EDITS = 1_000
"""So many letters are edited by a call."""

MAX_PAGE_BYTES = 8 << 20
"""An answer ends with the record with which its payloads come to so many bytes."""


@dataclass(frozen=True, slots=True)
class SelectRecords:
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


@dataclass(frozen=True, slots=True)
class RecordPage:
    """Reply to `SelectRecords`: what was found among ``examined`` records; ``more`` goes on, b"" at the end.

    A page may be empty and have more behind it. ``keys`` are those of ``records``, or all there is with ``keys_only``.
    """

    records: tuple[RecordInfo, ...]
    keys: tuple[bytes, ...]
    examined: int
    more: bytes


@dataclass(frozen=True, slots=True)
class DeadGroups:
    """How many dead letters are there of which kind? ``stream`` may be a stream or an owner; "" for all."""

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
class GroupList:
    """Reply to `DeadGroups`, the largest first; the smallest of more than 2,000 are ``left_out``.

    ``indexed`` is the share of the dead that is counted already: below 1 for a while after an older store was opened.
    """

    groups: tuple[DeadGroup, ...]
    indexed: float
    left_out: int = 0


@dataclass(frozen=True, slots=True)
class Edit:
    """A dead letter's new payload: one row of the schema that it has."""

    key: bytes
    payload: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class EditAndRequeue:
    """Give dead letters other payloads, and their attempts back; they are due at once and keep their history.

    ``by``: who does it. Refused with `MalformedRequestError`, naming the column, for another schema than the letter's,
    or a null where it takes none; with `ProtocolError` by a store that takes no records in. Then nothing of it is done
    (on each shard for itself). A topology sends an edited record where its new key belongs. Answered by `Changed`: how
    many of the letters were there.
    """

    edits: tuple[Edit, ...]
    by: str


@dataclass(frozen=True, slots=True)
class ListStreams:
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
class StreamList:
    streams: tuple[StreamDetails, ...]
