"""Small batches made into larger ones, and very large ones into smaller."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from ftlayer.handler.record_ids import concat_record_ids
from ftlayer.records.ids import I32Array, I64Array
from ftlayer.runtime.protocol.elements import Batch, RecordIds

MAX_BATCH_BYTES = 16 << 20
"""A batch of more bytes is cut, so that credits mean something; a single record may be larger."""


def size_of(batch: Batch) -> int:
    """Return about how many bytes of memory a batch holds on to: what views share is counted for each."""
    size = int(batch.payload.get_total_buffer_size())
    if batch.lineage is not None:
        size += 2 * int(batch.lineage.roots.nbytes)
    return size


def can_join(one: Batch, other: Batch) -> bool:
    """Whether two batches of a channel can be made into one: both have times or neither, and so for lineage.

    They are of the same split, too.
    """
    if one.split != other.split:
        return False
    return (one.lineage is None) == (other.lineage is None) and (one.times is None) == (other.times is None)


def joined(batches: Sequence[Batch]) -> Batch:
    """Return the rows of several batches (see `can_join`) as one; a single one as it is."""
    if len(batches) == 1:
        return batches[0]
    lineages = [batch.lineage for batch in batches if batch.lineage is not None]
    return Batch(
        pa.concat_batches([batch.payload for batch in batches]),
        concat_record_ids(lineages) if lineages else None,
        _concatenated([batch.times for batch in batches if batch.times is not None]),
        batches[0].split,
    )


def cut(batch: Batch, max_rows: int) -> list[Batch]:
    """Cut a batch of more than twice ``max_rows``, or of more than `MAX_BATCH_BYTES`, into several views."""
    rows = batch.num_rows
    step = max_rows if rows > 2 * max_rows else rows
    if batch.payload.get_total_buffer_size() > MAX_BATCH_BYTES and batch.payload.nbytes > MAX_BATCH_BYTES:
        step = min(step, max(1, rows * MAX_BATCH_BYTES // batch.payload.nbytes))
    if step >= rows:
        return [batch]
    return [rows_of(batch, start, min(start + step, rows)) for start in range(0, rows, step)]


def rows_of(batch: Batch, start: int, end: int) -> Batch:
    """Return the rows from ``start`` up to ``end`` of a batch, as views."""
    lineage = batch.lineage
    return Batch(
        batch.payload.slice(start, end - start),
        None if lineage is None else _lineage_of(lineage, start, end),
        None if batch.times is None else batch.times[start:end],
        batch.split,
    )


def _lineage_of(lineage: RecordIds, start: int, end: int) -> RecordIds:
    offsets: I32Array | None = None
    if lineage.offsets is not None:
        first, last = int(lineage.offsets[start]), int(lineage.offsets[end])
        offsets = lineage.offsets[start : end + 1] - np.int32(first)
    else:
        first, last = start, end
    origins = None if lineage.origins is None else lineage.origins[first:last]
    tries = None if lineage.tries is None else lineage.tries[first:last]
    roots = lineage.roots[first:last]
    ids = roots if lineage.ids is lineage.roots else lineage.ids[first:last]
    return RecordIds(roots, ids, offsets, origins, tries)


def _concatenated(arrays: list[I64Array]) -> I64Array | None:
    return np.concatenate(arrays) if arrays else None
