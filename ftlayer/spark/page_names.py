"""Names of pages: only the copy of a page that the driver has counted is ever read.

Spark may hold two copies of one block, left by two attempts of a task that both came to their end
(speculation, or an executor that was given up and came back), and reads whichever is nearer. Where
functions answer differently each time, the copies differ, and rows read from the one would be judged by
the head of the other. So each page is given a random name when it is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.errors import RecomputedResultError
from ftlayer.spark.pages import PAGE_COLUMNS

MapArrow = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

NAME = "name"
NAMED_PAGE_COLUMNS = f"{PAGE_COLUMNS}, {NAME} binary"
"""The columns of a page with its name (DDL)."""

NAME_BYTES = 16


@dataclass(frozen=True)
class WithNames:
    """Gives the pages of a stage's task their names."""

    task: MapArrow

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Run the task; each page gets the column `NAME`, and its parts (rows without a head) the same one."""
        name = b""
        for row in self.task(batches):
            if row.column("head").null_count == 0:
                name = os.urandom(NAME_BYTES)
            yield row.append_column(NAME, pa.array([name], pa.binary()))


def counted_pages(
    batches: Iterator[pa.RecordBatch], column: str, names: frozenset[bytes]
) -> Iterator[pa.Scalar[Any]]:
    """Yield ``column`` of each page; `RecomputedResultError` for a page that is none of ``names``."""
    for batch in batches:
        for name, value in zip(batch.column(NAME).to_pylist(), batch.column(column), strict=True):
            if name not in names:
                raise RecomputedResultError(
                    "a page of this batch is not the one that was counted: Spark has another copy of it, from "
                    "another attempt of its task; the batch has to run again"
                )
            yield value
