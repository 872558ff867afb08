"""Find, in a batch that is run again, the source rows that its seal took: as a multiset, by content.

Partition numbers and the order of rows may differ between the runs (SPARK-28650), so a row is known by
what it holds. Of rows that are equal, as many are left out as the seal took.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from ftlayer.errors import CodecError, QueryError
from ftlayer.spark.deliveries.row_digests import row_digests
from ftlayer.spark.deliveries.stored_rows import check_none_gone, fit_rows
from ftlayer.spark.stages.task import FT, Skip
from ftlayer.vertex.calls import BatchBegun

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOUND_COLUMNS = "partition int, ordinal bigint, digest binary"
FOUND_SCHEMA = pa.schema([("partition", pa.int32()), ("ordinal", pa.int64()), ("digest", pa.binary())])


def rows_to_skip(source: DataFrame, sealed: BatchBegun, schema: pa.Schema) -> Skip:
    """Return what a run of ``source`` (whose rows must not change between readings) has to leave out.

    ``schema`` are the source's columns. If it has gained some since the seal, rows are known by those they had.

    Raises `QueryError` when a row that the seal took is not in the source any more: the source did not
    give the batch again as it was; and `CodecError` when the sealed rows do not fit the source as it is now.
    """
    wanted: Counter[bytes] = Counter()
    known_by: set[tuple[str, ...]] = set()
    for rows in sealed.failed:
        names = tuple(name for name in schema.names if name in rows.payload.schema.names)
        known_by.add(names)
        wanted.update(row_digests(_as_read_now(rows.payload, schema, names)))
    roots = frozenset(sealed.redelivered) | frozenset(failure.root for failure in sealed.resumed)
    if not wanted:
        return Skip(roots=roots)
    # A row that is known by more columns has fewer that it could be: it chooses first.
    widest_first = tuple(sorted(known_by, key=len, reverse=True))
    found = source.mapInArrow(_find(frozenset(wanted), widest_first), FOUND_COLUMNS).toLocalIterator()
    chosen = choose(((row[0], row[1], bytes(row[2])) for row in found), wanted)
    return Skip(chosen, roots)


def _as_read_now(payload: pa.RecordBatch, schema: pa.Schema, names: tuple[str, ...]) -> pa.RecordBatch:
    """Return sealed rows with the types that the source's columns have now."""
    check_none_gone(payload.schema, schema)
    shape = pa.schema([schema.field(name) for name in names])
    fitted = fit_rows(payload, shape)
    if fitted.misfits:
        raise CodecError(
            "rows that failed in the first run of this batch cannot be found in it with the source's schema as it is "
            f"now, for example: {next(iter(fitted.misfits.values()))}. Read the source with its former schema until "
            "this batch is through"
        )
    return pa.RecordBatch.from_arrays(fitted.columns, names=list(names))


def choose(found: Iterable[tuple[int, int, bytes]], wanted: Counter[bytes]) -> dict[int, frozenset[int]]:
    """Choose among the rows found, (partition, ordinal, digest), as many of each digest as are wanted."""
    left = wanted.copy()
    chosen: dict[int, set[int]] = {}
    for partition, ordinal, digest in found:
        places = chosen.setdefault(partition, set())
        if left[digest] > 0 and ordinal not in places:
            left[digest] -= 1
            places.add(ordinal)
    missing = sum(left.values())
    if missing:
        raise QueryError(
            f"{missing} of {sum(wanted.values())} source rows that failed in the first run of this batch are "
            "not in it any more: the source did not give the same rows for the same offsets again. They are safe "
            "in the vertex, but the batch cannot go on; restore the source's data for these offsets"
        )
    return {partition: frozenset(ordinals) for partition, ordinals in chosen.items() if ordinals}


def _find(
    wanted: frozenset[bytes], known_by: tuple[tuple[str, ...], ...]
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        ordinal = 0
        for batch in batches:
            delivered = batch.column(FT).is_valid().to_pylist()
            digests = zip(*(row_digests(batch.select(names)) for names in known_by), strict=True)
            hits = [
                {"partition": partition, "ordinal": ordinal + place, "digest": digest}
                for place, found in enumerate(digests)
                for digest in found
                if digest in wanted and not delivered[place]
            ]
            ordinal += batch.num_rows
            if hits:
                yield pa.RecordBatch.from_pylist(hits, schema=FOUND_SCHEMA)

    return find
