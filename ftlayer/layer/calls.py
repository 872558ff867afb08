"""What can be asked of the vertex: one frozen dataclass a call, one a reply.

These are the contract between the rules (`ftlayer.layer`), the service that carries them and its
clients. A call that changes the vertex travels in an envelope with (client, sequence); see
`Envelope`. Arrays are NumPy, ids are uint64, times are milliseconds, ``payload`` is an Arrow record
batch that nobody in the vertex looks into.

Names:
  stream    what a source's records are filed under: ``"<query>/<source>"`` for a wrapped source,
            ``"ingest/<name>"`` for an ingest, ``"<job>/<source>"`` for a topology. A stream lives on one
            shard.
  query     the stable name of a wrapped query (it survives restarts)
  epoch     handed out by `OpenQuery`; calls of an older epoch are refused with `StaleOwnerError`
  offset    position in a stream's delivery log: the number of rows ever made deliverable before it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt
import pyarrow as pa

U64 = npt.NDArray[np.uint64]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Now:
    """The time a call happens at: ``mono_ms`` drives timeouts, ``wall_ms`` (Unix) what survives a restart."""

    mono_ms: int
    wall_ms: int


@dataclass(frozen=True, slots=True)
class Envelope:
    """Who calls, and the how-many-eth call of theirs it is (from 1, without gaps).

    A client's call with a sequence already seen has no second effect and gets the first one's reply.
    """

    client: str
    sequence: int


# ---------------------------------------------------------------- retry options


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """How a stream's records are retried and how many may be in flight.

    ``max_attempts`` counts runs, the first included. ``backoff_ms`` lists the pause before attempt
    2, 3, …; its last entry serves all later ones. ``jitter`` (0 to 1) is the share of a pause that is
    drawn at random (deterministically, from the record's origin and attempt).
    """

    timeout_ms: int = 30_000
    max_attempts: int = 5
    backoff_ms: tuple[int, ...] = (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 60_000)
    jitter: float = 0.1
    max_pending: int = 1_000_000


# ---------------------------------------------------------------- tracking (any client)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The rows of one call advance ``partition`` of their source from ``start`` to ``end`` without a gap."""

    partition: str
    start: bytes | None
    end: bytes


@dataclass(frozen=True, slots=True)
class EventIds:
    """The ids that values were folded from, for a vertex with ``tracker="exact"``; others take no note of them.

    ``values[i]`` is the XOR of ``ids[offsets[i]:offsets[i + 1]]``: ids uint64[m], offsets int32[n + 1], as
    Arrow lays lists out. ``owners``, int32[m], has for each id the position in ``operators`` of the operator
    that is to acknowledge it, or -1 where this event acknowledges the id itself.
    """

    ids: U64
    offsets: I32
    owners: I32
    operators: tuple[str, ...] = ()

    def take(self, which: npt.NDArray[np.int64]) -> EventIds:
        """Return the lists at the positions ``which``, in that order."""
        sizes = np.diff(self.offsets)[which]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
        places = np.repeat(self.offsets[which] - offsets[:-1], sizes) + np.arange(offsets[-1])
        return EventIds(self.ids[places], offsets, self.owners[places], self.operators)


@dataclass(frozen=True, slots=True)
class Persist:
    """Store records and register them: ``values[i]`` is the XOR of the ids of all copies of row i."""

    stream: str
    payload: pa.RecordBatch
    roots: U64
    values: U64
    key_hashes: I32 | None = None  # shape (n,) or (n, selectors)
    position: SourcePosition | None = None
    ids: EventIds | None = None


@dataclass(frozen=True, slots=True)
class Ingest:
    """Store records for delivery to the stream's query; the vertex draws their root ids."""

    stream: str
    payload: pa.RecordBatch


@dataclass(frozen=True, slots=True)
class Accepted:
    """Reply to `Persist` and `Ingest`: the rows are stored as ``durability`` says."""

    rows: int


@dataclass(frozen=True, slots=True)
class Xor:
    """XOR deltas. ``hold`` keeps those of unknown roots for a registration that is still to come (`emit`)."""

    roots: U64
    values: U64
    incarnation: int
    hold: bool = False
    ids: EventIds | None = None


@dataclass(frozen=True, slots=True)
class Xored:
    """Reply to `Xor`: how many roots were completed by it, and how many events named an unknown root."""

    completed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one root failed. ``traceback`` is cut to a bound by the layer. ``fatal`` skips further attempts."""

    root: int
    reason: str
    operator: str = ""
    traceback: str = ""
    fatal: bool = False


@dataclass(frozen=True, slots=True)
class Fail:
    """End this attempt of each root named; unknown roots are ignored and counted."""

    failures: tuple[Failure, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reply to `Fail`: roots that wait for a replay, that are dead now, that nobody knew."""

    waiting: int
    dead: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Touch:
    """Start the time of these roots again."""

    roots: U64
    incarnation: int


@dataclass(frozen=True, slots=True)
class Touched:
    """Reply to `Touch`."""

    touched: int


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Declare a stream and its options (idempotent; new options replace the old ones)."""

    stream: str
    options: StreamOptions = field(default_factory=StreamOptions)


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Reply to `OpenStream`: where each source partition is to go on reading.

    ``exact``: the vertex keeps every id, so that `EventIds` are worth sending.
    """

    incarnation: int
    positions: dict[str, bytes]
    exact: bool = False


@dataclass(frozen=True, slots=True)
class TakeReplays:
    """Take up to ``limit`` due replays of a stream that is pushed (not read by offset); registers them.

    Each is registered with its root id as its one copy's record id.
    """

    stream: str
    limit: int


@dataclass(frozen=True, slots=True)
class Records:
    """Stored records as they came, with what the vertex knows of them. Arrays have one entry a row."""

    payload: pa.RecordBatch
    roots: U64
    origins: U64
    attempts: I32  # 1 on the first run
    key_hashes: I32 | None = None


@dataclass(frozen=True, slots=True)
class RecordBatches:
    """Reply with records; several batches where schemas differ, and none where there is nothing."""

    batches: tuple[Records, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Make every pending root of these streams due for replay at once: whoever worked on them may be gone.

    Their roots leave the tracker (late events are ignored), and the attempt that ends is not counted. What has
    failed or timed out already is left as it is. The streams are of one job; an unknown one is an error.
    Not covered: a `Persist` that is answered later; its rows are pending from then on.
    """

    streams: tuple[str, ...]
    incarnation: int


@dataclass(frozen=True, slots=True)
class Recalled:
    """Reply to `Recall`: how many rows it made due."""

    rows: int


@dataclass(frozen=True, slots=True)
class StreamStatusCall:
    """What is still to do for these streams of one job?"""

    streams: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StreamStatus:
    """Reply to `StreamStatusCall`: sums over the streams.

    ``pending`` roots are registered and not complete, ``due`` can be taken now (`TakeReplays`), ``waiting``
    have their pause still to go (``next_due_in_ms``, -1 when nothing is due or waits), ``dead`` are dead
    letters. Of the records of a stream whose pause is over, 10,000 at most are counted as ``due``, the rest
    as ``waiting``.
    """

    pending: int
    due: int
    waiting: int
    dead: int
    next_due_in_ms: int

    @property
    def drained(self) -> bool:
        """Whether a bounded job could end."""
        return not (self.pending or self.due or self.waiting)


# ---------------------------------------------------------------- micro-batches


class BatchState(StrEnum):
    """How far a micro-batch has come."""

    NEW = "new"
    SEALED = "sealed"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class OpenQuery:
    """Take a query over for a new run: older epochs are fenced off from here on.

    ``streams`` are its wrapped sources and ingests; an ingest that another query has claimed is
    refused with `StaleOwnerError` naming that query.
    """

    query: str
    run: str
    streams: tuple[str, ...]
    options: StreamOptions = field(default_factory=StreamOptions)


@dataclass(frozen=True, slots=True)
class QueryOpened:
    """Reply to `OpenQuery`. Batch ids are -1 where there was none yet; root ids carry ``shard``.

    ``exact``: the vertex keeps every id, so that `EventIds` are worth sending.
    """

    epoch: int
    incarnation: int
    last_sealed: int
    last_committed: int
    shard: int = 0
    shards: int = 1
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Deliverable:
    """How far can a query read ``stream`` from ``start``, taking ``max_rows`` at most?

    Moves due replays into the delivery log as far as they are asked for; sent again, it is executed again.
    """

    stream: str
    start: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class DeliverableUpTo:
    """Reply to `Deliverable`: the end offset (= start: nothing now)."""

    end: int


@dataclass(frozen=True, slots=True)
class ReadDeliveries:
    """The rows of [start, end) in delivery order. The same answer until a later batch begins."""

    stream: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class BeginBatch:
    """A query is about to run this batch; forgets what older committed batches kept."""

    query: str
    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class BatchBegun:
    """Reply to `BeginBatch`. Only if SEALED: what the seal (and its reseals) said had failed.

    ``failed`` are the rewindable source rows the seal took, ``redelivered`` the roots of the delivered
    rows that failed, ``resumed`` the failures of records resumed from another query.
    """

    state: BatchState
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[int, ...] = ()
    resumed: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class SealedRows:
    """Rows of a rewindable source the vertex takes over at a seal, one failure a row.

    ``roots`` are the ids the rows had in this run; ``failures[i].root == roots[i]``.
    """

    stream: str
    payload: pa.RecordBatch
    roots: U64
    failures: tuple[Failure, ...]
    key_hashes: I32 | None = None


@dataclass(frozen=True, slots=True)
class EmittedRows:
    """Rows whose derivatives were handed to another query: they stay pending until that one is done.

    ``values[i]`` is the XOR of the ids of everything emitted under ``roots[i]``. ``payload`` is None for
    rows that were delivered by the vertex, which has them stored.
    """

    stream: str
    payload: pa.RecordBatch | None
    roots: U64
    values: U64
    ids: EventIds | None = None


@dataclass(frozen=True, slots=True)
class Seal:
    """The verdict of a batch: what failed, what was handed on; everything else of it is done at commit.

    ``delivered`` gives for each stream the offsets [start, end) this batch was given. ``redelivered``
    are failures of delivered rows (the vertex has their payload), ``resumed`` those of records another
    query emitted: kept and handed back, the caller sends the `Fail` for them. Sealing a sealed batch again
    is refused unless it says the same; a *sealed* batch that is run again uses `Reseal`.
    """

    query: str
    epoch: int
    batch: int
    delivered: dict[str, tuple[int, int]]
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class Reseal:
    """Add to a sealed batch what failed when it was run again: rows that had passed before.

    ``emitted`` replaces what the first seal said (the run again has fresh ids).
    """

    query: str
    epoch: int
    batch: int
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class Sealed:
    """Reply to `Seal` and `Reseal`: of the failed rows, how many will wait and how many are dead at
    commit.
    """

    waiting: int
    dead: int


@dataclass(frozen=True, slots=True)
class Commit:
    """The sink has the batch: its failed rows start to wait for replay, the rest is done. Idempotent."""

    query: str
    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Reply to `Commit`. ``again`` when it had been committed before."""

    again: bool


@dataclass(frozen=True, slots=True)
class QueryStatusCall:
    """What is still to do for a query?"""

    query: str


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """Reply to `QueryStatusCall`: counts of rows over the query's streams.

    ``next_due_in_ms`` is -1 when nothing waits. ``drained`` when all but ``dead`` are 0.
    """

    waiting: int
    deliverable: int
    delivered: int
    pending: int
    dead: int
    next_due_in_ms: int

    @property
    def drained(self) -> bool:
        """Whether a bounded job could end: nothing waits, nothing is on its way."""
        return not (self.waiting or self.deliverable or self.delivered or self.pending)


# ---------------------------------------------------------------- operators' calls


@dataclass(frozen=True, slots=True)
class ListRecords:
    """List records in a ``state``: "pending", "waiting", "delivery" or "dead". ``after`` pages on."""

    state: str
    stream: str = ""  # "" for all
    limit: int = 1_000
    after: bytes = b""


@dataclass(frozen=True, slots=True)
class RecordInfo:
    """One record as `ListRecords` shows it; ``history`` has one (wall_ms, reason, operator) a failed
    attempt.
    """

    key: bytes
    stream: str
    state: str
    root: int
    origin: int
    attempt: int
    not_before_ms: int
    reason: str
    operator: str
    traceback: str
    history: tuple[tuple[int, str, str], ...]
    payload: pa.RecordBatch  # one row


@dataclass(frozen=True, slots=True)
class RecordList:
    """Reply to `ListRecords`; ``more`` is the ``after`` of the next page, b"" at the end."""

    records: tuple[RecordInfo, ...]
    more: bytes


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
    """Give dead letters (by `RecordInfo.key`) their attempts back and deliver them again now."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Purge:
    """Delete dead letters for ever."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Changed:
    """Reply to `Requeue` and `Purge`: how many of the keys were there."""

    count: int


@dataclass(frozen=True, slots=True)
class Stats:
    """Ask for counters and gauges."""


@dataclass(frozen=True, slots=True)
class StatsReply:
    """Counters since the start of this incarnation, and gauges (``used_share``, ``pending``, ``waiting``
    …).
    """

    values: dict[str, float]


MutatingCall = (
    Persist
    | Ingest
    | Xor
    | Fail
    | Touch
    | OpenStream
    | TakeReplays
    | Recall
    | OpenQuery
    | BeginBatch
    | Seal
    | Reseal
    | Commit
    | Requeue
    | Purge
    | Deliverable
)
ReadingCall = ReadDeliveries | StreamStatusCall | QueryStatusCall | ListRecords | Explain | Stats
Call = MutatingCall | ReadingCall

Reply = (
    Accepted
    | Xored
    | Failed
    | Touched
    | StreamOpened
    | RecordBatches
    | Recalled
    | StreamStatus
    | QueryOpened
    | DeliverableUpTo
    | BatchBegun
    | Sealed
    | Committed
    | QueryStatus
    | RecordList
    | Explained
    | Changed
    | StatsReply
)
