"""The demo's input: lines of real text, each with its name, cut into the files of a stream."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ftlayer.errors import ConfigError

FILES_A_BATCH = 2
"""One for each core of the demo's Spark."""

NOT_ITS_OWN = {"site-packages", "test", "tests", "lib2to3", "idlelib", "__pycache__"}
"""Directories of a standard library that hold other people's code, tests, or what is often left out."""


@dataclass(frozen=True)
class PreparedInput:
    """The query's input: ``lines`` records out of ``sources`` files, in ``batches`` micro-batches."""

    title: str
    sources: int
    lines: int
    batches: int


def prepare(pattern: str | None, directory: Path, *, max_lines: int, batches: int) -> PreparedInput:
    """Write the lines of the files that match ``pattern`` (None: Python's own sources) into ``directory``.

    Blank lines are left out. Raises `ConfigError` when there are no files, or too few lines for two batches.
    """
    paths = _standard_library() if pattern is None else _matching(pattern)
    base = Path(os.path.commonpath([path.parent for path in paths]))
    lines = list(islice(_records(paths, base), max_lines))
    if len(lines) < 2 * FILES_A_BATCH:
        raise ConfigError(f"--input: {pattern!r} has {len(lines)} lines of text; that is too few to show")
    files = min(batches * FILES_A_BATCH, len(lines))
    directory.mkdir(parents=True)
    for number in range(files):
        part = lines[len(lines) * number // files : len(lines) * (number + 1) // files]
        text = "".join(f"{line}\n" for line in part)
        # Spark must never see a file that is half written.
        partial = directory / f".part-{number:04}"
        partial.write_text(text, "utf-8", newline="\n")
        partial.rename(directory / f"part-{number:04}.txt")
    title = "the sources of Python's standard library" if pattern is None else pattern
    return PreparedInput(title, len(paths), len(lines), -(-files // FILES_A_BATCH))


def prepared_files(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the records of each file that `prepare` wrote."""
    for path in sorted(directory.glob("part-*.txt")):
        yield path.name, path.read_bytes().decode().removesuffix("\n").split("\n")


def _standard_library() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    paths = [path for path in root.rglob("*.py") if not NOT_ITS_OWN & set(path.relative_to(root).parts)]
    if not paths:
        raise ConfigError(f"{root} holds no .py files on this machine; name others with --input 'GLOB'")
    return sorted(paths)


def _matching(pattern: str) -> list[Path]:
    found = glob.glob(os.path.expanduser(pattern), recursive=True)
    paths = [Path(name).absolute() for name in found if os.path.isfile(name)]
    if not paths:
        raise ConfigError(
            f"--input: no file matches {pattern!r}; put it in quotes, so that the shell leaves it alone"
        )
    return sorted(paths)


def _records(paths: Sequence[Path], base: Path) -> Iterator[str]:
    """Yield ``"file:number<tab>text"`` for each line that has text in it."""
    for path in paths:
        # A tab or a line break in a file's name would end the record's name.
        name = " ".join(str(path.relative_to(base)).split())
        try:
            text = path.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise ConfigError(f"--input: {path} cannot be read: {error.strerror}") from error
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                yield f"{name}:{number}\t{line.removesuffix(chr(13))}"
