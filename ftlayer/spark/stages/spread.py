"""Key partitioning ahead of Spark's shuffle: a stage sorts its rows into pages by their target partition.

Spark then moves whole pages (`DataFrame.repartitionById`) where it would move rows one by one. The target is
what Spark's own ``repartition(partitions, *columns)`` gives: pmod of its hash over the columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ftlayer.records.keyhash import key_column, partition_of, spark_hash


@dataclass(frozen=True)
class Spread:
    """Rows go to the partition that the hash of ``columns`` names, of ``partitions``."""

    columns: tuple[str, ...]
    partitions: int

    def split(self, batches: Sequence[pa.RecordBatch]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of ``batches`` (one schema) by partition, in their order; empty ones are left out."""
        if not batches:
            return
        rows = pa.concat_batches(batches)
        targets = partition_of(spark_hash([key_column(rows, name) for name in self.columns]), self.partitions)
        order = np.argsort(targets, kind="stable")
        rows = rows.take(pa.array(order))
        edges = np.searchsorted(targets[order], np.arange(self.partitions + 1))
        for partition in np.flatnonzero(np.diff(edges)):
            start, stop = int(edges[partition]), int(edges[partition + 1])
            yield int(partition), rows.slice(start, stop - start)
