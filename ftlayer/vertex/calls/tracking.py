"""Calls of sources and tasks: persist records, tell what became of them."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from ftlayer.vertex.calls.common import I32, U64, EventIds, Failure, RowRoots


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
