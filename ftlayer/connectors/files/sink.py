"""An exactly-once sink of files: readers of the directory see committed rows, and each of them once.

```
<path>/part-<unique>.parquet                          committed
<path>/_ftlayer-inprogress/<execution>/<unique>.part  written, and not committed
<path>/_ftlayer-commits/…                             for queries of Spark's own: `batch_log`
```

Names that begin with ``_`` are hidden to Spark, Hive, `pyarrow.dataset` and their like.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import Any, BinaryIO, cast

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.custom_storage import FileStatus
from ftlayer.checkpoint.storage.files import FileOutput, Files, StoragePool, open_files, raise_together
from ftlayer.checkpoint.storage.layout import check_location, join, last_name, normal, parent, part
from ftlayer.common.checks import known_options
from ftlayer.common.printable import hides_secrets, secrets_of, shown_url
from ftlayer.connectors.at_least_once import as_json
from ftlayer.connectors.fitting import MISFITS, whole_or_refused
from ftlayer.connectors.table_commits import CleaningSink, by_query, streaming_query
from ftlayer.errors import ConfigError, FTLayerError, SinkTargetError, UncommittableError
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource
from ftlayer.records.ipc import copied, retyped

ROW_GROUP_ROWS = 1 << 17
"""Small batches are put together to Parquet row groups of at least so many rows."""

Encode = Callable[[Iterable[pa.RecordBatch], pa.Schema, BinaryIO, dict[str, Any]], None]


@dataclass(frozen=True)
class Format:
    """How rows become a file; ``encode`` writes a whole one, ``together`` so many rows at a time, or a batch."""

    suffix: str
    encode: Encode
    together: int = 1


def format_named(name: str, options: dict[str, Any]) -> Format:
    """Return the format; `ConfigError` if there is none of this name, or if it does not take the options."""
    found = _FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"format: expected one of {', '.join(_FORMATS)}, got {name!r}")
    try:
        found.encode([], pa.schema([("a", pa.int64())]), BytesIO(), options)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ConfigError(f"{', '.join(options)}: not an option of {name}: {error}") from error
    return found


def _parquet(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    import pyarrow.parquet as pq

    with pq.ParquetWriter(file, schema, **options) as writer:
        gathered: list[pa.RecordBatch] = []
        for batch in batches:
            # Parquet has milliseconds, which before version 21 Arrow lets overflow.
            gathered.append(_checked(batch, "s"))
            if sum(one.num_rows for one in gathered) >= ROW_GROUP_ROWS:
                writer.write_table(pa.Table.from_batches(gathered, schema))
                gathered = []
        if gathered:
            writer.write_table(pa.Table.from_batches(gathered, schema))


def _checked(batch: pa.RecordBatch, lacks: str = "") -> pa.RecordBatch:
    """Return a batch whose texts are some (other ones are written, and no reader takes them), and whose times fit.

    ``lacks``: timestamps in ``"s"`` are written in milliseconds, times of day in ``"ns"`` in microseconds.
    """

    def held(kind: pa.DataType) -> pa.DataType | None:
        if pa.types.is_dictionary(kind):
            found = retyped(kind.value_type, held)
            return None if found == kind.value_type else found
        if lacks == "s" and pa.types.is_timestamp(kind) and kind.unit == "s":
            return pa.timestamp("ms", kind.tz)
        return pa.time64("us") if lacks == "ns" and kind == pa.time64("ns") else None

    def look(rows: pa.RecordBatch) -> pa.RecordBatch:
        rows.validate(full=True)
        for column in rows.columns:
            if (kind := retyped(column.type, held)) != column.type:
                column.cast(kind)
        return rows

    try:
        return look(batch)
    except pa.ArrowInvalid:
        return look(copied(batch))


def _csv(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    from pyarrow import csv

    with csv.CSVWriter(file, schema, write_options=csv.WriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(_checked(batch))


def _json(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema, file: BinaryIO, options: dict[str, Any]
) -> None:
    if options:
        raise TypeError("JSON lines have no options")
    for batch in batches:
        # Python's times of day have microseconds.
        batch = _checked(batch, "ns")
        rows = batch.to_pylist(maps_as_pydicts="lossy")
        lines = (json.dumps(_plain(row), ensure_ascii=False, default=as_json) for row in rows)
        file.write("".join(f"{line}\n" for line in lines).encode())


def _plain(value: Any) -> Any:
    """Return what JSON can carry, written as Spark writes and reads it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


_FORMATS = {
    "parquet": Format(".parquet", _parquet, ROW_GROUP_ROWS),
    "csv": Format(".csv", _csv),
    "json": Format(".json", _json),
}


# Which files belong to which batch of a streaming query: a batch that is run again must not add others.
#
# ```
# <path>/_ftlayer-commits/<query>/<batch>.json
# ```
#
# An entry is published before the first file gets its name, and from then on the batch consists of these files.


DIRECTORY = "_ftlayer-commits"
UNHELD = (*MISFITS, pa.ArrowNotImplementedError)
KEPT = 100
"""Entries of so many batches are kept; Spark runs only the last one again."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    temporary: str
    target: str
    size: int


class BatchLog:
    def __init__(self, files: Files, query: str) -> None:
        self._files = files
        self._directory = join(DIRECTORY, part(query))

    def find(self, batch: int) -> list[WrittenFile] | None:
        """Return the files of a batch; None: it was never committed."""
        path = self._path(batch)
        return None if self._files.size(path) is None else _read(self._files, path)

    def put(self, batch: int, written: Iterable[WrittenFile]) -> None:
        rows = [[one.temporary, one.target, one.size] for one in written]
        self._files.publish(self._path(batch), json.dumps(rows).encode())
        self._files.delete(self._path(batch - KEPT))

    def _path(self, batch: int) -> str:
        return join(self._directory, f"{batch}.json")


def all_logged(files: Files) -> set[str]:
    entries = [entry.path for entry in files.walk(DIRECTORY) if entry.path.endswith(".json")]
    return {written.temporary for path in entries for written in _read(files, path)}


def _read(files: Files, path: str) -> list[WrittenFile]:
    try:
        return [WrittenFile(*row) for row in json.loads(files.read(path))]
    except (ValueError, TypeError) as error:
        raise UncommittableError(
            f"{shown_url(join(files.url, path))} was damaged after it was written ({error}); it says which files "
            "a batch has"
        ) from error


IN_PROGRESS = "_ftlayer-inprogress"


@dataclass(frozen=True)
class FileMessage(WriterCommitMessage):
    """The result of one `FileSink.write`; ``file`` None: there were no rows. ``query``: see `streaming_query`."""

    file: WrittenFile | None
    rows: int
    query: str


@known_options
@hides_secrets(lambda sink: secrets_of(sink._path))
class FileSink(CleaningSink[FileMessage]):
    """Writes rows into files of a directory.

    The rows of one ``write`` are one file. It gets the name that readers see when it is committed, by a rename (on an
    object store: a copy), so each file is seen as a whole or not at all; several files of one commit are not seen at
    the same moment. A commit that was called before changes nothing, as long as its files are where it has put them;
    an abort leaves alone what is committed. Files are durable before the checkpoint that holds them is.

    A row with a value that the format cannot hold is refused by `RowsRejected`. Not guaranteed: any order of rows or
    files.
    """

    _kind = FileMessage

    def __init__(self, path: str | os.PathLike[str], format: str = "parquet", **options: Any) -> None:
        """Make the sink; nothing is touched before the first rows come.

        Args:
            path: directory, a path or any URL of fsspec's; it need not be there.
            format: ``"parquet"``, ``"csv"`` or ``"json"`` (a line a row; binary as base64, times as ISO 8601).
            options: of `pyarrow.parquet.ParquetWriter` or `pyarrow.csv.WriteOptions`.

        Raises `ConfigError` for a format or an option that is none, or an unreadable URL.
        """
        super().__init__()
        if not (isinstance(path, (str, os.PathLike)) and (where := os.fspath(path))):
            raise ConfigError(f"path: expected a path or URL of a directory, got {path!r}")
        check_location(where, "path")
        self._path = normal(where)
        self._options = options
        self._format = format_named(format, options)
        open_files(self._path)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> FileMessage:
        """Write rows into a new hidden file. Raises `CheckpointStorageError` and `RowsRejected`, and leaves nothing."""
        query = streaming_query()
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return FileMessage(None, 0, query)
        # Names sort by the time of writing, as far as clocks agree.
        unique = f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(8)}"
        temporary = join(IN_PROGRESS, self._execution, f"{unique}.part")
        stream = _Stream(self._files().create(temporary))
        rows = _Passing(self._format.together)
        try:
            self._format.encode(
                rows.passed(chain([first], batches)), first.schema, cast(BinaryIO, stream), self._options
            )
            stream.output.sync()
            stream.output.close()
        except BaseException as error:
            stream.output.abandon()
            if isinstance(error, UNHELD) and not isinstance(error, FTLayerError) and not rows.are_broken:
                self._refuse(rows, first.schema)
            raise
        target = f"part-{unique}{self._format.suffix}"
        return FileMessage(WrittenFile(temporary, target, stream.size), rows.rows, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Make the rows visible. Called again, it goes on where it was.

        Raises `UncommittableError` if a file is gone that was never committed, and `CheckpointStorageError`: call it
        again then.
        """
        files = self._files()
        for query, written in _by_query(messages).items():
            if not query:
                _name(files, written)
                continue
            log = BatchLog(files, query)
            found = log.find(batch_id)
            if found is None:
                log.put(batch_id, written)
                found = written
            _name(files, found)
            _delete(files, set(written) - set(found))

    def _abort(self, written: list[FileMessage], batch_id: int) -> None:
        files = self._files()
        for query, mine in _by_query(written).items():
            # Spark aborts after a commit that failed, too; what was begun is finished when the batch runs again.
            logged = BatchLog(files, query).find(batch_id) if query else None
            _delete(files, set(mine) - set(logged or ()))

    def _clean(self, keep: list[FileMessage], older_than_ms: int) -> list[str]:
        files = self._files()
        kept = {one.file.temporary for one in keep if one.file is not None} | all_logged(files)
        horizon_ms = time.time() * 1_000 - older_than_ms
        dead = [
            entry.path
            for entry in files.walk(IN_PROGRESS)
            if entry.path not in kept
            and not entry.path.startswith(f"{IN_PROGRESS}/{self._execution}/")
            and (written_ms := _written_ms(entry)) is not None
            and written_ms <= horizon_ms
        ]
        delete_paths(files, dead)
        for directory in {parent(path) for path in dead}:
            files.delete_empty(directory)
        return [join(files.url, path) for path in dead]

    def _refuse(self, passing: _Passing, schema: pa.Schema) -> None:
        """Raise `RowsRejected` for those of the last rows that the format cannot hold, `SinkTargetError` for a type."""
        for field in schema:
            try:
                self._format.encode([], pa.schema([field]), io.BytesIO(), {})
            except UNHELD as error:
                raise SinkTargetError(
                    f"{shown_url(self._path)}: column {field.name!r} is {field.type}, which {self._format.suffix} "
                    f"files cannot hold ({error}); make it another type in a function before"
                ) from None
        if any(batch.schema != schema for batch in passing.last):
            return
        last = pa.Table.from_batches(passing.last, schema)

        def encode(start: int, end: int) -> None:
            self._format.encode(
                last.slice(start, end - start).to_batches(), schema, io.BytesIO(), self._options
            )

        whole_or_refused(last.num_rows, passing.rows - last.num_rows, encode)

    def _files(self) -> Files:
        return open_files(self._path)


def _written_ms(entry: FileStatus) -> int | None:
    """Return when a file in progress was written, as its storage says, or its name; None: unknown."""
    if entry.modified_ms:
        return entry.modified_ms
    try:
        return int(last_name(entry.path).partition("-")[0], 16)
    except ValueError:
        return None


class _Stream(io.RawIOBase):
    def __init__(self, output: FileOutput) -> None:
        super().__init__()
        self.output = output
        self.size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        content = bytes(data)
        self.output.write(content)
        self.size += len(content)
        return len(content)

    def tell(self) -> int:
        return self.size


class _Passing:
    """Rows on their way into a file: how many, and the ``last`` ones, of which at least ``together`` are kept."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._held = self.rows = 0
        self.last: deque[pa.RecordBatch] = deque()
        self.are_broken = False

    def passed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Pass batches on; ``are_broken``: it was their iterator that has raised."""
        todo = iter(batches)
        while True:
            try:
                batch = next(todo, None)
            except BaseException:
                self.are_broken = True
                raise
            if batch is None:
                return
            self.rows += batch.num_rows
            self._held += batch.num_rows
            self.last.append(batch)
            while self._held - self.last[0].num_rows >= self._together:
                self._held -= self.last.popleft().num_rows
            yield batch


def _by_query(messages: Iterable[WriterCommitMessage | None]) -> dict[str, list[WrittenFile]]:
    found = by_query(messages, FileMessage)
    return {query: [one.file for one in written if one.file is not None] for query, written in found.items()}


def _name(files: Files, written: list[WrittenFile]) -> None:
    """Give files the names that readers see, unless they have them."""

    def name(one: WrittenFile) -> None:
        if files.size(one.target) == one.size:
            # On an object store the copy may have come to its end, and the deletion not.
            files.delete(one.temporary)
        elif not files.move(one.temporary, one.target) and files.size(one.target) != one.size:
            raise UncommittableError(
                f"{shown_url(join(files.url, one.temporary))} is gone, and {one.target}, as which it is "
                "committed, is not there: "
                "the sink has another path than where it was written (files that wait for their commit lie there, not "
                "in the checkpoint), or it was committed and moved away or removed since, or something has removed it "
                "before (FileSink.clean with a checkpoint that was kept, say), and its rows are lost"
            )

    with contextlib.closing(StoragePool()) as crew:
        crew.map(name, written)
    files.sync_names("")


def _delete(files: Files, written: Iterable[WrittenFile]) -> None:
    delete_paths(files, [one.temporary for one in written])


def delete_paths(files: Files, paths: list[str]) -> None:
    if not paths:
        return
    with contextlib.closing(StoragePool()) as crew:
        errors = crew.delete(files, paths)
    raise_together(errors, files.url)


class FileDataSource(OptionsDataSource):
    """``format("ftlayer-files")``: ``path``, ``fileFormat`` (parquet). A batch that Spark runs again adds nothing."""

    format = "ftlayer-files"

    def sink(self, options: DataSourceOptions) -> FileSink:
        return options.made(FileSink, {"format": "fileFormat"}, path=options.required("path"))
