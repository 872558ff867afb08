"""A directory holds each committed row exactly once, and its readers see no others."""

from __future__ import annotations

import datetime
import glob
import itertools
import json
import os
import pickle
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.storage import files as remote_files
from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.common.failures import RowsRejected
from ftlayer.connectors.files import sink as files
from ftlayer.errors import CheckpointStorageError, ConfigError, SinkTargetError, UncommittableError
from ftlayer.sinks import FileMessage, FileSink, PostgresMessage

_directories = itertools.count()


@pytest.fixture(params=["local", "remote"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory that is not there yet."""
    return str(tmp_path / "out") if request.param == "local" else f"memory://sink-{next(_directories)}"


def rows(*numbers: int) -> Any:
    return iter([pa.record_batch({"n": pa.array(numbers, pa.int64())})])


def names_in(url: str) -> list[str]:
    """All files below the directory."""
    fs, root = fsspec.core.url_to_fs(url)
    return sorted(path.removeprefix(root).lstrip("/") for path in fs.find(root))


def in_progress(url: str) -> list[str]:
    return [name for name in names_in(url) if name.startswith("_ftlayer-inprogress/")]


def numbers_in(url: str) -> list[int]:
    """What readers see: Arrow's datasets, and names that a plain glob finds."""
    fs, root = fsspec.core.url_to_fs(url)
    found = ds.dataset(root, filesystem=fs, format="parquet").to_table() if fs.exists(root) else None
    seen = [] if found is None or not found.num_columns else sorted(found["n"].to_pylist())
    plain = [path for path in fs.glob(f"{root}/*") if not path.rpartition("/")[2].startswith(("_", "."))]
    assert all(path.endswith(".parquet") for path in plain)
    by_name = [fs.open(path, "rb") for path in plain]
    assert seen == sorted(
        number for file in by_name for number in pa.parquet.read_table(file)["n"].to_pylist()
    )
    return seen


def test_rows_are_seen_when_they_are_committed(url: str) -> None:
    sink = FileSink(url)
    messages = [sink.write(rows(1, 2)), sink.write(rows(3)), sink.write(iter([])), None]
    assert numbers_in(url) == []
    assert [message.rows for message in messages if message] == [2, 1, 0]
    driver = pickle.loads(pickle.dumps(sink))
    driver.commit(pickle.loads(pickle.dumps(messages)), 7)
    assert numbers_in(url) == [1, 2, 3]
    assert in_progress(url) == []


def test_a_commit_that_comes_again_changes_nothing(url: str) -> None:
    sink = FileSink(url)
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    before = names_in(url)
    sink.commit([first], 1)
    assert names_in(url) == before
    sink.commit([first, second], 2)
    sink.commit([second, first], 3)
    assert numbers_in(url) == [1, 2]


def test_an_abort_removes_what_waits_and_nothing_else(url: str) -> None:
    sink = FileSink(url)
    first, second = sink.write(rows(1)), sink.write(rows(2))
    sink.commit([first], 1)
    sink.abort([first, second, None], 2)
    sink.abort([second], 2)
    assert numbers_in(url) == [1]
    assert in_progress(url) == []
    with pytest.raises(UncommittableError, match=r"is gone, and .* is not there"):
        sink.commit([second], 3)


def test_a_write_that_fails_leaves_nothing(url: str) -> None:
    def batches() -> Any:
        yield from rows(1, 2)
        raise ValueError("the user's")

    def changing() -> Any:
        yield from rows(1)
        yield pa.record_batch({"other": [1]})

    sink = FileSink(url)
    with pytest.raises(ValueError, match="the user's"):
        sink.write(batches())
    with pytest.raises((ValueError, pa.ArrowException)):
        sink.write(changing())
    assert names_in(url) == []


SECONDS = pa.timestamp("s")
NO_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
)


@pytest.mark.parametrize("format", ["parquet", "csv", "json"])
def test_rows_that_the_format_cannot_hold_are_refused_by_their_numbers(url: str, format: str) -> None:
    """Those of the rows that were written together: the others are named when it is tried again."""
    count = 2 * files.ROW_GROUP_ROWS + 100
    bad = [5, files.ROW_GROUP_ROWS + 7, files.ROW_GROUP_ROWS + 8, count - 1]

    def batches(left: list[int]) -> Any:
        numbers = pa.array(left, pa.int64())
        words = pa.array(["é"] * len(left))
        whole = pa.concat_arrays([pa.array(["good"]), NO_TEXT])
        for start in range(0, len(left), 50_000):
            part = numbers.slice(start, 50_000)
            place = [int(number in bad) for number in part.to_pylist()]
            yield pa.record_batch(
                {"n": part, "v": whole.take(pa.array(place)), "w": words.slice(start, 50_000)}
            )

    sink, left, refused = FileSink(url, format), list(range(count)), list[int]()
    while True:
        try:
            message = sink.write(batches(left))
        except RowsRejected as rejected:
            assert names_in(url) == in_progress(url) == []
            refused += [left[row] for row in rejected.errors]
            left = [number for row, number in enumerate(left) if row not in rejected.errors]
        else:
            break
    assert refused == bad
    sink.commit([message], 1)
    assert message.rows == count - len(bad)


@pytest.mark.parametrize(
    ("format", "kind", "fine", "value"),
    [
        ("json", pa.timestamp("us"), 0, 2**62),
        ("json", pa.date32(), 0, 2**30),
        ("json", pa.list_(SECONDS), [0], [2**40]),
        ("json", pa.struct([("a", pa.time64("ns"))]), {"a": 1_000}, {"a": 1}),
        ("parquet", SECONDS, 0, 10**17),
        ("parquet", pa.list_(SECONDS), [0], [10**17]),
        ("parquet", pa.list_(SECONDS, 1), [0], [10**17]),
        ("parquet", pa.map_(pa.string(), pa.large_list(SECONDS)), [("k", [0])], [("k", [10**17])]),
        ("parquet", pa.struct([("a", pa.list_(SECONDS))]), {"a": [0]}, {"a": [10**17]}),
        ("parquet", pa.dictionary(pa.int8(), SECONDS), 0, 10**17),
    ],
)
def test_a_time_that_the_format_lacks_is_refused(
    url: str, format: str, kind: pa.DataType, fine: Any, value: Any
) -> None:
    sink = FileSink(url, format)
    if pa.types.is_dictionary(kind):
        values = pa.array([fine, value, fine], kind.value_type).dictionary_encode()
    else:
        values = pa.array([fine, value, fine], kind)
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter([pa.record_batch({"v": values})]))
    assert list(refused.value.errors) == [1]
    message = sink.write(iter([pa.record_batch({"v": values.take(pa.array([0, 2]))})]))
    assert message.rows == 2


@pytest.mark.parametrize("format", ["parquet", "json"])
def test_a_row_is_not_refused_for_what_lies_beside_it_in_a_list(url: str, format: str) -> None:
    texts = pa.concat_arrays([pa.array(["good", "good"]), NO_TEXT, pa.array(["good"])])
    rows = pa.record_batch({"v": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3, 4], pa.int32()), texts)})
    sink = FileSink(url, format)
    with pytest.raises(RowsRejected) as refused:
        sink.write(iter([rows]))
    assert list(refused.value.errors) == [2]
    message = sink.write(iter([rows.slice(0, 2), rows.slice(3)]))
    assert message.rows == 3


@pytest.mark.parametrize(
    ("format", "kind"), [("parquet", pa.month_day_nano_interval()), ("csv", pa.list_(pa.int64()))]
)
def test_a_type_that_the_format_lacks_is_named_with_its_column(
    url: str, format: str, kind: pa.DataType
) -> None:
    rows = pa.record_batch({"n": pa.array([1]), "odd": pa.nulls(1, kind)})
    with pytest.raises(SinkTargetError, match=re.escape(f"column 'odd' is {kind}, which .{format} files")):
        FileSink(url, format).write(iter([rows]))


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_a_commit_that_is_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    sink = FileSink(str(tmp_path / "out"))
    messages = [sink.write(rows(number)) for number in range(4)]
    move = LocalFiles.move
    left = [2]

    def interrupted(self: LocalFiles, path: str, target: str) -> bool:
        if moment == "behind":
            move(self, path, target)
        left[0] -= 1
        if left[0] < 0:
            raise CheckpointStorageError("made to fail")
        return moment == "behind" or move(self, path, target)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "move", interrupted)
        with pytest.raises(CheckpointStorageError, match="made to fail"):
            sink.commit(messages, 1)
    sink.commit(messages, 1)
    assert numbers_in(str(tmp_path / "out")) == [0, 1, 2, 3]
    assert in_progress(str(tmp_path / "out")) == []


def test_a_copy_whose_original_was_not_deleted(url: str) -> None:
    """On an object store a rename is a copy and a deletion; the process may end between them."""
    sink = FileSink(url)
    message = sink.write(rows(1))
    assert message.file is not None
    fs, root = fsspec.core.url_to_fs(url)
    fs.copy(f"{root}/{message.file.temporary}", f"{root}/{message.file.target}")
    sink.commit([message], 1)
    assert numbers_in(url) == [1]
    assert in_progress(url) == []


def test_names_last_before_a_commit_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is committed is forgotten elsewhere: a machine that crashes then must not lose the names."""
    sink = FileSink(str(tmp_path / "out"))
    messages = [sink.write(rows(number)) for number in range(3)]
    calls: list[str] = []
    for name in ("move", "sync_names"):
        real = getattr(LocalFiles, name)

        def noted(self: Any, *args: Any, name: str = name, real: Any = real) -> Any:
            done = real(self, *args)
            calls.append(name)
            return done

        monkeypatch.setattr(LocalFiles, name, noted)
    sink.commit(messages, 1)
    assert calls == ["move", "move", "move", "sync_names"]
    # A commit that was interrupted may have left names that do not last yet.
    sink.commit(messages, 1)
    assert calls[-1] == "sync_names"
    assert len(calls) == 5


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    sink = FileSink(str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(CheckpointStorageError, match="make room"):
            sink.write(rows(1))
    assert in_progress(str(tmp_path)) == []


# ---------------------------------------------------------------- streaming queries


def test_a_batch_that_spark_runs_again_adds_nothing(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "streaming_query", lambda: "query-1")
    sink = FileSink(url)
    sink.commit([sink.write(rows(1)), sink.write(rows(2))], 0)
    again = FileSink(url)
    again.commit([again.write(rows(1, 2))], 0)
    again.commit([again.write(rows(3))], 1)
    assert numbers_in(url) == [1, 2, 3]
    assert in_progress(url) == []
    monkeypatch.setattr(files, "streaming_query", lambda: "query-2")
    again.commit([again.write(rows(4))], 0)
    assert numbers_in(url) == [1, 2, 3, 4]


def test_a_batch_whose_commit_failed_is_aborted_by_spark_and_run_again(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "streaming_query", lambda: "query-1")
    sink = FileSink(url)
    messages = [sink.write(rows(1)), sink.write(rows(2))]

    def failing(*_: Any) -> None:
        raise CheckpointStorageError("made to fail")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_name", failing)
        with pytest.raises(CheckpointStorageError):
            sink.commit(messages, 0)
    sink.abort(messages, 0)
    again = FileSink(url)
    assert again.clean(older_than=0) == []
    again.commit([again.write(rows(1, 2))], 0)
    assert numbers_in(url) == [1, 2]
    assert in_progress(url) == []


def test_only_the_last_batches_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "streaming_query", lambda: "q")
    sink = FileSink(str(tmp_path))
    for batch in range(103):
        sink.commit([sink.write(rows(batch))], batch)
    assert len(list((tmp_path / "_ftlayer-commits" / "q").iterdir())) == 100


# ---------------------------------------------------------------- what the dead leave


def test_what_the_dead_have_left_is_cleaned(url: str) -> None:
    dead, alive = FileSink(url), FileSink(url)
    lost, kept, mine = dead.write(rows(1)), dead.write(rows(2)), alive.write(rows(3))
    assert alive.clean([kept, None]) == []
    assert len(alive.clean([kept, None], older_than=-1)) == 1
    alive.commit([kept], 1)
    alive.commit([mine], 2)
    assert numbers_in(url) == [2, 3]
    with pytest.raises(UncommittableError, match="is gone"):
        alive.commit([lost], 3)


def test_what_others_are_writing_is_not_cleaned_where_its_age_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some file systems (FTP, say) do not tell when a file was changed."""
    url = f"memory://sink-{next(_directories)}"
    monkeypatch.setattr(remote_files, "modified_ms", lambda info: 0)
    job, other = FileSink(url), FileSink(url)
    message = job.write(rows(1))
    fs, root = fsspec.core.url_to_fs(url)
    fs.pipe_file(f"{root}/_ftlayer-inprogress/x/not-ours", b"")
    assert other.clean() == []
    job.commit([message], 1)
    assert numbers_in(url) == [1]
    job.write(rows(2))
    assert len(other.clean(older_than=-1)) == 1
    assert in_progress(url) == ["_ftlayer-inprogress/x/not-ours"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "commit", "again", "abort", "die", "clean"]), st.integers(0, 5)),
        max_size=20,
    )
)
def test_against_a_model(events: list[tuple[str, int]]) -> None:
    """Checkpoints hold messages; what they hold is committed once or more, everything else is aborted or left."""
    url = f"memory://model-{next(_directories)}"
    sink = FileSink(url)
    numbers = itertools.count()
    waiting: list[tuple[Any, list[int]]] = []
    committed: list[Any] = []
    expected: list[int] = []
    for happens, choice in events:
        if happens == "write":
            mine = [next(numbers) for _ in range(choice)]
            waiting.append((sink.write(rows(*mine)), mine))
        elif happens == "commit":
            messages, waiting = waiting, []
            sink.commit([message for message, _ in messages], choice)
            committed += [message for message, _ in messages]
            expected += [number for _, mine in messages for number in mine]
        elif happens == "again":
            sink.commit(committed[choice:], choice)
        elif happens == "abort":
            sink.abort([message for message, _ in waiting] + committed[choice:], choice)
            waiting = []
        elif happens == "clean":
            sink.clean([message for message, _ in waiting], older_than=-1)
        else:
            sink = FileSink(url)
            waiting = waiting[:choice]
        assert numbers_in(url) == expected
    FileSink(url).clean(older_than=-1)
    assert in_progress(url) == []


# ---------------------------------------------------------------- formats

ROW = {
    "n": 1,
    "f": float("nan"),
    "s": 'ä "quoted", \n',
    "b": b"\x00\xff",
    "t": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
    "d": Decimal("1.50"),
    "l": [1.5, float("inf"), None],
    "m": None,
}
SCHEMA = pa.schema(
    {
        "n": pa.int64(),
        "f": pa.float64(),
        "s": pa.string(),
        "b": pa.binary(),
        "t": pa.timestamp("us", "UTC"),
        "d": pa.decimal128(10, 2),
        "l": pa.list_(pa.float64()),
        "m": pa.map_(pa.string(), pa.int64()),
    }
)


def committed(url: str, batches: list[pa.RecordBatch], format: str, **options: Any) -> str:
    sink = FileSink(url, format, **options)
    message = sink.write(iter(batches))
    sink.commit([message], 1)
    assert message.file is not None
    return f"{url}/{message.file.target}"


def test_json_lines(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([ROW, {"n": 2, "m": [("k", 3)]}], SCHEMA)
    lines = Path(committed(str(tmp_path), [batch], "json")).read_text("utf-8").splitlines()
    first, second = map(json.loads, lines)
    assert first["f"] == "NaN"
    assert first["s"] == ROW["s"]
    assert first["b"] == "AP8="
    assert first["t"] == "2026-01-02T03:04:05.000006+00:00"
    assert first["d"] == "1.50"
    assert first["l"] == [1.5, "Infinity", None]
    assert second["m"] == {"k": 3}


def test_csv_with_options(tmp_path: Path) -> None:
    batch = pa.record_batch({"n": [1, 2], "s": ["a;b", None]})
    file = committed(str(tmp_path), [batch, batch], "csv", delimiter=";", include_header=False)
    assert Path(file).read_text() == '1;"a;b"\n2;\n' * 2


def test_parquet_keeps_types_and_takes_options(tmp_path: Path) -> None:
    batch = pa.RecordBatch.from_pylist([ROW], SCHEMA)
    file = committed(str(tmp_path), [batch] * 3, "parquet", compression="zstd")
    read = pa.parquet.ParquetFile(file)
    assert read.schema_arrow == SCHEMA
    assert (read.metadata.num_rows, read.metadata.num_row_groups) == (3, 1)
    assert read.metadata.row_group(0).column(0).compression == "ZSTD"
    many = pa.record_batch({"n": pa.array(range(100_000), pa.int64())})
    file = committed(str(tmp_path / "many"), [many] * 3, "parquet")
    assert pa.parquet.ParquetFile(file).metadata.num_row_groups == 2


def test_what_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format: expected one of parquet, csv, json"):
        FileSink(str(tmp_path), "orc")
    with pytest.raises(ConfigError, match="compresion: not an option of parquet"):
        FileSink(str(tmp_path), compresion="zstd")
    with pytest.raises(ConfigError, match="header: not an option of csv"):
        FileSink(str(tmp_path), "csv", header=True)
    with pytest.raises(ConfigError, match="x: not an option of json"):
        FileSink(str(tmp_path), "json", x=1)
    with pytest.raises(ConfigError, match="cannot be reached"):
        FileSink("nosuchscheme://x/y")
    for path in ("", 7, None):
        with pytest.raises(ConfigError, match="path: expected a path or URL"):
            FileSink(path)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="format: expected one of"):
        FileSink(str(tmp_path), ["csv"])  # type: ignore[arg-type]
    with pytest.raises(UncommittableError, match="expected messages of FileSink"):
        FileSink(str(tmp_path)).commit([PostgresMessage("x", 1, (), "")], 1)


def test_relative_paths_mean_the_drivers_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sink = FileSink("out")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    sink.commit([sink.write(rows(1))], 1)
    assert glob.glob(str(tmp_path / "out" / "*.parquet"))
    assert FileMessage(None, 0, "") == FileSink("x").write(iter([]))
