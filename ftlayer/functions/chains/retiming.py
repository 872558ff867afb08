"""Functions of two inputs that give what they return event times of its own: pairs of a join have the later one's.

Such a function (`gives_times`) returns each record with its time as one more column, `TIME_COLUMN`; it is the first
of its chain, and what is behind it sees the records without the column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.functions.failures import I64

TIME_COLUMN = "_ft_time"
"""int64, milliseconds since 1970. Users' columns have no such names."""


def gives_times(function: Any) -> bool:
    """Whether what ``function`` returns has the column."""
    return bool(getattr(function, "gives_times", False))


def with_time_column(schema: pa.Schema) -> pa.Schema:
    """Return what such a function emits if its operator emits ``schema``."""
    return schema.append(pa.field(TIME_COLUMN, pa.int64(), nullable=False))


def taken_off(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, I64]:
    """Return the records without the column, and their times: int64[n]."""
    times: I64 = batch.column(TIME_COLUMN).to_numpy().astype(np.int64, copy=False)
    return batch.drop_columns([TIME_COLUMN]), times
