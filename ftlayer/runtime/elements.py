"""What travels on a channel: record batches, and marks between them. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.records.ids import I32Array, I64Array, U64Array

MIN_TIME_MS = -(2**63)
"""The watermark before the first one."""

MAX_TIME_MS = 2**63 - 1
"""The watermark behind the last record."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The RecordIds of n records.

    Attributes:
        roots, ids: uint64[m], m = n while every record has one anchor.
        offsets: int32[n + 1], record i has the RecordIds ``offsets[i]`` up to ``offsets[i + 1]``, with
            distinct roots; None where each has one.
        origins: uint64[m], the first root of each; None where these are the roots themselves (no replays).
    """

    roots: U64Array
    ids: U64Array
    offsets: I32Array | None = None
    origins: U64Array | None = None

    def __len__(self) -> int:
        return len(self.roots) if self.offsets is None else len(self.offsets) - 1

    @property
    def record_of(self) -> I64Array:
        """int64[m]: the record that each RecordId belongs to."""
        if self.offsets is None:
            return np.arange(len(self.roots), dtype=np.int64)
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))


@dataclass(frozen=True, slots=True)
class Batch:
    """n records: the user's columns, their RecordIds (None with FTStatus.OFF), their times (None: none yet).

    ``times`` is int64[n], milliseconds since 1970.
    """

    payload: pa.RecordBatch
    lineage: Lineage | None = None
    times: I64Array | None = None

    @property
    def num_rows(self) -> int:
        """Number of records."""
        return int(self.payload.num_rows)


@dataclass(frozen=True, slots=True)
class Watermark:
    """No record older than this comes on this channel any more (replays may)."""

    time_ms: int


@dataclass(frozen=True, slots=True)
class Idle:
    """This channel holds no watermark back until it carries something again."""


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """Nothing comes on this channel any more. Implies `MAX_TIME_MS`."""


Element = Batch | Watermark | Idle | EndOfStream
