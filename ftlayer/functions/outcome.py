"""The results of a segment of a chain."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ftlayer.functions.failures import RowFailure

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SideOutput:
    """Records of one side output, and the input row of each: int64[n]."""

    tag: str
    batch: pa.RecordBatch
    parents: I64


@dataclass(frozen=True, slots=True)
class SegmentOutcome:
    """The rows that came out, the input row of each (int64[n]), and what failed."""

    batch: pa.RecordBatch
    parents: I64
    failures: list[RowFailure]
    side: list[SideOutput] = field(default_factory=list)


def without_rows(batch: pa.RecordBatch, parents: I64, failed: I64) -> tuple[pa.RecordBatch, I64]:
    """Leave out the rows that come from the input rows ``failed``."""
    keep = ~np.isin(parents, failed)
    if keep.all():
        return batch, parents
    return batch.filter(pa.array(keep)), parents[keep]


def failed_rows(failures: Iterable[RowFailure]) -> I64:
    """Return the input rows that failed, ascending: int64[n]."""
    return np.array(sorted({failure.row for failure in failures}), dtype=np.int64)
