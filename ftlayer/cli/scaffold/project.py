from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from string import Template

from ftlayer import __version__
from ftlayer.cli.scaffold.choices import Choices, ProjectKind
from ftlayer.errors import ConfigError


def check_free(directory: Path) -> None:
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


TEMPLATES = Path(__file__).parent / "templates"

NAME = "my_project"
"""How the project of the templates is called, in their texts and paths."""

_VARIABLE = re.compile(r'os\.environ\.get\(\s*"(SOURCE_\w+|SINK_\w+)", "([^"]*)"\s*\)')
"""A variable of a source or sink, and its default."""

_FILLED = ".in"
"""How names of templates end that have places to be filled in."""


def project(choices: Choices) -> dict[str, str]:
    files = {**_below(TEMPLATES / "common"), **_below(TEMPLATES / choices.variant)}
    files[".gitignore"] = files.pop("gitignore")
    source, sink = TEMPLATES / "sources" / choices.source, TEMPLATES / "sinks" / choices.sink
    files[f"{NAME}/source.py"] = (source / f"{choices.kind}.py").read_text("utf-8")
    files[f"{NAME}/sink.py"] = _sink(sink, choices).read_text("utf-8")
    data = {path: text for path, text in _below(source).items() if path.startswith("data/")}
    files |= data

    variables = _VARIABLE.findall(files[f"{NAME}/source.py"] + files[f"{NAME}/sink.py"])
    extras = f"[{','.join(choices.extras)}]" if choices.extras else ""
    places = {
        "about": files.pop("about.md"),
        "dead_letters": files.pop("dead-letters.md"),
        "stop": files.pop("stop.md"),
        "state": files.pop("state.md"),
        "stopping": files.pop("stopping.txt"),
        "source": Template((source / "README.md").read_text("utf-8")).substitute(),
        "sink": (sink / "README.md").read_text("utf-8"),
        "requirement": f"ftlayer{extras}>={__version__}",
        "version": __version__,
        "data": f"Put the files that it is to read into `/var/lib/{NAME}/data`." if data else "",
    }
    places = {name: text.rstrip("\n") for name, text in places.items()}
    places["files"] = files.pop("files.md", "")  # Rows of a table, or none.
    places["settings"] = "\n".join(f"| `{name}` | `{value}` |" for name, value in variables)
    places["variables"] = "\n".join(f"#{name}={value}" for name, value in variables)
    for path in [path for path in files if path.endswith(_FILLED)]:
        files[path.removesuffix(_FILLED)] = Template(files.pop(path)).substitute(places)
    return {_named(path, choices): _named(text, choices) for path, text in files.items()}


def _below(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): path.read_text("utf-8")
        for path in sorted(directory.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def _sink(directory: Path, choices: Choices) -> Path:
    """Return the piece of this mode; where both have the same, that is the one of topologies."""
    of_mode = directory / f"{choices.variant}.py"
    return of_mode if of_mode.exists() else directory / f"{ProjectKind.TOPOLOGY}.py"


def _named(text: str, choices: Choices) -> str:
    return text.replace(NAME, choices.name)
