"""Find, in a batch that is run again, the source rows that its seal took: as a multiset, by content.

Partition numbers and the order of rows may differ between the runs (SPARK-28650), so a row is known by
what it holds. Of rows that are equal, as many are left out as the seal took.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from ftlayer.errors import QueryError
from ftlayer.layer.calls import BatchBegun
from ftlayer.spark.stage_task import FT, Skip

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

FOUND_COLUMNS = "partition int, ordinal bigint, digest binary"
FOUND_SCHEMA = pa.schema([("partition", pa.int32()), ("ordinal", pa.int64()), ("digest", pa.binary())])


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Return 16 bytes a row that stand for its content; equal rows have equal ones, NaN equals NaN.

    Text and times are taken as bytes and numbers: what Python cannot hold is what fails.
    """
    columns = [column.view(raw_type(column.type)).to_pylist() for column in batch.columns]
    return [
        hashlib.blake2b(repr(row).encode(), digest_size=16).digest() for row in zip(*columns, strict=True)
    ]


def raw_type(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same layout whose every value Python can hold."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind) or pa.types.is_time64(kind):
        return pa.int64()
    if pa.types.is_date32(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(raw_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(raw_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(raw_type(kind.key_type), raw_type(kind.item_type))
    return kind


def rows_to_skip(source: DataFrame, sealed: BatchBegun) -> Skip:
    """Return what a run of ``source`` (whose rows must not change between readings) has to leave out.

    Raises `QueryError` when a row that the seal took is not in the source any more: the source did not
    give the batch again as it was.
    """
    wanted: Counter[bytes] = Counter()
    for rows in sealed.failed:
        wanted.update(row_digests(rows.payload))
    roots = frozenset(sealed.redelivered) | frozenset(failure.root for failure in sealed.resumed)
    if not wanted:
        return Skip(roots=roots)
    found = source.mapInArrow(_find(frozenset(wanted)), FOUND_COLUMNS).toLocalIterator()
    chosen = choose(((row[0], row[1], bytes(row[2])) for row in found), wanted)
    return Skip(chosen, roots)


def choose(found: Iterable[tuple[int, int, bytes]], wanted: Counter[bytes]) -> dict[int, frozenset[int]]:
    """Choose among the rows found, (partition, ordinal, digest), as many of each digest as are wanted."""
    left = wanted.copy()
    chosen: dict[int, set[int]] = {}
    for partition, ordinal, digest in found:
        if left[digest] > 0:
            left[digest] -= 1
            chosen.setdefault(partition, set()).add(ordinal)
    missing = sum(left.values())
    if missing:
        raise QueryError(
            f"{missing} of {sum(wanted.values())} source rows that failed in the first run of this batch are "
            "not in it any more: the source did not give the same rows for the same offsets again. They are safe "
            "in the vertex, but the batch cannot go on; restore the source's data for these offsets"
        )
    return {partition: frozenset(ordinals) for partition, ordinals in chosen.items()}


def _find(wanted: frozenset[bytes]) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark import TaskContext

        context = TaskContext.get()
        partition = context.partitionId() if context is not None else 0
        ordinal = 0
        for batch in batches:
            delivered = batch.column(FT).is_valid().to_pylist()
            names = [name for name in batch.schema.names if name != FT]
            hits = [
                {"partition": partition, "ordinal": ordinal + place, "digest": digest}
                for place, digest in enumerate(row_digests(batch.select(names)))
                if digest in wanted and not delivered[place]
            ]
            ordinal += batch.num_rows
            if hits:
                yield pa.RecordBatch.from_pylist(hits, schema=FOUND_SCHEMA)

    return find
