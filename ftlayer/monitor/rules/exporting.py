"""Dead letters as files have them, lines of JSON or a Parquet table, made a piece at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA, letter_of, row_of
from ftlayer.monitor.rules.facts import record_facts
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.row_json import json_of_row
from ftlayer.vertex.calls import RecordInfo

GROUP_ROWS = 5_000
GROUP_CHARS = 8 << 20
"""A row group of Parquet has so many letters, or so much text of theirs: that is what an export keeps in memory."""

Page = tuple[str, Sequence[RecordInfo]]
"""A vertex, and some letters of it."""


def exported(pages: Iterable[Page], names: JobNames, format: ExportFormat) -> Iterator[bytes]:
    """Yield a file of letters, each piece as soon as it is complete. Raises what ``pages`` does."""
    return _parquet(pages, names) if format is ExportFormat.PARQUET else _lines(pages, names)


def _lines(pages: Iterable[Page], names: JobNames) -> Iterator[bytes]:
    for vertex, letters in pages:
        # ASCII alone: nothing in it that a terminal would obey.
        yield "".join(json.dumps(record_facts(vertex, letter, names)) + "\n" for letter in letters).encode()


def _parquet(pages: Iterable[Page], names: JobNames) -> Iterator[bytes]:
    # Late: JSON lines and all other commands do without.
    from pyarrow import parquet

    out = _Pieces()
    with parquet.ParquetWriter(pa.PythonFile(out, mode="w"), LETTER_SCHEMA) as writer:
        for rows in _row_groups(pages, names):
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=LETTER_SCHEMA))
            yield out.take()
    yield out.take()


def _row_groups(pages: Iterable[Page], names: JobNames) -> Iterator[list[dict[str, Any]]]:
    """Gather rows into groups: pages of a search may have a letter or two each."""
    rows: list[dict[str, Any]] = []
    chars = 0
    for vertex, letters in pages:
        for letter in letters:
            rows.append(_row(vertex, letter, names))
            chars += len(rows[-1]["record"]) + len(rows[-1]["traceback"])
            if len(rows) >= GROUP_ROWS or chars >= GROUP_CHARS:
                yield rows
                rows, chars = [], 0
    if rows:
        yield rows


def _row(vertex: str, letter: RecordInfo, names: JobNames) -> dict[str, Any]:
    row = row_of(letter_of(letter))
    record = json.dumps(json_of_row(letter.payload), ensure_ascii=False)
    return {**row, "stream": names.stream(vertex, letter.stream), "record": record}


class _Pieces:
    """A file that Arrow writes to, whose bytes are taken away while it does."""

    def __init__(self) -> None:
        self.closed = False
        self._kept: list[bytes] = []

    def write(self, data: bytes) -> None:
        self._kept.append(bytes(data))

    def flush(self) -> None:
        """Keep what there is: `take` is what gives it away."""

    def close(self) -> None:
        self.closed = True

    def take(self) -> bytes:
        pieces, self._kept = self._kept, []
        return b"".join(pieces)
