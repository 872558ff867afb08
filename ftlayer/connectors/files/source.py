"""`FilesSource`, and `FileSink`, as a Python Data Source."""

from __future__ import annotations

import codecs
import logging
import os
import secrets
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgpack
import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from ftlayer.checkpoint.custom_storage import FileStatus
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.layout import check_location, join, normal
from ftlayer.common.checks import (
    MOST_BYTES,
    Duration,
    check_bool,
    check_choice,
    check_int,
    check_text,
    duration_ms,
    known_options,
    named_type,
)
from ftlayer.common.printable import described, hides_secrets, shown_url, without_secrets
from ftlayer.config import MIB
from ftlayer.connectors.files import listing
from ftlayer.connectors.files.formats import FORMATS, OFFSET, PATH, VALUE, FileFormat
from ftlayer.connectors.files.sink import FileDataSource
from ftlayer.connectors.from_json import ObjectReader
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions import data_sources
from ftlayer.records.beside import note, valid
from ftlayer.topology.ddl import parse_ddl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)


# Which files a source has found, in a directory beside its checkpoints.
#
# ```
# <url>/<id>/00000000000000000000-00000000000000004711.msgpack    many entries, put together
# <url>/<id>/00000000000000004711.msgpack                         the files that one listing found
# ```
#
# A source's offset is a number: of pieces of files, in the order of the journal. So an offset stays small however many
# files there are, and the same files are read again behind one that is gone back to.


COMPACT_AT = 50
"""So many listings are put together, once they are committed."""

_SUFFIX = ".msgpack"


class Journal:
    """The journal of one source. It lasts when a method has returned."""

    def __init__(
        self, url: str, journal_id: str, remember_ms: int, *, clock: Callable[[], float] = time.time
    ) -> None:
        """Read what is there.

        Args:
            url: of the directory.
            journal_id: which one there.
            remember_ms: how long a file's name is remembered at least that is there no more.
            clock: seconds since 1970.

        Raises `SourceError` if a part of it is missing, and `CheckpointStorageError`.
        """
        self.url, self.id = join(normal(url), journal_id), journal_id
        self._files = open_files(self.url)
        self._remember_ms = remember_ms
        self._clock = clock
        self._entries: list[listing.Entry] = []
        self._versions: dict[str, str] = {}
        self._end = 0
        # Parts: what was put together, and listings with the number behind each.
        self._merged: list[str] = []
        self._listings: list[tuple[str, int]] = []
        self._load()

    @property
    def end(self) -> int:
        return self._end

    def behind(self, start: int) -> Sequence[listing.Entry]:
        return self._entries[bisect_right(self._entries, start, key=attrgetter("end")) :]

    def version(self, path: str) -> str | None:
        return self._versions.get(path)

    def between(self, start: int, end: int) -> list[listing.Entry]:
        """Return the files with pieces of these numbers. Raises `SourceError` if they are not remembered."""
        found = list(takewhile(lambda entry: entry.first < end, self.behind(start)))
        known = sum(min(entry.end, end) - max(entry.first, start) for entry in found)
        if known < end - start:
            raise SourceError(
                f"journal {shown_url(self.url)}: it does not reach back to what was read from {start} to {end}: "
                "those files were removed, and forgotten since"
            )
        return found

    def append(self, found: Sequence[listing.FoundFile], step_of: Callable[[listing.FoundFile], int]) -> None:
        """Add files. Raises `SourceError` if another one writes to this journal, and `CheckpointStorageError`."""
        now_ms, first = int(self._clock() * 1_000), self._end
        entries: list[listing.Entry] = []
        for file in found:
            entry = listing.Entry(first, file.path, file.size, file.version, now_ms, step_of(file))
            entries.append(entry)
            first = entry.end
        name = f"{self._end:020}{_SUFFIX}"
        if not self._files.publish_new(name, _packed(first, entries)):
            raise SourceError(
                f"journal {shown_url(self.url)}: {name} is there already: another source writes to this journal; "
                "each has one of its own"
            )
        self._listings.append((name, first))
        self._take(entries, first)

    def committed(self, end: int, there: Collection[str]) -> None:
        """All before ``end`` is durable: put listings together, and forget files that are no more ``there``."""
        done = [(name, upto) for name, upto in self._listings if upto <= end]
        if len(done) < COMPACT_AT:
            return
        upto = done[-1][1]
        oldest_ms = int(self._clock() * 1_000) - self._remember_ms
        kept = [entry for entry in self._entries if entry.path in there or entry.found_ms > oldest_ms]
        entries = [entry for entry in self._entries if entry.end > upto]
        merged = [entry for entry in kept if entry.end <= upto]
        name = f"{0:020}-{upto:020}{_SUFFIX}"
        self._files.publish(name, _packed(upto, merged))
        for old in (*self._merged, *(each for each, _ in done)):
            self._files.delete(old)
        self._merged, self._listings = [name], self._listings[len(done) :]
        self._entries, self._versions = [], {}
        self._take([*merged, *entries], self._end)

    def _take(self, entries: Sequence[listing.Entry], end: int) -> None:
        self._entries += entries
        self._versions |= {entry.path: entry.version for entry in entries}
        self._end = end

    def _load(self) -> None:
        names = sorted(status.path for status in self._files.walk() if _is_part(status))
        self._merged = [name for name in names if "-" in name]
        if self._merged:
            # The last one has all that the others have: these were to be removed.
            end, entries = self._read(self._merged[-1])
            self._take(entries, end)
        for name in names:
            if "-" in name:
                continue
            if int(name.removesuffix(_SUFFIX)) < self._end:
                self._files.delete(name)  # It is put together with others, and was to be removed.
                continue
            if int(name.removesuffix(_SUFFIX)) > self._end:
                raise SourceError(f"journal {shown_url(self.url)}: the part before {name} is missing")
            end, entries = self._read(name)
            self._listings.append((name, end))
            self._take(entries, end)

    def _read(self, name: str) -> tuple[int, list[listing.Entry]]:
        end, packed = msgpack.unpackb(self._files.read(name), unicode_errors="surrogateescape")
        return end, listing.unpacked(packed)


def _is_part(status: FileStatus) -> bool:
    name = status.path.removesuffix(_SUFFIX)
    return name != status.path and name.replace("-", "").isdecimal()


def _packed(end: int, entries: Sequence[listing.Entry]) -> bytes:
    packed: Any = msgpack.packb([end, [entry.pack() for entry in entries]], unicode_errors="surrogateescape")
    return bytes(packed)


MAX_FILES, MAX_BYTES, SPLIT_BYTES = 1_000, 256 * MIB, 16 * MIB

JOURNAL, NEXT = "journal", "next"


@known_options
@hides_secrets(lambda source: source._listing.secrets)
class FilesSource(data_sources.DataSourceStreamReader, data_sources.SupportsTriggerAvailableNow):
    """Reads the files of a directory, and those that come later: each once, those written first first.

    Which files were found is kept in a journal, a directory of this source's own, and a place in the journal with who
    reads: in the checkpoint of a query or topology, or in the vertex. So each record is in one batch of a query, and
    barrier mode reflects it exactly once.

    Files have to come complete: written under another name, or elsewhere in the same file system, and renamed. One that
    is another than when it was found fails the source; what is written to a file that was read is never read.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "text",
        *,
        journal: str | os.PathLike[str],
        schema: pa.Schema | str | None = None,
        position: bool = True,
        malformed: str = "",
        header: bool = True,
        delimiter: str = ",",
        max_files: int = MAX_FILES,
        max_bytes: int = MAX_BYTES,
        split_bytes: int = SPLIT_BYTES,
        poll: Duration = "1s",
        min_age: Duration = "0s",
        remember: Duration = "168h",
        ignore_missing: bool = False,
        encoding: str = "utf-8",
        errors: str = "fail",
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is touched before it is read.

        Args:
            path: a directory, with all below it, a file, or a pattern (``logs/*.json``, ``logs/**/*.json``); a path, or
                any URL of fsspec's. What is there by the very name (``logs[1]/``) is no pattern. Hidden files (``_…``,
                ``.…``) and empty ones are left out.
            format: ``"text"`` (a line a row), ``"json"`` (an object a line), ``"csv"``, ``"parquet"``. The first three
                may be compressed, as their names say (``.gz``, ``.bz2``, ``.zst``, …).
            journal: directory for the list of the files that were found; of this source alone, for the driver.
            schema: of the files' columns, a `pyarrow.Schema` or text like ``"id bigint, name string"``. Text has one
                column, ``value``.
            position: whether rows begin with ``path`` and ``offset``: the byte at which a line begins (of a compressed
                file: of what it has unpacked), or the number of a row of a Parquet file.
            malformed: name of a last column, which has the text of a JSON or CSV line that cannot be read; its other
                columns are null then. Without it ``errors`` says what becomes of such a line.
            header: of CSV: whether the first line of each file has the columns' names.
            delimiter: of CSV.
            max_files: of a batch of a query, or a range of a topology: as many pieces as fit.
            max_bytes: the same.
            split_bytes: larger files are read in pieces of this size, also by several subtasks. After a failure a
                piece is read again from its beginning, and what was taken of it is skipped.
            poll: how often the directory is listed.
            min_age: how long ago a file has to be written before it is read.
            remember: how long the names of files are remembered at least that were removed.
            ignore_missing: whether a file that is removed before it is read is left out, with a warning. Otherwise it
                fails the source.
            encoding: of text, JSON and CSV, as Python calls it: ``"utf-16"``, ``"cp1252"``. Files of another one than
                UTF-8 are read as a whole, and ``offset`` counts the bytes of their text in UTF-8.
            errors: ``"fail"`` or ``"skip"``: whether a file that cannot be read (one that is cut off, say, or lacks a
                column) or a line that cannot fails the source, or is left out, from there on, with a line in the log.
            storage_options: of the file system, as fsspec takes them.

        Raises `ConfigError` for an option that will not do.
        """
        for option, given in ((PATH, path), (JOURNAL, journal)):
            check_text(os.fspath(given) if isinstance(given, os.PathLike) else given, option, "a path or URL")
        check_choice(format, "format", FORMATS)
        for option, flag in (("position", position), ("header", header), ("ignore_missing", ignore_missing)):
            check_bool(flag, option)
        if malformed != "":
            check_text(malformed, "malformed", "the name of a column")
        if not isinstance(delimiter, str) or len(delimiter.encode()) != 1 or delimiter in '"\r\n':
            raise ConfigError(f"delimiter: expected one character of ASCII, and no quote, got {delimiter!r}")
        check_choice(errors, "errors", ("fail", "skip"))
        check_int(max_files, "max_files", least=1)
        check_int(max_bytes, "max_bytes", least=1, most=MOST_BYTES)
        check_int(split_bytes, "split_bytes", least=1, most=MOST_BYTES)
        if storage_options is not None and not isinstance(storage_options, Mapping):
            raise ConfigError(f"storage_options: expected a dict, got {named_type(storage_options)}")
        self.path, self.journal = os.fspath(path), os.fspath(journal)
        for option, location in ((PATH, self.path), (JOURNAL, self.journal)):
            check_location(location, option)
        if _reads_below(self.path, self.journal):
            raise ConfigError(
                f"journal: {shown_url(self.journal)} is below {shown_url(self.path)}, and would be read; name "
                "another directory"
            )
        columns = _columns(format, schema, malformed, position=position)
        self._skips = errors == "skip"
        self._format = FileFormat(
            format, columns, position, malformed, header, delimiter, _encoding(encoding, format), self._skips
        )
        self.schema: pa.Schema = self._format.schema
        self._listing = listing.Listing(self.path, storage_options or {})
        self._max_files, self._max_bytes, self._split_bytes = max_files, max_bytes, split_bytes
        self._poll_s = duration_ms(poll, "poll", least=0) / 1_000
        self._min_age_ms = duration_ms(min_age, "min_age", least=0)
        self._remember_ms = duration_ms(remember, "remember", least=0)
        self._ignore_missing = ignore_missing
        self._opened: Journal | None = None
        self._listed_s: float | None = None
        self._there: set[str] = set()
        self._last: list[listing.FoundFile] | None = None
        self._warned: set[str] = set()

    # ------------------------------------------------------------ in the driver

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        """Begin with a journal of its own: all files are new."""
        return {JOURNAL: secrets.token_hex(8), NEXT: 0}

    def getDefaultReadLimit(self) -> data_sources.ReadLimit:  # noqa: N802 - Spark's name
        return data_sources.ReadMaxFiles(self._max_files)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._last = self._listing.files()

    def latestOffset(self, start: dict[str, Any], limit: data_sources.ReadLimit) -> dict[str, Any]:  # noqa: N802
        journal = self._journal(start)
        self._look(journal)
        if isinstance(limit, data_sources.ReadAllAvailable):
            return {**start, NEXT: max(start[NEXT], journal.end)}
        files = limit.max_files if isinstance(limit, data_sources.ReadMaxFiles) else None
        return {
            **start,
            NEXT: listing.limited(journal.behind(start[NEXT]), start[NEXT], files, self._max_bytes),
        }

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        first, behind = start[NEXT], end[NEXT]
        entries = self._journal(end).between(first, behind)
        pieces = [piece for entry in entries for piece in entry.pieces(first, behind)]
        return listing.packed_splits(pieces, self._split_bytes)

    def commit(self, end: dict[str, Any]) -> None:
        self._journal(end).committed(end[NEXT], self._there)

    def stop(self) -> None:
        """There is nothing to free."""

    def _journal(self, offset: Mapping[str, Any]) -> Journal:
        if set(offset) != {JOURNAL, NEXT}:
            raise ConfigError(
                f"{shown_url(self._listing.url)}: the offset {dict(offset)!r} is of another source; give the new one "
                "a uid of its own"
            )
        if self._opened is None or self._opened.id != offset[JOURNAL]:
            self._opened = Journal(self.journal, offset[JOURNAL], self._remember_ms)
            self._listed_s = None
        if self._opened.end < offset[NEXT]:
            raise SourceError(
                f"journal {shown_url(self._opened.url)}: it ends at {self._opened.end}, and what was read at "
                f"{offset[NEXT]}: a part of it was removed, or journal= names another directory than before"
            )
        return self._opened

    def _look(self, journal: Journal) -> None:
        now = time.monotonic()
        if self._listed_s is not None and (self._last is not None or now - self._listed_s < self._poll_s):
            return
        found = self._listing.files() if self._last is None else self._last
        self._listed_s = now
        self._there = {file.path for file in found}
        youngest_ms = time.time_ns() // 1_000_000 - self._min_age_ms
        new = []
        for file in found:
            known = journal.version(file.path)
            if known is None:
                if not self._min_age_ms or file.modified_ms <= youngest_ms:
                    new.append(file)
            elif known != file.version and file.path not in self._warned:
                self._warned.add(file.path)
                logger.warning(
                    "%s has changed since it was found, and is not read again", self._shown(file.path)
                )
        if new:
            # Where that fails, only what was written says whether it was.
            self._opened = None
            journal.append(new, self._step_of)
            self._opened = journal

    def _shown(self, path: str) -> str:
        return without_secrets(valid(path), self._listing.secrets)

    def _step_of(self, file: listing.FoundFile) -> int:
        return self._split_bytes if self._format.is_cut(file.path) and file.size > self._split_bytes else 0

    # ------------------------------------------------------------ in the tasks

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, listing.FilePieces)
        for piece in partition.pieces:
            yield from self._read(piece)

    def _read(self, piece: listing.Piece) -> Iterator[pa.RecordBatch]:
        if not self._is_there(piece):
            return
        name = valid(piece.path)
        try:
            yield from self._format.rows(self._listing.file_system, piece)
        except FileNotFoundError as error:
            raise SourceError(f"{name} was removed while it was read") from error
        except Exception as error:
            # One that was written to meanwhile is said to be that.
            self._is_there(piece)
            why = str(error) if isinstance(error, SourceError) else described(error)
            said = why if name in why else f"{name}: it cannot be read: {why}"
            if not self._skips or not self._is_of_content(error, piece):
                hint = "" if "errors=" in said else "; errors='skip' leaves out what cannot be read"
                raise SourceError(said + hint) from error
            note(name, "the rest of it is left out", 1, said)
        # What was written to it meanwhile may be among the rows.
        self._is_there(piece)

    def _is_of_content(self, error: Exception, piece: listing.Piece) -> bool:
        """Whether reading again leads to the same: a file system that gives all of the file is not to blame."""
        if isinstance(error, MemoryError | ImportError):
            return False
        try:
            with self._listing.file_system.open(piece.path, "rb") as file:
                while file.read(MIB):
                    pass
        except Exception as unread:
            raise SourceError(f"{valid(piece.path)} cannot be read: {described(unread)}") from unread
        return True

    def _is_there(self, piece: listing.Piece) -> bool:
        """Whether the file is as it was found. Raises `SourceError` if it is another one, or gone."""
        try:
            found = self._listing.version(piece.path)
        except FileNotFoundError as error:
            if self._ignore_missing:
                logger.warning("%s was removed before it was read, and is left out", self._shown(piece.path))
                return False
            raise SourceError(
                f"{valid(piece.path)} was removed before it was read; ignore_missing=True leaves such files out"
            ) from error
        if found != (piece.size, piece.version):
            raise SourceError(
                f"{valid(piece.path)} has changed since it was found, with {piece.size} bytes ({found[0]} now): "
                "write files under a hidden name, and rename them when they are complete, or set min_age"
            )
        return True

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads the journal by itself.
        return {**self.__dict__, "_opened": None, "_listed_s": None}


def _reads_below(path: str, directory: str) -> bool:
    """Return whether files in ``directory`` are among those of ``path``, a directory or a pattern of all below one."""
    top, pattern, _ = path.partition("**")
    if not pattern and any(letter in path for letter in "*?[") and not os.path.exists(path):
        return False
    inner, outer = (each if "://" in each else os.path.abspath(each) for each in (directory, top))
    return inner == outer.rstrip("/") or inner.startswith(outer.rstrip("/") + "/")


def _encoding(encoding: object, format: str) -> str:
    try:
        name = codecs.lookup(encoding).name if isinstance(encoding, str) else ""
        "\n".encode(name)
    except (LookupError, ValueError, TypeError) as error:
        raise ConfigError(
            f"encoding: expected one of text that Python knows, like 'utf-16' or 'cp1252', got {encoding!r}"
        ) from error
    if format == "parquet" and name != "utf-8":
        raise ConfigError("encoding: Parquet has its own; leave it out")
    return name


def _columns(format: str, schema: pa.Schema | str | None, malformed: str, *, position: bool) -> pa.Schema:
    if format == "text":
        if schema is not None:
            raise ConfigError(f"schema: text has one column, {VALUE!r}: leave it out")
        columns = pa.schema([pa.field(VALUE, pa.string())])
    elif schema is None:
        raise ConfigError(
            f"schema: expected the columns of the {format} files, like 'id bigint, name string'"
        )
    elif isinstance(schema, pa.Schema):
        columns = schema.remove_metadata()
    else:
        check_text(schema, "schema", "a pyarrow.Schema or text like 'id bigint, name string'")
        columns = parse_ddl(schema)
    if format == "json":
        ObjectReader(columns)
    nested = next((field for field in columns if pa.types.is_nested(field.type)), None)
    if format == "csv" and nested is not None:
        raise ConfigError(f"schema: {nested.name} is {nested.type}, which CSV has not")
    if malformed and format not in ("json", "csv"):
        raise ConfigError(f"malformed: {format} has no lines that cannot be read")
    names = [*((PATH, OFFSET) if position else ()), *columns.names, *([malformed] if malformed else [])]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        hint = (
            f"; position=False leaves {PATH!r} and {OFFSET!r} out"
            if position and twice in (PATH, OFFSET)
            else ""
        )
        raise ConfigError(f"schema: column {twice!r} is there twice{hint}")
    return columns


class FilesDataSource(FileDataSource):
    """``spark.dataSource.register(FilesDataSource)``, then ``format("ftlayer-files")`` to read or to write.

    Options of a reader are the parameters of `FilesSource`, in camel case (``splitBytes``), but ``storage_options``;
    its ``format`` is called ``fileFormat`` here, ``schema`` ``columns`` (``"id bigint, name string"``), ``max_files``
    ``maxFilesPerTrigger`` and ``max_bytes`` ``maxBytesPerTrigger``. A writer has those of `FileDataSource`.
    """

    def schema(self) -> StructType:
        return data_sources.from_arrow_schema(self._reader().schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        return self._reader()

    def _reader(self) -> FilesSource:
        options = self.given()
        names = {
            "format": "fileFormat",
            "schema": "columns",
            "max_files": "maxFilesPerTrigger",
            "max_bytes": "maxBytesPerTrigger",
        }
        source = options.made(FilesSource, names)
        options.check_all_known()
        options.note_limit(source)
        return source
