"""Files as rows: text, JSON lines, CSV and Parquet."""

from __future__ import annotations

import codecs
import csv
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
from fsspec.utils import infer_compression

from ftlayer.config import MIB
from ftlayer.connectors.files.listing import Piece
from ftlayer.connectors.from_json import ObjectReader, line_starts, texts_of
from ftlayer.errors import SourceError
from ftlayer.functions.conversion import cast_strictly
from ftlayer.records.beside import note, valid

CHUNK_BYTES = MIB
MAX_LINE = 64 * MIB


def line_blocks(file: Any, start: int, end: int, newline: bytes = b"\n") -> Iterator[tuple[int, bytes]]:
    """Yield the lines that begin in the bytes [start, end), many at a time: where they begin, and they themselves.

    ``file`` is at its beginning. The last line of the file may be without a newline. Raises `SourceError` for a line
    of more than 64 MiB.
    """
    at = _first_line(file, start, newline)
    rest = b""
    while at < end:
        chunk = file.read(CHUNK_BYTES)
        data = rest + chunk if rest else chunk
        # The line that has the last byte before the end is the last one.
        stop = data.find(newline, end - at - 1) + 1 if len(data) >= end - at else 0
        if not chunk or stop:
            if data:
                yield at, data[:stop] if stop else data
            return
        whole = data.rfind(newline) + 1
        if whole:
            yield at, data[:whole]
        at, rest = at + whole, data[whole:]
        if len(rest) > MAX_LINE:
            raise SourceError(f"the line at byte {at} is longer than {MAX_LINE} bytes")


def _first_line(file: Any, start: int, newline: bytes) -> int:
    """Go to the first line that begins at ``start`` or behind it; return where that is."""
    if not start:
        return 0
    at = start - 1
    file.seek(at)
    while chunk := file.read(CHUNK_BYTES):
        found = chunk.find(newline)
        if found >= 0:
            file.seek(at + found + 1)
            return int(at + found + 1)
        at += len(chunk)
    return at


FORMATS = ("text", "json", "csv", "parquet")

PATH, OFFSET, VALUE = "path", "offset", "value"
POSITION = (pa.field(PATH, pa.string()), pa.field(OFFSET, pa.int64()))

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".snappy", ".zip")
_ARROWS = {".zst": "zstd", ".lz4": "lz4"}  # others read a file that is cut off as if it ended there
_PARQUET_ROWS = 1 << 16
_BOM = b"\xef\xbb\xbf"
_OTHER_BOMS = {b"\xff\xfe\0\0": 32, b"\0\0\xfe\xff": 32, b"\xff\xfe": 16, b"\xfe\xff": 16}
_HEAD_BYTES = 1 << 16
_NULLS = ["", "NA", "N/A", "n/a", "#NA", "#N/A", "NULL", "null"]  # of Arrow's own, without those of NaN
_OPEN, _CLOSE, _NEWLINE, _RETURN = b"{}\n\r"
_SPACE = np.isin(np.arange(256), list(b" \t\r\n\v\f"))


@dataclass(frozen=True)
class FileFormat:
    """How files become rows.

    Attributes:
        name: one of `FORMATS`.
        columns: of the files' own; of text it is ``value``.
        position: whether rows begin with ``path`` and ``offset``.
        malformed: column for the text of lines that cannot be read; "": there is none.
        header: of CSV: whether the first line has the names.
        delimiter: of CSV.
        encoding: of text, as Python calls it.
        skips: whether lines that cannot be read are left out, if there is no column for them. Otherwise they fail.
    """

    name: str
    columns: pa.Schema
    position: bool = True
    malformed: str = ""
    header: bool = True
    delimiter: str = ","
    encoding: str = "utf-8"
    skips: bool = False

    @property
    def schema(self) -> pa.Schema:
        last = [pa.field(self.malformed, pa.string())] if self.malformed else []
        return pa.schema([*(POSITION if self.position else ()), *self.columns, *last])

    def is_cut(self, path: str) -> bool:
        """Whether parts of a file can be read by themselves: not where it is compressed, or decoded, as a whole."""
        return self.name == "parquet" or (self.encoding == "utf-8" and not _is_compressed(path))

    def rows(self, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
        """Read a piece: the same rows whenever it is read. Raises what its content, or the file system, leads to."""
        read = _parquet if self.name == "parquet" else _lines
        return read(self, fs, piece)

    def batch(self, path: str, offsets: Any, columns: list[Any]) -> pa.RecordBatch:
        own = [pa.repeat(pa.scalar(valid(path)), len(offsets)), pa.array(offsets, pa.int64())]
        arrays = [*(own if self.position else ()), *columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def open(self, fs: Any, path: str) -> Any:
        is_packed, end = _is_compressed(path), os.path.splitext(path)[1].lower()
        if end in _ARROWS:
            file = pa.CompressedInputStream(fs.open(path, "rb"), _ARROWS[end])
        elif is_packed and infer_compression(path) is None:
            raise ImportError(f"no package is installed that unpacks {end}")
        else:
            file = fs.open(path, "rb", compression="infer" if is_packed else None)
        return file if self.encoding == "utf-8" else _Decoded(file, self.encoding)


def _is_compressed(path: str) -> bool:
    return path.lower().endswith(_COMPRESSED)


codecs.register_error("ftlayer.odd", lambda error: ("\udcff", error.end))  # type: ignore[attr-defined]


class _Decoded(io.RawIOBase):
    """A file in UTF-8. What is none of its encoding is the byte 0xFF, which UTF-8 has not: as in a file of UTF-8."""

    def __init__(self, file: Any, encoding: str) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder(encoding)("ftlayer.odd")

    def read(self, size: int = -1) -> bytes:
        while chunk := self._file.read(size):
            if text := self._decoder.decode(chunk):
                return text.encode("utf-8", "surrogateescape")
        return self._decoder.decode(b"", final=True).encode("utf-8", "surrogateescape")

    def close(self) -> None:
        self._file.close()
        super().close()


class _Head(NamedTuple):
    """How a file begins: what ends its lines, where rows may begin, and the names of its columns."""

    newline: bytes
    begin: int
    names: list[str]


def _lines(form: FileFormat, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    head = _head(form, fs, piece.path)
    end = piece.end if form.is_cut(piece.path) else 1 << 62
    with form.open(fs, piece.path) as file:
        for at, data in line_blocks(file, piece.start, end, head.newline):
            if at < head.begin:
                at, data = min(head.begin, at + len(data)), data[head.begin - at :]
            if head.newline != b"\n":
                data = data.replace(head.newline, b"\n")
            if not data:
                continue
            if form.name == "text":
                yield form.batch(piece.path, line_starts(data) + at, [texts_of(data)])
            else:
                yield from _Parser(form, piece.path, head.names).rows(at, data)


def _head(form: FileFormat, fs: Any, path: str) -> _Head:
    names = list(form.columns.names)
    with form.open(fs, path) as file:
        data = file.read(_HEAD_BYTES)
        bits = next((bits for bom, bits in _OTHER_BOMS.items() if data.startswith(bom)), 0)
        if form.encoding == "utf-8" and bits:
            raise SourceError(
                f"{valid(path)} begins with the byte order mark of UTF-{bits}: encoding='utf-{bits}' reads such files"
            )
        begin = len(_BOM) if data.startswith(_BOM) else 0
        if form.name == "text":
            return _Head(b"\n", begin, names)
        # A first line that ends with a carriage return alone, which old Macs and some spreadsheets write.
        while (
            (newline := _newline_of(data)) is None
            and len(data) <= MAX_LINE
            and (more := file.read(len(data)))
        ):
            data += more
        newline = newline or b"\n"
        if form.name == "json" or not form.header:
            return _Head(newline, begin, names)
        while True:
            stop = data.find(newline, begin) + 1
            if not stop and len(data) <= MAX_LINE and (more := file.read(len(data) or 1)):
                data += more
                continue
            line = data[begin : stop or len(data)]
            begin = stop or len(data)
            if line.strip():
                return _Head(newline, begin, _column_names(form, path, line))
            if not stop:
                return _Head(newline, begin, names)


def _newline_of(data: bytes) -> bytes | None:
    """Return what ends the first line that is there; None: it is not known yet."""
    at = data.find(b"\r")
    if at < 0 or b"\n" in data[:at]:
        return b"\n" if b"\n" in data else None
    return None if at + 1 == len(data) else b"\n" if data[at + 1 : at + 2] == b"\n" else b"\r"


def _column_names(form: FileFormat, path: str, line: bytes) -> list[str]:
    """Return the names that a CSV file's first line has. Raises `SourceError` if one of the schema is missing."""
    try:
        names = next(csv.reader([line.decode().strip("\r\n")], delimiter=form.delimiter, strict=True))
    except (ValueError, csv.Error) as error:
        raise SourceError(
            f"{valid(path)}: its first line has no names of columns: {error}; encoding= says what text it is"
        ) from error
    for name in form.columns.names:
        if names.count(name) != 1:
            how = "twice the" if name in names else "no"
            raise SourceError(
                f"{valid(path)}: its first line has {how} column {name!r}: it has {', '.join(names)}"
            )
    return names


class _Parser:
    """Parses blocks of lines; where one cannot be parsed, halves of the block are, down to single lines."""

    def __init__(self, form: FileFormat, path: str, names: list[str]) -> None:
        self._form, self._path, self._names = form, path, names
        self._parse: Callable[[bytes, int], list[pa.Array]] = self._csv
        if form.name == "json":
            reader = ObjectReader(form.columns)
            self._parse = lambda data, count: list(reader.read(pa.py_buffer(data), count).flatten())

    def rows(self, at: int, data: bytes) -> Iterator[pa.RecordBatch]:
        """Return the rows of these lines, which begin at this offset; blank lines are none."""
        if not data.endswith(b"\n"):
            data += b"\n"
        content = np.frombuffer(data, np.uint8)
        starts = line_starts(data)
        offsets = starts + at
        blank = np.zeros(len(starts), np.bool_)
        ends = np.append(starts[1:], len(data))
        for line in np.flatnonzero(_SPACE[content[starts]]).tolist():
            blank[line] = not data[starts[line] : ends[line]].strip()
        if blank.any():
            kept = ~blank
            data = b"".join(data[start:end] for start, end in zip(starts[kept], ends[kept], strict=True))
            offsets = offsets[kept]
            if not data:
                return
            content, starts = np.frombuffer(data, np.uint8), line_starts(data)
            ends = np.append(starts[1:], len(data))
        odd = self._odd(content, starts, ends)
        # Lines that are odd are parsed for themselves: with others they could pass for what they are not.
        parts = np.flatnonzero(np.diff(odd)) + 1
        for first, behind in zip([0, *parts], [*parts, len(starts)], strict=True):
            lines = data[starts[first] : ends[behind - 1]]
            if not odd[first]:
                yield from self._rows(offsets[first:behind], lines)
            elif self._form.name == "json":
                yield from self._malformed(offsets[first:behind], lines, "it is no JSON object")
            else:
                for line in range(first, behind):
                    yield from self._rows(offsets[line : line + 1], data[starts[line] : ends[line]])

    def _odd(self, content: Any, starts: Any, ends: Any) -> Any:
        """Return which lines are no objects between braces, or of CSV have a carriage return that ends no line."""
        if self._form.name == "json":
            last: Any = ends - 2
            last = np.where(content[last] == _RETURN, last - 1, last)
            odd = (content[starts] != _OPEN) | (content[last] != _CLOSE)
            for line in np.flatnonzero(odd).tolist():
                text = content[starts[line] : ends[line]].tobytes().strip()
                odd[line] = not (text.startswith(b"{") and text.endswith(b"}"))
            return odd
        returns = np.flatnonzero(content == _RETURN)
        lone = returns[content[returns + 1] != _NEWLINE]
        odd = np.zeros(len(starts), np.bool_)
        odd[np.searchsorted(starts, lone, "right") - 1] = True
        return odd

    def _rows(self, offsets: Any, data: bytes) -> Iterator[pa.RecordBatch]:
        try:
            data.decode()  # Arrow's reader of JSON takes any bytes for text.
            columns = self._parse(data, len(offsets))
        except (pa.ArrowInvalid, UnicodeDecodeError) as error:
            if len(offsets) > 1:
                half = len(offsets) // 2
                cut = int(line_starts(data)[half])
                yield from self._rows(offsets[:half], data[:cut])
                yield from self._rows(offsets[half:], data[cut:])
                return
            yield from self._malformed(offsets, data, str(error))
            return
        if self._form.malformed:
            columns.append(pa.nulls(len(offsets), pa.string()))
        yield self._form.batch(self._path, offsets, columns)

    def _malformed(self, offsets: Any, data: bytes, why: str) -> Iterator[pa.RecordBatch]:
        form = self._form
        if form.malformed:
            columns = [pa.nulls(len(offsets), field.type) for field in form.columns]
            yield form.batch(self._path, offsets, [*columns, texts_of(data)])
            return
        what = f"the line at byte {int(offsets[0])} is no {form.name} of this schema: {why}"
        if not form.skips:
            raise SourceError(
                f"{valid(self._path)}: {what}. malformed= names a column for such lines, errors='skip' leaves them out"
            )
        note(valid(self._path), "lines that cannot be read are left out", len(offsets), what)

    def _csv(self, data: bytes, count: int) -> list[pa.Array]:
        types = {field.name: field.type for field in self._form.columns}
        # A quote that is open at the end would take the newline, and what comes, into its value.
        if count == 1:
            data *= 2
        elif data.count(b'"', data.rfind(b"\n", 0, -1) + 1) % 2:
            raise pa.ArrowInvalid("a quote is open at the end of a line")
        table = self._table(data, types)
        if table.num_rows != max(2, count):
            raise pa.ArrowInvalid(
                "a quote is open at its end, or a carriage return within it"
                if count == 1
                else "lines are no rows"
            )
        for name, kind in types.items():
            if pa.types.is_floating(kind) and pc.any(large := pc.is_inf(table.column(name))).as_py():
                texts = self._table(data, {name: pa.string()}).column(name).filter(large)
                if not pc.all(pc.match_substring(texts, "inf", ignore_case=True)).as_py():
                    raise pa.ArrowInvalid(f"a number in {name!r} is too large for its type")
        return [_whole(table.column(name)).slice(0, count) for name in types]

    def _table(self, data: bytes, types: dict[str, pa.DataType]) -> pa.Table:
        return arrow_csv.read_csv(
            io.BytesIO(data),
            arrow_csv.ReadOptions(use_threads=False, block_size=len(data) + 1, column_names=self._names),
            arrow_csv.ParseOptions(delimiter=self._form.delimiter),
            arrow_csv.ConvertOptions(column_types=types, include_columns=list(types), null_values=_NULLS),
        )


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found


def _parquet(form: FileFormat, fs: Any, piece: Piece) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    names = list(form.columns.names)
    with fs.open(piece.path, "rb") as file, pq.ParquetFile(file) as parquet:
        missing = [name for name in names if name not in parquet.schema_arrow.names]
        if missing:
            raise SourceError(f"{valid(piece.path)}: it has no column {missing[0]!r}")
        first = 0
        for group in range(parquet.metadata.num_row_groups):
            described = parquet.metadata.row_group(group)
            if piece.start <= _begin(described) < piece.end:
                row = first
                for batch in parquet.iter_batches(_PARQUET_ROWS, [group], names, use_threads=False):
                    columns = [
                        cast_strictly(
                            batch.column(field.name), field.type, f"column {field.name!r}", lax=True
                        )
                        for field in form.columns
                    ]
                    yield form.batch(piece.path, np.arange(row, row + batch.num_rows), columns)
                    row += batch.num_rows
            first += described.num_rows


def _begin(group: Any) -> int:
    """Return where a row group begins in its file: with the dictionary of its first column, or its values."""
    if not group.num_columns:
        return 0
    column = group.column(0)
    dictionary = column.dictionary_page_offset
    return int(column.data_page_offset if dictionary is None else min(dictionary, column.data_page_offset))
