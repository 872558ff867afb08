"""The command ``ftlayer new``."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.prompt import Prompt

from ftlayer.cli.printing import is_terminal
from ftlayer.cli.scaffold.choices import (
    Choices,
    ProjectKind,
    ProjectMode,
    ProjectSink,
    ProjectSource,
    name_of,
    sinks_of,
)

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
    from ftlayer.cli.scaffold.project import check_free, project, write_project

    check_free(dir)
    if kind is None:
        kind = (
            ProjectKind.TOPOLOGY
            if mode is not None
            else ProjectKind(_ask("Kind", ProjectKind, ProjectKind.QUERY))
        )
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
