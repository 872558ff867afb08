"""Writing dead letters to a file: JSON lines, or Parquet."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import typer

from ftlayer.cli.records import page_of
from ftlayer.clock import system_now
from ftlayer.dead_letters.letter import letter_of, row_of
from ftlayer.dead_letters.schema import LETTER_SCHEMA
from ftlayer.errors import ConfigError
from ftlayer.monitor.editing import json_of_row
from ftlayer.monitor.facts import record_facts
from ftlayer.monitor.search import Search, Selection

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.names import JobNames
    from ftlayer.vertex.calls import RecordInfo

Write = Callable[[str, Sequence["RecordInfo"]], None]


def export_letters(
    gatherer: Gatherer, selections: list[Selection], names: JobNames, output: Path | None, *, is_parquet: bool
) -> int:
    """Write the letters of ``selections``, and return how many.

    ``output`` is a new file, which appears when all of it is there; None is standard output. Raises `ConfigError`.
    """
    count, now_ms = 0, system_now().wall_ms
    opened = _to_parquet(output, names) if is_parquet and output is not None else _to_lines(output, names)
    with opened as write:
        for selection in selections:
            search = Search(selection, names, now_ms)
            while (call := search.next_call()) is not None:
                letters = search.take(page_of(gatherer.client(selection.vertex), call))
                write(selection.vertex, letters)
                count += len(letters)
    return count


@contextmanager
def _to_lines(output: Path | None, names: JobNames) -> Iterator[Write]:
    def lines(vertex: str, letters: Sequence[RecordInfo]) -> str:
        # ASCII alone: nothing in it that a terminal would obey.
        return "".join(json.dumps(record_facts(vertex, letter, names)) + "\n" for letter in letters)

    if output is None:
        yield lambda vertex, letters: typer.echo(lines(vertex, letters), nl=False)
        return
    with _new_file(output) as path, path.open("x", encoding="utf-8") as file:

        def write(vertex: str, letters: Sequence[RecordInfo]) -> None:
            file.write(lines(vertex, letters))

        yield write


@contextmanager
def _to_parquet(output: Path, names: JobNames) -> Iterator[Write]:
    from pyarrow import parquet

    def rows(vertex: str, letters: Sequence[RecordInfo]) -> pa.RecordBatch:
        found = [_row(vertex, letter, names) for letter in letters]
        return pa.RecordBatch.from_pylist(found, schema=LETTER_SCHEMA)

    with _new_file(output) as path, parquet.ParquetWriter(path, LETTER_SCHEMA) as writer:
        yield lambda vertex, letters: writer.write_batch(rows(vertex, letters))


def _row(vertex: str, letter: RecordInfo, names: JobNames) -> dict[str, Any]:
    row = row_of(letter_of(letter))
    record = json.dumps(json_of_row(letter.payload), ensure_ascii=False)
    return {**row, "stream": names.stream(vertex, letter.stream), "record": record}


@contextmanager
def _new_file(output: Path) -> Iterator[Path]:
    """Give a path to write to, which gets its name at the end; nothing is left of it after an error."""
    if output.exists():
        raise ConfigError(f"--output: {output} is there already: name a new file")
    path = output.with_name(f"{output.name}.{os.getpid()}.new")
    try:
        yield path
        path.rename(output)
    except OSError as error:
        raise ConfigError(f"--output: {output} cannot be written: {error.strerror or error}") from error
    finally:
        path.unlink(missing_ok=True)
