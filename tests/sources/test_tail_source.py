"""Growing files of this machine: which belong to a log, what is read of them, and which options there are."""

from __future__ import annotations

import errno
import gzip
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from ftlayer.connectors import tail
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources import TailSource
from ftlayer.topology.operators import Fetched, Member, QueueReader

MEMBER = Member("job/lines", 0, 1)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LOOK_S", 0.0)


def fetch_all(reader: QueueReader, rows: int = 1_000) -> list[Fetched]:
    found: list[Fetched] = []
    while (fetched := reader.fetch(rows, 0.0)) is not None:
        found.append(fetched)
    return found


def rows_of(found: list[Fetched]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for each in found for row in each.rows.to_pylist()]


def values(found: list[Fetched]) -> list[str]:
    return [row[3] for row in rows_of(found)]


def test_lines_have_their_place(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_bytes("ä\r\ntwo\n\nfo".encode())
    source = TailSource(log)
    reader = source.open(MEMBER, {}, stored=True)
    found = fetch_all(reader, rows=2)
    inode = log.stat().st_ino
    assert rows_of(found) == [
        (str(log), inode, 0, "ä"),
        (str(log), inode, 4, "two"),
        (str(log), inode, 8, ""),
    ]
    assert [each.rows.num_rows for each in found] == [2, 1]
    assert all(each.rows.schema.equals(source.schema) for each in found)
    assert len({each.position for each in found}) == 2
    with log.open("ab") as file:
        file.write(b"ur\n\xff\n")
    assert values(fetch_all(reader)) == ["four", "�"]
    reader.close()
    again = source.open(MEMBER, {0: found[0].position}, stored=True)
    assert values(fetch_all(again)) == ["", "four", "�"]
    again.close()


def test_a_log_is_followed_over_its_rotation(tmp_path: Path) -> None:
    """Also while nobody follows it: twice, and once to a name that nobody has heard of."""
    log = tmp_path / "app.log"
    source = TailSource(log)
    reader = source.open(MEMBER, {}, stored=True)
    assert fetch_all(reader) == []
    log.write_text("1\n2\n")
    (fetched,) = fetch_all(reader)
    with log.open("a") as writer:
        log.rename(tmp_path / "app.log.1")
        writer.write("3\n")
        writer.flush()
        log.write_text("4\n")
    assert values(fetch_all(reader)) == ["3", "4"]
    reader.close()
    (tmp_path / "app.log.1").rename(tmp_path / "old-name")
    log.rename(tmp_path / "app.log-20261123")
    log.write_text("5\n")
    log.rename(tmp_path / "app.log.1")
    log.write_text("6\n")
    (tmp_path / "app.log.2.gz").write_bytes(gzip.compress(b"what was read long ago\n"))
    (tmp_path / "app.logbook").write_text("no log\n")
    reader = source.open(MEMBER, {0: fetched.position}, stored=True)
    assert values(fetch_all(reader)) == ["3", "4", "5", "6"]
    reader.close()


def test_several_logs_by_a_pattern(tmp_path: Path) -> None:
    for name, text in [("a.log", "a\n"), ("b.log", "b\n"), ("a.1.log", "old\n"), ("b.log.1", "older\n")]:
        (tmp_path / name).write_text(text)
    source = TailSource(tmp_path / "*.log", rotated=["{stem}.*{suffix}", "{name}.*"])
    reader = source.open(MEMBER, {}, stored=True)
    found = rows_of(fetch_all(reader))
    assert sorted((Path(row[0]).name, row[3]) for row in found) == [
        ("a.log", "a"),
        ("a.log", "old"),
        ("b.log", "b"),
        ("b.log", "older"),
    ]
    (tmp_path / "c.log").write_text("c\n")
    assert values(fetch_all(reader)) == ["c"]
    reader.close()


def test_a_log_that_is_copied_and_truncated(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    source = TailSource(log, rotation="copytruncate")
    log.write_text("1\n2\n")
    reader = source.open(MEMBER, {}, stored=True)
    (fetched,) = fetch_all(reader)
    reader.close()
    for line, copy in [("3\n", "app.log.2"), ("4\n", "app.log.1")]:
        with log.open("a") as writer:
            writer.write(line)
        (tmp_path / copy).write_text(log.read_text())
        log.write_text("")
    log.write_text("5\n6\n7\n8\n")
    reader = source.open(MEMBER, {0: fetched.position}, stored=True)
    assert values(fetch_all(reader)) == ["3", "4", "5", "6", "7", "8"]
    reader.close()


def test_one_subtask_reads(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("1\n")
    source = TailSource(log)
    assert source.most_subtasks == 1
    idle = source.open(Member("job/lines", 1, 2), {}, stored=True)
    assert idle.fetch(10, 0.0) is None
    idle.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": ""}, "path: expected a path of this machine"),
        ({"path": []}, "path: expected a path, or several"),
        ({"path": ["a", 7]}, "path: expected a path of this machine"),
        ({"path": "s3://bucket/log"}, "path: expected files of this machine, got 's3://bucket/log'"),
        ({"rotated": "{name}.*"}, "rotated: expected a list"),
        ({"rotated": ["{nam}.*"]}, "rotated: expected a pattern with {name}"),
        ({"rotated": ["{}.*"]}, "rotated: expected a pattern with {name}"),
        ({"rotated": ["old/{name}"]}, "rotated: expected the name of files beside their log"),
        ({"rotation": "move"}, "rotation: expected"),
        ({"start": "now"}, "start: expected"),
        ({"quiet": "soon"}, "quiet"),
        ({"max_line": 10}, "max_line: "),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    options = {"path": "app.log", **given}
    with pytest.raises(ConfigError, match=said):
        TailSource(options.pop("path"), **options)


def test_a_position_of_another_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="give the new one a uid of its own"):
        TailSource("app.log").open(MEMBER, {0: b"\x07"}, stored=True)


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    reader = TailSource(str(tmp_path)).open(Member("job", 0, 1), {}, stored=True)
    with pytest.raises(SourceError, match="is a directory; name its logs"):
        reader.fetch(1, 0)


@pytest.mark.parametrize("pattern", [True, False])
def test_one_that_cannot_be_read_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pattern: bool
) -> None:
    for name in ("a.log", "closed.log", "z.log"):
        (tmp_path / name).write_text(f"{name}\n")
    (tmp_path / "folder.log").mkdir()
    (tmp_path / "nowhere.log").symlink_to(tmp_path / "gone")
    (tmp_path / "round.log").symlink_to(tmp_path / "round.log")
    plain, closed = os.open, {str(tmp_path / "closed.log")}

    def refusing(path: str, flags: int) -> int:
        if path in closed:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return plain(path, flags)

    monkeypatch.setattr(tail.os, "open", refusing)
    given = tmp_path / "*.log" if pattern else sorted(tmp_path.glob("*.log"))
    reader = TailSource(given).open(MEMBER, {}, stored=True)
    with caplog.at_level(logging.WARNING):
        assert values(fetch_all(reader)) == ["a.log", "z.log"]
        assert fetch_all(reader) == []
    said = [record.getMessage() for record in caplog.records]
    assert sorted(Path(each.split()[0]).name for each in said) == ["closed.log", "folder.log", "round.log"]
    assert any("closed.log cannot be read: Permission denied; it is left out until" in each for each in said)
    closed.clear()
    assert values(fetch_all(reader)) == ["closed.log"]
    reader.close()


def test_where_nothing_of_what_was_named_can_be_read_the_source_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "app.log").write_text("1\n")

    def refuses(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(tail.os, "open", refuses)
    reader = TailSource([tmp_path / "app.log", tmp_path]).open(MEMBER, {}, stored=True)
    with pytest.raises(SourceError, match=r"app.log cannot be read: Permission denied; .* is a directory"):
        reader.fetch(1, 0)
