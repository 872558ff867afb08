"""The commands about records, over a vertex with letters of a query that people gave a name."""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from ftlayer.cli.main import app
from ftlayer.cli.records import keepers, parsed_keys
from ftlayer.config import VertexOptions
from ftlayer.errors import ConfigError, StoreLockedError
from ftlayer.monitor.rules.names import VertexView
from ftlayer.monitor.sources import user_name
from ftlayer.vertex import calls
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.embedded import EmbeddedVertex

OWNER = "3f2a" + "0" * 28
STREAM = f"{OWNER}/orders"
ROOTS = itertools.count(1)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FTLAYER_TOKEN", "FTLAYER_ADDRESS", "VISUAL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dead") / "ft"


@pytest.fixture(scope="module")
def vertex(store: Path) -> Iterator[EmbeddedVertex]:
    with EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)) as started:
        yield started


def run(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*map(str, arguments)], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


class Letters:
    """Dead letters of a query that people call clean-orders, and the commands about them."""

    def __init__(self, store: Path, client: VertexClient) -> None:
        self.store = store
        self.client = client
        options = calls.StreamOptions(max_attempts=1)
        client.call(calls.OpenQuery(OWNER, "run-1", (STREAM,), options, "clean-orders"))
        opened = client.call(calls.OpenStream("topology/in", options))
        assert isinstance(opened, calls.StreamOpened)
        self._incarnation = opened.incarnation

    def make(self, prices: list[float], operator: str = "parse", stream: str = STREAM) -> list[str]:
        """Make a letter of each price; return their keys."""
        before = set(self.found())
        roots = np.array([next(ROOTS) for _ in prices], np.uint64)
        texts = [f"no {price}" for price in prices]
        self.client.call(
            calls.Persist(stream, pa.record_batch({"price": prices, "text": texts}), roots, roots)
        )
        failures = tuple(
            calls.Failure(int(root), f"ValueError: no number: '{price}'", operator, "Traceback: here")
            for root, price in zip(roots, prices, strict=True)
        )
        self.client.call(calls.Fail(failures, self._incarnation))
        return [key for key in self.found() if key not in before]

    def found(self) -> list[str]:
        """Return the keys of all letters there are."""
        page = self.client.call(calls.SelectRecords("dead", keys_only=True, limit=calls.MAX_KEYS))
        assert isinstance(page, calls.RecordPage)
        return [key.hex() for key in page.keys]

    def run(self, *arguments: object, answer: str | None = None) -> tuple[int, str]:
        """Run ``ftlayer`` for this vertex; return its exit code and what it printed."""
        return run(*arguments, "--vertex", self.store, answer=answer)

    def json(self, *arguments: object) -> Any:
        """Run ``ftlayer … --json``; return what it printed."""
        code, output = self.run(*arguments, "--json")
        assert code == 0, output
        return json.loads(output)


@pytest.fixture
def letters(vertex: EmbeddedVertex, store: Path) -> Iterator[Letters]:
    with vertex.client() as client:
        made = Letters(store, client)
        yield made
        client.call(calls.Purge(tuple(bytes.fromhex(key) for key in made.found())))


def test_where_all_that_was_found_keeps_no_records_the_error_says_what_it_was_and_where_else_to_look() -> (
    None
):
    board = VertexView("driver-7", "grpc://127.0.0.1:1", is_up=True, has_records=False)
    silent = VertexView("elsewhere", "grpc://127.0.0.1:2")
    found: Any = SimpleNamespace(views=lambda: (board, silent))
    with pytest.raises(
        ConfigError, match=r"was found \(driver-7\).*--vertex.*--checkpoints.*ftlayer inspect PATH"
    ):
        keepers(found)
    totals = calls.CheckpointTotals(directory="/data/ck")
    job = calls.JobDetails(
        "bar", "bar", calls.JobKind.TOPOLOGY, "1", "barrier", "running", False, 1, 1, checkpoint_totals=totals
    )
    found.views = lambda: (replace(board, jobs=(calls.AnnouncedJob(job, 0, False),)), silent)
    with pytest.raises(ConfigError, match=r"\(those of bar are named by --checkpoints /data/ck\)"):
        keepers(found)
    kept = VertexView("ft", "grpc://127.0.0.1:3", is_up=True)
    found.views = lambda: (board, silent, kept)
    assert keepers(found) == ["ft"]


def test_letters_are_grouped_and_listed_by_the_names_that_people_gave(letters: Letters) -> None:
    letters.make([1.5, 2.5, 30.5])
    letters.make([4.5], "trim", "topology/in")
    code, output = letters.run("dead", "group")
    assert code == 0
    first, second = output.splitlines()[1:3]
    assert first.split()[:3] == ["3", "clean-orders/orders", "parse"]
    assert second.split()[:3] == ["1", "topology/in", "trim"]
    assert output.splitlines()[-1] == "4 dead letters in 2 groups"
    assert OWNER not in output
    code, output = letters.run("dead", "list", "--where", "operator = parse and record.price > 2")
    assert code == 0
    assert "(in parse) ValueError: no number: '30.5'" in output
    assert '{"price": 2.5, "text": "no 2.5"}' in output
    assert "clean-orders/orders  attempt 1" in output
    assert output.splitlines()[-1] == "2 listed"
    output = letters.run("dead", "list", "--where", "stream = clean-orders", "--limit", 1)[1]
    assert output.splitlines()[-1] == "1 listed of 3; --limit shows more"
    assert "30.5" in letters.run("dead", "list", "--limit", 1, "--newest", "--where", "operator = parse")[1]
    assert letters.run("dead", "list", "--where", "operator = none")[1] == "none\n"


def test_json_has_records_groups_and_totals(letters: Letters) -> None:
    (key, _) = letters.make([1.5, 2.5])
    groups = letters.json("dead", "group")
    assert (groups["total"], [group["count"] for group in groups["items"]]) == (2, [2])
    assert groups["items"][0]["reason"] == "ValueError: no number: …"
    assert letters.json("dead", "group", "--where", "record.price = 1.5")["total"] == 1
    listed = letters.json("dead", "list", "--limit", 1)
    assert (listed["found"], listed["total"], listed["is_all"]) == (2, 2, True)
    assert listed["items"][0]["stream"] == "clean-orders/orders"
    (shown,) = letters.json("dead", "show", key)
    assert shown["record"] == {"price": 1.5, "text": "no 1.5"}
    assert shown["attempts"][0]["traceback"] == "Traceback: here"


@pytest.mark.parametrize("command", ["requeue", "purge"])
def test_a_variable_that_is_not_set_does_not_mean_everything(letters: Letters, command: str) -> None:
    letters.make([1.5])
    for where in ("", "   "):
        assert letters.run("dead", command, "--where", where, "--dry-run")[0] == 2
        assert letters.run("dead", command, "--where", where, "--yes")[0] == 2
    assert len(letters.found()) == 1


def test_a_filter_that_is_none_is_a_usage_error(letters: Letters) -> None:
    code, output = letters.run("dead", "list", "--where", "oprator = x")
    assert code == 2
    assert output.startswith("ftlayer: where, character 1: expected one of stream, operator")


def test_a_dry_run_says_how_many_and_changes_nothing(letters: Letters) -> None:
    letters.make([1.5, 2.5, 30.5])
    for command in ("requeue", "purge", "export"):
        code, output = letters.run("dead", command, "--where", "record.price > 2", "--dry-run")
        assert code == 0
        assert output.splitlines()[-1] == "2 dead letters in 1 group"
    assert len(letters.found()) == 3


def test_a_selection_is_changed_after_a_question(letters: Letters) -> None:
    letters.make([1.5, 2.5, 30.5])
    chosen = ("--where", "record.price > 2")
    code, output = letters.run("dead", "requeue", *chosen, answer="n\n")
    asked = f"Requeue 2 dead letters of clean-orders/orders in ft ({letters.store})?"
    assert (code, asked in output, len(letters.found())) == (1, True, 3)
    code, output = letters.run("dead", "requeue", *chosen, answer="y\n")
    assert (code, output.splitlines()[-1], len(letters.found())) == (0, "requeued 2 of 2", 1)
    assert letters.json("dead", "purge", "--all", "--yes") == {"action": "purge", "asked": 1, "changed": 1}
    assert letters.run("dead", "purge", "--all") == (0, "purged 0 of 0\n")
    assert letters.run("dead", "purge", "--all", *chosen)[0] == 2


@pytest.mark.parametrize("command", ["requeue", "purge"])
def test_a_change_is_done_on_one_vertex(letters: Letters, tmp_path: Path, command: str) -> None:
    letters.make([1.5])
    other = tmp_path / "other"
    with EmbeddedVertex(VertexOptions(other, max_store_bytes=1 << 26)) as second, second.client() as client:
        elsewhere = Letters(other, client)
        (key, _) = elsewhere.make([2.5, 3.5], "trim", "topology/in")
        for chosen in (("--all",), ("--where", "age < 1h")):
            for sure in ("--yes", "--dry-run"):
                code, output = letters.run("dead", command, *chosen, sure, "--vertex", other)
                assert (code, "2 vertices are meant" in output) == (2, True), output
                assert f"ft ({letters.store}) has 1; other ({other}) has 2" in output
        output = letters.run("dead", "list", "--vertex", other)[1]
        assert f"{key}  other  topology/in" in output
        assert letters.run("dead", "group", "--vertex", other)[1].splitlines()[1].split()[:2] == [
            "2",
            "other",
        ]
        assert letters.run("dead", command, key, "--yes", "--vertex", other)[1].endswith("1 of 1\n")
        stream = ("--where", "stream = topology/in and operator = trim")
        assert elsewhere.run("dead", command, *stream, "--vertex", letters.store, "--yes")[0] == 2, (
            "both have it"
        )
        assert letters.run("dead", command, "--where", "stream = clean-orders", "--yes")[1].endswith(
            "1 of 1\n"
        )
        assert (len(letters.found()), len(elsewhere.found())) == (0, 1)


def test_letters_are_exported_as_lines_and_as_parquet(letters: Letters, tmp_path: Path) -> None:
    letters.make([1.5, 2.5, 30.5])
    chosen = ("--where", "record.price > 2")
    code, output = letters.run("dead", "export", *chosen)
    assert code == 0
    assert [json.loads(line)["record"]["price"] for line in output.splitlines()] == [2.5, 30.5]
    lines, table = tmp_path / "letters.jsonl", tmp_path / "letters.parquet"
    assert letters.run("dead", "export", *chosen, "--output", lines)[1] == f"exported 2 to {lines}\n"
    assert lines.read_text("utf-8") == output
    assert letters.json("dead", "export", *chosen, "--output", table) == {"exported": 2, "output": str(table)}
    rows = parquet.read_table(table).to_pylist()
    assert [json.loads(row["record"])["price"] for row in rows] == [2.5, 30.5]
    assert {row["stream"] for row in rows} == {"clean-orders/orders"}
    assert letters.run("dead", "export", "--all") == letters.run("dead", "export")
    code, output = letters.run("dead", "export", "--all", *chosen)
    assert (code, "by --where, or say --all" in output) == (2, True)
    code, output = letters.run("dead", "export", "--output", lines)
    assert (code, "is there already" in output) == (2, True)
    assert letters.run("dead", "export", "--format", "parquet")[0] == 2
    code, output = letters.run("dead", "export", "--output", tmp_path / "letters.txt")
    assert (code, "letters.txt ends in neither .jsonl" in output) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["letters.jsonl", "letters.parquet"]
    assert len(letters.found()) == 3


def test_an_export_that_has_no_place_says_so_and_leaves_no_half_file(
    letters: Letters, tmp_path: Path
) -> None:
    """A device that is full, a reader that has gone, a file that may not grow any more."""
    letters.make([float(price) for price in range(200)])
    program = "from ftlayer.cli.main import main; main()"
    command = [sys.executable, "-c", program, "dead", "export", "--vertex", str(letters.store)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=900)
    said = "ftlayer: No space left on device: what this command was to write is not all there\n"
    assert (done.returncode, done.stderr) == (1, said)
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=900)
    os.close(writes)
    assert (done.returncode, done.stderr) == (1, "")
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "letters.jsonl")],
        capture_output=True,
        text=True,
        timeout=900,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000)),
    )
    said = f"ftlayer: --output: {tmp_path / 'letters.jsonl'} cannot be written: File too large\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert not list(tmp_path.iterdir())


def test_what_is_not_done_is_counted_by_stream_and_listed_from_the_oldest_on(letters: Letters) -> None:
    for price in (1.5, 2.5, 3.5):
        root = np.array([next(ROOTS)], np.uint64)
        letters.client.call(calls.Persist(STREAM, pa.record_batch({"price": [price]}), root, root))
    code, output = letters.run("pending")
    assert code == 0
    row = next(line for line in output.splitlines() if line.startswith("clean-orders/orders"))
    assert int(row.split()[1]) >= 3
    where = ("--where", "record.price > 2", "--state", "pending")
    code, output = letters.run("pending", "--oldest", *where, "--limit", 1)
    assert code == 0
    assert '{"price": 2.5}' in output
    assert "3.5" not in output
    items = letters.json("pending", "--oldest", "--state", "pending")["items"]
    assert [item["record"]["price"] for item in items][-3:] == [1.5, 2.5, 3.5]
    assert {stream["stream"] for stream in letters.json("pending")} >= {"clean-orders/orders"}


def test_the_oldest_are_of_every_state_unless_one_is_named(letters: Letters) -> None:
    root = np.array([next(ROOTS)], np.uint64)
    letters.client.call(calls.Persist(STREAM, pa.record_batch({"price": [0.5]}), root, root))
    (key,) = letters.make([9.5])
    assert letters.run("dead", "requeue", key)[0] == 0
    waiting = letters.json("pending", "--oldest", "--state", "waiting")["items"]
    everything = letters.json("pending", "--oldest", "--limit", 1_000)
    assert waiting[-1]["record"]["price"] == 9.5
    assert {item["state"] for item in everything["items"]} == {"pending", "waiting"}
    assert {item["key"] for item in waiting} <= {item["key"] for item in everything["items"]}
    assert len(everything["items"]) == everything["total"]
    code, output = letters.run("pending", "--oldest", "--state", "delivery")
    assert (code, output.splitlines()[0]) == (0, "none")
    assert "none of state delivery; there are" in output
    assert f"{len(waiting):,} with --state waiting" in output
    code, output = letters.run("pending", "--oldest")
    assert "  waiting  attempt 1" in output


def test_a_record_is_changed_and_tried_again(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, third) = letters.make([1.5, 2.5, 3.5])
    assert letters.json("dead", "edit", first, "--set", "price=7", "--set", "text=7", "--dry-run") == {
        "price": 7.0,
        "text": "7",
    }
    assert len(letters.found()) == 3
    done = "edited and requeued 1 of 1\n"
    changes = "  price\n  - 1.5\n  + 7.0\n"
    assert letters.run("dead", "edit", first, "--set", "price=7", "--dry-run") == (0, changes)
    assert letters.run("dead", "edit", first, "--set", "price=7") == (0, changes + done)
    (tmp_path / "record.json").write_text('{"price": 8.5, "text": null}')
    file = ("--from", tmp_path / "record.json")
    assert letters.json("dead", "edit", second, *file) == {"action": "edit", "asked": 1, "changed": 1}
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/3.5,/9.5,/" "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))
    assert letters.run("dead", "edit", third) == (0, f"  price\n  - 3.5\n  + 9.5\n{done}")
    waiting = letters.client.call(calls.SelectRecords("waiting", stream=STREAM))
    assert isinstance(waiting, calls.RecordPage)
    found = [info.payload.to_pylist()[0] for info in waiting.records if info.edited_by]
    assert [(row["price"], row["text"]) for row in found] == [(7.0, "no 1.5"), (8.5, None), (9.5, "no 3.5")]
    code, output = letters.run("dead", "edit", first, "--set", "price=7")
    assert (code, output) == (1, f"ftlayer: there is no dead letter {first}\n")


FIXES = """
import json

def halved(record):
    if record["price"] > 100:
        raise ValueError("too dear")
    if record["price"] == 7.5:
        return {"price": "much", "text": "x"}
    if record["price"] == 8.5:
        return [record]
    if record["price"] > 50:
        return None
    if record["price"] < 0:
        return record
    record["price"] /= 2
    return {"price": record["price"], "text": record["text"] + "!"}

half = 0.5
"""


@pytest.fixture
def fixes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, as somebody writes one."""
    (tmp_path / "fixes_of_prices.py").write_text(FIXES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "fixes_of_prices", raising=False)
    return "fixes_of_prices:halved"


def test_many_letters_are_edited_by_a_function(letters: Letters, fixes: str) -> None:
    """Previewed, asked for, and changed; those that it fails for, or leaves, stay as they are."""
    keys = letters.make([float(price) for price in range(2, 24, 2)] + [60.0, -1.0, 200.0, 7.5, 8.5])
    chosen = ("dead", "edit", "--where", "stream = clean-orders", "--with", fixes)
    code, output = letters.run(*chosen, answer="n\n")
    assert code == 1
    assert output.count("  price\n") == 10
    assert f"{keys[0]}  clean-orders/orders" in output
    assert '  price\n  - 2.0\n  + 1.0\n  text\n  - "no 2.0"\n  + "no 2.0!"\n' in output
    assert "11 of 16 dead letters would change, the first 10 as above; 2 stay as they are\n" in output
    assert f"ftlayer: {keys[13]} is left as it is: ValueError: too dear\n" in output
    assert f"{keys[14]} is left as it is: column 'price' (double): expected a number, got 'much'" in output
    assert f"{keys[15]} is left as it is: expected an object with the columns of the record" in output
    assert "Edit and requeue 11 dead letters of clean-orders/orders in" in output
    assert letters.found() == keys
    code, output = letters.run(*chosen, "--dry-run", "--json")
    dry = json.loads(output)
    assert (code, dry["asked"], dry["edited"], dry["unchanged"], len(dry["preview"])) == (1, 16, 11, 2, 10)
    assert dry["preview"][0]["after"] == {"price": 1.0, "text": "no 2.0!"}
    assert letters.found() == keys
    code, output = letters.run(*chosen, "--yes")
    assert (code, "edited and requeued 11 of 11\n" in output) == (1, True), "not all was done"
    assert letters.found() == keys[11:]
    waiting = letters.client.call(calls.SelectRecords("waiting", stream=STREAM))
    assert isinstance(waiting, calls.RecordPage)
    found = [info.payload.to_pylist()[0] for info in waiting.records if info.edited_by == user_name()]
    assert [row["price"] for row in found if (row["text"] or "").endswith("!")] == [
        float(n) for n in range(1, 12)
    ]
    code, output = letters.run("dead", "edit", keys[11], keys[12], "--with", fixes)
    assert (code, output) == (
        0,
        "0 of 2 dead letters would change; 2 stay as they are\nedited and requeued 0 of 0\n",
    )


def test_records_of_an_edit_go_to_a_vertex_in_calls_of_a_bounded_size(
    letters: Letters, fixes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftlayer.monitor.rules.plans._EDIT_BYTES", 64)
    letters.make([2.0] * 7)
    before = len(letters.client.call(calls.ListAudit()).entries)  # type: ignore[union-attr]
    assert letters.json("dead", "edit", "--all", "--with", fixes, "--yes")["changed"] == 7
    assert len(letters.client.call(calls.ListAudit()).entries) - before > 1  # type: ignore[union-attr]
    monkeypatch.setattr("ftlayer.monitor.rules.plans.MOST_EDITED", 2)
    keys = letters.make([2.0] * 3)
    code, output = letters.run("dead", "edit", "--all", "--with", fixes, "--yes")
    assert (code, "more than 2 letters" in output, letters.found()) == (2, True, keys)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("--with", "fixes_of_prices:nothing", "--all"),
            "--with: 'fixes_of_prices:nothing' cannot be imported",
        ),
        (("--with", "no_such:fix", "--all"), "expected 'package.module:function'"),
        (("--with", "fixes_of_prices:half", "--all"), "is a float, not a function of a record"),
        (("--with", "fixes_of_prices:halved"), "by their keys or by --where, or say --all"),
        (
            ("--with", "fixes_of_prices:halved", "--set", "price=1", "--all"),
            "--with, --set, --from: give one",
        ),
        (("--all",), "many are edited by a function, --with module:function"),
        (("--where", "age > 1s", "--set", "price=1"), "many are edited by a function"),
        ((), "name one letter by its key"),
    ],
)
def test_an_edit_of_many_that_makes_no_sense(
    letters: Letters, fixes: str, given: tuple[str, ...], said: str
) -> None:
    keys = letters.make([1.5])
    code, output = letters.run("dead", "edit", *given)
    assert (code, said in output, letters.found()) == (2, True, keys), output


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--set", "prise=1"), "column 'prise' is none of the record's: did you mean 'price'?"),
        (("--set", "price=much"), "column 'price' (double): expected a number, got 'much'"),
        (("--set", "price"), "--set: expected COLUMN=VALUE"),
        (("--from", "/nowhere"), "--from: /nowhere cannot be read"),
        (("--set", "price=1", "--from", "/nowhere"), "--set, --from: give one of them"),
    ],
)
def test_a_change_that_does_not_fit_names_the_column(
    letters: Letters, options: tuple[str, ...], said: str
) -> None:
    (key,) = letters.make([1.5])
    code, output = letters.run("dead", "edit", key, *options)
    assert (code, said in output, letters.found()) == (2, True, [key]), output


def test_without_a_terminal_no_editor_is_opened_that_nobody_has_named(
    letters: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    (key,) = letters.make([1.5])
    monkeypatch.delenv("EDITOR", raising=False)
    monkeypatch.setattr("subprocess.run", None)
    assert letters.run("dead", "edit", key) == (
        2,
        "ftlayer: no terminal is there for an editor: say what changes by --set, --from or --with\n",
    )


def test_an_editor_that_changes_nothing_leaves_the_letter(
    letters: Letters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (key,) = letters.make([1.5])
    monkeypatch.setenv("EDITOR", "true")
    assert letters.run("dead", "edit", key) == (1, "ftlayer: nothing was changed\n")
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "no json" > "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", "false")
    code, output = letters.run("dead", "edit", key)
    assert (code, output) == (1, "ftlayer: the editor 'false' failed (exit code 1); nothing was changed\n")
    monkeypatch.setenv("EDITOR", str(editor))
    code, output = letters.run("dead", "edit", key, answer="n\n")
    assert (code, "the record: no JSON" in output, letters.found()) == (1, True, [key])


def test_changes_are_in_the_audit_log_with_who_made_them(letters: Letters) -> None:
    (key,) = letters.make([1.5])
    assert letters.run("dead", "purge", key, "--yes")[0] == 0
    page = letters.client.call(calls.ListAudit())
    assert isinstance(page, calls.AuditPage)
    latest = page.entries[0]
    assert (latest.what, latest.count, latest.who) == ("purge", 1, user_name())


def test_the_store_of_a_program_that_has_ended_is_opened_for_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "ended"
    with EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)) as vertex, vertex.client() as client:
        made = Letters(store, client)
        first, _ = made.make([1.5, 3.5])
        code, output = run("dead", "requeue", "--all", "--yes", "--store", store)
        assert code == 1
        assert f"{store} is held by process {os.getpid()}, whose vertex listens at {vertex.address}" in output
        with pytest.raises(StoreLockedError, match=f"held by process {os.getpid()}, whose vertex"):
            EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)).start()
        assert (store / "vertex.log").exists(), "the log is that of the one that runs"
    for left in ("vertex.access", "vertex.log"):  # as of a program that was killed
        (store / left).write_text("left\n")
    code, output = run("dead", "list", "--store", store / "shard-000")
    assert (code, "is a shard of a store" in output) == (2, True), output
    code, output = run("dead", "list", "--store", store, "--vertex", store)
    assert (code, "--store: it alone is asked" in output) == (2, True)
    monkeypatch.setenv("FTLAYER_ADDRESS", "grpc://127.0.0.1:1")
    assert run("dead", "edit", first, "--set", "price=7", "--store", store) == (
        0,
        "  price\n  - 1.5\n  + 7.0\nedited and requeued 1 of 1\n",
    )
    assert run("dead", "requeue", "--all", "--yes", "--store", store)[1].endswith(
        f"({store})\nrequeued 1 of 1\n"
    )
    streams = json.loads(run("pending", "--json", "--store", store)[1])
    assert [(stream["waiting"], stream["dead"]) for stream in streams if stream["waiting"]] == [(2, 0)]
    assert (store / "vertex.access").read_text() == "left\n"
    assert (store / "vertex.log").read_text().startswith("left\n")
    code, output = run("dead", "list", "--store", tmp_path)
    assert (code, "holds no store of a vertex" in output) == (2, True), output
    assert not list(tmp_path.glob("vertex*")), "nothing is made where no store is"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("checkpoints", "clean", ""), "the argument behind 'clean'"),
        (("dead", "list", "--store="), "--store"),
        (("jobs", ""), "the argument behind 'jobs'"),
        (("serve", ""), "the argument behind 'serve'"),
    ],
)
def test_an_argument_that_is_empty_is_not_the_working_directory(command: tuple[str, ...], name: str) -> None:
    assert run(*command) == (2, f"ftlayer: {name} is empty: give it a value, or leave it out\n")


def test_a_text_that_is_no_key_is_told_what_one_is() -> None:
    for text in ("abc", "ab", "zz00ff"):
        with pytest.raises(
            ConfigError, match=f"KEY: '{text}' is no key of a record: these are hexadecimal digits"
        ):
            parsed_keys([text])


def test_a_path_that_cannot_be_looked_at_is_said(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "loop" / "x", tmp_path / ("x" * 300)):
        for command in (
            ("dead", "list", "--vertex"),
            ("dead", "list", "--store"),
            ("checkpoints", "list"),
            ("inspect",),
        ):
            code, output = run(*command, path)
            assert (code in (1, 2), output.startswith("ftlayer: "), len(output.splitlines())) == (
                True,
                True,
                1,
            ), output
