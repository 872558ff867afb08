"""Calls of a wrapped query: what it can read, and its micro-batches from begin to commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from ftlayer.notebook import html_table
from ftlayer.vertex.calls.common import I32, U64, EventIds, Failure, StreamOptions
from ftlayer.vertex.calls.streams import Fail, Xor


class BatchState(StrEnum):
    NEW = "new"
    SEALED = "sealed"
    COMMITTED = "committed"


@dataclass(frozen=True, slots=True)
class OpenQuery:
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
class Report:
    """A batch's report on records that other queries handed on: events, each for one incarnation.

    All are kept as events with ``hold``: the query that hands records on may not have committed yet.
    """

    done: tuple[Xor, ...] = ()
    failed: tuple[Fail, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchBegun:
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
    query emitted: kept and handed back. ``report`` are the events for all records that were resumed; it is kept
    and has no effect: the caller sends them once the batch is committed, and again if `BeginBatch` then hands them
    back. Sealing a sealed batch again is refused unless it says the same; a *sealed* batch that is run again uses
    `Reseal`.
    """

    query: str
    epoch: int
    batch: int
    delivered: dict[str, tuple[int, int]]
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()
    report: Report = field(default_factory=Report)


@dataclass(frozen=True, slots=True)
class Reseal:
    """Add to a sealed batch what failed when it was run again: rows that had passed before.

    ``emitted`` and ``report`` replace what the first seal said (the run again has fresh ids).
    """

    query: str
    epoch: int
    batch: int
    failed: tuple[SealedRows, ...] = ()
    redelivered: tuple[Failure, ...] = ()
    resumed: tuple[Failure, ...] = ()
    emitted: tuple[EmittedRows, ...] = ()
    report: Report = field(default_factory=Report)


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
    """How much is still to do for a query?"""

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

    def _repr_html_(self) -> str:
        names = ("waiting", "deliverable", "delivered", "pending", "dead")
        title = "nothing is left to do" if self.drained else "rows that are not done"
        return html_table(title, names, [tuple(getattr(self, name) for name in names)])
