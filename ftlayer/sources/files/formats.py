"""Files as rows: text, JSON lines, CSV and Parquet."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import SourceError
from ftlayer.sources.files.blocks import line_blocks
from ftlayer.sources.files.pieces import Piece
from ftlayer.sources.lines import line_starts, texts_of

FORMATS = ("text", "json", "csv", "parquet")

PATH, OFFSET, VALUE = "path", "offset", "value"
POSITION = (pa.field(PATH, pa.string()), pa.field(OFFSET, pa.int64()))

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip")
_PARQUET_ROWS = 1 << 16


@dataclass(frozen=True)
class FileFormat:
    """How files become rows.

    Attributes:
        name: one of `FORMATS`.
        columns: of the files' own; of text it is ``value``.
        position: whether rows begin with ``path`` and ``offset``.
        malformed: column for the text of lines that cannot be read; "": such a line fails the source.
        header: of CSV: whether the first line has the names.
        delimiter: of CSV.
    """

    name: str
    columns: pa.Schema
    position: bool = True
    malformed: str = ""
    header: bool = True
    delimiter: str = ","

    @property
    def schema(self) -> pa.Schema:
        """Of the rows."""
        last = [pa.field(self.malformed, pa.string())] if self.malformed else []
        return pa.schema([*(POSITION if self.position else ()), *self.columns, *last])

    def is_cut(self, path: str) -> bool:
        """Whether parts of a file can be read by themselves: not where it is compressed as a whole."""
        return self.name == "parquet" or not path.endswith(_COMPRESSED)

    def rows(self, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read a piece: the same rows whenever it is read. Raises `SourceError` for a line that cannot be read."""
        read = _parquet if self.name == "parquet" else _lines
        return read(self, fs, piece)

    def batch(self, path: str, offsets: Any, columns: list[Any]) -> pa.RecordBatch:
        """Return rows with their position."""
        own = [pa.repeat(pa.scalar(path), len(offsets)), pa.array(offsets, pa.int64())]
        arrays = [*(own if self.position else ()), *columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


# ---------------------------------------------------------------- lines


def _lines(form: FileFormat, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    names = _header(form, fs, piece.path)
    end = piece.end if form.is_cut(piece.path) else 1 << 62
    with fs.open(piece.path, "rb", compression=None if form.is_cut(piece.path) else "infer") as file:
        for at, data in line_blocks(file, piece.start, end):
            if form.name == "csv" and form.header and at == 0:
                first = data.find(b"\n") + 1 or len(data)
                at, data = first, data[first:]
            if not data:
                continue
            if form.name == "text":
                yield form.batch(piece.path, line_starts(data) + at, [texts_of(data)])
            else:
                yield from _Parser(form, piece.path, names).rows(at, data)


def _header(form: FileFormat, fs: Any, path: str) -> list[str]:
    """Return the names of a CSV file's columns."""
    if form.name != "csv" or not form.header:
        return list(form.columns.names)
    from pyarrow import csv

    with fs.open(path, "rb", compression="infer") as file:
        line = file.readline()
    options = csv.ReadOptions(autogenerate_column_names=True)
    parsing = csv.ParseOptions(delimiter=form.delimiter)
    texts = csv.ConvertOptions(column_types=dict.fromkeys((f"f{n}" for n in range(10_000)), pa.string()))
    row = csv.read_csv(io.BytesIO(line.removeprefix(b"\xef\xbb\xbf")), options, parsing, texts).to_pylist()[0]
    names = list(row.values())
    missing = [name for name in form.columns.names if name not in names]
    if missing:
        raise SourceError(f"{path}: its first line has no column {missing[0]!r}: it has {', '.join(names)}")
    return names


class _Parser:
    """Parses blocks of lines; where one cannot be parsed, halves of the block are, down to single lines."""

    def __init__(self, form: FileFormat, path: str, names: list[str]) -> None:
        self._form, self._path, self._names = form, path, names
        self._parse: Callable[[bytes], pa.Table] = self._json if form.name == "json" else self._csv

    def rows(self, at: int, data: bytes) -> Iterator[pa.RecordBatch]:
        """Return the rows of these lines, which begin at this offset; blank lines are none."""
        starts = line_starts(data)
        ends = np.append(starts[1:], len(data))
        blank = [not data[start:end].strip() for start, end in zip(starts, ends, strict=True)]
        if any(blank):
            kept = ~np.array(blank)
            data = b"".join(data[start:end] for start, end in zip(starts[kept], ends[kept], strict=True))
            offsets = starts[kept] + at
        else:
            offsets = starts + at
        if len(offsets):
            yield from self._rows(offsets, data)

    def _rows(self, offsets: Any, data: bytes) -> Iterator[pa.RecordBatch]:
        try:
            table = self._parse(data)
            if table.num_rows != len(offsets):
                raise pa.ArrowInvalid(f"{len(offsets)} lines are {table.num_rows} rows")
        except pa.ArrowInvalid as error:
            if len(offsets) > 1:
                half = len(offsets) // 2
                cut = int(line_starts(data)[half])
                yield from self._rows(offsets[:half], data[:cut])
                yield from self._rows(offsets[half:], data[cut:])
                return
            yield self._malformed(offsets, data, error)
            return
        columns = [_whole(table.column(name)) for name in self._form.columns.names]
        if self._form.malformed:
            columns.append(pa.nulls(table.num_rows, pa.string()))
        yield self._form.batch(self._path, offsets, columns)

    def _malformed(self, offsets: Any, data: bytes, error: Exception) -> pa.RecordBatch:
        if not self._form.malformed:
            raise SourceError(
                f"{self._path}: the line at byte {int(offsets[0])} is no {self._form.name} of this schema: {error}. "
                "malformed= names a column for such lines"
            ) from error
        columns = [pa.nulls(1, field.type) for field in self._form.columns]
        return self._form.batch(self._path, offsets, [*columns, texts_of(data)])

    def _json(self, data: bytes) -> pa.Table:
        from pyarrow import json

        return json.read_json(
            io.BytesIO(data),
            json.ReadOptions(use_threads=False, block_size=len(data) + 1),
            json.ParseOptions(explicit_schema=self._form.columns, unexpected_field_behavior="ignore"),
        )

    def _csv(self, data: bytes) -> pa.Table:
        from pyarrow import csv

        types = {field.name: field.type for field in self._form.columns}
        return csv.read_csv(
            io.BytesIO(data),
            csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names),
            csv.ParseOptions(delimiter=self._form.delimiter),
            csv.ConvertOptions(column_types=types, include_columns=list(types)),
        )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


# ---------------------------------------------------------------- Parquet


def _parquet(form: FileFormat, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    names = list(form.columns.names)
    try:
        with fs.open(piece.path, "rb") as file, pq.ParquetFile(file) as parquet:
            missing = [name for name in names if name not in parquet.schema_arrow.names]
            if missing:
                raise SourceError(f"{piece.path}: it has no column {missing[0]!r}")
            first = 0
            for group in range(parquet.metadata.num_row_groups):
                described = parquet.metadata.row_group(group)
                if piece.start <= _begin(described) < piece.end:
                    row = first
                    for batch in parquet.iter_batches(_PARQUET_ROWS, [group], names, use_threads=False):
                        columns = [batch.column(field.name).cast(field.type) for field in form.columns]
                        yield form.batch(piece.path, np.arange(row, row + batch.num_rows), columns)
                        row += batch.num_rows
                first += described.num_rows
    except pa.ArrowException as error:
        raise SourceError(f"{piece.path}: {error}") from error


def _begin(group: Any) -> int:
    """Return where a row group begins in its file: with the dictionary of its first column, or its values."""
    if not group.num_columns:
        return 0
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    return int(column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset))
