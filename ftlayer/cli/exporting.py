"""Writing dead letters to a file, or as lines to standard output."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import pyarrow as pa
import typer

from ftlayer.cli.connection import EXIT_ERROR, confirm, warn
from ftlayer.cli.printing import is_terminal
from ftlayer.common.clock import system_now
from ftlayer.common.secret_files import read_file
from ftlayer.errors import ConfigError, MachineError
from ftlayer.monitor.rules.exporting import Page, exported
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.plans import Search, Selection
from ftlayer.monitor.rules.row_json import json_of_row, row_of_json, structured_row, value_of_text
from ftlayer.vertex.calls import RecordInfo

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer


def edited_row(info: RecordInfo, values: list[str], file: Path | None) -> pa.RecordBatch:
    """Return the new payload of a letter: by ``COLUMN=VALUE`` options, by a file with JSON, or by $EDITOR.

    Raises `ConfigError` for what does not fit the record's columns, and ends the command where the editor's text is
    given up, or has changed nothing.
    """
    schema = info.payload.schema
    if values and file is not None:
        raise ConfigError("--set, --from: give one of them")
    if file is not None:
        text = read_file(file, "--from").decode("utf-8", "replace")
        return row_of_json(_json(text, "--from"), schema, info.payload)
    if values:
        row = json_of_row(info.payload)
        for assigned in values:
            name, equals, value = assigned.partition("=")
            if not equals:
                raise ConfigError(f"--set: expected COLUMN=VALUE, got {assigned!r}")
            row[name] = value_of_text(value, name, schema)
        return row_of_json(row, schema)
    return _in_editor(info.payload)


def _in_editor(row: pa.RecordBatch) -> pa.RecordBatch:
    before = text = json.dumps(structured_row(row), indent=2, ensure_ascii=False) + "\n"
    while True:
        edited = _edited(text)
        if edited == before:
            warn("nothing was changed")
            raise typer.Exit(EXIT_ERROR)
        try:
            return row_of_json(_json(edited, "the record"), row.schema, row)
        except ConfigError as error:
            warn(str(error))
            confirm("Edit it again?")
            text = edited


def _edited(text: str) -> str:
    """Return what $VISUAL, $EDITOR or vi makes of ``text``; the file that it has is this user's alone."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR")
    if not editor and not is_terminal():
        raise ConfigError("no terminal is there for an editor: say what changes by --set, --from or --with")
    editor = editor or "vi"
    with tempfile.TemporaryDirectory(prefix="ftlayer-edit-") as directory:
        file = Path(directory) / "record.json"
        file.write_text(text, "utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
        except (OSError, ValueError, IndexError) as error:
            reason = getattr(error, "strerror", "") or str(error)
            text = f"EDITOR: {editor!r} cannot be started ({reason}); nothing was changed"
            raise ConfigError(f"{text}. Name another, or use --set or --from") from error
        except subprocess.CalledProcessError as error:
            warn(f"the editor {editor!r} failed (exit code {error.returncode}); nothing was changed")
            raise typer.Exit(EXIT_ERROR) from error
        return file.read_text("utf-8", "replace")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error


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
    gatherer: Gatherer, selections: list[Selection], output: Path | None, format: ExportFormat
) -> int:
    """Write the letters of ``selections``, and return how many.

    ``output`` is a new file, which appears when all of it is there; None is standard output. Raises `ConfigError`.
    """
    count, names, now_ms = 0, gatherer.names(), system_now().wall_ms

    def pages() -> Iterator[Page]:
        nonlocal count
        for selection in selections:
            search = Search(selection, names, now_ms)
            while (call := search.next_call()) is not None:
                letters = search.take(gatherer.client(selection.vertex).call(call))
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
        failed = f"--output: {output} cannot be written: {error.strerror or error}"
        # A path that will not do has its name in the error; a disk that is full has not.
        raise (MachineError if error.filename is None else ConfigError)(failed) from error
    finally:
        path.unlink(missing_ok=True)
