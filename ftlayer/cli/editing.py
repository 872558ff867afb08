"""A dead letter's record as a person changes it: by options, by a file, or in an editor."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import typer

from ftlayer.cli.connection import EXIT_ERROR, warn
from ftlayer.errors import ConfigError
from ftlayer.monitor.row_json import json_of_row, row_of_json, value_of_text
from ftlayer.secret_files import read_file
from ftlayer.vertex.calls import RecordInfo


def edited_row(info: RecordInfo, values: list[str], file: Path | None) -> pa.RecordBatch:
    """Return the new payload of a letter: by ``COLUMN=VALUE`` options, by a file with JSON, or by $EDITOR.

    Raises `ConfigError` for what does not fit the record's columns, and ends the command where the editor's text is
    given up, or has changed nothing.
    """
    schema = info.payload.schema
    if values and file is not None:
        raise ConfigError("--set, --from: give one of them")
    if file is not None:
        return row_of_json(_json(read_file(file, "--from").decode("utf-8", "replace"), "--from"), schema)
    if values:
        changed = dict(_assigned(value, schema) for value in values)
        return row_of_json({**json_of_row(info.payload), **changed}, schema)
    return _in_editor(json_of_row(info.payload), schema)


def _assigned(text: str, schema: pa.Schema) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set: expected COLUMN=VALUE, got {text!r}")
    return name, value_of_text(value, name, schema)


def _in_editor(row: dict[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    before = text = json.dumps(row, indent=2, ensure_ascii=False) + "\n"
    while True:
        edited = _edited(text)
        if edited == before:
            warn("nothing was changed")
            raise typer.Exit(EXIT_ERROR)
        try:
            return row_of_json(_json(edited, "the record"), schema)
        except ConfigError as error:
            warn(str(error))
            typer.confirm("Edit it again?", abort=True, err=True)
            text = edited


def _edited(text: str) -> str:
    """Return what $VISUAL, $EDITOR or vi makes of ``text``; the file that it has is this user's alone."""
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory(prefix="ftlayer-edit-") as directory:
        file = Path(directory) / "record.json"
        file.write_text(text, "utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(file)], check=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise ConfigError(
                f"EDITOR: {editor!r} did not end well: {error}; or use --set or --from"
            ) from error
        return file.read_text("utf-8", "replace")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}") from error
