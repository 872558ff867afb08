"""A replayed row lands in the partition that Spark's own repartition(n, key) puts the original in."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import functions as f
from pyspark.sql.types import IntegerType, StructField, StructType

from ftlayer.records.keyhash import partition_of
from ftlayer.records.traced import KeySelector
from ftlayer.spark.batch.runner import row_digests
from ftlayer.vertex.calls import ReadDeliveries, RecordBatches, Records

pytestmark = pytest.mark.spark

PARTITIONS = 5
ROWS = 60
NO_FILE_HAS = ["day_time_interval", "time", "void"]
SHUFFLED = [("string",), ("decimal_38_0",), ("struct",), ("double", "timestamp")]


def key_types() -> ModuleType:
    path = Path(__file__).parents[2] / "records" / "conftest.py"
    spec = importlib.util.spec_from_file_location("key_types", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def typed_rows() -> pa.Table:
    """Rows with a column of every type, and maps, which are no keys."""
    table = key_types().make_key_table(ROWS, seed=3).drop_columns(NO_FILE_HAS)
    maps = [None if row % 7 == 0 else [(f"k{i}", i * row) for i in range(row % 4)] for row in range(ROWS)]
    table = table.append_column("map", pa.array(maps, pa.map_(pa.string(), pa.int64())))
    return table.append_column("row", pa.array(range(ROWS)))


def digests(table: pa.Table, names: list[str]) -> Counter[bytes]:
    whole = table.select(names).combine_chunks()
    return Counter(digest for batch in whole.to_batches() for digest in row_digests(batch))


def test_rows_of_every_type_are_replayed_unchanged_and_to_their_partition(
    layer: Any, spark: Any, tmp_path: Path, tools: Any
) -> None:
    frame = spark.createDataFrame(typed_rows()).coalesce(1)
    frame.write.parquet(str(tmp_path / "typed"))
    static = spark.read.parquet(str(tmp_path / "typed"))
    names = static.columns
    works = tmp_path / "works"

    def fail_at_first(batch: pa.RecordBatch) -> pa.RecordBatch:
        if not works.exists():
            raise RuntimeError("not yet")
        return batch

    def placed(number: int) -> Any:
        def place(batch: pa.RecordBatch) -> pa.RecordBatch:
            from pyspark import TaskContext

            partition = TaskContext.get().partitionId()  # type: ignore[union-attr]
            return batch.append_column(f"p{number}", pa.array(np.full(batch.num_rows, partition, np.int32)))

        return place

    source = spark.readStream.schema(static.schema).parquet(str(tmp_path / "typed"))
    stream = layer.source(source, name="typed", key=("string", "long")).map_batches(
        fail_at_first, static.schema
    )
    for number, key in enumerate(SHUFFLED):
        schema = StructType([*stream.schema.fields, StructField(f"p{number}", IntegerType())])
        stream = stream.key_by(*key, partitions=PARTITIONS).map_batches(placed(number), schema)
    out: list[pa.Table] = []
    stored: list[Records] = []

    def sink(rows: Any, batch: int) -> None:
        out.append(rows.toArrow())
        for name in {row.stream for row in layer.deliveries(spark).select("stream").collect()}:
            if name.endswith("/typed"):
                reply = layer.client.call(ReadDeliveries(name, 0, ROWS))
                assert isinstance(reply, RecordBatches)
                stored.extend(reply.batches)
        works.touch()

    query = tools.run(stream, sink)
    assert [(r.rows_in, r.failed, r.delivered) for r in query.recent_batches] == [
        (ROWS, ROWS, 0),
        (ROWS, 0, ROWS),
    ]
    replayed = out[1].sort_by("row")
    assert digests(replayed, names) == digests(static.toArrow(), names)

    def spark_places(key: tuple[str, ...]) -> list[int]:
        rows = static.repartition(PARTITIONS, *key).select("row", f.spark_partition_id().alias("p")).toArrow()
        places: list[int] = rows.sort_by("row").column("p").to_pylist()
        return places

    for number, key in enumerate(SHUFFLED):
        assert replayed.column(f"p{number}").to_pylist() == spark_places(key), key

    (records,) = stored
    order = np.argsort(records.payload.column("row").to_numpy())
    assert partition_of(records.key_hashes, PARTITIONS)[order].tolist() == spark_places(("string", "long"))
    for column in set(names) - {"map", "row"}:
        hashes = KeySelector((column,)).hash(records.payload)
        assert partition_of(hashes, PARTITIONS)[order].tolist() == spark_places((column,)), column
