"""Calls about records on their way: of a topology's streams, of sources that can be read again, of a query's batches.

Of a source that can be read again the vertex keeps where rows are, and not the rows themselves. A *range* is what one
`Register` brings: rows of a partition from one position to the next. Its rows are pending until they are done, or
stored because their attempt has ended. One instance of a source's subtask holds a partition: it has the rows in memory,
or reads them again, and gives those to the vertex that it asks for.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

import numpy as np
import pyarrow as pa

from ftlayer.common.printable import html_table
from ftlayer.common.rules.circuit import CircuitStatus
from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls.common import (
    I32,
    MAX_RUN_BYTES,
    U64,
    AnsweredBy,
    Call,
    DurableCall,
    EventIds,
    Failure,
    IntakeCall,
    MemoryCall,
    MutatingCall,
    PassingCall,
    ReadingCall,
    RecordBatches,
    Reply,
    Route,
    RowRoots,
    StreamOptions,
    check_event_ids,
    check_failures,
    check_ids,
    check_key_hashes,
    check_least,
    check_lengths,
    check_most,
    check_name,
    check_range,
    check_rows,
    check_streams,
    check_values,
)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The rows of one call advance ``partition`` of their source from ``start`` to ``end`` without a gap."""

    partition: str
    start: bytes | None
    end: bytes


@dataclass(frozen=True, slots=True)
class Persist(IntakeCall, AnsweredBy["Accepted"], route=Route.STREAM):
    """Store records and register them: ``values[i]`` is the XOR of the ids of row i's copies; None: the root."""

    stream: str
    payload: pa.RecordBatch
    roots: RowRoots
    values: U64 | None
    key_hashes: I32 | None = None  # shape (n,) or (n, selectors)
    position: SourcePosition | None = None
    ids: EventIds | None = None
    owner: str = ""

    def check_fields(self) -> None:
        check_rows(len(self.roots), "Persist")
        check_ids(self.roots, "Persist.roots")
        check_lengths("Persist", len(self.roots), payload=self.payload)
        check_values(self.roots, self.values, self.ids, "Persist")
        check_key_hashes(self.key_hashes, len(self.roots), "Persist.key_hashes")
        if self.position is not None:
            check_name(self.position.partition, "Persist.position.partition")


@dataclass(frozen=True, slots=True)
class Ingest(IntakeCall, AnsweredBy["Accepted"], route=Route.STREAM):
    """Store records for delivery to the stream's query; the vertex draws their root ids."""

    stream: str
    payload: pa.RecordBatch

    def check_fields(self) -> None:
        check_rows(self.payload.num_rows, "Ingest")


@dataclass(frozen=True, slots=True)
class Accepted(Reply):
    """Reply to `Persist` and `Ingest`: the rows are stored as ``durability`` says."""

    rows: int


class RootsCall(Call):
    """About roots of any shards."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Xor(RootsCall, MemoryCall, AnsweredBy["Xored"], route=Route.ALL):
    """XOR deltas (``values`` None: the roots' own ids); ``hold`` keeps those of roots that are not registered yet."""

    roots: U64
    values: U64 | None
    incarnation: int
    hold: bool = False
    ids: EventIds | None = None

    @property
    def deltas(self) -> U64:
        return self.roots if self.values is None else self.values

    def check_fields(self) -> None:
        check_ids(self.roots, "Xor.roots")
        check_values(self.roots, self.values, self.ids, "Xor")


@dataclass(frozen=True, slots=True)
class Xored(Reply):
    completed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Fail(RootsCall, PassingCall, AnsweredBy["Failed"], route=Route.ALL):
    """End this attempt of each root named; unknown roots are counted, or with ``hold`` kept until they come."""

    failures: tuple[Failure, ...]
    incarnation: int
    hold: bool = False

    def check_fields(self) -> None:
        check_failures(self.failures, "Fail.failures")


@dataclass(frozen=True, slots=True)
class Failed(Reply):
    """Reply to `Fail`: roots that wait for a replay, that are dead now, that are unknown, that are unknown as yet."""

    waiting: int
    dead: int
    unknown: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Touch(RootsCall, MemoryCall, AnsweredBy["Touched"], route=Route.ALL):
    """Start the time of these roots again."""

    roots: U64
    incarnation: int

    def check_fields(self) -> None:
        check_ids(self.roots, "Touch.roots")


@dataclass(frozen=True, slots=True)
class Touched(Reply):
    touched: int


@dataclass(frozen=True, slots=True)
class ClaimJob(DurableCall, AnsweredBy["JobClaimed"], route=Route.JOB):
    """Take a topology over for a new run: earlier runs are fenced off from here on, durably.

    Calls about its streams that name another run as ``owner`` get `StaleOwnerError`; those that name none pass.
    """

    job: str
    run: str

    def check_fields(self) -> None:
        check_name(self.run, "ClaimJob.run", MAX_RUN_BYTES)


@dataclass(frozen=True, slots=True)
class JobClaimed(Reply):
    """Reply to `ClaimJob`: the run that had claimed the job before, "" if none had."""

    previous: str


@dataclass(frozen=True, slots=True)
class OpenStream(MutatingCall, AnsweredBy["StreamOpened"], route=Route.STREAM):
    """Declare a stream and its options (idempotent; new options replace the old ones)."""

    stream: str
    options: StreamOptions = field(default_factory=StreamOptions)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class StreamOpened(Reply):
    """Where each source partition is to go on reading; ``exact``: `EventIds` are worth sending.

    ``held`` are the partitions of `TakeOver`, ``planned`` what `NoteRange` noted, in the order of their numbers.
    """

    incarnation: int
    positions: dict[str, bytes]
    exact: bool = False
    held: tuple[str, ...] = ()
    planned: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TakeReplays(PassingCall, AnsweredBy[RecordBatches], route=Route.STREAM):
    """Take up to ``limit`` due replays of a stream that is not read by offset; each has its root as one id."""

    stream: str
    limit: int
    owner: str = ""

    def check_fields(self) -> None:
        check_least(self.limit, 1, "TakeReplays.limit")


@dataclass(frozen=True, slots=True)
class Recall(PassingCall, AnsweredBy["Recalled"], route=Route.ALL):
    """Make every pending root of these streams due for replay at once: the slots that worked on them may be gone.

    Their roots leave the tracker (late events are ignored), and the attempt that ends is not counted. Streams are of
    one job; an unknown one is an error. Not covered: a `Persist` of the job's run that is answered later.
    """

    streams: tuple[str, ...]
    incarnation: int
    owner: str = ""

    def check_fields(self) -> None:
        check_streams(self.streams, "Recall.streams")


@dataclass(frozen=True, slots=True)
class Recalled(Reply):
    rows: int


@dataclass(frozen=True, slots=True)
class StreamStatusCall(ReadingCall, AnsweredBy["StreamStatus"], route=Route.ALL):
    """What is still to do for these streams of one job?"""

    streams: tuple[str, ...]
    owner: str = ""

    def check_fields(self) -> None:
        check_streams(self.streams, "StreamStatusCall.streams")


@dataclass(frozen=True, slots=True)
class StreamStatus(Reply):
    """Reply to `StreamStatusCall`: sums over the streams.

    ``pending`` roots are registered and not complete, ``due`` can be taken now (`TakeReplays`), ``waiting``
    have their pause still to go (``next_due_in_ms``, -1 when nothing is due or waits), ``dead`` are dead
    letters. Of the records of a stream whose pause is over, 10,000 at most are counted as ``due``, the rest
    as ``waiting``; so are all those that a circuit breaker holds. ``done`` counts what completed since the vertex's
    start. ``circuits`` are the breakers of these streams by name.
    """

    pending: int
    due: int
    waiting: int
    dead: int
    next_due_in_ms: int
    done: int = 0
    circuits: dict[str, CircuitStatus] = field(default_factory=dict)

    @property
    def drained(self) -> bool:
        """Whether a bounded job could end."""
        return not (self.pending or self.due or self.waiting)


MAX_PARTITIONS = 65_536
MAX_HOLDER_BYTES = 2 * MAX_RUN_BYTES
MAX_DIGEST_BYTES = 64
MAX_PLANNED_BYTES = 16 << 20
"""Offsets of all splits of a source, as text."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """Rows of a source's ``partition`` from position ``start`` (None: its beginning) to ``end``.

    ``number`` and ``first`` say where the rows are, in an order in which a partition is read: ``rows`` of them behind
    place ``first`` of split ``number``. They take ``span`` places: as many as there are rows, or more where a log has
    gaps between its offsets. ``digest`` is one of their values: equal rows have equal digests. Zero rows only move the
    position on.
    """

    partition: str
    start: bytes | None
    end: bytes
    number: int
    first: int
    rows: int
    span: int
    digest: bytes = b""

    def check(self, where: str) -> None:
        check_name(self.partition, f"{where}.partition")
        check_least(self.number, 0, f"{where}.number")
        check_least(self.first, 0, f"{where}.first")
        check_least(self.span, self.rows, f"{where}.span")
        check_most(self.digest, MAX_DIGEST_BYTES, f"{where}.digest", "bytes ")

    @property
    def begins(self) -> tuple[int, int]:
        return self.number, self.first

    @property
    def ends(self) -> tuple[int, int]:
        return self.number, self.first + self.span


@dataclass(frozen=True, slots=True)
class NoteRange(PassingCall, AnsweredBy["RangeNoted"], route=Route.STREAM):
    """Keep, durably, what range ``number``, soon to be opened, is read by; those below ``first`` are done, and go."""

    stream: str
    number: int
    planned: bytes
    first: int
    owner: str = ""

    def check_fields(self) -> None:
        check_least(self.first, 0, "NoteRange.first")
        check_least(self.number, self.first, "NoteRange.number")
        check_most(self.planned, MAX_PLANNED_BYTES, "NoteRange.planned", "bytes ")


@dataclass(frozen=True, slots=True)
class RangeNoted(Reply):
    """Reply to `NoteRange`."""


@dataclass(frozen=True, slots=True)
class TakeOver(PassingCall, AnsweredBy["TakenOver"], route=Route.STREAM):
    """Hold these partitions of a stream from here on, as ``holder``; others' calls about them are refused."""

    stream: str
    partitions: tuple[str, ...]
    holder: str
    owner: str = ""

    def check_fields(self) -> None:
        _check_holder(self)
        check_most(self.partitions, MAX_PARTITIONS, "TakeOver.partitions")
        for index, partition in enumerate(self.partitions):
            check_name(partition, f"TakeOver.partitions[{index}]")


@dataclass(frozen=True, slots=True)
class OpenRange:
    """A range with rows that are not done; ``segment`` is what calls name it by, in this incarnation."""

    segment: int
    range: RowRange


@dataclass(frozen=True, slots=True)
class HeldPartition:
    """A partition as its holder finds it.

    Attributes:
        position: up to which its rows are registered; None: none was; ``number`` and ``place`` as in `RowRange`.
        ranges: those that have to be held, or read again, without gaps up to ``position``.
    """

    partition: str
    position: bytes | None
    number: int
    place: int
    ranges: tuple[OpenRange, ...]


@dataclass(frozen=True, slots=True)
class TakenOver(Reply):
    """Reply to `TakeOver`. Calls of the holder name ``incarnation``."""

    incarnation: int
    partitions: tuple[HeldPartition, ...]


@dataclass(frozen=True, slots=True)
class Register(MemoryCall, AnsweredBy["Registered"], route=Route.STREAM):
    """Register rows that their holder keeps (``values`` as in `Persist`) in memory; ``wanted``: as replays, stored."""

    stream: str
    range: RowRange
    roots: RowRoots
    values: U64 | None
    holder: str
    incarnation: int
    ids: EventIds | None = None
    owner: str = ""
    wanted: bool = False

    def check_fields(self) -> None:
        _check_holder(self)
        self.range.check("Register.range")
        check_rows(len(self.roots), "Register")
        check_ids(self.roots, "Register.roots")
        check_values(self.roots, self.values, self.ids, "Register")
        if self.range.rows != len(self.roots):
            raise MalformedRequestError(
                f"Register.range.rows: expected {len(self.roots)}, as Register.roots has, got {self.range.rows}"
            )


@dataclass(frozen=True, slots=True)
class Registered(Reply):
    """Reply to `Register`: what the range is named from here on."""

    segment: int


@dataclass(frozen=True, slots=True)
class AskRanges(MemoryCall, AnsweredBy["RangesTold"], route=Route.STREAM):
    """What need not be held any more, and which rows are wanted?"""

    stream: str
    holder: str
    incarnation: int
    owner: str = ""

    def check_fields(self) -> None:
        _check_holder(self)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a range, by their place in it (uint64[m], ascending), that are to be stored."""

    segment: int
    rows: U64


@dataclass(frozen=True, slots=True)
class RangesTold(Reply):
    """``done_below``: by partition, the segment of the first range to be held; what is before is durably done.

    Of ``wanted`` rows there may be more than a reply has.
    """

    done_below: dict[str, int]
    wanted: tuple[WantedRows, ...]


@dataclass(frozen=True, slots=True)
class StoreRows(PassingCall, AnsweredBy["RowsStored"], route=Route.STREAM):
    """Store rows of a range that are still wanted, by their places in it (uint64[m], ascending), like any record."""

    stream: str
    segment: int
    rows: U64
    payload: pa.RecordBatch
    holder: str
    incarnation: int
    key_hashes: I32 | None = None  # shape (n,) or (n, selectors)
    owner: str = ""

    def check_fields(self) -> None:
        _check_holder(self)
        check_least(self.segment, 0, "StoreRows.segment")
        check_rows(len(self.rows), "StoreRows")
        if self.payload.num_rows != len(self.rows):
            raise MalformedRequestError(
                f"StoreRows.payload: expected {len(self.rows)} rows, as StoreRows.rows has, got "
                f"{self.payload.num_rows}"
            )
        check_key_hashes(self.key_hashes, len(self.rows), "StoreRows.key_hashes")
        if len(self.rows) and (int(self.rows[-1]) >= 1 << 20 or np.any(self.rows[1:] <= self.rows[:-1])):
            raise MalformedRequestError("StoreRows.rows: expected places below 2^20 in ascending order")


@dataclass(frozen=True, slots=True)
class RowsStored(Reply):
    rows: int


def _check_holder(call: TakeOver | Register | AskRanges | StoreRows) -> None:
    where = type(call).__name__
    check_name(call.holder, f"{where}.holder", MAX_HOLDER_BYTES)


class BatchState(StrEnum):
    NEW = "new"
    SEALED = "sealed"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class OpenQuery(DurableCall, AnsweredBy["QueryOpened"], route=Route.QUERY):
    """Take a query over for a new run: older epochs are fenced off from here on.

    ``streams`` are its wrapped sources and ingests; an ingest that another query has claimed is
    refused with `StaleOwnerError` naming that query. ``title`` is what people call it; "": as the vertex knows it.
    ``run`` is unique to each take-over; what is before its first dot names the execution, which announces itself so.
    """

    query: str
    run: str
    streams: tuple[str, ...]
    options: StreamOptions = field(default_factory=StreamOptions)
    title: str = ""

    def check_fields(self) -> None:
        for index, stream in enumerate(self.streams):
            check_name(stream, f"OpenQuery.streams[{index}]")
        if self.title:
            check_name(self.title, "OpenQuery.title")


@dataclass(frozen=True, slots=True)
class QueryOpened(Reply):
    """Reply to `OpenQuery`. Batch ids are -1 where there was none yet; ``exact``: see `StreamOpened`."""

    epoch: int
    incarnation: int
    last_sealed: int
    last_committed: int
    shard: int = 0
    shards: int = 1
    exact: bool = False


@dataclass(frozen=True, slots=True)
class Deliverable(MutatingCall, AnsweredBy["DeliverableUpTo"], route=Route.STREAM):
    """How far can a query read ``stream`` from ``start``, taking ``max_rows`` at most? Logs due replays."""

    enveloped: ClassVar[bool] = False

    stream: str
    start: int
    max_rows: int

    def check_fields(self) -> None:
        check_least(self.start, 0, "Deliverable.start")
        check_least(self.max_rows, 1, "Deliverable.max_rows")


@dataclass(frozen=True, slots=True)
class DeliverableUpTo(Reply):
    """Reply to `Deliverable`: the end offset (= start: nothing now)."""

    end: int


@dataclass(frozen=True, slots=True)
class ReadDeliveries(ReadingCall, AnsweredBy[RecordBatches], route=Route.STREAM):
    """The rows of [start, end) in delivery order. The same answer until a later batch begins."""

    stream: str
    start: int
    end: int

    def check_fields(self) -> None:
        check_range(self.start, self.end, "ReadDeliveries")


@dataclass(frozen=True, slots=True)
class BatchCall(MutatingCall):
    query: str
    epoch: int
    batch: int

    def check_fields(self) -> None:
        where = type(self).__name__
        check_least(self.epoch, 0, f"{where}.epoch")
        check_least(self.batch, 0, f"{where}.batch")


@dataclass(frozen=True, slots=True)
class BeginBatch(BatchCall, AnsweredBy["BatchBegun"], route=Route.QUERY):
    """A query is about to run this batch; forgets what older committed batches kept."""


@dataclass(frozen=True, slots=True)
class Report:
    """A batch's report on records that other queries, maybe uncommitted yet, handed on: events with ``hold``."""

    done: tuple[Xor, ...] = ()
    failed: tuple[Fail, ...] = ()

    def check(self, where: str) -> None:
        for index, event in enumerate(self.done):
            check_values(event.roots, event.values, event.ids, f"{where}.done[{index}]")
        for index, fail in enumerate(self.failed):
            check_failures(fail.failures, f"{where}.failed[{index}].failures")


@dataclass(frozen=True, slots=True)
class BatchBegun(Reply):
    """Reply to `BeginBatch`. Only if SEALED: what the seal (and its reseals) said had failed.

    ``failed`` are the rewindable source rows the seal took, ``redelivered`` the roots of the delivered
    rows that failed, ``resumed`` the failures of records resumed from another query. Only if COMMITTED, and of
    the last batch: ``report``, which may not have been sent to its end.
    """

    state: BatchState
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[int, ...] = ()
    resumed: tuple[Failure, ...] = ()
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class SealedRows:
    """Rows of a rewindable source the vertex takes over at a seal, under their ids in this run, one failure a row."""

    stream: str
    payload: pa.RecordBatch
    roots: U64
    failures: tuple[Failure, ...]
    key_hashes: I32 | None = None

    def check(self, where: str) -> None:
        check_name(self.stream, f"{where}.stream")
        check_rows(len(self.roots), where)
        check_ids(self.roots, f"{where}.roots")
        check_lengths(where, len(self.roots), payload=self.payload, failures=self.failures)
        check_key_hashes(self.key_hashes, len(self.roots), f"{where}.key_hashes")
        for row, failure in enumerate(self.failures):
            if failure.root != int(self.roots[row]):
                raise MalformedRequestError(
                    f"{where}.failures[{row}].root: differs from {where}.roots[{row}]"
                )


@dataclass(frozen=True, slots=True)
class EmittedRows:
    """Rows handed to another query, pending until that is done; ``values[i]`` is the XOR of ids under ``roots[i]``.

    ``payload`` is None for rows that the vertex has delivered, and stored.
    """

    stream: str
    payload: pa.RecordBatch | None
    roots: U64
    values: U64
    ids: EventIds | None = None

    def check(self, where: str) -> None:
        check_name(self.stream, f"{where}.stream")
        check_rows(len(self.roots), where)
        check_ids(self.roots, f"{where}.roots")
        check_lengths(where, len(self.roots), values=self.values)
        check_event_ids(self.ids, self.values, f"{where}.ids")
        if self.payload is not None:
            check_lengths(where, len(self.roots), payload=self.payload)


@dataclass(frozen=True, slots=True)
class Seal(BatchCall, IntakeCall, AnsweredBy["Sealed"], route=Route.QUERY):
    """The verdict of a batch: what failed, what was handed on; everything else of it is done at commit.

    ``delivered`` gives for each stream the offsets [start, end) this batch was given. ``redelivered`` are failures of
    delivered rows (the vertex has their payload), ``resumed`` those of records another query emitted: kept and handed
    back. ``report`` are the events for all records that were resumed; it is kept and has no effect: the caller sends
    them once the batch is committed, and again if `BeginBatch` then hands them back. Sealing a sealed batch again is
    refused unless it says the same; a *sealed* batch that is run again uses `Reseal`.
    """

    delivered: dict[str, tuple[int, int]]
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()
    report: Report = field(default_factory=Report)

    def check_fields(self) -> None:
        _check_verdict(self)
        for stream, (start, end) in self.delivered.items():
            check_name(stream, "Seal.delivered")
            check_range(start, end, f"Seal.delivered[{stream!r}]")


@dataclass(frozen=True, slots=True)
class Reseal(BatchCall, IntakeCall, AnsweredBy["Sealed"], route=Route.QUERY):
    """Add what failed when a sealed batch was run again; ``emitted`` and ``report`` replace what the seal said."""

    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()
    report: Report = field(default_factory=Report)

    def check_fields(self) -> None:
        _check_verdict(self)


@dataclass(frozen=True, slots=True)
class Sealed(Reply):
    """Reply to `Seal` and `Reseal`: of the failed rows, how many will wait and how many are dead at commit."""

    waiting: int
    dead: int


@dataclass(frozen=True, slots=True)
class Commit(BatchCall, DurableCall, AnsweredBy["Committed"], route=Route.QUERY):
    """The sink has the batch: its failed rows start to wait for replay, the rest is done. Idempotent."""


@dataclass(frozen=True, slots=True)
class Committed(Reply):
    """Reply to `Commit`. ``again`` when it had been committed before."""

    again: bool


@dataclass(frozen=True, slots=True)
class QueryStatusCall(ReadingCall, AnsweredBy["QueryStatus"], route=Route.QUERY):
    """How much is still to do for a query?"""

    query: str


@dataclass(frozen=True, slots=True)
class QueryStatus(Reply):
    """Counts of rows over a query's streams; ``next_due_in_ms`` is -1 when nothing waits."""

    waiting: int
    deliverable: int
    delivered: int
    pending: int
    dead: int
    next_due_in_ms: int

    @property
    def drained(self) -> bool:
        """Whether a bounded job could end."""
        return not (self.waiting or self.deliverable or self.delivered or self.pending)

    def _repr_html_(self) -> str:
        names = ("waiting", "deliverable", "delivered", "pending", "dead")
        title = "nothing is left to do" if self.drained else "rows that are not done"
        return html_table(title, names, [tuple(getattr(self, name) for name in names)])


def _check_verdict(call: Seal | Reseal) -> None:
    BatchCall.check_fields(call)
    where = type(call).__name__
    check_failures(call.redelivered, f"{where}.redelivered")
    check_failures(call.resumed, f"{where}.resumed")
    call.report.check(f"{where}.report")
    for index, sealed in enumerate(call.failed):
        sealed.check(f"{where}.failed[{index}]")
    for index, emitted in enumerate(call.emitted):
        emitted.check(f"{where}.emitted[{index}]")
