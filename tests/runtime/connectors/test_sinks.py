from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.common.failures import FailException, RowsRejected
from ftlayer.errors import ConfigError
from ftlayer.functions import writing as bisect
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.functions.writing import settle
from ftlayer.runtime.connectors.sinks import MAX_WRITERS, BatchNumbers, open_sink
from ftlayer.runtime.task.contract import Settled, SinkBody
from ftlayer.topology.operators import FunctionSink, Sink, WriterSink

ID = pa.schema([("id", pa.int64())])


def ids(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch({"id": list(numbers)}, schema=ID)


def failed(settled: Settled) -> list[int]:
    return [failure.row for failure in settled.failures]


# ---------------------------------------------------------------- functions


class Table:
    """Takes batches; refuses those with a bad id in them."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.rows: list[int] = []
        self.calls = 0

    def __call__(self, batch: pa.RecordBatch) -> None:
        self.calls += 1
        numbers = batch.column(0).to_pylist()
        for number in numbers:
            if number in self.bad:
                raise ValueError(f"{number} is bad")
        self.rows += numbers


def function_sink(function: Callable[[pa.RecordBatch], Any]) -> SinkBody:
    return open_sink(Sink("out", FunctionSink(function), ID), 0, 1, run="run")


@settings(deadline=None)
@given(st.integers(0, 70), st.sets(st.integers(0, 69)))
def test_just_the_culprits_fail(rows: int, bad: set[int]) -> None:
    table = Table(bad)
    settled = function_sink(table).write(ids(*range(rows)), 0)
    assert settled.rows == rows
    assert failed(settled) == sorted(bad & set(range(rows)))
    assert table.rows == [number for number in range(rows) if number not in bad]
    assert all(failure.reason == f"ValueError: {failure.row} is bad" for failure in settled.failures)
    assert all(failure.operator == "out" for failure in settled.failures)
    assert all("in __call__" in failure.traceback for failure in settled.failures)


def test_one_call_where_nothing_fails() -> None:
    table = Table(set())
    body = function_sink(table)
    assert body.write(ids(*range(1_000)), 0) == Settled(1_000)
    assert table.calls == 1
    assert body.due_ms is None
    assert body.flush(0, force=True) == Settled(0)
    body.close()


def test_one_culprit_costs_few_calls() -> None:
    table = Table({500})
    function_sink(table).write(ids(*range(1_024)), 0)
    assert table.calls <= 2 * 10 + 1


def test_fail_exception_gives_its_own_reason() -> None:
    def refuse(batch: pa.RecordBatch) -> None:
        raise FailException("not today")

    (failure,) = function_sink(refuse).write(ids(1), 0).failures
    assert failure.reason == "not today"


@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt(), SystemExit(1)])
def test_what_is_no_exception_fails_its_rows(error: BaseException) -> None:
    def broken(batch: pa.RecordBatch) -> None:
        raise error

    assert [failure.row for failure in function_sink(broken).write(ids(1, 2), 0).failures] == [0, 1]


@pytest.mark.parametrize("takes_the_rest", [True, False])
@given(st.integers(1, 30), st.sets(st.integers(0, 29)))
def test_rows_that_a_sink_names_fail_alone(takes_the_rest: bool, rows: int, bad: set[int]) -> None:
    """It has taken the others, or gets them again, without those that it has named."""
    bad &= set(range(rows))
    taken: list[int] = []

    def write(batch: pa.RecordBatch) -> None:
        given = batch.column(0).to_pylist()
        refused = {
            place: ValueError(f"{number} is bad") for place, number in enumerate(given) if number in bad
        }
        if takes_the_rest or not refused:
            taken.extend(number for number in given if number not in bad)
        if refused:
            raise RowsRejected(refused)

    failures = settle("out", ids(*range(rows)), write, takes_the_rest=takes_the_rest)
    assert [failure.row for failure in failures] == sorted(bad)
    assert all(failure.reason == f"ValueError: {failure.row} is bad" for failure in failures)
    assert taken == [number for number in range(rows) if number not in bad]


@pytest.mark.parametrize("rejected", [{}, {4: "no"}, {-1: "no"}, {"1": "no"}, {True: "no"}])
def test_rows_that_are_not_there_cannot_be_named(rejected: Any) -> None:
    def write(_: pa.RecordBatch) -> None:
        raise RowsRejected(rejected)

    with pytest.raises(ConfigError, match="RowsRejected"):
        settle("out", ids(0, 1, 2, 3), write)


def test_a_sink_that_is_down_is_not_tried_for_ever() -> None:
    now = 0.0
    calls = 0

    def down(batch: pa.RecordBatch) -> None:
        nonlocal now, calls
        calls += 1
        now += 3.0
        raise OSError("no route")

    failures = settle("out", ids(*range(4_096)), down, lambda: now)
    assert [failure.row for failure in failures] == list(range(4_096))
    assert calls <= 12 + 2 * bisect.GIVE_UP_ROWS


def test_a_slow_sink_that_takes_rows_is_tried_on() -> None:
    now = 0.0
    table = Table({3})

    def slow(batch: pa.RecordBatch) -> None:
        nonlocal now
        now += 5.0
        table(batch)

    failures = settle("out", ids(*range(64)), slow, lambda: now)
    assert [failure.row for failure in failures] == [3]


# ---------------------------------------------------------------- writers


class Message(WriterCommitMessage):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows


class Recorder:
    """What a writer was called with."""

    def __init__(self, bad: set[int] = frozenset(), *, where: str = "write") -> None:  # type: ignore[assignment]
        self.bad = bad
        self.where = where
        self.written: list[list[Any]] = []
        self.committed: list[tuple[int, list[Any]]] = []
        self.aborted: list[tuple[int, list[Any]]] = []

    def note(self, rows: list[Any], numbers: list[int]) -> Message:
        self.written.append(rows)
        if self.where == "write" and self.bad & set(numbers):
            raise ValueError("bad")
        return Message(rows)

    def commit(self, messages: list[Any], batch: int) -> None:
        (message,) = messages
        if self.where == "commit" and self.bad & {row["id"] for row in message.rows}:
            raise ValueError("bad commit")
        self.committed.append((batch, message.rows))

    def abort(self, messages: list[Any], batch: int) -> None:
        self.aborted.append((batch, messages))


class Plain(Recorder, DataSourceStreamWriter):
    def write(self, iterator: Iterator[Row]) -> Message:
        rows = list(iterator)
        return self.note(rows, [row["id"] for row in rows])


class Arrow(Recorder, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        rows = [row for batch in iterator for row in batch.to_pylist()]
        return self.note(rows, [row["id"] for row in rows])


def writer_sink(writer: Any, every_ms: int = 100, max_rows: int = 4, schema: pa.Schema = ID) -> SinkBody:
    return open_sink(Sink("out", WriterSink(writer, every_ms, max_rows), schema), 1, 2, run="run")


def committed(writer: Recorder) -> list[int]:
    return [row["id"] for _, rows in writer.committed for row in rows]


def test_rows_are_gathered_up_to_their_number() -> None:
    writer = Plain()
    body = writer_sink(writer)
    assert body.write(ids(0, 1), 10) == Settled(0)
    assert body.due_ms == 110
    assert body.write(ids(2), 50) == Settled(0)
    assert body.write(ids(3, 4, 5, 6, 7, 8), 60) == Settled(8)
    assert [len(rows) for _, rows in writer.committed] == [4, 4]
    assert body.due_ms == 160
    assert body.flush(159, force=False) == Settled(0)
    assert body.flush(160, force=False) == Settled(1)
    assert body.due_ms is None
    assert body.flush(1_000, force=True) == Settled(0)
    assert committed(writer) == list(range(9))


def test_a_forced_flush_writes_at_once() -> None:
    writer = Plain()
    body = writer_sink(writer)
    body.write(ids(0), 0)
    assert body.flush(0, force=True) == Settled(1)
    assert committed(writer) == [0]


def test_many_bytes_do_not_wait_for_their_number() -> None:
    class Sizes(Recorder, DataSourceStreamArrowWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
            self.written.append([batch.num_rows for batch in iterator])
            return Message([])

    writer = Sizes()
    schema = pa.schema([("data", pa.binary())])
    body = writer_sink(writer, 1_000, 10_000, schema)
    large = pa.record_batch({"data": [bytes(24 << 20)]}, schema=schema)
    assert [body.write(large, 0).rows for _ in range(4)] == [0, 0, 3, 0]


def test_plain_writers_get_rows_as_spark_gives_them() -> None:
    schema = pa.schema(
        [("id", pa.int64()), ("in", pa.struct([("a", pa.int64())])), ("m", pa.map_(pa.string(), pa.int64()))]
    )
    writer = Plain()
    body = writer_sink(writer, schema=schema)
    body.write(pa.record_batch({"id": [1], "in": [{"a": 2}], "m": [[("k", 3)]]}, schema=schema), 0)
    body.flush(0, force=True)
    assert writer.written == [[Row(id=1, **{"in": Row(a=2)}, m={"k": 3})]]
    assert isinstance(writer.written[0][0], Row)


@pytest.mark.parametrize("kind", [Plain, Arrow])
@pytest.mark.parametrize("where", ["write", "commit"])
@pytest.mark.parametrize("bad", [{0}, {7}, {3, 4}, set(range(8))])
def test_a_writer_that_fails_aborts_and_writes_the_others(kind: Any, where: str, bad: set[int]) -> None:
    writer = kind(bad, where=where)
    body = writer_sink(writer, max_rows=8)
    settled = body.write(ids(*range(8)), 0)
    assert settled.rows == 8
    assert failed(settled) == sorted(bad)
    assert committed(writer) == [number for number in range(8) if number not in bad]
    numbers = [number for number, _ in (*writer.committed, *writer.aborted)]
    assert len(set(numbers)) == len(numbers) == len(writer.written)
    for _, (message,) in writer.aborted:
        assert (message is None) == (where == "write")


def test_failures_are_counted_from_the_first_row_that_waited() -> None:
    writer = Plain({1, 6, 9})
    body = writer_sink(writer)
    body.write(ids(0, 1, 2), 0)
    settled = body.write(ids(3, 4, 5, 6, 7, 8, 9), 0)
    assert settled.rows == 8
    assert failed(settled) == [1, 6]
    settled = body.flush(0, force=True)
    assert settled.rows == 2
    assert failed(settled) == [1]


def test_write_has_to_return_a_message() -> None:
    class Silent(Plain):
        def write(self, iterator: Iterator[Row]) -> Any:
            return None

    writer = Silent()
    (failure,) = writer_sink(writer, max_rows=1).write(ids(1), 0).failures
    assert "Silent.write returned a NoneType, not a WriterCommitMessage" in failure.reason
    assert [messages for _, messages in writer.aborted] == [[None]]


def test_an_abort_that_fails_does_not_hide_why(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Plain):
        def abort(self, messages: list[Any], batch: int) -> None:
            raise RuntimeError("cannot abort")

    with caplog.at_level(logging.WARNING):
        (failure,) = writer_sink(Stuck({1}), max_rows=1).write(ids(1), 0).failures
    assert failure.reason == "ValueError: bad"
    assert "abort of batch" in caplog.text
    assert "cannot abort" in caplog.text


def test_memory_errors_of_a_writer_fail_its_rows() -> None:
    class Full(Plain):
        def write(self, iterator: Iterator[Row]) -> Any:
            raise MemoryError

    (failure,) = writer_sink(Full(), max_rows=1).write(ids(1), 0).failures
    assert failure.reason.startswith("MemoryError")


def test_batch_ids_grow_and_are_unique() -> None:
    wall = 1_000.0
    mine, other = BatchNumbers(0, lambda: wall), BatchNumbers(1, lambda: wall)
    first = [mine.next() for _ in range(3)]
    wall = 999.0
    first += [mine.next() for _ in range(3)]
    assert first == sorted(set(first))
    others = [other.next() for _ in range(6)]
    wall = 1_001.0
    successor = BatchNumbers(0, lambda: wall)
    assert len({*first, *others, successor.next()}) == 13
    wall = 4_000_000_000.0
    assert mine.next() < 2**63


def test_too_many_writers() -> None:
    with pytest.raises(ConfigError, match=r"sink 'out': parallelism 4097"):
        open_sink(Sink("out", WriterSink(Plain(), 1, 1), ID), 0, MAX_WRITERS + 1, run="run")


def test_what_is_no_writer() -> None:
    with pytest.raises(ConfigError, match=r"sink 'out': expected a DataSourceStreamWriter"):
        writer_sink(object())


def test_a_schema_that_spark_lacks() -> None:
    with pytest.raises(ConfigError, match=r"sink 'out': Spark has no type"):
        writer_sink(Plain(), schema=pa.schema([("id", pa.uint64())]))


def test_a_third_partys_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    """``meta_capi`` of pyspark-data-sources posts rows to a web service: here, to a stand-in for it."""
    module = pytest.importorskip("pyspark_datasources.meta_capi")
    from ftlayer.functions.data_sources import from_arrow_schema

    posted: list[Any] = []

    class Answer:
        status_code = 200

        def raise_for_status(self) -> None: ...

        def json(self) -> Any:
            return {"events_received": len(posted[-1])}

    def post(url: str, json: Any = None, **more: Any) -> Answer:
        posted.append(json["data"])
        return Answer()

    monkeypatch.setattr(module.requests, "post", post)
    schema = pa.schema([("event_name", pa.string()), ("email", pa.string()), ("event_time", pa.int64())])
    source = module.MetaCapiDataSource({"access_token": "t", "pixel_id": "p"})
    writer = source.streamWriter(from_arrow_schema(schema), False)
    body = writer_sink(writer, max_rows=2, schema=schema)
    rows = {"event_name": ["a", "b"], "email": ["x@y", "z@y"], "event_time": [1, 2]}
    assert body.write(pa.record_batch(rows, schema=schema), 0) == Settled(2)
    assert [event["event_name"] for event in posted[0]] == ["a", "b"]
