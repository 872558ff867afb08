"""Calls about a topology and its whole streams: claim it, open them, take or force replays, ask what is left to do."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from ftlayer.circuit import CircuitStatus
from ftlayer.vertex.calls.common import I32, U64, EventIds, Failure, RowRoots, StreamOptions


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """The rows of one call advance ``partition`` of their source from ``start`` to ``end`` without a gap."""

    partition: str
    start: bytes | None
    end: bytes


@dataclass(frozen=True, slots=True)
class Persist:
    """Store records and register them: ``values[i]`` is the XOR of the ids of all copies of row i.

    ``values`` None: there is one copy of each, and its id is the root's.
    """

    stream: str
    payload: pa.RecordBatch
    roots: RowRoots
    values: U64 | None
    key_hashes: I32 | None = None  # shape (n,) or (n, selectors)
    position: SourcePosition | None = None
    ids: EventIds | None = None
    owner: str = ""


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
    """XOR deltas. ``hold`` keeps those of unknown roots for a registration that is still to come (`emit`).

    ``values`` None: the delta of each root is the root's own id.
    """

    roots: U64
    values: U64 | None
    incarnation: int
    hold: bool = False
    ids: EventIds | None = None

    @property
    def deltas(self) -> U64:
        """uint64[n], what is XORed into each root."""
        return self.roots if self.values is None else self.values


@dataclass(frozen=True, slots=True)
class Xored:
    """Reply to `Xor`: how many roots were completed by it, and how many events named an unknown root."""

    completed: int
    unknown: int


@dataclass(frozen=True, slots=True)
class Fail:
    """End this attempt of each root named; unknown roots are ignored and counted.

    ``hold`` keeps failures of unknown roots for a registration that is still to come, which fails then (`emit`).
    """

    failures: tuple[Failure, ...]
    incarnation: int
    hold: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """Reply to `Fail`: roots that wait for a replay, that are dead now, that are unknown, that are unknown as yet."""

    waiting: int
    dead: int
    unknown: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class Touch:
    """Start the time of these roots again."""

    roots: U64
    incarnation: int


@dataclass(frozen=True, slots=True)
class Touched:
    touched: int


@dataclass(frozen=True, slots=True)
class ClaimJob:
    """Take a topology over for a new run: earlier runs are fenced off from here on, durably.

    Calls about a stream of the job that name another run as their ``owner`` are refused with `StaleOwnerError`. Those
    that name none are not checked.
    """

    job: str
    run: str


@dataclass(frozen=True, slots=True)
class JobClaimed:
    """Reply to `ClaimJob`: the run that had claimed the job before, "" if none had."""

    previous: str


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Declare a stream and its options (idempotent; new options replace the old ones)."""

    stream: str
    options: StreamOptions = field(default_factory=StreamOptions)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class StreamOpened:
    """Reply to `OpenStream`: where each source partition is to go on reading.

    ``exact``: the vertex keeps every id, so that `EventIds` are worth sending. ``held`` are the partitions that were
    taken over (`TakeOver`), ``planned`` what was noted of ranges (`NoteRange`), in the order of their numbers.
    """

    incarnation: int
    positions: dict[str, bytes]
    exact: bool = False
    held: tuple[str, ...] = ()
    planned: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class TakeReplays:
    """Take up to ``limit`` due replays of a stream that is pushed (not read by offset); registers them.

    Each is registered with its root id as its one copy's record id.
    """

    stream: str
    limit: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Recall:
    """Make every pending root of these streams due for replay at once: the slots that worked on them may be gone.

    Their roots leave the tracker (late events are ignored), and the attempt that ends is not counted. What has
    failed or timed out already is left as it is. The streams are of one job; an unknown one is an error.
    Not covered: a `Persist` that is answered later; its rows are pending from then on. (One of a run that has lost
    the job is refused.)
    """

    streams: tuple[str, ...]
    incarnation: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Recalled:
    """Reply to `Recall`: how many rows it made due."""

    rows: int


@dataclass(frozen=True, slots=True)
class StreamStatusCall:
    """What is still to do for these streams of one job?"""

    streams: tuple[str, ...]
    owner: str = ""


@dataclass(frozen=True, slots=True)
class StreamStatus:
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
