"""An Iceberg table holds each committed row exactly once, whatever is repeated, lost, or committed meanwhile."""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import RowsRejected
from ftlayer.connectors import table_commits
from ftlayer.connectors.iceberg import HOUR_MS, Commits
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import FileMessage, IcebergDataSource, IcebergMessage, IcebergSink

pyiceberg = pytest.importorskip("pyiceberg")
pytest.importorskip("sqlalchemy")

NAMES = (f"shop.table_{number}" for number in itertools.count())


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_commits, "TRY_AGAIN_S", 0)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Properties of a catalog that is not there yet."""
    directory = tmp_path_factory.mktemp("catalog")
    return {
        "type": "sql",
        "uri": f"sqlite:///{directory}/catalog.db",
        "warehouse": f"file://{directory}/warehouse",
    }


@pytest.fixture
def name() -> str:
    """A table that is not there yet."""
    return next(NAMES)


@pytest.fixture
def sink(catalog: dict[str, str], name: str) -> IcebergSink:
    return IcebergSink(name, catalog)


@pytest.fixture
def load(catalog: dict[str, str]) -> Iterator[Any]:
    """Loads a table."""
    from pyiceberg.catalog import load_catalog

    opened = load_catalog("default", **catalog)
    yield opened.load_table
    opened.close()


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64())})])


def numbers_in(table: Any) -> list[int]:
    return sorted(table.scan().to_arrow()["n"].to_pylist())


def data_files(table: Any) -> int:
    directory = Path(table.location().removeprefix("file://"))
    return sum(1 for _ in directory.rglob("*.parquet"))


def again(sink: IcebergSink) -> IcebergSink:
    """The sink of another process."""
    copy: IcebergSink = pickle.loads(pickle.dumps(sink))
    return copy


def test_rows_are_seen_when_they_are_committed(sink: IcebergSink, name: str, load: Any) -> None:
    messages = [again(sink).write(rows(1, 2)), again(sink).write(rows(3)), again(sink).write(iter([])), None]
    assert numbers_in(load(name)) == []
    assert [message.rows for message in messages if message] == [2, 1, 0]
    again(sink).commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(load(name)) == [1, 2, 3]
    (snapshot,) = load(name).snapshots()
    assert snapshot.summary["ftlayer.number"] == "7"
    assert "commit.retry.num-retries" not in load(name).properties


def test_a_commit_that_comes_again_changes_nothing(sink: IcebergSink, name: str, load: Any) -> None:
    first, second, third = sink.write(rows(1)), sink.write(rows(2)), sink.write(rows(3))
    sink.commit([third], 1)
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    again(sink).commit([first, second], 2)
    sink.commit([second, first, third], 3)
    assert numbers_in(load(name)) == [1, 2, 3]
    assert len(load(name).snapshots()) == 3
    (known,) = [value for key, value in load(name).properties.items() if key.startswith("ftlayer.commits.")]
    assert known.endswith(" 1-3")


def test_an_abort_removes_what_waits_and_nothing_else(sink: IcebergSink, name: str, load: Any) -> None:
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    sink.abort([second], 2)
    assert numbers_in(load(name)) == [1]
    assert data_files(load(name)) == 1
    with pytest.raises(UncommittableError, match="is gone or changed"):
        sink.commit([second], 3)


def test_a_write_that_fails_leaves_nothing(sink: IcebergSink, name: str, load: Any) -> None:
    def raising() -> Any:
        yield from rows(1, 2)
        raise ValueError("the user's")

    sink.commit([sink.write(rows(0))], 1)
    with pytest.raises(ValueError, match="the user's"):
        sink.write(raising())
    assert data_files(load(name)) == 1


# ---------------------------------------------------------------- columns


def test_columns_and_partitions_of_a_table_that_is_there(
    catalog: dict[str, str], sink: IcebergSink, name: str, load: Any
) -> None:
    from pyiceberg.catalog import load_catalog
    from pyiceberg.schema import Schema
    from pyiceberg.transforms import BucketTransform, DayTransform
    from pyiceberg.types import LongType, NestedField, StringType, TimestamptzType

    schema = Schema(
        NestedField(1, "key", StringType(), required=True),
        NestedField(2, "n", LongType()),
        NestedField(3, "at", TimestamptzType()),
    )
    opened = load_catalog("default", **catalog)
    opened.create_namespace_if_not_exists("shop")
    with opened.create_table(name, schema).update_spec() as spec:
        spec.add_field("key", BucketTransform(4))
        spec.add_field("at", DayTransform())
    at = pa.array(
        [datetime.datetime(2026, 11, day, tzinfo=datetime.UTC) for day in (1, 2, 2)],
        pa.timestamp("us", "UTC"),
    )
    keys = pa.array(["a", "b", "c"])
    message = sink.write(iter([pa.record_batch({"at": at, "key": keys.dictionary_encode()})]))
    assert len(message.files) >= 2
    sink.commit(pickle.loads(pickle.dumps([message])), 1)
    found = load(name).scan().to_arrow().sort_by("key")
    assert (found["key"].to_pylist(), found["at"].to_pylist()) == (keys.to_pylist(), at.to_pylist())
    assert len(load(name).scan(row_filter="key = 'b'").to_arrow()) == 1
    before = data_files(load(name))
    for columns, said in [
        ({"key": keys, "m": keys}, r"has no column 'm' \(it has key, n, at\)"),
        ({"key": keys, "n": keys}, "column 'n' is int64 there, and string in the rows"),
        ({"n": [1]}, "the rows lack 'key'"),
    ]:
        with pytest.raises(SinkError, match=said):
            sink.write(iter([pa.record_batch(columns)]))
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter([pa.record_batch({"key": ["a", None]})]))
    assert list(refused.value.errors) == [1]
    late = pa.array([0, 10**14], pa.timestamp("s", "UTC"))
    with pytest.raises(RowsRejected, match=r"column 'at'.* cannot hold its value") as refused:
        sink.write(iter([pa.record_batch({"key": ["a", "a"], "at": late})]))
    assert list(refused.value.errors) == [1]
    beyond = pa.array([2**62, 0], pa.timestamp("us", "UTC"))  # Python has no such time, pyiceberg wants one.
    with pytest.raises(RowsRejected, match="OverflowError") as refused:
        sink.write(iter([pa.record_batch({"key": ["a", "a"], "at": beyond})]))
    assert list(refused.value.errors) == [0]
    assert data_files(load(name)) == before
    opened.close()


def test_a_table_is_made_with_partitions(catalog: dict[str, str], name: str, load: Any) -> None:
    columns = {
        "day": pa.array([datetime.date(2026, 11, 23), None]),
        "key": pa.array(["a b/ä=%", "c"]),
        "price": pa.array([Decimal("1.50")] * 2, pa.decimal128(10, 2)),
        "parts": pa.array([["x"], None]),
        "at": pa.array([0, None], pa.timestamp("us", "Europe/Berlin")),
        "n": pa.array([1, 2]),
    }
    sink = IcebergSink(name, catalog, partition_by=["day", "key", "price"])
    sink.commit([sink.write(iter([pa.record_batch(columns)]))], 1)
    assert load(name).scan().to_arrow().sort_by("n").to_pylist() == pa.table(columns).to_pylist()
    assert load(name).schema().as_arrow().field("at").type == pa.timestamp("us", "UTC")
    assert [field.name for field in load(name).spec().fields] == ["day", "key", "price"]
    with pytest.raises(SinkError, match="partition column 'm' is not in the rows"):
        IcebergSink("shop.never", catalog, partition_by=["m"]).write(rows(1))


def test_a_table_that_has_changed_since(
    sink: IcebergSink, name: str, catalog: dict[str, str], load: Any
) -> None:
    message = sink.write(rows(1))
    with load(name).update_schema() as update:
        update.rename_column("n", "number")
    sink.commit([message], 1)
    assert load(name).scan().to_arrow()["number"].to_pylist() == [1]
    message = sink.write(iter([pa.record_batch({"number": [2]})]))
    with load(name).update_spec() as spec:
        spec.add_identity("number")
    with pytest.raises(UncommittableError, match="is partitioned in another way"):
        sink.commit([message], 2)
    load(name).catalog.drop_table(name)
    sink.commit([sink.write(rows(3))], 3)
    with pytest.raises(UncommittableError, match="was made anew"):
        sink.commit([message], 2)


# ---------------------------------------------------------------- what is known, and for how long


def message(number: int, written_ms: int, query: str = "") -> IcebergMessage:
    return IcebergMessage("w", number, written_ms, (), 1, "", 0, query)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 30), max_size=20))
def test_numbers_are_kept_as_ranges(numbers: list[int]) -> None:
    properties: dict[str, str] = {}
    for number in numbers:
        commits = Commits(properties, HOUR_MS, 0, "it")
        assert commits.is_committed(message(number, 0)) == (
            number in numbers[: numbers.index(number)] or False
        ) or (numbers.count(number) > 1)
        properties |= commits.with_messages([message(number, 0)], 1)
    commits = Commits(properties, HOUR_MS, 0, "it")
    assert {number for number in range(40) if commits.is_committed(message(number, 0))} == set(numbers)


def test_what_is_forgotten_is_said() -> None:
    day_ms = 86_400_000
    old = Commits({}, day_ms, 0, "it").with_messages([message(7, 0)], 1)
    assert Commits(old, day_ms, day_ms, "it").forgotten() == []
    later = Commits(old, day_ms, 2 * day_ms, "it")
    assert later.forgotten() == ["ftlayer.commits.w"]
    assert later.is_committed(message(7, 0)), "it is known for as long as it is there"
    for known in ({}, Commits({}, day_ms, 0, "it").with_messages([message(9, 2 * day_ms)], 1)):
        with pytest.raises(UncommittableError, match="longer ago than remember says"):
            Commits(known, day_ms, 2 * day_ms, "it").is_committed(message(7, 0))
    with pytest.raises(UncommittableError, match="was changed to 'x'"):
        Commits({"ftlayer.commits.w": "x"}, day_ms, 0, "it").is_committed(message(7, 0))


def test_writers_are_forgotten_in_the_table(
    sink: IcebergSink, name: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = sink.write(rows(1))
    sink.commit([old], 1)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 40 * 86_400 * 10**9)
    copy = again(sink)
    copy.commit([copy.write(rows(2))], 2)
    known = [key for key in load(name).properties if key.startswith("ftlayer.commits.")]
    assert known == [f"ftlayer.commits.{copy._numbers.writer}"]
    with pytest.raises(UncommittableError, match="longer ago than remember says"):
        copy.commit([old], 1)
    copy.abort([old], 1)
    assert numbers_in(load(name)) == [1, 2]


# ---------------------------------------------------------------- queries


def test_a_batch_that_spark_runs_again_adds_nothing(
    sink: IcebergSink, name: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-1")
    messages = [again(sink).write(rows(1)), again(sink).write(rows(2))]
    sink.commit(messages, 0)
    sink.commit(messages, 0)
    assert numbers_in(load(name)) == [1, 2], "its own files stay"
    later = again(sink)
    later.commit([later.write(rows(1, 2))], 0)
    later.abort(messages, 0)
    assert data_files(load(name)) == 2
    later.commit([later.write(rows(3))], 1)
    later.abort(messages, 0)
    lost = later.write(rows(4))
    later.abort([lost], 2)
    assert data_files(load(name)) == 3
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-2")
    later.commit([later.write(rows(4))], 0)
    assert numbers_in(load(name)) == [1, 2, 3, 4]


# ---------------------------------------------------------------- faults


def test_another_commits_the_same_between_the_look_and_the_commit(
    sink: IcebergSink, name: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also into a table that had no snapshot yet; pyiceberg by itself would commit again on top."""
    messages = [again(sink).write(rows(1)), again(sink).write(rows(2))]
    add = IcebergSink._add
    left = [1]

    def behind_another(self: IcebergSink, *arguments: Any) -> None:
        if left:
            left.pop()
            again(sink).commit(messages[:1], 1)
        add(self, *arguments)

    monkeypatch.setattr(IcebergSink, "_add", behind_another)
    sink.commit(messages, 1)
    assert numbers_in(load(name)) == [1, 2]
    left.append(1)
    messages = [again(sink).write(rows(3)), again(sink).write(rows(4))]
    sink.commit(messages, 2)
    assert numbers_in(load(name)) == [1, 2, 3, 4]


def test_two_subtasks_make_the_table_at_once(
    sink: IcebergSink, name: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = IcebergSink._create
    left = [1]

    def behind_another(self: IcebergSink, schema: pa.Schema) -> Any:
        if left:
            left.pop()
            again(sink).commit([again(sink).write(rows(1))], 1)
        return create(self, schema)

    monkeypatch.setattr(IcebergSink, "_create", behind_another)
    sink.commit([sink.write(rows(2))], 1)
    assert numbers_in(load(name)) == [1, 2]


class Killed(BaseException):
    """The process ends here."""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "commit", "commit", "again", "abort", "die"]),
        st.integers(1, 3),
        st.sampled_from(["", "before", "behind", "killed before", "killed behind", "another"]),
    ),
    min_size=4,
    max_size=10,
)


@settings(
    max_examples=12, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_against_a_model(catalog: dict[str, str], load: Any, steps: list[tuple[str, int, str]]) -> None:
    """Commits fail or are killed before or behind what they do, others commit the same in between."""
    name = next(NAMES)
    add = IcebergSink._add
    sink = IcebergSink(name, catalog)
    written = itertools.count()
    waiting: list[tuple[Any, list[int]]] = []
    committed: list[Any] = []
    expected: list[int] = []

    def commit(messages: list[Any], number: int, fault: str) -> None:
        """Commit as the driver does: until it has returned, with another process if one was killed."""
        faults = [fault] if fault else []

        def faulty(self: IcebergSink, *arguments: Any) -> None:
            now = faults.pop() if faults else ""
            if now == "another":
                again(sink).commit(messages, number)
            if "before" in now:
                raise Killed if "killed" in now else OSError("made to fail")
            add(self, *arguments)
            if "behind" in now:
                raise Killed if "killed" in now else OSError("the answer is lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(IcebergSink, "_add", faulty)
            try:
                sink.commit(messages, number)
            except Killed:
                again(sink).commit(messages, number)

    for step, size, fault in steps:
        if step == "write":
            numbers = [next(written) for _ in range(size)]
            waiting.append((sink.write(rows(*numbers)), numbers))
        elif step == "commit":
            now, waiting = waiting[:size], waiting[size:]
            commit([message for message, _ in now], size, fault)
            committed += [message for message, _ in now]
            expected += [number for _, numbers in now for number in numbers]
        elif step == "again":
            commit(committed[-size:], size, fault)
        elif step == "abort":
            sink.abort([message for message, _ in waiting] + committed[size:], size)
            waiting = []
        else:
            sink = IcebergSink(name, catalog)
            waiting = waiting[:size]
        if expected:
            assert numbers_in(load(name)) == sorted(expected)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": ""}, "table: expected 'namespace.table'"),
        ({"table": "lines"}, "table: expected 'namespace.table', got 'lines'"),
        ({"catalog": {}}, "catalog: expected properties of pyiceberg's"),
        ({"catalog": {"type": 7}}, "catalog: "),
        ({"catalog": 7}, "catalog: "),
        ({"catalog": {"type": "sq1", "uri": "x"}}, "catalog: type: expected one of .*sql"),
        ({"catalog": ""}, "catalog: "),
        ({"partition_by": "day"}, "partition_by: expected names of columns in a list"),
        ({"remember": "1s"}, "remember: "),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        IcebergSink(**{"table": "shop.lines", "catalog": {"type": "in-memory"}, **options})


def test_options_of_plain_spark() -> None:
    from pyspark.sql.datasource import CaseInsensitiveDict

    options = {"table": "shop.lines", "partitionBy": "day", "catalog.type": "rest", "catalog.uri": "http://x"}
    sink = IcebergDataSource(CaseInsensitiveDict(options)).streamWriter(Any, False)
    assert (sink._partition_by, sink._properties) == (("day",), {"type": "rest", "uri": "http://x"})
    with pytest.raises(ConfigError, match="option 'catalog' is missing"):
        IcebergDataSource(CaseInsensitiveDict({"table": "shop.lines"})).streamWriter(Any, False)


def test_messages_of_another_sink_are_refused(sink: IcebergSink) -> None:
    with pytest.raises(UncommittableError, match="expected messages of IcebergSink, got a FileMessage"):
        sink.commit([FileMessage(None, 0, "")], 1)


def test_a_catalog_that_cannot_be_reached_is_said(tmp_path: Path) -> None:
    catalog = {"type": "sql", "uri": f"sqlite:///{tmp_path}/no/such/directory/catalog.db"}
    with pytest.raises(SinkError, match=r"Iceberg table shop\.lines: rows cannot be staged: "):
        IcebergSink("shop.lines", catalog).write(rows(1))
    assert os.listdir(tmp_path) == []


def test_partitions_whose_names_are_too_long_are_refused(
    catalog: dict[str, str], name: str, load: Any
) -> None:
    """They failed the whole write, and left the files of others behind."""
    sink = IcebergSink(name, catalog, partition_by=["k", "b"])
    keys = ["a", "x" * 254, "ä" * 50, "x" * 253, None]
    batch = pa.record_batch({"k": keys, "b": [b"c", b"c", b"c", b"c", b"y" * 300]})
    with pytest.raises(RowsRejected) as caught:
        sink.write(iter([batch]))
    assert list(caught.value.errors) == [1, 2, 4]
    sink.commit([sink.write(iter([batch.take(pa.array([0, 3]))]))], 1)
    table = load(name)
    assert sorted(table.scan().to_arrow()["k"].to_pylist()) == ["a", "x" * 253]
    assert data_files(table) == 2


def test_a_table_that_is_gone_at_its_commit_is_told_at_once(
    catalog: dict[str, str], sink: IcebergSink, name: str, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", None)
    first, message = sink.write(rows(1)), sink.write(rows(2, 3))
    sink.commit([first], 1)
    where = load(name).metadata_location
    opened = pyiceberg.catalog.load_catalog("default", **catalog)
    opened.drop_table(name)
    with pytest.raises(UncommittableError, match=rf"{name} is not there any more\. 2 rows of checkpoint 7"):
        sink.commit([message], 7)
    opened.register_table(name, where)
    opened.close()
    sink.commit([message], 7)
    assert numbers_in(load(name)) == [1, 2, 3]
