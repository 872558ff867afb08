from __future__ import annotations

import re
from pathlib import Path
from string import Template

from ftlayer import __version__
from ftlayer.scaffold.choices import Choices, ProjectKind

TEMPLATES = Path(__file__).parent / "templates"

NAME = "my_project"
"""How the project of the templates is called, in their texts and paths."""

_VARIABLE = re.compile(r'os\.environ\.get\(\s*"(SOURCE_\w+|SINK_\w+)", "([^"]*)"\s*\)')
"""A variable of a source or sink, and its default."""

_FILLED = ".in"
"""How names of templates end that have places to be filled in."""


def project(choices: Choices) -> dict[str, str]:
    """Return the texts of a project's files by their paths."""
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
