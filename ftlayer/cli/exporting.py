"""Writing dead letters to a file, or as lines to standard output."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from ftlayer.cli.records import page_of
from ftlayer.clock import system_now
from ftlayer.errors import ConfigError
from ftlayer.monitor.exporting import Page, exported
from ftlayer.monitor.file_formats import ExportFormat
from ftlayer.monitor.plans import Search, Selection

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.names import JobNames


def format_for(output: Path | None, format: ExportFormat | None) -> ExportFormat:
    """Return the format that was asked for, or that the name of the file says.

    Raises `ConfigError` for a name that says none, and for Parquet without a file.
    """
    if output is None:
        if format is ExportFormat.PARQUET:
            raise ConfigError("--output: name a file to write Parquet to")
        return ExportFormat.JSONL
    try:
        return format or ExportFormat.of_name(output.name)
    except ConfigError as error:
        raise ConfigError(f"--output: {error}; name it so, or say which by --format") from None


def export_letters(
    gatherer: Gatherer,
    selections: list[Selection],
    names: JobNames,
    output: Path | None,
    format: ExportFormat,
) -> int:
    """Write the letters of ``selections``, and return how many.

    ``output`` is a new file, which appears when all of it is there; None is standard output. Raises `ConfigError`.
    """
    count, now_ms = 0, system_now().wall_ms

    def pages() -> Iterator[Page]:
        nonlocal count
        for selection in selections:
            search = Search(selection, names, now_ms)
            while (call := search.next_call()) is not None:
                letters = search.take(page_of(gatherer.client(selection.vertex), call))
                count += len(letters)
                yield selection.vertex, letters

    pieces = exported(pages(), names, format)
    if output is None:
        for piece in pieces:
            typer.echo(piece, nl=False)
    else:
        with _new_file(output) as file:
            for piece in pieces:
                file.write(piece)
    return count


@contextmanager
def _new_file(output: Path) -> Iterator[BinaryIO]:
    """Give a file to write to, which gets its name at the end; nothing is left of it after an error."""
    if output.exists():
        raise ConfigError(f"--output: {output} is there already: name a new file")
    path = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        with path.open("xb") as file:
            yield file
        path.rename(output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror or error}") from error
    finally:
        path.unlink(missing_ok=True)
