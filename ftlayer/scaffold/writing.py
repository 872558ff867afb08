"""Putting a project in its place: all of it, or nothing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ftlayer.errors import ConfigError


def check_free(directory: Path) -> None:
    """Raise `ConfigError` unless a directory is absent or empty."""
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.is_symlink() or directory.exists():
        what = "is not empty" if directory.is_dir() else "is no directory"
        raise ConfigError(f"DIR: {directory} {what}; name one that is new or empty")


def write_project(directory: Path, files: Mapping[str, str]) -> None:
    """Write files below a directory that is new or empty, by their paths.

    They are written beside it and renamed, so that an error or a kill leaves it as it was, or with all files. Of a
    kill a hidden directory beside it may be left.

    Raises `ConfigError` where it has something in it, or cannot be written.
    """
    check_free(directory)
    directory = directory.absolute()
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{directory.name}-", dir=directory.parent) as scratch:
            made = Path(scratch) / directory.name
            for path, text in files.items():
                (made / path).parent.mkdir(parents=True, exist_ok=True)
                (made / path).write_text(text, "utf-8")
            _put(made, directory)
    except OSError as error:
        raise ConfigError(f"DIR: {directory} cannot be written: {error}") from error


def _put(made: Path, directory: Path) -> None:
    """Rename the whole; an empty directory that is there stays what it is, since a shell may be in it."""
    if not directory.exists():
        made.rename(directory)
        return
    moved: list[Path] = []
    try:
        for entry in sorted(made.iterdir()):
            moved.append(directory / entry.name)
            os.rename(entry, moved[-1])
    except OSError:
        for path in moved:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        raise
