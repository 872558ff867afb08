"""``ftlayer checkpoints`` …"""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

from ftlayer.checkpoint.letters import ChainLetter, LetterBatch, LetterKind
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Committable,
    KeyedSnapshot,
    OperatorInfo,
    OperatorState,
    Redistribution,
    Scope,
    SnapshotTimes,
    StatePiece,
    TableInfo,
)
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.keys import take_over
from ftlayer.checkpoint.storage.layout import new_savepoint
from ftlayer.checkpoint.storage.report import details
from ftlayer.cli.main import app
from ftlayer.errors import StaleOwnerError

LARGE = b"x" * 300_000


def ftlayer(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoints", *map(str, arguments)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@dataclasses.dataclass
class Left:
    """What a job has left: checkpoints 1 and 2 share a file, 3 is a savepoint."""

    kit: Any
    one: str
    two: str
    savepoint: str
    shared: str


@pytest.fixture
def left(make_kit: Any, made: Any, tmp_path: Path) -> Left:
    kit = make_kit("local")
    slot, driver = kit.slot(), kit.driver()

    def published(number: int, location: str, base: Any) -> Any:
        writer = slot.writer(made.barrier(number, location))
        own = writer.write([LARGE])
        shared = base or writer.write([LARGE], Scope.SHARED)
        writer.close()
        tables = (TableInfo(0, "count", "seen", "value", "msgpack", 1),)
        pieces = (StatePiece("entries", own, 7, number), StatePiece("entries", shared, 5, number))
        part = dataclasses.replace(
            made.subtask([]),
            keyed=KeyedSnapshot(0, 128, tables, pieces),
            operators=(OperatorState("buffer", "rows", Redistribution.SPLIT, (b"12", b"345")),),
            positions={"p0": msgpack.packb([1, "{}", b"\xab"])},
            committables=(Committable("sink", b"m", number),),
            channels=(ChannelState("a", "", "b", 0, 0, 1, False, own, 11),),
            times=SnapshotTimes(1, 2, 3.5, 4.25, 6, True),
            written_bytes=600_000,
        )
        checkpoint = made.checkpoint(number, part, savepoint=bool(location))
        info = OperatorInfo("count", "count", "process", 1, ("bigint",))
        return driver.publish(dataclasses.replace(checkpoint, operators=(info,)), location), shared

    one, shared = published(1, "", None)
    two, _ = published(2, "", shared)
    savepoint, _ = published(3, new_savepoint(str(tmp_path / "savepoints"), kit.run), None)
    slot.close()
    return Left(kit, one.location, two.location, savepoint.location, shared.path)


def test_a_path_is_listed(left: Left, tmp_path: Path) -> None:
    code, output = ftlayer(tmp_path)
    assert code == 0
    places = [output.index(location) for location in (left.savepoint, left.two, left.one)]
    assert places == sorted(places)
    assert (code, output) == ftlayer("list", tmp_path)
    code, output = ftlayer(tmp_path, "--json")
    rows = json.loads(output)
    assert [row["checkpoint"] for row in rows] == [3, 2, 1]
    assert rows[1]["duration_ms"] == 5
    assert rows[1]["state_bytes"] == 900_005


def test_nothing_is_there(tmp_path: Path) -> None:
    assert ftlayer(tmp_path) == (0, f"{tmp_path}: no checkpoints or savepoints\n")
    assert ftlayer(tmp_path, "--json") == (0, "[]\n")
    code, output = ftlayer("verify", tmp_path)
    assert code == 2
    assert "no checkpoint or savepoint here" in output


def test_a_path_that_does_not_exist_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    none, file = tmp_path / "none", tmp_path / "file"
    for command in ("list", "verify", "show", "delete", "dispose"):
        sure = ["--yes"] if command in ("delete", "dispose") else []
        assert ftlayer(command, none, *sure) == (2, f"ftlayer: {none} does not exist\n")
    file.write_text("")
    for command in ("list", "verify"):
        assert ftlayer(command, file) == (2, f"ftlayer: {file} is a file, not a directory\n")


def test_a_checkpoint_is_shown(left: Left) -> None:
    code, output = ftlayer("show", left.two)
    assert code == 0
    for expected in ("bigint", "585.9 KiB", "buffer 5 B", "3.5 ms", '[1, "{}", "ab"]', "11 (293.0 KiB)"):
        assert expected in output, output
    facts = json.loads(ftlayer("show", left.savepoint + "/_metadata", "--json")[1])
    assert facts["kind"] == "savepoint"
    assert facts["sizes"][0]["keyed_entries"] == 12
    assert facts["sizes"][0]["waiting_records"] == 0
    assert facts["letters"] == []
    assert facts["uncommitted"] == [{"sink": "sink", "subtask": 0, "checkpoint": 3}]


def test_letters_of_a_checkpoint_are_counted_by_chain(made: Any) -> None:
    letter = ChainLetter(bytes(16), 2, "parse", 0, 0, LetterKind.RECORD, "parse", b"", b"", None, (), 1, 2)
    back = dataclasses.replace(made.subtask([]), letters=(letter, letter), readmitted=(b"x",))
    uid = back.uid
    checkpoint = dataclasses.replace(made.checkpoint(3, back), letters=(LetterBatch("run-2", (letter,)),))
    assert details(checkpoint)["letters"] == [
        {"chain": chain, "readmitted": readmitted, "unwritten": unwritten}
        for chain, readmitted, unwritten in sorted([("parse", 0, 1), (uid, 1, 0)])
    ]


def test_what_is_no_checkpoint_names_those_below(left: Left, tmp_path: Path) -> None:
    for command in ("show", "delete", "dispose"):
        code, output = ftlayer(command, tmp_path / "checkpoints", *(["--yes"] if command != "show" else []))
        assert code == 2
        assert left.two in output


def test_damage_is_found(left: Left, tmp_path: Path) -> None:
    assert ftlayer("verify", tmp_path)[0] == 0
    file = Path(left.two).parent / left.shared
    file.write_bytes(LARGE[:-1] + b"y")
    code, output = ftlayer("verify", tmp_path)
    assert code == 1
    (told,) = [line for line in output.splitlines() if "is damaged" in line and left.one in line]
    assert told.startswith(f"{left.one} is damaged")
    assert told.count(f"{left.one} ") == 1
    assert f"{left.savepoint}: good" in output
    results = json.loads(ftlayer("verify", left.savepoint, "--json")[1])
    assert results == [{"location": left.savepoint, "error": None}]


def test_unreadable_metadata_is_listed(left: Left, tmp_path: Path) -> None:
    Path(left.two, "_metadata").write_bytes(b"FTLCHKPT?")
    code, output = ftlayer(tmp_path)
    assert code == 0
    assert "unreadable" in output
    assert "cut off" in output
    assert any("error" in row for row in json.loads(ftlayer(tmp_path, "--json")[1]))


def test_deleting_leaves_what_others_need(left: Left) -> None:
    run = Path(left.one).parent
    assert ftlayer("delete", left.one, answer="n\n")[0] == 1
    assert ftlayer("verify", left.one)[0] == 0
    assert ftlayer("delete", left.one, "--yes") == (0, f"deleted {left.one}\n")
    assert ftlayer("verify", left.two)[0] == 0
    assert ftlayer("delete", left.two, answer="y\n")[0] == 0
    assert not run.exists()
    assert ftlayer("delete", left.two, "--yes")[0] == 2


def test_a_damaged_one_can_be_deleted_and_is_deleted_first(left: Left) -> None:
    Path(left.two, "_metadata").write_bytes(b"nonsense")
    code, output = ftlayer("delete", left.one, "--yes")
    assert code == 1
    assert f"which files {left.two} shares" in output
    assert ftlayer("delete", left.two, "--yes")[0] == 0
    assert ftlayer("verify", left.one)[0] == 0


def test_savepoints_are_disposed_of(left: Left) -> None:
    code, output = ftlayer("delete", left.savepoint, "--yes")
    assert code == 2
    assert "use `ftlayer checkpoints dispose`" in output
    code, output = ftlayer("dispose", left.one, "--yes")
    assert code == 2
    assert "use `ftlayer checkpoints delete`" in output
    Path(left.savepoint, "notes.txt").write_text("mine")
    assert ftlayer("dispose", left.savepoint, "--yes")[0] == 0
    assert [path.name for path in Path(left.savepoint).iterdir()] == ["notes.txt"]


def test_a_jobs_own_key_is_asked_for(make_kit: Any, made: Any, tmp_path: Path) -> None:
    kit = make_kit("local", key=b"k" * 32)
    location = kit.driver().publish(made.checkpoint(1, made.subtask([]))).location
    code, output = ftlayer("show", location)
    assert code == 1
    assert "CheckpointConfig(key" in output
    (tmp_path / "key").write_bytes(b"k" * 32)
    (tmp_path / "key").chmod(0o600)
    assert ftlayer("show", location, "--key-file", tmp_path / "key")[0] == 0
    assert ftlayer("show", location, "--key-file", tmp_path / "none")[0] == 2
    (tmp_path / "key").write_bytes(b"short")
    code, output = ftlayer("verify", location, "--key-file", tmp_path / "key")
    assert code == 2
    assert (
        output
        == f"ftlayer: --key-file: {tmp_path / 'key'} has 5 bytes, and CheckpointConfig.key 16 or more\n"
    )


@pytest.mark.parametrize("below", ["", "/job"])
@pytest.mark.parametrize("kind", ["local", "table"])
def test_clean_removes_what_no_checkpoint_needs(
    make_kit: Any, made: Any, kind: str, below: str, table_storage: Any
) -> None:
    options = {"storage": "table_storage:TableStorage"} if kind == "table" else {}
    named = ["--storage", options["storage"]] if options else []
    kit = make_kit(kind, **options)
    owner = take_over(kit.config.directory, kit.job, kit.run)
    slot, driver = kit.slot(), kit.driver()
    where = f"{kit.config.directory}{below}"
    writer = slot.writer(made.barrier(1))
    pieces = [writer.write([LARGE]), writer.write([LARGE], Scope.SHARED)]
    writer.close()
    kept = driver.publish(made.checkpoint(1, made.subtask(pieces)))
    assert ftlayer("clean", where, *named)[1].startswith("nothing was left behind; files with names")
    code, said = ftlayer("clean", kit.directory.url, *named)
    assert code == 2
    assert f"it is a part of the job at {kit.config.directory}/job; name that" in " ".join(said.split())
    dead = kit.slot(slot=1, instance="dead")
    writer = dead.writer(made.barrier(2))
    left = {writer.write([LARGE], scope).path for scope in Scope}
    writer.close()
    before = kit.paths()
    owner.check()
    code, said = ftlayer("clean", where, *named, answer="n\n")
    assert (code, kit.paths()) == (1, before)
    assert all(f"{kit.directory.url}/{path}" in said for path in left)
    owner.check()
    code, said = ftlayer("clean", where, "--yes", *named)
    assert (code, kit.paths()) == (0, before - left), said
    assert "deleted 2 files of" in said
    driver.verify(kept)
    # A driver that still ran publishes nothing that has lost its files.
    with pytest.raises(StaleOwnerError, match="run ftlayer checkpoints clean"):
        owner.check()
    kit.slot(slot=2, instance="dead").writer(made.barrier(3)).write([LARGE])
    kit.directory.publish("chk-1/_metadata", b"damaged")
    code, said = ftlayer("clean", where, "--yes", *named)
    assert code == 1
    assert "is not known, so all of it stays" in said
    assert "nothing was left behind" not in said


def test_clean_wants_a_directory_of_jobs(tmp_path: Path) -> None:
    assert "no job has its checkpoints here" in " ".join(ftlayer("clean", tmp_path)[1].split())
    assert "does not exist" in ftlayer("clean", tmp_path / "none")[1]


def test_what_its_job_removes_while_a_command_looks_is_no_finding(
    left: Left, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftlayer.checkpoint.storage import loading

    found = loading.find_checkpoints
    monkeypatch.setattr(loading, "find_checkpoints", lambda url: [*found(url), f"{left.one}9"])
    code, said = ftlayer("list", left.kit.config.directory, "--json")
    assert (code, {row["location"] for row in json.loads(said)}) == (0, {left.one, left.two})
    code, said = ftlayer("verify", left.kit.config.directory, "--json")
    assert (code, len(json.loads(said))) == (0, 2)


def test_no_command_shows_the_secret_of_a_url(make_kit: Any, made: Any) -> None:
    kit = make_kit("secret")
    directory, driver = kit.config.directory, kit.driver()
    one, two = (driver.publish(made.checkpoint(n, made.subtask([]))).location for n in (1, 2))
    assert "hunter2" in one
    broken = make_kit("secret").config.directory
    open_files(f"{broken}/job/run-1/chk-1").put_new("_metadata", b"cut off")
    said = [
        ftlayer(*arguments, answer="y")
        for arguments in (
            ("list", directory),
            ("list", directory, "--json"),
            ("show", one),
            ("show", one, "--json"),
            ("show", directory),
            ("verify", directory),
            ("verify", directory, "--json"),
            ("refused", one, "--table", "t", "--dsn", "dbname=none"),
            ("clean", directory),
            ("dispose", one),
            ("delete", one),
            ("delete", two, "--yes"),
            ("show", two),
            ("list", broken),
            ("list", broken, "--json"),
            ("verify", broken),
            ("clean", broken),
            ("list", directory),
            ("clean", f"{directory}/none"),
        )
    ]
    assert not [output for _, output in said if "hunter2" in output]


def test_what_clients_of_a_storage_log_for_debugging_stays_out(
    make_kit: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients = [logging.getLogger(name) for name in ("botocore", "fsspec", "s3fs")]
    for client in clients:
        monkeypatch.setattr(client, "level", logging.NOTSET)
        client.manager._clear_cache()  # type: ignore[attr-defined]
    monkeypatch.setattr(clients[2], "level", logging.DEBUG)
    with caplog.at_level(logging.DEBUG):
        make_kit("secret")
        logging.getLogger("botocore.auth").debug("a signature")
        logging.getLogger("botocore.credentials").info("found")
        clients[2].debug("asked for")
    assert "hunter2" not in caplog.text
    assert [record.message for record in caplog.records if record.name[:3] in ("bot", "s3f")] == [
        "found",
        "asked for",
    ]
