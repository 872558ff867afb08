"""``ftlayer new``: a small project that runs as it is, composed of files that each are a piece of one.

``scaffold/templates/`` has the pieces. They are files of a project called ``my_project``, and hold no conditions: a
choice is a choice of files.
"""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from string import Template
from typing import Annotated, Self

import typer
from rich.prompt import Prompt

from ftlayer import __version__
from ftlayer.cli.printing import is_terminal
from ftlayer.errors import ConfigError

_MODULE = re.compile(r"[a-z][a-z0-9_]{0,30}")
"""A name of a module, of a user of Linux and of a replication slot of PostgreSQL."""


class ProjectKind(StrEnum):
    QUERY = "query"
    TOPOLOGY = "topology"


class ProjectMode(StrEnum):
    ACKER = "acker"
    BARRIER = "barrier"


class ProjectPart(StrEnum):
    """A source or a sink.

    Attributes:
        what: it is, as it is offered.
        extra: of ftlayer, that it needs; "": none.
    """

    what: str
    extra: str

    def __new__(cls, value: str, what: str = "", extra: str | None = None) -> Self:
        """``extra`` None: it is called as the part is."""
        member = str.__new__(cls, value)
        member._value_, member.what, member.extra = value, what, value if extra is None else extra
        return member


class ProjectSource(ProjectPart):
    FILES = "files", "files of JSON lines in a directory; needs no server", ""
    TAIL = "tail", "a log that grows and is rotated; needs no server", ""
    KAFKA = "kafka", "a topic of Kafka"
    REDIS = "redis", "a stream of Redis"
    NATS = "nats", "a stream of NATS JetStream"
    AMQP = "amqp", "a queue of RabbitMQ"
    MQTT = "mqtt", "topics of MQTT"
    WEBHOOK = "webhook", "requests that others post; needs no server", "http"
    SSE = "sse", "Server-Sent Events of a server", "http"
    POLLED_JSON = "polled-json", "a list as JSON, asked for again and again", "http"
    POSTGRES_CHANGES = (
        "postgres-changes",
        "inserts into a table of PostgreSQL, by logical replication",
        "postgres",
    )
    POSTGRES_TABLE = "postgres-table", "rows of a table of PostgreSQL, by a column that grows", "postgres"


class ProjectSink(ProjectPart):
    FILES = "files", "Parquet files; needs no server", ""
    PRINT = "print", "the terminal, to look at them; needs no server", ""
    KAFKA = "kafka", "a topic of Kafka"
    REDIS = "redis", "a stream of Redis"
    NATS = "nats", "a stream of NATS JetStream"
    AMQP = "amqp", "a queue of RabbitMQ"
    MQTT = "mqtt", "a topic of MQTT"
    HTTP = "http", "requests to a server, one a row; not of a query"
    POSTGRES = "postgres", "a table of PostgreSQL"
    DELTA = "delta", "a Delta table; needs no server"
    ICEBERG = "iceberg", "an Iceberg table"


_DIRECTORIES = frozenset({"data", "deploy", "out", "state"})
"""Those of a project that are not its package; two of them are its state and its results, which people remove."""

_ONLY_OF_TOPOLOGIES = frozenset({ProjectSink.HTTP})


@dataclass(frozen=True)
class Choices:
    """What a project is made of. ``mode`` is None for a query. Raises `ConfigError` for what cannot be."""

    name: str
    kind: ProjectKind = ProjectKind.QUERY
    mode: ProjectMode | None = None
    source: ProjectSource = ProjectSource.FILES
    sink: ProjectSink = ProjectSink.FILES

    def __post_init__(self) -> None:
        check_name(self.name)
        if (self.mode is None) != (self.kind is ProjectKind.QUERY):
            raise ConfigError(
                "--mode: a topology is in mode acker or barrier, and a query in none: leave --mode out, or say "
                "--kind topology"
            )
        if self.sink not in sinks_of(self.kind):
            there = ", ".join(sinks_of(self.kind))
            raise ConfigError(
                f"--sink {self.sink}: there is none for a {self.kind}; say --kind topology, or take one of {there}"
            )

    @property
    def variant(self) -> str:
        return str(self.mode or self.kind)

    @property
    def extras(self) -> list[str]:
        return sorted({self.source.extra, self.sink.extra} - {""})


def sinks_of(kind: ProjectKind) -> list[ProjectSink]:
    return [sink for sink in ProjectSink if kind is ProjectKind.TOPOLOGY or sink not in _ONLY_OF_TOPOLOGIES]


def name_of(directory: Path) -> str:
    """Return the name of the project that is made in a directory; it may be one that `check_name` refuses."""
    return re.sub(r"[-. ]", "_", directory.absolute().name)


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a package and a user of the system can be called so."""
    if _MODULE.fullmatch(name) is None or keyword.iskeyword(name):
        raise ConfigError(
            "--name: expected the name of a Python package, lower-case letters, digits and _, 31 at most, no word of "
            f"Python's own, got {name!r}"
        )
    if name in ("test", "tests") or name in sys.stdlib_module_names or _is_installed(name):
        raise ConfigError(f"--name {name}: a module is called so already; give the project another name")
    if name in _DIRECTORIES:
        text = "a project has a directory of this name beside its package; give it another name"
        raise ConfigError(f"--name {name}: {text}")


def _is_installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None


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


TEMPLATES = Path(__file__).parent / "scaffold" / "templates"

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
    pieces = ("about.md", "dead-letters.md", "stop.md", "state.md", "stopping.txt")
    places = {
        **{name.partition(".")[0].replace("-", "_"): files.pop(name) for name in pieces},
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


_BIN = Path(sys.executable).parent


def _print_choices(asked: bool) -> None:
    if not asked:
        return
    typer.echo("--kind\n  query             of Structured Streaming: batch after batch; the default")
    typer.echo("  topology          continuous: record by record, milliseconds")
    typer.echo("--mode, of a topology\n  acker             every record is followed; the default")
    typer.echo("  barrier           checkpoints: state and transactional sinks are exact")
    for option, parts in (("--source", ProjectSource), ("--sink", ProjectSink)):
        typer.echo(option)
        for choice in parts:
            typer.echo(f"  {choice:<17} {choice.what}" + ("; the default" if choice == "files" else ""))
    raise typer.Exit


def new(
    dir: Annotated[Path, typer.Argument(help="Where to: a directory that is new or empty.")],
    name: Annotated[
        str | None, typer.Option(help="Of the Python package and of the job; by default the directory's.")
    ] = None,
    kind: Annotated[ProjectKind | None, typer.Option(help="What it is; by default a query.")] = None,
    mode: Annotated[ProjectMode | None, typer.Option(help="Of a topology; by default acker.")] = None,
    source: Annotated[ProjectSource | None, typer.Option(help="What it reads; by default files.")] = None,
    sink: Annotated[ProjectSink | None, typer.Option(help="What it writes; by default files.")] = None,
    list_choices: Annotated[
        bool, typer.Option("--list", callback=_print_choices, is_eager=True, help="Say what each choice is.")
    ] = False,
) -> None:
    """Write a small project that runs as it is: a query or a topology, tests, a systemd unit.

    On a terminal what is not given is asked for; elsewhere it has its default. The default runs without any server.
    """

    check_free(dir)
    if kind is None and mode is not None:
        kind = ProjectKind.TOPOLOGY
    if kind is None:
        kind = ProjectKind(_ask("Kind", ProjectKind, ProjectKind.QUERY))
    if kind is ProjectKind.TOPOLOGY and mode is None:
        mode = ProjectMode(_ask("Mode", ProjectMode, ProjectMode.ACKER))
    if source is None:
        source = ProjectSource(_ask("Source", ProjectSource, ProjectSource.FILES))
    if sink is None:
        sink = ProjectSink(_ask("Sink", sinks_of(kind), ProjectSink.FILES))
    choices = Choices(name_of(dir) if name is None else name, kind, mode, source, sink)
    files = project(choices)
    write_project(dir, files)
    what = f"{choices.kind} in mode {choices.mode}" if choices.mode else choices.kind
    typer.echo(f"{dir}: a {what}, {choices.source} to {choices.sink}, {len(files)} files. To run it:\n")
    typer.echo(f"  cd {shlex.quote(str(dir))}")
    typer.echo(f"  {shlex.quote(_interpreter())} -m {choices.name}\n")
    typer.echo("README.md says the rest.")


def _ask(what: str, choices: Iterable[str], default: str) -> str:
    if not is_terminal():
        return default
    return Prompt.ask(what, choices=[str(choice) for choice in choices], default=str(default))


def _interpreter() -> str:
    """Return how this interpreter is called: ``python`` where the path has it first."""
    found = shutil.which("python")
    return "python" if found is not None and os.path.samefile(Path(found).parent, _BIN) else sys.executable
