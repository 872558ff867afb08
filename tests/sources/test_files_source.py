"""Files as a source: which are found, how they are cut, what is read of them, and what is read again."""

from __future__ import annotations

import datetime as dt
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.connectors.files import source as journals
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxFiles
from ftlayer.records.beside import misfits
from ftlayer.sources import FilesSource, TailSource
from ftlayer.topology.operators import Member

Make = Callable[..., FilesSource]


@pytest.fixture
def inbox(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def make(inbox: Path, tmp_path: Path) -> Make:
    def made(format: str = "text", path: Any = inbox, **options: Any) -> FilesSource:
        return FilesSource(path, format, **{"journal": tmp_path / "journal", "poll": 0, **options})

    return made


def put(path: Path, content: str | bytes, age_s: int = 0) -> None:
    """Write a file, and have it look as if it were written in the past."""
    path.parent.mkdir(exist_ok=True)
    hidden = path.with_name(f".{path.name}")
    hidden.write_bytes(content.encode() if isinstance(content, str) else content)
    os.utime(hidden, (1_700_000_000 - age_s,) * 2)
    hidden.rename(path)


def range_rows(source: FilesSource, start: Any, end: Any) -> list[dict[str, Any]]:
    """Read a range as tasks do: with copies, and offsets that have been JSON."""
    copy: FilesSource = pickle.loads(pickle.dumps(source))
    start, end = json.loads(json.dumps([start, end]))
    batches = [batch for part in copy.partitions(start, end) for batch in copy.read(part)]
    for batch in batches:
        assert batch.schema.equals(source.schema)
        batch.validate(full=True)
    return [row for batch in batches for row in batch.to_pylist()]


def ranges(source: FilesSource, start: Any, limit: Any = None) -> Iterator[tuple[Any, Any]]:
    while (end := source.latestOffset(start, limit or source.getDefaultReadLimit())) != start:
        yield start, end
        start = end


def all_rows(source: FilesSource) -> list[dict[str, Any]]:
    return [row for each in ranges(source, source.initialOffset()) for row in range_rows(source, *each)]


def test_each_file_is_read_once_those_written_first_first(make: Make, inbox: Path) -> None:
    source = make()
    start = source.initialOffset()
    assert source.latestOffset(start, ReadAllAvailable()) == start
    put(inbox / "b", "three\n", 1)
    put(inbox / "c", "one\r\ntwo", 2)
    put(inbox / "sub" / "a", "four\n", 1)
    for hidden in (inbox / "_x", inbox / ".y", inbox / "_sub" / "z"):
        put(hidden, "hidden\n")
    put(inbox / "empty", "")
    end = source.latestOffset(start, ReadAllAvailable())
    found = range_rows(source, start, end)
    assert [(row["value"], Path(row["path"]).name, row["offset"]) for row in found] == [
        ("one", "c", 0),
        ("two", "c", 5),
        ("three", "b", 0),
        ("four", "a", 0),
    ]
    put(inbox / "a", "five\n", 9)
    again = make()
    after = again.latestOffset(end, ReadAllAvailable())
    assert [row["value"] for row in range_rows(again, end, after)] == ["five"], (
        "it is new, though it is older"
    )
    assert range_rows(again, start, end) == found


def test_a_range_has_so_many_files_and_bytes(make: Make, inbox: Path) -> None:
    for number in range(9):
        put(inbox / f"{number}", f"{number}\n" * 10, 9 - number)
    files = [end["next"] for _, end in ranges(make(max_files=4), make().initialOffset())]
    assert files == [4, 8, 9]
    in_bytes = make(max_bytes=50, split_bytes=7)
    found = [range_rows(in_bytes, *each) for each in ranges(in_bytes, in_bytes.initialOffset())]
    assert [row["value"] for rows in found for row in rows] == [str(n) for n in range(9) for _ in range(10)]
    assert max(map(len, found)) <= 50 // 2 + 1
    every = in_bytes.initialOffset()
    assert len(list(ranges(in_bytes, every, ReadAllAvailable()))) == 1
    assert len(in_bytes.partitions(every, in_bytes.latestOffset(every, ReadMaxFiles(100)))) > 1


LINES = st.lists(st.sampled_from([b"", b"a", b"\xff", b"bc\r", "ä".encode(), b"x" * 40]), max_size=30)


@settings(max_examples=150, deadline=None)
@given(lines=LINES, last=st.booleans(), step=st.integers(1, 60), compressed=st.booleans())
def test_a_file_cut_anywhere_has_the_same_lines(
    lines: list[bytes], last: bool, step: int, compressed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("cut")
    content = b"\n".join(lines) + (b"\n" if last else b"")
    name = "f.gz" if compressed else "f"
    (directory / name).write_bytes(gzip.compress(content, mtime=0) if compressed else content)
    source = FilesSource(directory, journal=f"{directory}-journal", split_bytes=step)
    rows = all_rows(source) if content or compressed else []
    found = re.finditer(rb"([^\n]*?)(?:\r?\n|\Z)", content)
    expected = [(line.start(), line[1].decode("utf-8", "replace")) for line in found if line[0]]
    # A carriage return belongs to the newline behind it, and only to that.
    if expected and content.endswith(b"\r"):
        assert expected[-1][1].endswith("\r")
    assert [(row["offset"], row["value"]) for row in rows] == expected


@pytest.mark.parametrize("step", [1 << 24, 37])
def test_json_lines(make: Make, inbox: Path, step: int) -> None:
    good = [{"n": n, "s": None if n % 3 else f"t{n}", "unknown": [1]} for n in range(50)]
    lines = [json.dumps(row) for row in good]
    lines[7:7] = ["", "nonsense", '{"n": "x"}', '{"n": 1}{"n": 2}', "   "]
    put(inbox / "a.json", "\n".join(lines))
    source = make("json", schema="n bigint, s string", malformed="bad", split_bytes=step)
    rows = all_rows(source)
    assert [(row["n"], row["s"]) for row in rows if row["bad"] is None] == [
        (row["n"], row["s"]) for row in good
    ]
    assert [row["bad"] for row in rows if row["bad"] is not None] == [lines[8], lines[9], lines[10]]
    text = "\n".join(lines)
    assert all(text[row["offset"] :].startswith(row["bad"] or f'{{"n": {row["n"]}') for row in rows)
    strict = make("json", schema="n bigint, s string", split_bytes=step)
    with pytest.raises(SourceError, match=f"a.json: the line at byte {text.index('nonsense')} is no json"):
        all_rows(strict)


@pytest.mark.parametrize("step", [1 << 24, 11])
def test_csv(make: Make, inbox: Path, step: int) -> None:
    put(inbox / "a.csv", "s;n\n" + "".join(f'"x;{n}";{n}\n' for n in range(20)) + "short\n", 1)
    put(inbox / "b.csv", "n;more;s\n7;;y\n")
    options: dict[str, Any] = {"delimiter": ";", "split_bytes": step, "malformed": "bad"}
    rows = all_rows(make("csv", schema="n int, s string", **options))
    assert [(row["n"], row["s"]) for row in rows[:20]] == [(n, f"x;{n}") for n in range(20)]
    assert [row["bad"] for row in rows] == [None] * 20 + ["short"] + [None]
    assert (rows[-1]["n"], rows[-1]["s"]) == (7, "y")
    put(inbox / "plain" / "c.csv", "1;a\n2;b\n")
    plain = make("csv", inbox / "plain", schema="n int, s string", header=False, position=False, **options)
    assert all_rows(plain) == [{"n": 1, "s": "a", "bad": None}, {"n": 2, "s": "b", "bad": None}]
    with pytest.raises(SourceError, match=r"c.csv: its first line has no column 'n': it has 1, a"):
        all_rows(make("csv", inbox / "plain", schema="n int", delimiter=";"))


@pytest.mark.parametrize("step", [1 << 24, 300, 1])
def test_parquet_row_groups(make: Make, inbox: Path, step: int) -> None:
    table = pa.table({"s": [str(n) for n in range(100)], "n": pa.array(range(100), pa.int32())})
    pq.write_table(table, inbox / "a.parquet", row_group_size=7)
    rows = all_rows(make("parquet", schema="n bigint, s string", split_bytes=step))
    assert [(row["offset"], row["n"], row["s"]) for row in rows] == [(n, n, str(n)) for n in range(100)]
    (inbox / "b.parquet").write_bytes(b"no such thing")
    with pytest.raises(SourceError, match=r"b.parquet: "):
        all_rows(make("parquet", schema="n bigint"))
    with pytest.raises(SourceError, match=r"a.parquet: it has no column 'm'"):
        all_rows(make("parquet", schema="m bigint"))


def without_z(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: value for name, value in values.items() if name != "z"}
    return [without_z(value) for value in values] if isinstance(values, list) else values


@pytest.mark.parametrize(
    ("kind", "fits", "misfit"),
    [
        ("float", pa.array([1.5]), pa.array([1e300])),
        ("date", pa.array([dt.date(2024, 1, 1)]), pa.array([dt.datetime(2024, 1, 1, 5)])),
        ("timestamp", pa.array([dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]), pa.array([5])),
        (
            "timestamp_ntz",
            pa.array([dt.datetime(2024, 1, 1)]),
            pa.array([dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]),
        ),
        ("boolean", pa.array([True]), pa.array([3.5])),
        ("bigint", pa.array([5]), pa.array(["5"])),
        ("struct<x: bigint, y: bigint>", pa.array([{"x": 1, "y": 2}]), pa.array([{"x": 1, "z": 2}])),
        (
            "array<struct<y: int, x: int>>",
            pa.array([[{"x": 1, "y": 2, "z": "3"}]]),
            pa.array([[{"x": "1", "y": 2}]]),
        ),
        ("array<struct<x: float>>", pa.array([[{"x": 1.5}]]), pa.array([[{"x": 1e300}]])),
        ("binary", pa.array([b"abc"], pa.binary(3)), pa.array(["abc"])),
    ],
)
def test_parquet_of_other_types(make: Make, inbox: Path, kind: str, fits: pa.Array, misfit: pa.Array) -> None:
    pq.write_table(pa.table({"v": fits}), inbox / "a.parquet")
    assert [row["v"] for row in all_rows(make("parquet", schema=f"v {kind}"))] == without_z(fits.to_pylist())
    pq.write_table(pa.table({"v": misfit}), inbox / "b.parquet")
    with pytest.raises(SourceError, match=r"b.parquet: it cannot be read: "):
        all_rows(make("parquet", schema=f"v {kind}"))


def test_numbers_of_text_that_a_type_has_not(make: Make, inbox: Path) -> None:
    put(inbox / "a.csv", b"f,i\n1e39,1\ninf,2\nnan,3\nNA,NA\n1.5,nan\n", 1)
    rows = all_rows(make("csv", schema="f float, i int", malformed="bad"))
    assert [(str(row["f"]), row["i"], row["bad"]) for row in rows] == [
        ("None", None, "1e39,1"),
        ("inf", 2, None),
        ("nan", 3, None),
        ("None", None, None),
        ("None", None, "1.5,nan"),
    ]


def test_a_file_that_changes_before_it_is_read_fails_the_source(make: Make, inbox: Path) -> None:
    put(inbox / "a", "one\n")
    source = make()
    start = source.initialOffset()
    end = source.latestOffset(start, ReadAllAvailable())
    with (inbox / "a").open("a") as file:
        file.write("two\n")
    with pytest.raises(SourceError, match=r"a has changed since it was found, with 4 bytes \(8 now\)"):
        range_rows(source, start, end)


def test_a_file_that_changes_while_it_is_read_fails_the_source(make: Make, inbox: Path) -> None:
    put(inbox / "a", "one\n" * 600_000)
    source = make()
    start = source.initialOffset()
    (part,) = source.partitions(start, source.latestOffset(start, ReadAllAvailable()))
    reading = source.read(part)
    next(reading)
    with (inbox / "a").open("a") as file:
        file.write("two\n")
    with pytest.raises(SourceError, match="a has changed"):
        list(reading)


def test_a_file_that_changes_afterwards_is_not_read_again(
    make: Make, inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(inbox / "a", "one\n")
    source = make()
    end = source.latestOffset(source.initialOffset(), ReadAllAvailable())
    put(inbox / "a", "one\ntwo\n", 5)
    assert source.latestOffset(end, ReadAllAvailable()) == end
    assert source.latestOffset(end, ReadAllAvailable()) == end
    assert caplog.text.count("has changed since it was found") == 1


def test_a_file_that_is_removed_before_it_is_read(
    make: Make, inbox: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(inbox / "a", "one\n", 1)
    put(inbox / "b", "two\n")
    source = make()
    start = source.initialOffset()
    end = source.latestOffset(start, ReadAllAvailable())
    (inbox / "a").unlink()
    with pytest.raises(SourceError, match="a was removed before it was read; ignore_missing=True"):
        range_rows(source, start, end)
    assert [row["value"] for row in range_rows(make(ignore_missing=True), start, end)] == ["two"]
    assert "a was removed before it was read, and is left out" in caplog.text


def test_a_young_file_waits(make: Make, inbox: Path) -> None:
    put(inbox / "old", "old\n")
    (inbox / "young").write_text("young\n")
    source = make(min_age="1h")
    assert [row["value"] for row in all_rows(source)] == ["old"]


def test_the_directory_is_listed_every_so_often(make: Make, inbox: Path) -> None:
    source = make(poll="1h")
    start = source.initialOffset()
    assert source.latestOffset(start, ReadAllAvailable()) == start
    put(inbox / "a", "one\n")
    assert source.latestOffset(start, ReadAllAvailable()) == start


def test_what_is_there_now(make: Make, inbox: Path) -> None:
    put(inbox / "a", "one\n")
    source = make()
    source.prepareForTriggerAvailableNow()
    put(inbox / "b", "two\n")
    assert [row["value"] for row in all_rows(source)] == ["one"]


def test_a_pattern_on_another_file_system(make: Make) -> None:
    memory = fsspec.filesystem("memory")
    for name in ("a.txt", "b.log", "sub/c.txt", "_d.txt"):
        memory.pipe_file(f"/pattern/{name}", name.encode())
    assert [row["value"] for row in all_rows(make(path="memory://pattern/*.txt"))] == ["a.txt"]
    found = [row["value"] for row in all_rows(make(path="memory://pattern/**/*.txt"))]
    assert found == ["a.txt", "sub/c.txt"]
    missing = make(path="memory://pattern/none")
    assert missing.latestOffset(start := missing.initialOffset(), ReadAllAvailable()) == start
    with pytest.raises(ConfigError, match="path: nosuch://x cannot be reached"):
        all_rows(make(path="nosuch://x"))


# ---------------------------------------------------------------- the journal


def test_the_journal_stays_small(
    make: Make, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "COMPACT_AT", 3)
    source = make(remember=0, split_bytes=3)
    first = end = source.initialOffset()
    read: list[str] = []
    for number in range(30):
        if number >= 10:
            (inbox / str(number - 10)).unlink()
        put(inbox / str(number), f"{number}\n{number}\n")
        if number % 7 == 0:
            source = make(remember=0, split_bytes=3)
        start, end = end, source.latestOffset(end, ReadAllAvailable())
        rows = range_rows(source, start, end)
        assert rows == range_rows(make(), start, end), "whoever reads the journal"
        read += [row["value"] for row in rows]
        source.commit(end)
        (directory,) = (tmp_path / "journal").iterdir()
        assert len(list(directory.iterdir())) <= 4
        assert sum(path.stat().st_size for path in directory.iterdir()) < 4_000
    assert read == [str(number) for number in range(30) for _ in range(2)]
    with pytest.raises(SourceError, match="does not reach back to what was read from 0"):
        source.partitions(first, end)
    put(inbox / "0", "again\n")
    assert [
        row["value"] for row in range_rows(source, end, source.latestOffset(end, ReadAllAvailable()))
    ] == ["again"]


def test_a_name_is_remembered_for_some_time(make: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "COMPACT_AT", 1)
    source = make()
    put(inbox / "a", "one\n")
    end = source.latestOffset(source.initialOffset(), ReadAllAvailable())
    (inbox / "a").unlink()
    put(inbox / "b", "two\n")
    end = source.latestOffset(end, ReadAllAvailable())
    source.commit(end)
    put(inbox / "a", "one\n")
    assert make().latestOffset(end, ReadAllAvailable()) == end


def test_one_who_was_killed_while_it_put_the_journal_together(
    make: Make, inbox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "COMPACT_AT", 2)
    source = make()
    start = end = source.initialOffset()
    for number in range(4):
        put(inbox / str(number), f"{number}\n", -number)
        end = source.latestOffset(end, ReadAllAvailable())
    with monkeypatch.context() as killed:
        killed.setattr("ftlayer.checkpoint.storage.files.LocalFiles.delete", lambda *_: None)
        source.commit(end)
    assert [row["value"] for row in range_rows(make(), start, end)] == ["0", "1", "2", "3"]
    (directory,) = (tmp_path / "journal").iterdir()
    assert len(list(directory.iterdir())) == 1


def test_two_sources_do_not_share_a_journal(make: Make, inbox: Path, tmp_path: Path) -> None:
    first, second = make(), make()
    start = first.initialOffset()
    for source in (first, second):
        source.latestOffset(start, ReadAllAvailable())
    put(inbox / "a", "one\n")
    first.latestOffset(start, ReadAllAvailable())
    with pytest.raises(SourceError, match="another source writes to this journal"):
        second.latestOffset(start, ReadAllAvailable())
    # It reads what the other one has written.
    end = second.latestOffset(start, ReadAllAvailable())
    assert [row["value"] for row in range_rows(second, start, end)] == ["one"]
    (directory,) = (tmp_path / "journal").iterdir()
    next(directory.iterdir()).unlink()
    with pytest.raises(SourceError, match="it ends at 0, and what was read at 1"):
        make().latestOffset(end, ReadAllAvailable())
    with pytest.raises(ConfigError, match="of another source"):
        make().latestOffset({"x-0": 1}, ReadAllAvailable())


def test_a_directory_that_is_not_there_yet_is_said_once(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    later = tmp_path / "later"
    source = make(path=str(later), poll="0s")
    start = source.initialOffset()
    for _ in range(3):
        assert source.latestOffset(start, ReadAllAvailable()) == start
    assert [record.getMessage() for record in caplog.records] == [
        f"{later} is not there; its files are read when it is"
    ]
    later.mkdir()
    assert source.latestOffset(start, ReadAllAvailable()) == start
    (later / "a").write_text("one\n")
    assert source.latestOffset(start, ReadAllAvailable()) != start
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": ""}, "path: expected a path or URL"),
        ({"path": 7}, "path: expected a path or URL"),
        ({"path": "s3:/bucket"}, "path: expected a path, or a URL like s3://bucket/path"),
        ({"journal": None}, "journal: expected a path or URL"),
        ({"format": "xml"}, "format: expected"),
        ({"format": "json"}, "schema: expected the columns of the json files"),
        ({"schema": "n int"}, "schema: text has one column"),
        ({"format": "json", "schema": "path string"}, "schema: column 'path' is there twice; position=False"),
        ({"format": "parquet", "schema": "n int", "malformed": "bad"}, "malformed: parquet has no lines"),
        ({"format": "json", "schema": "n"}, "n"),
        ({"format": "csv", "schema": "n int", "malformed": "n"}, "schema: column 'n' is there twice$"),
        ({"delimiter": ""}, "delimiter: expected one character"),
        ({"delimiter": "é"}, "delimiter: expected one character of ASCII"),
        ({"encoding": "utf-99"}, "encoding: expected one of text"),
        ({"encoding": "base64"}, "encoding: expected one of text"),
        ({"errors": "ignore"}, "errors: expected"),
        ({"format": "json", "schema": "m map<string, int>"}, "schema: m is map"),
        ({"format": "csv", "schema": "m array<int>"}, "schema: m is list<.*which CSV has not"),
        ({"max_files": 0}, "max_files: "),
        ({"max_bytes": 0}, "max_bytes: "),
        ({"split_bytes": True}, "split_bytes: "),
        ({"poll": "soon"}, "poll"),
        ({"min_age": -1}, "min_age"),
        ({"remember": "x"}, "remember"),
        ({"ignore_missing": "yes"}, "ignore_missing: expected True or False"),
        ({"storage_options": "key"}, "storage_options: expected a dict"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    options = {"path": "in", "journal": "journal", **given}
    with pytest.raises(ConfigError, match=said):
        FilesSource(options.pop("path"), **options)


@pytest.mark.parametrize(
    ("path", "journal", "is_read"),
    [
        ("in", "in/journal", True),
        ("in/", "in", True),
        ("in/**/*.json", "in/journal", True),
        ("in/*.json", "in/journal", False),
        ("in", "in-journal", False),
        ("s3://b/in", "s3://b/in/journal", True),
        ("s3://b/in", "journal", False),
    ],
)
def test_a_journal_is_not_among_the_files_that_are_read(path: str, journal: str, is_read: bool) -> None:
    if is_read:
        with pytest.raises(ConfigError, match="would be read; name another directory"):
            FilesSource(path, journal=journal)
    else:
        FilesSource(path, journal=journal)


# ---------------------------------------------------------------- files and lines that cannot be read

GOOD = b"id,name\n9,z\n"
CSV = b"id,name\n1,a\n2,b\n"
ROWS = [(1, "a"), (2, "b")]


ZSTD = {"zst": "zstd", "lz4": "lz4"}


def packed(content: bytes, kind: str) -> bytes:
    made = pa.BufferOutputStream()
    with pa.CompressedOutputStream(made, kind) as stream:
        stream.write(content)
    return bytes(made.getvalue())


def pairs(source: FilesSource) -> list[Any]:
    return [(row["id"], row["name"]) for row in all_rows(source)]


@pytest.mark.parametrize("step", [1 << 24, 5])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (CSV.replace(b"\n", b"\r"), ROWS),
        (CSV.replace(b"\n", b"\r\n"), ROWS),
        (b"id,name", []),
        (b"\n  \r\n" + CSV, ROWS),
        (b"\r\r" + CSV.replace(b"\n", b"\r"), ROWS),
        (b"\n\n", []),
        (b"\xef\xbb\xbf" + CSV, ROWS),
        (b'"id","na""me",name\n1,x,"a, b"\n2,,"c\rd"\n', [(1, "a, b"), (2, "c\rd")]),
        (b'id,name\n1,5" pipe\n2,b\n', [(1, '5" pipe'), (2, "b")]),
    ],
)
def test_a_csv_file_of_others(make: Make, inbox: Path, content: bytes, found: Any, step: int) -> None:
    put(inbox / "a.csv", content, 1)
    put(inbox / "b.csv", GOOD)
    assert pairs(make("csv", schema="id int, name string", split_bytes=step)) == [*found, (9, "z")]


@pytest.mark.parametrize(
    ("name", "content", "said", "read"),
    [
        ("utf16.csv", CSV.decode().encode("utf-16"), "byte order mark of UTF-16: encoding='utf-16'", []),
        ("other.csv", b"id,nom\n1,a\n", "its first line has no column 'name'", []),
        ("twice.csv", b"id,name,id\n1,a,2\n", "its first line has twice the column 'id'", []),
        ("latin.csv", b"id,name,\xe9\n1,a,\n", "its first line has no names of columns", []),
        ("cut.csv.gz", gzip.compress(CSV * 9, mtime=0)[:-9], "EOFError: Compressed file ended before", []),
        ("none.csv.gz", b"nothing", "BadGzipFile", []),
        ("cut.csv.xz", b"\xfd7zXZ\0bad", "EOFError", []),
        ("no.csv.zip", b"PKbad", "BadZipFile", []),
        *((f"cut.csv.{end}", packed(CSV, kind)[:-5], "Truncated", []) for end, kind in ZSTD.items()),
        ("utf32.csv", CSV.decode().encode("utf-32"), "byte order mark of UTF-32: encoding='utf-32'", []),
        ("cr.csv", b"id,name\n1,a\r3,c\n2,b\n", "the line at byte 8 is no csv", [(2, "b")]),
        ("quote.csv", b'id,name\n1,"a\nb"\n2,b\n', "the line at byte 8 is no csv", [(2, "b")]),
        ("open.csv", b'id,name\n2,b\n1,"a', "the line at byte 12 is no csv", [(2, "b")]),
        ("byte.csv", b"id,name\n1,\xe9\n2,b\n", "the line at byte 8 is no csv", [(2, "b")]),
    ],
)
def test_the_trouble_of_a_file_is_its_own(
    make: Make, inbox: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, said: str, read: Any
) -> None:
    put(inbox / name, content, 1)
    put(inbox / "z.csv", GOOD)
    put(inbox / "empty.csv.gz", gzip.compress(b"", mtime=0))
    with pytest.raises(SourceError, match=f"{name}.*{said}.*errors="):
        all_rows(make("csv", schema="id int, name string"))
    before = misfits()
    assert pairs(make("csv", schema="id int, name string", errors="skip")) == [*read, (9, "z")]
    assert misfits() > before
    assert said in caplog.text
    assert name in caplog.text


def test_a_file_system_that_fails_is_no_trouble_of_a_file(
    make: Make, inbox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(inbox / "a.csv", GOOD)
    source = make("csv", schema="id int, name string", errors="skip")
    (each,) = ranges(source, source.initialOffset())

    def fails(*_: Any, **__: Any) -> Any:
        raise OSError("the disk is gone")

    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.open", fails)
    with pytest.raises(SourceError, match=r"a.csv cannot be read: OSError: the disk is gone"):
        range_rows(source, *each)


def test_packed_files_and_a_mark_at_the_beginning_of_text(make: Make, inbox: Path) -> None:
    for end, kind in ZSTD.items():
        put(inbox / f"a.{end}", packed(b"1\n", kind) * 2)
    put(inbox / "b.txt", b"\xef\xbb\xbf1\n1\n", -1)
    assert [(row["value"], row["offset"]) for row in all_rows(make())] == [("1", 0), ("1", 2)] * 2 + [
        ("1", 3),
        ("1", 5),
    ]


@pytest.mark.parametrize("format", ["text", "json", "csv"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "cp1252"])
def test_encodings(make: Make, inbox: Path, format: str, encoding: str) -> None:
    lines = {"text": "é\nb", "json": '{"name": "é"}\n{"name": "b"}', "csv": "name\né\nb"}[format]
    put(inbox / f"a.{format}", lines.encode(encoding), 1)
    put(inbox / f"b.{format}.gz", gzip.compress(lines.encode(encoding)))
    schema = {} if format == "text" else {"schema": "name string"}
    rows = all_rows(make(format, encoding=encoding, split_bytes=3, **schema))
    assert [row["value" if format == "text" else "name"] for row in rows] == ["é", "b"] * 2
    assert rows[1]["offset"] == lines.encode().index(lines.encode().splitlines()[-1])


def test_what_is_none_of_the_encoding(make: Make, inbox: Path) -> None:
    put(inbox / "a.csv", b"id,name\n1,\x81\n2,b\n", 1)
    content = "id,name\n1,a\ud800\n2,b\n".encode("utf-16", "surrogatepass") + b"x"
    put(inbox / "b.csv", content)
    for encoding, name in (("cp1252", "a"), ("utf-16", "b")):
        source = make(
            "csv", inbox / f"{name}.csv", schema="id int, name string", encoding=encoding, malformed="bad"
        )
        rows = [(row["id"], row["name"], row["bad"]) for row in all_rows(source)]
        assert rows[1] == (2, "b", None)
        assert rows[0][:2] == (None, None)
        assert rows[0][2].startswith("1,")
        assert "\ufffd" in rows[0][2]


def test_what_is_there_by_its_very_name_is_no_pattern(make: Make, inbox: Path) -> None:
    for name in ("log[1].txt", "log1.txt", "d[1]/a.txt", "d1/a.txt", "d[1]/b*.txt", "star/x.txt", "a::b"):
        put(inbox / name, name)
    found = {
        "log[1].txt": ["log[1].txt"],
        "log[12].txt": ["log1.txt"],
        "d[1]/a.txt": ["d[1]/a.txt"],
        "d[1]/*.txt": ["d[1]/a.txt", "d[1]/b*.txt"],
        "d[1]": ["d[1]/a.txt", "d[1]/b*.txt"],
        "d[1]/b*.txt": ["d[1]/b*.txt"],
        "d[12]/*.txt": ["d1/a.txt"],
        "st?r/*": ["star/x.txt"],
        "a::b": ["a::b"],
    }
    for path, names in found.items():
        assert sorted(row["value"] for row in all_rows(make(path=inbox / path))) == names, path
        reader = TailSource(inbox / path).open(Member("me", 0, 1), {}, stored=True)
        if path != "d[1]":
            fetched = [reader.fetch(9, 0.0) for _ in names]
            lines = [line for each in fetched if each is not None for line in each.rows["value"].to_pylist()]
            assert lines == [], "their lines have no newline yet"
            assert {place.log for place in reader._follower.places()} == {f"{inbox}/{name}" for name in names}
        reader.close()


def test_a_name_that_is_not_utf_8(make: Make, inbox: Path) -> None:
    name = os.fsdecode(b"a\xff.txt")
    put(inbox / name, "one\n", 1)
    put(inbox / "b.txt", "two\n")
    rows = all_rows(make())
    assert [(Path(row["path"]).name, row["value"]) for row in rows] == [
        ("a\ufffd.txt", "one"),
        ("b.txt", "two"),
    ]
    source = TailSource(inbox / "*.txt")
    reader = source.open(Member("me", 0, 1), {}, stored=True)
    first = reader.fetch(1, 0.0)
    assert first is not None
    again = source.open(Member("me", 0, 1), {0: first.position}, stored=True).fetch(9, 0.0)
    assert again is not None
    values = [first.rows["value"].to_pylist(), again.rows["value"].to_pylist()]
    assert sorted(values) == [["one"], ["two"]]


OBJECTS = st.one_of(
    st.sampled_from(
        ["null", "{}", "[]", "1", '{"n": 1}{"n": 2}', '{"n":', "2}", '{"n": null}', "\x00", " ", "{"]
    ),
    st.fixed_dictionaries({"n": st.integers(-9, 9)}).map(json.dumps),
    st.text('{}[]":,n1 ', max_size=8),
    st.builds(lambda text: f'  {{"n": 7, "s": {json.dumps(text)}}} ', st.text("{}\n,", max_size=4)),
)


@settings(max_examples=300, deadline=None)
@given(
    lines=st.lists(OBJECTS, max_size=9),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    step=st.integers(1, 60),
)
def test_each_json_line_is_a_row_or_malformed(
    lines: list[str], newline: str, step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    def expected(line: str) -> Any:
        try:
            value = json.loads(line, object_pairs_hook=lambda pairs: pairs)
        except ValueError:
            return (None, line)
        is_fit = line.strip().startswith("{") and [name for name, _ in value].count("n") < 2
        numbers = [found for name, found in value if name == "n"] if is_fit else ["none"]
        is_fit = is_fit and all(found is None or type(found) is int for found in numbers)
        return (dict(value).get("n"), None) if is_fit else (None, line)

    directory = tmp_path_factory.mktemp("json")
    (directory / "a.json").write_bytes(newline.join(lines).encode())
    source = FilesSource(
        directory,
        "json",
        schema="n bigint",
        malformed="bad",
        journal=f"{directory}-journal",
        split_bytes=step,
    )
    wanted = [expected(line) for line in lines if line.strip(" ")]
    assert [(row["n"], row["bad"]) for row in all_rows(source)] == wanted


def test_no_document_kills_its_reader() -> None:
    """In processes of their own: a parser that dies would take the tests with it."""
    script = Path(__file__).with_name("odd_documents.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=1_000
    )
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
