"""``ftlayer new`` as a command: what it says, asks and refuses. What it writes: tests/scaffold."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ftlayer.cli import new
from ftlayer.cli.main import app
from ftlayer.cli.new import ProjectSink, ProjectSource


def ftlayer(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=answer)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_without_a_terminal_it_takes_the_defaults(tmp_path: Path) -> None:
    code, said = ftlayer("new", "my-shop")
    assert code == 0
    assert said.startswith("my-shop: a query, files to files, ")
    # By its name, where that is what the shell finds.
    interpreter = rf"(?:python|{re.escape(shlex.quote(sys.executable))})"
    assert re.search(rf"cd my-shop\n +{interpreter} -m my_shop\n", said)
    assert {"README.md", ".gitignore", "my_shop/job.py", "data/orders-1.jsonl"} <= files_of(
        tmp_path / "my-shop"
    )


def test_everything_may_be_given(tmp_path: Path) -> None:
    code, said = ftlayer(
        "new",
        tmp_path / "x",
        "--name",
        "my_hooks",
        "--mode",
        "barrier",
        "--source",
        "webhook",
        "--sink",
        "http",
    )
    assert code == 0
    assert "a topology in mode barrier, webhook to http" in said
    assert "ftlayer[http]>=" in (tmp_path / "x" / "pyproject.toml").read_text()
    assert "my_hooks/totals.py" in files_of(tmp_path / "x")


def test_on_a_terminal_it_asks_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new, "is_terminal", lambda: True)
    code, said = ftlayer("new", "shop", "--sink", "redis", answer="topology\nbarrier\nnonsense\nkafka\n")
    assert code == 0, said
    assert "a topology in mode barrier, kafka to redis" in said
    assert "Sink" not in said


def test_on_a_terminal_enter_is_the_default_and_a_query_is_asked_for_no_mode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(new, "is_terminal", lambda: True)
    code, said = ftlayer("new", "shop", answer="\n\n\n")
    assert code == 0, said
    assert "a query, files to files" in said
    assert "Mode" not in said
    assert "http" not in said.partition("Sink")[2].partition("a query")[0]


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "mine").write_text("mine")
    code, said = ftlayer("new", "shop")
    assert (code, files_of(tmp_path)) == (2, {"shop/mine"})
    assert "ftlayer: DIR: shop is not empty; name one that is new or empty" in said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("json",), "--name json: a module is called so already"),
        (("1st",), "--name: expected the name of a Python package"),
        (("shop", "--kind", "query", "--mode", "acker"), "--mode: a topology is in mode acker or barrier"),
        (("shop", "--sink", "http"), "--sink http: there is none for a query; say --kind topology"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_written(
    arguments: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    code, said = ftlayer("new", *arguments)
    assert (code, files_of(tmp_path)) == (2, set())
    assert error in said


def test_the_list_says_what_each_choice_is() -> None:
    code, said = ftlayer("new", "--list")
    assert code == 0
    lines = [line.split(None, 1) for line in said.splitlines() if line.startswith("  ")]
    assert {*ProjectSource, *ProjectSink, "query", "topology", "acker", "barrier"} == {
        name for name, _ in lines
    }
    assert all(part.what for part in (*ProjectSource, *ProjectSink))
