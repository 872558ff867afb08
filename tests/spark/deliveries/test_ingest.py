"""Records accepted from any thread: together where they can, and an answer that is true for each."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest
from pyspark import SparkContext
from pyspark.sql.types import LongType, StringType, StructType

from ftlayer.errors import (
    CodecError,
    ConfigError,
    IntakeTimeoutError,
    MalformedRequestError,
    ProtocolError,
    VertexUnavailableError,
)
from ftlayer.spark.deliveries.ingest_reader import IngestStream
from ftlayer.spark.tracked import struct_of
from ftlayer.vertex.calls import Accepted, Ingest

SCHEMA = StructType().add("a", LongType()).add("s", StringType())


class FakeClient:
    """Keeps what it is given. ``hold`` keeps the next call under way until it is set."""

    def __init__(self, answer: Callable[[list[int]], None] = lambda values: None) -> None:
        self.calls: list[list[int]] = []
        self.streams: set[str] = set()
        self.answer = answer
        self.under_way = threading.Event()
        self.hold: threading.Event | None = None

    def call(self, call: Any) -> Any:
        assert isinstance(call, Ingest)
        self.streams.add(call.stream)
        hold, self.hold = self.hold, None
        if hold is not None:
            self.under_way.set()
            assert hold.wait(600)
        values = call.payload.column("a").to_pylist()
        self.answer(values)
        self.calls.append(values)
        return Accepted(len(values))


class WatchedIngest(IngestStream):
    """Tells how many records wait to be sent together."""

    @property
    def gathered(self) -> int:
        return len(self._gathering.parts)


def ingest_of(client: FakeClient) -> WatchedIngest:
    return WatchedIngest("clicks", SCHEMA, client)  # type: ignore[arg-type]


class Thread(threading.Thread):
    """Puts one record; keeps what came of it."""

    def __init__(self, ingest: IngestStream, value: int) -> None:
        super().__init__(daemon=True)
        self.ingest, self.value = ingest, value
        self.result: Any = "nothing"
        self.start()

    def run(self) -> None:
        try:
            self.result = self.ingest.put({"a": self.value})
        except BaseException as error:  # noqa: BLE001 - kept for the test to look at
            self.result = error


def gathered(ingest: WatchedIngest, client: FakeClient, values: list[int]) -> list[Thread]:
    """Let threads gather behind a call that is under way (of value 0); return them when all are through."""
    client.hold = release = threading.Event()
    threads = [Thread(ingest, 0)]
    assert client.under_way.wait(600)
    threads += [Thread(ingest, value) for value in values]
    while ingest.gathered < len(values):
        pass
    release.set()
    for thread in threads:
        thread.join(600)
    return threads[1:]


def test_records_arrive_as_one_call_and_missing_columns_are_null() -> None:
    client = FakeClient()
    ingest = ingest_of(client)
    ingest.put({"a": 1, "s": "x"})
    ingest.put_many(iter([{"a": 2}, {}, {"s": "y", "a": 3}]))
    assert client.calls == [[1], [2, None, 3]]
    assert client.streams == {"ingest/clicks"}


def test_nothing_is_not_sent() -> None:
    client = FakeClient()
    ingest_of(client).put_many([])
    assert client.calls == []


def test_what_gathers_behind_a_call_travels_together() -> None:
    client = FakeClient()
    threads = gathered(ingest_of(client), client, list(range(1, 9)))
    assert [thread.result for thread in threads] == [None] * 8
    assert client.calls[0] == [0]
    assert sorted(client.calls[1]) == list(range(1, 9))
    assert len(client.calls) == 2


@pytest.mark.parametrize("refusal", [ProtocolError, MalformedRequestError])
def test_what_is_refused_together_goes_one_by_one(refusal: type[Exception]) -> None:
    """Eight records may be too many for one call; none of their senders is to blame."""

    def answer(values: list[int]) -> None:
        if len(values) > 1 or values == [3]:
            raise refusal("too many")

    client = FakeClient(answer)
    threads = gathered(ingest_of(client), client, [1, 2, 3, 4])
    results = {thread.value: thread.result for thread in threads}
    assert isinstance(results.pop(3), refusal)
    assert results == {1: None, 2: None, 4: None}
    assert sorted(value for call in client.calls for value in call) == [0, 1, 2, 4]


@pytest.mark.parametrize("error", [IntakeTimeoutError, VertexUnavailableError])
def test_an_error_of_a_call_is_raised_to_all_whose_records_were_in_it(error: type[Exception]) -> None:
    def answer(values: list[int]) -> None:
        if 0 not in values and 9 not in values:
            raise error("no room")

    client = FakeClient(answer)
    ingest = ingest_of(client)
    threads = gathered(ingest, client, [1, 2, 3])
    assert all(isinstance(thread.result, error) for thread in threads)
    ingest.put({"a": 9})
    assert client.calls == [[0], [9]]


def test_a_sender_that_is_interrupted_reports_no_success() -> None:
    def answer(values: list[int]) -> None:
        if 0 not in values and 9 not in values:
            raise KeyboardInterrupt

    client = FakeClient(answer)
    ingest = ingest_of(client)
    threads = gathered(ingest, client, [1, 2, 3])
    kinds = sorted(type(thread.result).__name__ for thread in threads)
    assert kinds == ["KeyboardInterrupt", "VertexUnavailableError", "VertexUnavailableError"]
    ingest.put({"a": 9})
    assert client.calls == [[0], [9]]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"a": "x"}, "record 1 does not fit the schema: column 'a' is int64, and the value 'x' is not"),
        ({"a": 1.5}, "'a' is an integer, not 1.5"),
        ({"a": 2**63}, "record 1 does not fit the schema: column 'a'"),
        ({"s": "\udc80"}, "record 1 does not fit the schema: column 's'"),
        ({"a": 1, "s": 7}, "record 1 does not fit the schema: column 's' is string, and the value 7 is not"),
        ({"b": 1}, "record 1 has a column 'b'"),
        ({"a": 1, 5: 1}, "record 1 has a column 5"),
        ("a", "record 1 is a str, not a mapping"),
        (None, "record 1 is a NoneType, not a mapping"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_with_all_of_its_call(record: Any, said: str) -> None:
    client = FakeClient()
    with pytest.raises(CodecError, match=said):
        ingest_of(client).put_many([{"a": 1}, record])
    assert client.calls == []


def test_null_where_there_may_be_none_is_refused() -> None:
    client = FakeClient()
    ingest = IngestStream("clicks", StructType().add("a", LongType(), nullable=False), client)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="'a' is null"):
        ingest.put({})


def test_batches_must_have_the_schemas_columns() -> None:
    client = FakeClient()
    ingest = ingest_of(client)
    batch = pa.record_batch({"a": pa.array([1, 2], pa.int64()), "s": ["x", None]}, metadata={"k": "v"})
    ingest.put_batch(batch)
    ingest.put_batch(batch.slice(0, 0))
    assert client.calls == [[1, 2]]
    for wrong in (
        batch.select(["a"]),
        batch.select(["s", "a"]),
        batch.cast(batch.schema.set(0, pa.field("a", pa.int32()))),
    ):
        with pytest.raises(CodecError, match="expected columns"):
            ingest.put_batch(wrong)


@pytest.mark.parametrize("name", ["", "two words", "ingest", None])
def test_a_reader_is_for_a_topology_with_a_name(name: Any) -> None:
    with pytest.raises(ConfigError, match="name of the topology"):
        ingest_of(FakeClient()).reader(name)


def test_a_ddl_schema_without_a_session_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process that has started none.
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    with pytest.raises(ConfigError, match=r"ingest 'clicks'.*there is none.*StructType"):
        struct_of("a bigint, s string", "ingest 'clicks'")
    assert struct_of(SCHEMA, "ingest 'clicks'") is SCHEMA
    for empty in ("", StructType()):
        with pytest.raises(ConfigError, match="schema of 'parse': there is no column in it"):
            struct_of(empty, "parse")
