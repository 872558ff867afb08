"""Sinks of wrapped queries that set rows aside, without Spark."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import LongType, StructType

from ftlayer.common.failures import PermanentFailure, RetryLater, RowsRejected
from ftlayer.common.rules.restart import is_programs, lasting
from ftlayer.errors import ConfigError, FTLayerError, QueryError, SinkError
from ftlayer.functions.chains.segments import ROW_TAG
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.spark.batch.sinks import (
    BatchFunctionSink,
    BatchSink,
    BatchWriterSink,
    EmitSink,
    WriteTask,
    rejections,
)

SCHEMA = StructType().add("v", LongType())


def raising(error: Exception) -> Any:
    def sink(rows: Any, batch: int) -> None:
        raise error

    return sink


def test_errors_become_failures_of_the_records_that_rows_name() -> None:
    rejected = RowsRejected({-1: ValueError("bad"), 5: "too long", np.int64(6): PermanentFailure("never")})
    bad, long, never = rejections(rejected, "to_table")
    assert (bad.root, bad.reason, bad.operator, bad.fatal) == (
        2**64 - 1,
        "ValueError: bad",
        "to_table",
        False,
    )
    assert (long.root, long.reason, long.traceback) == (5, "too long", "")
    assert (never.root, never.fatal) == (6, True)


def test_rejecting_takes_rows_and_their_names() -> None:
    with pytest.raises(ConfigError, match="without a row"):
        rejections(RowsRejected({}), "s")
    sink = BatchFunctionSink(raising(RowsRejected({1: "no"})), "s")
    result: Any = SimpleNamespace(good_rows=lambda: None)
    with pytest.raises(ConfigError, match="tagged=True"):
        sink.write(0, result, 1)


class Uncommitting:
    """A writer whose commit raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def commit(self, messages: Any, batch: int) -> None:
        raise self._error

    def abort(self, messages: Any, batch: int) -> None:
        pass


@pytest.mark.parametrize(
    ("sink_of", "name"),
    [
        (lambda error: BatchFunctionSink(raising(error), "to_table"), "query: sink 'to_table'"),
        (lambda error: EmitSink(raising(error), "ft"), "query: the function of emit"),
        (lambda error: BatchWriterSink(Uncommitting(error), "parquet"), "query: writer 'parquet'"),
    ],
)
def test_what_a_sink_raises_names_it_and_the_class(
    kit: SimpleNamespace, sink_of: Callable[[Exception], BatchSink], name: str
) -> None:
    rows = kit.FakeFrame([])
    result: Any = SimpleNamespace(good_rows=lambda: rows, emitted_rows=lambda *_: rows, schema=SCHEMA)

    def raised_by(error: Exception) -> FTLayerError:
        with pytest.raises(FTLayerError) as raised:
            sink_of(error).write(0, result, 1)
        assert raised.value.__cause__ is error
        return raised.value

    error = raised_by(ValueError("no table"))
    assert (str(error), type(error)) == (f"{name} raised ValueError: no table", QueryError)
    assert lasting(error) is None
    error = raised_by(RetryLater("later", after="30s"))
    assert str(error).startswith(f"{name} raised RetryLater: later (")
    assert "restart strategy" in str(error)
    assert lasting(error) is None
    error = raised_by(SinkError("the table is gone"))
    assert (type(error), str(error)) == (SinkError, f"{name} raised SinkError: the table is gone")
    error = raised_by(PermanentFailure("no way"))
    assert (type(error), str(error)) == (PermanentFailure, f"{name} raised PermanentFailure: no way")


def test_an_error_of_a_row_that_is_none_names_the_sink_and_ends_the_query() -> None:
    def sink(rows: Any, batch: int) -> None:
        raise RowsRejected({3: None})  # type: ignore[dict-item]

    result: Any = SimpleNamespace(tagged_rows=lambda: None)
    with pytest.raises(ConfigError) as raised:
        BatchFunctionSink(sink, "to_table", tagged=True).write(0, result, 1)
    assert lasting(raised.value) is raised.value
    assert str(raised.value).startswith(
        "query: sink 'to_table' raised ConfigError: RowsRejected: expected {row: error}"
    )


class NoSuchTenant(PermanentFailure):
    """A failure of a user's own, which is not made of a text."""

    def __init__(self, tenant: int, region: str) -> None:
        super().__init__(f"no tenant {tenant} in {region}")


def test_a_users_own_permanent_failure_of_a_sink_ends_the_query_as_one() -> None:
    result: Any = SimpleNamespace(good_rows=lambda: None)
    with pytest.raises(PermanentFailure) as raised:
        BatchFunctionSink(raising(NoSuchTenant(7, "eu")), "to_table").write(0, result, 1)
    assert type(raised.value) is PermanentFailure
    assert str(raised.value) == "query: sink 'to_table' raised NoSuchTenant: no tenant 7 in eu"


def test_the_exception_survives_pickling_and_says_what_it_is() -> None:
    again = pickle.loads(pickle.dumps(RowsRejected({1: "no", 2: "neither"})))
    assert again.errors == {1: "no", 2: "neither"}
    assert str(again) == "2 rows, for example 1: no"
    assert str(RowsRejected({})) == "no rows"


class Message(WriterCommitMessage):
    def __init__(self, values: list[int]) -> None:
        self.values = values


class Writer(DataSourceStreamArrowWriter):
    """Takes no multiple of ten; ``log`` has what the driver was told."""

    def __init__(self) -> None:
        self.log: list[tuple[str, list[int]]] = []

    def write(self, iterator: Any) -> Message:
        values = [value for batch in iterator for value in batch.column("v").to_pylist()]
        for value in values:
            if value % 10 == 0:
                raise ValueError(f"{value} is round")
        return Message(values)

    def commit(self, messages: Any, batch: int) -> None:
        self.log.append(("commit", sorted(value for message in messages for value in message.values)))

    def abort(self, messages: Any, batch: int) -> None:
        self.log.append(("abort", sorted(value for message in messages for value in message.values)))


def tagged(values: list[int], roots: list[int]) -> pa.RecordBatch:
    return pa.record_batch({"v": values, ROW_TAG: np.array(roots, np.uint64).view(np.int64)})


def test_a_partition_is_written_by_halves_where_it_is_asked_for() -> None:
    task = cloudpickle.loads(cloudpickle.dumps(WriteTask(Writer(), SCHEMA, "table")))
    batches = [tagged([1, 10, 2], [7, 7, 8]), tagged([20, 3], [2**64 - 1, 9])]
    (row,) = task(iter(batches))
    messages, failures, taken = cloudpickle.loads(row.column(0)[0].as_py())
    assert taken == 3
    assert sorted(value for message in messages for value in message.values) == [1, 2, 3]
    assert [(failure.root, failure.reason, failure.operator) for failure in failures] == [
        (7, "ValueError: 10 is round", "table"),
        (2**64 - 1, "ValueError: 20 is round", "table"),
    ]
    (row,) = task(iter([]))
    messages, failures, _ = cloudpickle.loads(row.column(0)[0].as_py())
    assert ([message.values for message in messages], failures) == ([[]], [])
    with pytest.raises(ValueError, match="10 is round"):
        list(WriteTask(Writer(), SCHEMA)(iter([pa.record_batch({"v": [1, 10]})])))


def test_what_was_written_beside_rejected_rows_is_aborted_and_the_rest_committed_as_one(
    kit: SimpleNamespace,
) -> None:
    writer = Writer()
    dropped: set[int] = set()

    def rows() -> Any:
        parts = [([1, 10, 2], [7, 7, 8]), ([30, 20, 3], [5, 5, 9])]
        kept = [
            tagged(*map(list, zip(*pairs, strict=True)))
            for pairs in (
                [pair for pair in zip(*part, strict=True) if pair[1] not in dropped] for part in parts
            )
            if pairs
        ]
        return kit.FakeFrame([[part] for part in kept])

    result: Any = SimpleNamespace(tagged_rows=rows, schema=SCHEMA)
    sink = BatchWriterSink(writer, "table", bisect=True)
    failures = sink.write(0, result, 1)
    assert {failure.root: failure.reason for failure in failures} == {
        7: "ValueError: 10 is round",
        5: "ValueError: 30 is round",
    }
    assert writer.log == [("abort", [1, 2, 3])]
    dropped |= {failure.root for failure in failures}
    assert sink.write(0, result, 1) == ()
    assert writer.log[1:] == [("commit", [2, 3])]


@pytest.mark.parametrize("batch", [0, 1])
def test_a_writer_that_is_wrong_ends_the_query_in_its_first_batch(kit: SimpleNamespace, batch: int) -> None:
    """Behind it, rows are what it fails with."""

    class Wrong(DataSourceStreamArrowWriter):
        def write(self, iterator: Any) -> Any:
            for rows in iterator:
                rows.wirte()
            return Message([])

        def abort(self, messages: Any, batch_id: int) -> None:
            pass

    rows = kit.FakeFrame([[tagged([1, 2], [7, 8])]])
    result: Any = SimpleNamespace(tagged_rows=lambda: rows, schema=SCHEMA)
    sink = BatchWriterSink(Wrong(), "table", bisect=True)
    if batch:
        assert {failure.root for failure in sink.write(batch, result, 1)} == {7, 8}
        return
    with pytest.raises(QueryError, match=r"could write no row of the first batch: .*'wirte'") as caught:
        sink.write(batch, result, 1)
    assert is_programs(caught.value)
