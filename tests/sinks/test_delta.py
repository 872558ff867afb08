"""A Delta table holds each committed row exactly once, whatever is repeated, lost, or committed by others meanwhile."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import pickle
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import RowsRejected
from ftlayer.connectors import table_commits
from ftlayer.connectors.delta import DeltaLog, statistics
from ftlayer.errors import ConfigError, SinkError, UncommittableError
from ftlayer.sinks import DeltaDataSource, DeltaSink, FileMessage

deltalake = pytest.importorskip("deltalake")

NUMBERS = pa.schema([("n", pa.int64())])


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_commits, "TRY_AGAIN_S", 0)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A table that is not there yet."""
    return str(tmp_path / "table")


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64())})])


def numbers_in(path: str) -> list[int]:
    if not deltalake.DeltaTable.is_deltatable(path):
        return []
    return sorted(deltalake.DeltaTable(path).to_pyarrow_table()["n"].to_pylist())


def staged_in(path: str) -> set[str]:
    """The Parquet files that the table does not have."""
    files = {str(file) for file in Path(path).rglob("*.parquet") if "_delta_log" not in file.parts}
    return files - set(deltalake.DeltaTable(path).file_uris())


def is_noted_once(path: str) -> bool:
    """Whether no two commits have the same message. (That a file was added twice readers do not see.)"""
    commits = deltalake.DeltaTable(path).history() if deltalake.DeltaTable.is_deltatable(path) else []
    names = [name for commit in commits for name in commit.get("ftlayer", {}).get("messages", [])]
    return len(names) == len(set(names))


def version_of(path: str) -> int:
    return int(deltalake.DeltaTable(path).version())


def again(sink: DeltaSink) -> DeltaSink:
    """The sink of another process."""
    copy: DeltaSink = pickle.loads(pickle.dumps(sink))
    return copy


def test_rows_are_seen_when_they_are_committed(path: str) -> None:
    sink = DeltaSink(path)
    messages = [again(sink).write(rows(1, 2)), again(sink).write(rows(3)), again(sink).write(iter([])), None]
    assert numbers_in(path) == []
    assert [message.rows for message in messages if message] == [2, 1, 0]
    again(sink).commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(path) == [1, 2, 3]
    assert version_of(path) == 1, "one commit for all"
    assert staged_in(path) == set()


def test_a_commit_that_comes_again_changes_nothing(path: str) -> None:
    sink = DeltaSink(path)
    first, second, third = sink.write(rows(1)), sink.write(rows(2)), sink.write(rows(3))
    sink.commit([first], 1)
    sink.commit([first, None], 1)
    again(sink).commit([first, second], 2)
    sink.commit([second, first], 3)
    assert version_of(path) == 2
    sink.commit([third], 1)
    assert numbers_in(path) == [1, 2, 3]


def test_what_comes_out_of_order_is_not_taken_for_committed(path: str) -> None:
    """A number below the highest one that is committed: the log's own information decides."""
    sink = DeltaSink(path)
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([second], 1)
    sink.commit([first], 2)
    deltalake.DeltaTable(path).optimize.compact()
    again(sink).commit([second], 3)
    sink.commit([first, second], 4)
    assert numbers_in(path) == [1, 2]
    assert is_noted_once(path)


def test_another_commits_right_behind_a_commit(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What this one remembers of its own commit is not what is last."""
    sink = DeltaSink(path)
    messages = [sink.write(rows(1)), sink.write(rows(2))]
    driver = again(sink)
    refresh = DeltaLog.refresh
    left = [1]

    def behind_another(self: DeltaLog) -> None:
        if left:
            left.pop()
            again(sink).commit(messages[1:], 2)
            deltalake.DeltaTable(path).optimize.compact()
        refresh(self)

    monkeypatch.setattr(DeltaLog, "refresh", behind_another)
    driver.commit(messages[:1], 1)
    assert not left
    driver.commit(messages[1:], 2)
    assert numbers_in(path) == [1, 2]


def test_what_was_compacted_is_not_committed_again(path: str) -> None:
    sink = DeltaSink(path)
    messages = [sink.write(rows(number)) for number in range(3)]
    for message in messages:
        sink.commit([message], 1)
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)
    again(sink).commit(messages, 1)
    assert numbers_in(path) == [0, 1, 2]


def test_a_log_that_does_not_reach_back_is_said(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink(path)
    messages = [sink.write(rows(number)) for number in range(3)]
    for message in messages:
        sink.commit([message], 1)
    table = deltalake.DeltaTable(path)
    table.optimize.compact()
    newest = [{"timestamp": time.time_ns() // 1_000_000 + 7_200_000, "version": 7}]
    monkeypatch.setattr(DeltaLog, "_commits", lambda _, most: newest)
    with pytest.raises(UncommittableError, match="cannot be told any more"):
        again(sink).commit(messages, 1)
    again(sink).abort(messages, 1)
    assert again(sink).clean(older_than=-60) == []
    assert numbers_in(path) == [0, 1, 2]


def test_transactions_that_the_table_forgets(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`delta.setTransactionRetentionDuration`: old ones are no longer known, and the log has to say."""
    deltalake.DeltaTable.create(
        path, NUMBERS, configuration={"delta.setTransactionRetentionDuration": "interval 1 minutes"}
    )
    sink = DeltaSink(path)
    with monkeypatch.context() as patch:
        long_ago = time.time_ns() - 7_200 * 10**9
        patch.setattr(time, "time_ns", lambda: long_ago)
        messages = [sink.write(rows(1)), sink.write(rows(2))]
        sink.commit(messages[:1], 1)
    assert deltalake.DeltaTable(path).transaction_version(f"ftlayer-{messages[0].writer}") is None
    again(sink).commit(messages, 2)
    assert numbers_in(path) == [1, 2]


def test_an_abort_removes_what_waits_and_nothing_else(path: str) -> None:
    sink = DeltaSink(path)
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    sink.abort([second], 2)
    assert numbers_in(path) == [1]
    assert staged_in(path) == set()
    with pytest.raises(UncommittableError, match="is gone or changed"):
        sink.commit([second], 3)


def test_a_write_that_fails_leaves_nothing(path: str) -> None:
    def raising() -> Any:
        yield from rows(1, 2)
        raise ValueError("the user's")

    sink = DeltaSink(path)
    sink.commit([sink.write(rows(0))], 1)
    with pytest.raises(ValueError, match="the user's"):
        sink.write(raising())
    assert staged_in(path) == set()


def test_large_writes_are_several_files(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftlayer.connectors.fitting.CHUNK_BYTES", 16)
    sink = DeltaSink(path)
    message = sink.write(itertools.chain(*(rows(number, number) for number in range(5))))
    assert (len(message.files), message.rows) == (5, 10)
    sink.commit([message], 1)
    assert len(numbers_in(path)) == 10


# ---------------------------------------------------------------- columns


def test_a_wrong_column_is_named_before_anything_is_staged(path: str) -> None:
    deltalake.DeltaTable.create(
        path,
        pa.schema(
            [
                ("n", pa.int32()),
                pa.field("key", pa.string(), nullable=False),
                ("at", pa.timestamp("us", "UTC")),
            ]
        ),
    )
    sink = DeltaSink(path)
    key = pa.array(["a"])

    def refused(columns: dict[str, Any]) -> str:
        with pytest.raises(SinkError) as error:
            sink.write(iter([pa.record_batch(columns)]))
        assert staged_in(path) == set()
        return str(error.value)

    assert "has no column 'm' (it has n, key, at)" in refused({"key": key, "m": key})
    assert "column 'n' is int32 there, and int64 in the rows" in refused({"key": key, "n": pa.array([1])})
    assert "the rows lack 'key', which may not be null there" in refused({"n": pa.array([1], pa.int32())})
    sink.commit(
        [
            sink.write(
                iter([pa.record_batch({"key": key.dictionary_encode(), "n": pa.array([1], pa.int8())})])
            )
        ],
        1,
    )
    assert deltalake.DeltaTable(path).to_pyarrow_table().to_pylist() == [{"n": 1, "key": "a", "at": None}]


NO_TEXT = pa.Array.from_buffers(
    pa.string(), 3, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0\4\0\0\0"), pa.py_buffer(b"a\xff\xfeb")]
)


@pytest.mark.parametrize("partition_by", [[], ["v"]])
@pytest.mark.parametrize(
    ("kind", "values", "refused"),
    [
        (pa.timestamp("us"), pa.array([0, 10**14, 1], pa.timestamp("s")), [1]),
        (pa.timestamp("us"), pa.array([1, 0, 3_000], pa.timestamp("ns")), [0]),
        (pa.timestamp("us", "UTC"), pa.array([0, 1, 2**62 // 10**6], pa.timestamp("s", "UTC")), [2]),
        (pa.string(), NO_TEXT, [1]),
    ],
)
def test_rows_with_a_value_that_a_column_cannot_hold_are_refused_by_their_numbers(
    path: str, kind: pa.DataType, values: pa.Array, refused: list[int], partition_by: list[str]
) -> None:
    deltalake.DeltaTable.create(path, pa.schema([("n", pa.int64()), ("v", kind)]), partition_by=partition_by)
    batch = pa.record_batch({"n": pa.array([0, 1, 2]), "v": values})
    sink = DeltaSink(path)
    try:
        message = sink.write(iter([batch.slice(0, 1), batch.slice(1)]))
    except RowsRejected as rejected:
        found = list(rejected.errors)
    else:
        # A time that Python lacks is no partition, and is a value of a file.
        found = []
        assert (refused, partition_by) == ([2], [])
        sink.abort([message], 1)
        return
    assert found == refused
    assert staged_in(path) == set()
    rest = batch.take(pa.array([row for row in range(3) if row not in refused]))
    sink.commit([sink.write(iter([rest]))], 1)
    rows = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("n")
    assert rows["n"].to_pylist() == rest["n"].to_pylist()


def test_rows_with_a_null_that_may_not_be_are_refused_by_their_numbers(path: str) -> None:
    deltalake.DeltaTable.create(path, pa.schema([pa.field("n", pa.int64(), nullable=False)]))
    batches = [pa.record_batch({"n": pa.array(numbers, pa.int64())}) for numbers in ([1, 2], [3, None])]
    with pytest.raises(RowsRejected) as refused:
        DeltaSink(path).write(iter(batches))
    assert list(refused.value.errors) == [3]


@pytest.mark.parametrize(
    ("configuration", "feature"), [({"delta.constraints.positive": "n > 0"}, "checkConstraints")]
)
def test_a_table_that_asks_more_of_writers_is_refused(
    path: str, configuration: dict[str, str], feature: str
) -> None:
    deltalake.DeltaTable.create(path, NUMBERS)
    deltalake.DeltaTable(path).alter.add_constraint({"positive": "n > 0"})
    with pytest.raises(SinkError, match=f"has {feature}, which DeltaSink does not do"):
        DeltaSink(path).write(rows(1))


def test_a_table_that_has_changed_since(path: str) -> None:
    sink = DeltaSink(path)
    message = sink.write(rows(1))
    deltalake.DeltaTable(path).alter.add_columns([deltalake.Field("more", "string")])
    sink.commit([message], 1)
    message = sink.write(rows(2))
    deltalake.write_deltalake(path, pa.table({"other": [1]}), mode="overwrite", schema_mode="overwrite")
    with pytest.raises(UncommittableError, match="has changed since rows were staged for it: column 'n'"):
        sink.commit([message], 2)


def test_a_table_is_made_for_rows_in_local_time(path: str) -> None:
    """As Spark gives them, in the session's time zone."""
    at = datetime.datetime(2026, 11, 23, 12, 30, tzinfo=datetime.UTC)
    times = pa.array([at, None], pa.timestamp("us", "Europe/Berlin"))
    columns = {"at": times, "all": pa.array([[at], None], pa.list_(times.type))}
    sink = DeltaSink(path)
    sink.commit([sink.write(iter([pa.record_batch(columns)]))], 1)
    table = deltalake.DeltaTable(path).to_pyarrow_table()
    assert table.schema.field("at").type == pa.timestamp("us", "UTC")
    assert table["at"].to_pylist() == [at, None]
    assert table["all"].to_pylist() == [[at], None]


def test_partitions(path: str) -> None:
    at = datetime.datetime(2026, 11, 23, 12, 30, 1, 500, datetime.UTC)
    columns = {
        "text": pa.array(["a b/ä=%", None, "a b/ä=%"]),
        "day": pa.array([datetime.date(2026, 11, 23)] * 3),
        "at": pa.array([at] * 3, pa.timestamp("us", "UTC")),
        "yes": pa.array([True, False, True]),
        "price": pa.array([Decimal("1.50")] * 3, pa.decimal128(10, 2)),
        "n": pa.array([1, 2, 3]),
    }
    sink = DeltaSink(path, partition_by=["text", "day", "at", "yes", "price"])
    message = sink.write(iter([pa.record_batch(columns)]))
    assert len(message.files) == 2
    sink.commit([message], 1)
    found = deltalake.DeltaTable(path).to_pyarrow_table().sort_by("n").to_pylist()
    assert found == pa.table(columns).to_pylist()
    with pytest.raises(SinkError, match="partition column 'm' is not in the rows"):
        DeltaSink(path + "-2", partition_by=["m"]).write(rows(1))
    with pytest.raises(SinkError, match="partition column 'x' is double"):
        DeltaSink(path + "-3", partition_by=["x"]).write(iter([pa.record_batch({"x": [1.0], "n": [1]})]))


def test_statistics_bound_what_is_in_a_file() -> None:
    at = datetime.datetime(2026, 11, 23, 12, 30, 1, 1_500, datetime.UTC)
    found = json.loads(
        statistics(
            pa.table(
                {
                    "n": [3, None, 1],
                    "x": [1.5, float("nan"), 2.0],
                    "text": ["b", "a" * 40, "a"],
                    "at": pa.array([at] * 3, pa.timestamp("us", "UTC")),
                    "late": pa.array([2**62] * 3, pa.timestamp("us")),
                    "list": [[1]] * 3,
                    "none": pa.nulls(3, pa.string()),
                }
            )
        )
    )
    assert found == {
        "numRecords": 3,
        "minValues": {"n": 1, "text": "a", "at": "2026-11-23T12:30:01.001Z"},
        "maxValues": {"n": 3, "text": "b", "at": "2026-11-23T12:30:01.002Z"},
        "nullCount": {"n": 1, "x": 0, "text": 0, "at": 0, "late": 0, "none": 3},
    }


def test_readers_skip_files_by_statistics(path: str) -> None:
    at = datetime.datetime(2026, 11, 23, 12, 30, 1, 1_501, datetime.UTC)
    sink = DeltaSink(path)
    for number in range(4):
        times = pa.array([at + datetime.timedelta(hours=number)], pa.timestamp("us", "UTC"))
        sink.commit([sink.write(iter([pa.record_batch({"n": [number], "at": times})]))], number)
    table = deltalake.DeltaTable(path)
    assert table.to_pyarrow_table(filters=[("n", ">=", 3)])["n"].to_pylist() == [3]
    assert table.to_pyarrow_table(filters=[("at", "==", at)])["n"].to_pylist() == [0]


# ---------------------------------------------------------------- queries


def test_a_batch_that_spark_runs_again_adds_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-1")
    sink = DeltaSink(path)
    messages = [again(sink).write(rows(1)), again(sink).write(rows(2))]
    sink.commit(messages, 0)
    sink.commit(messages, 0)
    assert numbers_in(path) == [1, 2], "its own files stay"
    later = DeltaSink(path)
    later.commit([later.write(rows(1, 2))], 0)
    assert staged_in(path) == set()
    later.abort(messages, 0)
    later.commit([later.write(rows(3))], 1)
    monkeypatch.setattr("ftlayer.connectors.table_commits.streaming_query", lambda: "query-2")
    later.commit([later.write(rows(4))], 0)
    assert numbers_in(path) == [1, 2, 3, 4]


# ---------------------------------------------------------------- faults


def test_another_commits_the_same_between_the_look_and_the_commit(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DeltaSink(path)
    messages = [again(sink).write(rows(1)), again(sink).write(rows(2))]
    check = DeltaSink._check_there
    left = [1]

    def with_another(self: DeltaSink, written: Any) -> None:
        check(self, written)
        if left:
            left.pop()
            again(sink).commit(messages[:1], 1)

    monkeypatch.setattr(DeltaSink, "_check_there", with_another)
    sink.commit(messages, 1)
    assert numbers_in(path) == [1, 2]
    assert is_noted_once(path)


def test_others_that_append_do_not_disturb(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DeltaSink(path)
    message = sink.write(rows(1))
    check = DeltaSink._check_there

    def with_others(self: DeltaSink, written: Any) -> None:
        check(self, written)
        for number in range(3):
            deltalake.write_deltalake(path, pa.table({"n": [10 + number]}), mode="append")

    monkeypatch.setattr(DeltaSink, "_check_there", with_others)
    sink.commit([message], 1)
    assert numbers_in(path) == [1, 10, 11, 12]


def test_two_subtasks_make_the_table_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    create = deltalake.DeltaTable.create
    sink = DeltaSink(path)

    def slowly(*arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(deltalake.DeltaTable, "create", create)
            again(sink).commit([again(sink).write(rows(1))], 1)
        return create(*arguments, **options)

    monkeypatch.setattr(deltalake.DeltaTable, "create", slowly)
    message = sink.write(rows(2))
    sink.commit([message], 1)
    assert numbers_in(path) == [1, 2]


class Killed(BaseException):
    """The process ends here."""


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "commit", "commit", "again", "abort", "die", "clean", "compact"]),
        st.integers(1, 3),
        st.sampled_from(["", "", "before", "behind", "killed before", "killed behind", "another"]),
    ),
    min_size=5,
    max_size=15,
)


@settings(
    max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(STEPS)
def test_against_a_model(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, str]]) -> None:
    """Commits fail or are killed before or behind what they do, others commit the same in between."""
    path = str(tmp_path_factory.mktemp("model") / "table")
    add = DeltaLog.add
    sink = DeltaSink(path)
    written = itertools.count()
    waiting: list[tuple[Any, list[int]]] = []
    committed: list[Any] = []
    expected: list[int] = []

    def commit(messages: list[Any], number: int, fault: str) -> None:
        """Commit as the driver does: until it has returned, with another process if one was killed."""
        faults = [fault] if fault else []

        def faulty(self: DeltaLog, adding: Any, at: int) -> None:
            now = faults.pop() if faults else ""
            if now == "another":
                again(sink).commit(messages, number)
            if "before" in now:
                raise Killed if "killed" in now else OSError("made to fail")
            add(self, adding, at)
            if "behind" in now:
                raise Killed if "killed" in now else deltalake.exceptions.DeltaError("the answer is lost")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DeltaLog, "add", faulty)
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
        elif step == "clean":
            if expected:
                sink.clean([message for message, _ in waiting], older_than=-60)
        elif step == "compact":
            if expected:
                deltalake.DeltaTable(path).optimize.compact()
        else:
            sink = DeltaSink(path)
            waiting = waiting[:size]
        assert numbers_in(path) == sorted(expected)
        assert is_noted_once(path)
    if expected:
        DeltaSink(path).clean(older_than=-60)
        sink.abort([message for message, _ in waiting], 0)
        assert numbers_in(path) == sorted(expected)


def test_what_dead_writers_left_is_removed(path: str) -> None:
    dead, kept = [DeltaSink(path).write(rows(number)) for number in (1, 2)]
    job = DeltaSink(path)
    mine = again(job).write(rows(3))
    assert job.clean([kept]) == []
    assert job.clean([kept, None], older_than=-60) == [dead.files[0].path]
    job.commit([kept, mine], 1)
    assert numbers_in(path) == [2, 3]
    deltalake.DeltaTable(path).optimize.compact()
    assert DeltaSink(path).clean(older_than=-60) == [], "what was committed is left to VACUUM"


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": ""}, "path: expected a path or URL of a table"),
        ({"path": 7}, "path: expected a path or URL of a table"),
        ({"path": "s3:/bucket/lines"}, "path: expected a path, or a URL like s3://bucket/path"),
        ({"partition_by": "day"}, "partition_by: expected names of columns in a list"),
        ({"partition_by": [1]}, "partition_by: "),
        ({"storage_options": {"timeout": 1}}, "storage_options: "),
        ({"storage_options": "x"}, "storage_options: "),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DeltaSink(**{"path": "somewhere", **options})


def test_options_of_plain_spark(path: str) -> None:
    from pyspark.sql.datasource import CaseInsensitiveDict

    options = CaseInsensitiveDict(
        {
            "path": path,
            "partitionBy": "day, hour",
            "storage.AWS_REGION": "eu-west-1",
            "checkpointLocation": "x",
        }
    )
    sink = DeltaDataSource(options).streamWriter(Any, False)
    assert (sink._partition_by, sink._options) == (("day", "hour"), {"aws_region": "eu-west-1"})
    with pytest.raises(ConfigError, match="option 'path' is missing"):
        DeltaDataSource(CaseInsensitiveDict({})).streamWriter(Any, False)


def test_messages_of_another_sink_are_refused(path: str) -> None:
    with pytest.raises(UncommittableError, match="expected messages of DeltaSink, got a FileMessage"):
        DeltaSink(path).commit([FileMessage(None, 0, "")], 1)


def test_a_type_that_delta_lacks_is_said(path: str) -> None:
    with pytest.raises(
        SinkError, match=r"rows cannot be staged: .*Invalid data type for Delta Lake: Duration\(µs\)$"
    ):
        DeltaSink(path).write(iter([pa.record_batch({"a": pa.array([1], pa.duration("us"))})]))


def test_a_directory_that_cannot_be_written_is_said() -> None:
    with pytest.raises(SinkError, match="Delta table /proc/table: rows cannot be staged"):
        DeltaSink("/proc/table").write(rows(1))
    assert not os.path.exists("/proc/table")


def test_a_table_that_is_gone_at_its_commit_is_told(path: str) -> None:
    sink = DeltaSink(path)
    first, message = sink.write(rows(1)), sink.write(rows(2, 3))
    sink.commit([first], 1)
    Path(path).rename(f"{path}-aside")
    with pytest.raises(UncommittableError, match="is gone or changed"):
        sink.commit([message], 7)
    with pytest.raises(UncommittableError, match=r"is not there any more\. 2 rows of checkpoint 7"):
        again(sink).commit([message], 7)
    Path(f"{path}-aside").rename(path)
    sink.commit([message], 7)
    assert numbers_in(path) == [1, 2, 3]
