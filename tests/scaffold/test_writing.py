from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ftlayer.cli.new import write_project
from ftlayer.errors import ConfigError

FILES = {"README.md": "one", "shop/job.py": "two", ".gitignore": "three"}


def below(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text() for path in directory.rglob("*") if path.is_file()
    }


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_or_empty_directory_gets_all_files(tmp_path: Path, is_there: bool) -> None:
    directory = tmp_path / "a" / "shop"
    if is_there:
        directory.mkdir(parents=True)
    write_project(directory, FILES)
    assert below(directory) == FILES
    assert list(directory.parent.iterdir()) == [directory]


def test_an_empty_directory_stays_the_same_one(tmp_path: Path) -> None:
    """A shell may be in it: ``ftlayer new .``."""
    before = tmp_path.stat().st_ino
    write_project(tmp_path, FILES)
    assert tmp_path.stat().st_ino == before


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty; name one that is new or empty"):
        write_project(tmp_path, FILES)
    assert below(tmp_path) == {"mine": "mine"}


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "shop").write_text("mine")
    with pytest.raises(ConfigError, match="is no directory"):
        write_project(tmp_path / "shop", FILES)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_project(tmp_path / "shop" / "below", FILES)
    assert below(tmp_path) == {"shop": "mine"}


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("fails_at", range(3))
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, is_there: bool, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "shop"
    if is_there:
        directory.mkdir()
    calls = iter(range(10))

    def failing(work: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if next(calls) == fails_at:
                raise OSError(28, os.strerror(28))
            return work(*arguments)

        return call

    monkeypatch.setattr(Path, "write_text", failing(Path.write_text)) if not is_there else None
    monkeypatch.setattr(os, "rename", failing(os.rename)) if is_there else None
    with pytest.raises(ConfigError, match="No space left"):
        write_project(directory, FILES)
    assert below(tmp_path) == {}
    assert list(tmp_path.iterdir()) == ([directory] if is_there else [])
