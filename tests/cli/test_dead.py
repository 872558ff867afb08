"""The commands about records, over a vertex with letters of a query that people gave a name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from ftlayer.cli.main import app
from ftlayer.cli.records import keepers
from ftlayer.config import VertexOptions
from ftlayer.errors import ConfigError
from ftlayer.monitor.names import VertexView
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


def test_what_is_not_done_is_counted_by_stream_and_listed_from_the_oldest_on(letters: Letters) -> None:
    for price in (1.5, 2.5, 3.5):
        root = np.array([next(ROOTS)], np.uint64)
        letters.client.call(calls.Persist(STREAM, pa.record_batch({"price": [price]}), root, root))
    code, output = letters.run("pending")
    assert code == 0
    row = next(line for line in output.splitlines() if line.startswith("clean-orders/orders"))
    assert int(row.split()[1]) >= 3
    code, output = letters.run("pending", "--oldest", "--where", "record.price > 2", "--limit", 1)
    assert code == 0
    assert '{"price": 2.5}' in output
    assert "3.5" not in output
    items = letters.json("pending", "--oldest")["items"]
    assert [item["record"]["price"] for item in items][-3:] == [1.5, 2.5, 3.5]
    assert {stream["stream"] for stream in letters.json("pending")} >= {"clean-orders/orders"}


def test_a_record_is_changed_and_tried_again(
    letters: Letters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, third) = letters.make([1.5, 2.5, 3.5])
    assert letters.json("dead", "edit", first, "--set", "price=7", "--set", "text=7", "--dry-run") == {
        "price": 7.0,
        "text": "7",
    }
    assert len(letters.found()) == 3
    assert letters.run("dead", "edit", first, "--set", "price=7") == (0, "edited and requeued 1 of 1\n")
    (tmp_path / "record.json").write_text('{"price": 8.5, "text": null}')
    file = ("--from", tmp_path / "record.json")
    assert letters.json("dead", "edit", second, *file) == {"action": "edit", "asked": 1, "changed": 1}
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nsed -i "s/3.5,/9.5,/" "$1"\n')
    editor.chmod(0o700)
    monkeypatch.setenv("EDITOR", str(editor))
    assert letters.run("dead", "edit", third) == (0, "edited and requeued 1 of 1\n")
    waiting = letters.client.call(calls.SelectRecords("waiting", stream=STREAM))
    assert isinstance(waiting, calls.RecordPage)
    found = [info.payload.to_pylist()[0] for info in waiting.records if info.edited_by]
    assert [(row["price"], row["text"]) for row in found] == [(7.0, "no 1.5"), (8.5, None), (9.5, "no 3.5")]
    code, output = letters.run("dead", "edit", first, "--set", "price=7")
    assert (code, output) == (1, f"ftlayer: there is no dead letter {first}\n")


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
    assert (code, output.startswith("ftlayer: EDITOR: 'false' did not end well")) == (2, True)
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
    with (
        EmbeddedVertex(VertexOptions(store, max_store_bytes=1 << 26)) as vertex,
        vertex.client() as client,
    ):
        made = Letters(store, client)
        first, _ = made.make([1.5, 3.5])
        code, output = run("dead", "requeue", "--all", "--yes", "--store", store)
        assert (code, "is open in a program" in output) == (2, True), output
    code, output = run("dead", "list", "--store", store / "shard-000")
    assert (code, "is a shard of a store" in output) == (2, True), output
    monkeypatch.setenv("FTLAYER_ADDRESS", "grpc://127.0.0.1:1")
    assert run("dead", "edit", first, "--set", "price=7", "--store", store) == (
        0,
        "edited and requeued 1 of 1\n",
    )
    assert run("dead", "requeue", "--all", "--yes", "--store", store) == (0, "requeued 1 of 1\n")
    streams = json.loads(run("pending", "--json", "--store", store)[1])
    assert [(stream["waiting"], stream["dead"]) for stream in streams if stream["waiting"]] == [(2, 0)]
    code, output = run("dead", "list", "--store", tmp_path)
    assert (code, "holds no store of a vertex" in output) == (1, True), output
    assert not list(tmp_path.glob("vertex*")), "nothing is made where no store is"


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
