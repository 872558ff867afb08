"""Dead letters beside checkpoints, as tools of a vertex see them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from ftlayer.checkpoint.letters import ChainLetter, LetterBatch, LetterKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.dead_letters import StoredLetters
from ftlayer.checkpoint.storage.keys import storage_key
from ftlayer.checkpoint.storage.report import put_report
from ftlayer.cli.main import app
from ftlayer.common.clock import Now
from ftlayer.errors import CheckpointError, MalformedRequestError, UnsupportedError
from ftlayer.monitor.gather import Gatherer, LetterReader, StoredReports
from ftlayer.records.ipc import as_stream
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Attempt


def letter(number: int, **more: Any) -> ChainLetter:
    """Return a letter of this number, which died in that second."""
    payload = as_stream(pa.record_batch({"n": [number], "text": [f"line {number}"]})).to_pybytes()
    operator = more.get("operator", "parse")
    attempts = tuple(
        Attempt(each, number * 1_000, f"ValueError: no number: 'x{number}'", operator, "slot 0", "Traceback")
        for each in (1, 2)
    )
    fields: dict[str, Any] = {
        "letter": number.to_bytes(8, "big") * 2,
        "checkpoint": 1,
        "chain": "parse",
        "subtask": 0,
        "input": 0,
        "kind": LetterKind.RECORD,
        "operator": "parse",
        "key": b"",
        "payload": payload,
        "event_time_ms": None,
        "attempts": attempts,
        "first_failed_ms": number * 1_000,
        "died_ms": number * 1_000,
    }
    return ChainLetter(**fields | more)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory with the letters of two jobs, one written twice."""
    config = CheckpointConfig(directory=str(tmp_path))
    orders = StoredLetters(str(tmp_path), "orders", storage_key(config, "orders"))
    orders.write(LetterBatch("run-1", tuple(letter(number) for number in (1, 2, 3))))
    orders.write(LetterBatch("run-2", (letter(3), letter(4, chain="count", operator="count"))))
    clicks = StoredLetters(str(tmp_path), "clicks", storage_key(config, "clicks"))
    timer = letter(5, kind=LetterKind.TIMER, payload=b"", event_time_ms=1_000, attempts=())
    clicks.write(LetterBatch("run-1", (timer,)))
    return tmp_path


def numbers(reader: LetterReader, **wanted: Any) -> list[int]:
    """Return the numbers of what is found, page by page."""
    found: list[int] = []
    call = calls.SelectRecords("dead", limit=2, **wanted)
    while True:
        page = reader.answer(call)
        assert isinstance(page, calls.RecordPage)
        found += [int.from_bytes(key[:8], "big") for key in page.keys]
        if not page.more:
            return found
        call = calls.SelectRecords("dead", limit=2, **wanted | {"after": page.more})


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({}, [1, 2, 3, 4, 5]),
        ({"newest": True}, [5, 4, 3, 2, 1]),
        ({"keys_only": True}, [1, 2, 3, 4, 5]),
        ({"stream": "orders"}, [1, 2, 3, 4]),
        ({"stream": "orders/count"}, [4]),
        ({"operator": "count"}, [4]),
        ({"text": "line 2"}, [2]),
        ({"text": "'x3'"}, [3]),
        ({"root": 2}, [2]),
        ({"since_ms": 2_000, "until_ms": 4_000}, [2, 3]),
        ({"keys": (letter(1).letter, letter(9).letter)}, [1]),
    ],
)
def test_what_is_found(directory: Path, wanted: dict[str, Any], found: list[int]) -> None:
    assert numbers(LetterReader(str(directory)), **wanted) == found


def test_the_directory_of_letters_may_be_named_itself(directory: Path) -> None:
    assert numbers(LetterReader(str(directory / "dead-letters"))) == [1, 2, 3, 4, 5]


def test_the_directory_of_one_jobs_letters_may_be_named_itself(directory: Path) -> None:
    assert numbers(LetterReader(str(directory / "dead-letters" / "orders"))) == [1, 2, 3, 4]
    assert numbers(LetterReader(str(directory / "dead-letters" / "clicks") + "/")) == [5]


def without_key(job: Path) -> None:
    (job / "orders" / "_key").unlink()


def damaged(job: Path) -> None:
    file = job / "dead-letters" / "orders" / "run-1.arrow"
    file.write_bytes(file.read_bytes()[:-1] + b"x")


@pytest.mark.parametrize(
    ("breaks", "left", "said"),
    [
        (without_key, [5], "bad/orders: no key is kept with it; if the job was run with"),
        (
            damaged,
            [3, 4, 5],
            "bad/dead-letters/orders/run-1.arrow: these dead letters were cut off or changed",
        ),
    ],
)
def test_what_is_broken_is_named_once_and_all_else_is_shown(
    directory: Path,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
    breaks: Any,
    left: list[int],
    said: str,
) -> None:
    above = tmp_path_factory.mktemp("above")
    shutil.copytree(directory, above / "bad")
    breaks(above / "bad")
    reader = LetterReader(str(above))
    assert numbers(reader) == left
    # The letters of the other job can be purged all the same.
    keys = (letter(5).letter, letter(1).letter)
    assert reader.answer(calls.Purge(keys)) == calls.Changed(1)
    assert numbers(reader) == left[:-1]
    assert caplog.text.count(said) == 1
    # Where there is nothing else, it is an error.
    shutil.rmtree(above / "bad" / "dead-letters" / "clicks")
    (above / "bad" / "dead-letters" / "orders" / "run-2.arrow").unlink()
    with pytest.raises(CheckpointError, match=said):
        LetterReader(str(above)).answer(calls.Stats())


def test_letters_are_listed_beside_what_a_driver_did_not_finish_to_say(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (directory / "hosts").mkdir()
    (directory / "hosts" / "_last").write_bytes(b"half")
    listed = CliRunner().invoke(app, ["dead", "list", "--checkpoints", str(directory)])
    assert listed.exit_code == 0
    assert "hosts/_last is not what a job's driver has said last" in caplog.text
    assert "remove the file to go on without it" in caplog.text
    assert "5 listed" in listed.output


def test_groups_and_their_letters(directory: Path) -> None:
    reader = LetterReader(str(directory))
    groups = reader.answer(calls.DeadGroups())
    assert isinstance(groups, calls.GroupList)
    first = groups.groups[0]
    assert (first.stream, first.operator, first.count) == ("orders/parse", "parse", 3)
    assert (first.first_seen_ms, first.last_seen_ms, groups.indexed) == (1_000, 3_000, 1.0)
    assert numbers(reader, stream=first.stream, group=first.number) == [1, 2, 3]


def test_a_letter_that_two_checkpoints_have_written_is_one(directory: Path) -> None:
    stats = LetterReader(str(directory)).answer(calls.Stats())
    assert isinstance(stats, calls.StatsReply)
    assert stats.values == {"dead_letters": 5.0, "waiting": 0.0}


def test_purged_letters_are_gone_from_all_files(directory: Path) -> None:
    reader = LetterReader(str(directory))
    keys = tuple(letter(number).letter for number in (2, 3, 9))
    assert reader.answer(calls.Purge(keys)) == calls.Changed(2)
    assert numbers(reader) == [1, 4, 5]
    assert reader.answer(calls.Purge(keys)) == calls.Changed(0)


def test_a_directory_without_letters_has_no_records(tmp_path: Path) -> None:
    assert LetterReader(str(tmp_path)).answer(calls.Stats()) is None


def test_what_is_requeued_waits_beside_the_files_and_is_not_dead_any_more(directory: Path) -> None:
    reader = LetterReader(str(directory))
    edited = pa.record_batch({"n": [40], "text": ["mended"]})
    assert reader.answer(calls.Requeue((letter(3).letter, letter(9).letter))) == calls.Changed(1)
    edits = (calls.Edit(letter(4).letter, edited),)
    assert reader.answer(calls.EditAndRequeue(edits, "me")) == calls.Changed(1)
    for again in (calls.Requeue((letter(3).letter,)), calls.Purge((letter(3).letter,))):
        assert reader.answer(again) == calls.Changed(0)
    assert numbers(reader) == [1, 2, 5]
    waiting = reader.answer(calls.SelectRecords("waiting"))
    assert isinstance(waiting, calls.RecordPage)
    assert [info.payload.to_pylist()[0]["n"] for info in waiting.records] == [3, 40]
    stats = reader.answer(calls.Stats())
    assert isinstance(stats, calls.StatsReply)
    assert stats.values == {"dead_letters": 3.0, "waiting": 2.0}


def test_an_edit_that_does_not_fit_changes_nothing(directory: Path) -> None:
    reader = LetterReader(str(directory))
    wrong = pa.record_batch({"n": ["one"], "text": ["mended"]})
    fits = pa.record_batch({"n": [2], "text": ["mended"]})
    edits = (calls.Edit(letter(2).letter, fits), calls.Edit(letter(1).letter, wrong))
    with pytest.raises(MalformedRequestError, match=f"the record of {letter(1).letter.hex()}.*n"):
        reader.answer(calls.EditAndRequeue(edits, "me"))
    timer = reader.answer(calls.SelectRecords("dead", keys=(letter(5).letter,)))
    assert isinstance(timer, calls.RecordPage)
    with pytest.raises(UnsupportedError, match="is a timer, which has no record to edit"):
        reader.answer(calls.EditAndRequeue((calls.Edit(letter(5).letter, timer.records[0].payload),), "me"))
    assert numbers(reader) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("state", "into", "said"),
    [
        ("running", (), "'parse' is a source: a row that it could not send does not come back into it"),
        ("ended", ("parse",), "'orders' has come to its end, and a start with restore_from='latest'"),
        ("cancelled", ("parse",), ""),
    ],
)
def test_what_nothing_would_carry_out_is_refused_and_says_what_to_do(
    directory: Path, state: str, into: tuple[str, ...], said: str
) -> None:
    nodes = tuple(calls.PlanNode(uid, (uid,), 1) for uid in ("parse", "count"))
    plan = calls.JobPlan(nodes, tuple(calls.PlanEdge("count", uid) for uid in into))
    times: dict[str, Any] = {"since_ms": 1, "at_ms": 2, "final": state != "running", "plan": plan}
    details = calls.JobDetails("orders", "orders", calls.JobKind.TOPOLOGY, "run", "barrier", state, **times)
    put_report(str(directory), details)
    words = ("requeue", letter(1).letter.hex())
    done = run(*words, directory=directory, code=1 if said else 0)
    assert (said or "requeued 1 of 1; their job takes them within ten seconds") in done
    listed = run("list", directory=directory)
    assert f"{5 if said else 4} listed" in listed


def test_what_watches_directories_sees_their_letters(directory: Path) -> None:
    gathering = Gatherer(lambda: (StoredReports(str(directory)),), clock=lambda: Now(0, 10_000))
    (view,) = gathering.gather()
    assert (view.state, view.has_records, view.stats["dead_letters"]) == ("stored", True, 5)
    assert [(stream.stream, stream.dead) for stream in view.streams] == [
        ("clicks/parse", 1),
        ("orders/count", 1),
        ("orders/parse", 3),
    ]
    assert len(view.groups) == 3
    gathering.close()


# ---------------------------------------------------------------- ftlayer dead --checkpoints


def run(*words: str, directory: Path, code: int = 0) -> str:
    """Run `ftlayer dead`; returns what it prints."""
    result = CliRunner().invoke(app, ["dead", *words, "--checkpoints", str(directory)])
    assert result.exit_code == code, result.output
    return result.output


def test_commands_over_a_directory(directory: Path, tmp_path: Path) -> None:
    assert "5 dead letters in 3 groups" in run("group", directory=directory)
    listing = json.loads(run("list", "--newest", "--limit", "2", "--json", directory=directory))
    assert [item["stream"] for item in listing["items"]] == ["clicks/parse", "orders/count"]
    key = letter(1).letter.hex()
    shown = run("show", key, directory=directory)
    for word in ("orders/parse", "no number: 'x1'", '"text": "line 1"', "slot 0", "Traceback"):
        assert word in shown
    out = tmp_path / "letters.parquet"
    run("export", "--where", "operator = parse", "--output", str(out), directory=directory)
    assert parquet.read_table(out).num_rows == 4
    assert "purged 3 of 3" in run("purge", "--where", "stream = orders/parse", "--yes", directory=directory)
    assert "2 dead letters in 2 groups" in run("group", directory=directory)


def test_letters_that_are_signed_with_the_users_key(tmp_path: Path) -> None:
    stored = StoredLetters(str(tmp_path), "orders", b"a secret of the user's")
    stored.write(LetterBatch("run-1", (letter(1),)))
    file = tmp_path / "secret"
    file.write_bytes(b"a secret of the user's")
    file.chmod(0o600)
    assert "1 dead letter in 1 group" in run("group", "--key-file", str(file), directory=tmp_path)
