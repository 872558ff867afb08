"""An exactly-once sink of a Delta table: its log, and the sink, whose commits have the ids of what they commit."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.storage.files import sync_directory
from ftlayer.checkpoint.storage.layout import check_location, is_local, normal, scheme_of
from ftlayer.common.checks import check_choice, check_instance, check_text, check_texts, known_options
from ftlayer.common.printable import hides_secrets, secrets_in, secrets_of, shown_url
from ftlayer.connectors import fitting, table_commits
from ftlayer.connectors.at_least_once import WriterNumbers
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError, SinkError, SinkTargetError, UncommittableError
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource

logger = logging.getLogger(__name__)


SCHEMES = frozenset({"s3", "s3a"})

_NAMES = {
    "access_key_id": "access_key",
    "secret_access_key": "secret_key",
    "session_token": "session_token",
    "token": "session_token",
    "region": "region",
    "default_region": "region",
    "virtual_hosted_style_request": "force_virtual_addressing",
    "skip_signature": "anonymous",
}
"""Options that both have: deltalake's names, without ``aws_``, and Arrow's."""

_ENDPOINTS = ("endpoint", "endpoint_url")
_TRUE = frozenset({"1", "true", "t", "yes", "y", "on"})
_TRUTHS = frozenset({"force_virtual_addressing", "anonymous"})
_OF_COMMITS = frozenset(
    {
        "allow_http",
        "allow_unsafe_rename",
        "checksum_algorithm",
        "conditional_put",
        "connect_timeout",
        "copy_if_not_exists",
        "disable_tagging",
        "max_retries",
        "request_timeout",
        "retry_timeout",
        "s3_locking_provider",
        "timeout",
    }
)
"""Options of deltalake's that say nothing about where, or as whom: its own client uses them alone."""


def check_s3_options(options: Mapping[str, str]) -> None:
    known = {*_NAMES, *_ENDPOINTS, *_OF_COMMITS}
    for name in options:
        if _plain(name) not in known:
            raise ConfigError(
                f"storage_options: {name!r} is none of those that data files are written with: "
                f"{', '.join(f'aws_{each}' for each in sorted(known - {'token'}))}; others can be set in the "
                "environment, as AWS names them"
            )


def s3_file_system(options: Mapping[str, str]) -> Any:
    """Return a client. What the options lack comes from the environment, as for any of AWS' clients."""
    from pyarrow.fs import S3FileSystem

    given: dict[str, Any] = {}
    for name, value in options.items():
        plain = _plain(name)
        if plain in _ENDPOINTS:
            address = urlsplit(value if "://" in value else f"https://{value}")
            given["endpoint_override"] = address.netloc
            given["scheme"] = address.scheme
        elif plain in _NAMES:
            is_truth = _NAMES[plain] in _TRUTHS
            given[_NAMES[plain]] = value.lower() in _TRUE if is_truth else value
    return S3FileSystem(**given)


def _plain(name: str) -> str:
    return name.lower().removeprefix("aws_")


_MAY_BE_ON = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "deletionVectors",
        "domainMetadata",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""Features that ask nothing of files that are added; for some see `_asks_something`."""

_FEATURES_BY_VERSION = {
    2: "invariants",
    3: "checkConstraints",
    4: "generatedColumns",
    5: "columnMapping",
    6: "identityColumns",
}
"""What a table may have whose writer version is this or later, and has no list of features."""

_SIGNS = {
    "checkConstraints": "delta.constraints.",
    "generatedColumns": "delta.generationExpression",
    "identityColumns": "delta.identity.",
    "invariants": "delta.invariants",
}
"""How properties, or fields of the schema, show that a feature is used."""


def delta_library() -> Any:
    modules = ("deltalake", "deltalake.exceptions", "deltalake.transaction")
    return client_library("a Delta table", "deltalake", "delta", *modules)


def check_can_add(table: Any, place: str) -> None:
    """Raise `SinkError` for a table with a feature that needs more of a writer than to add files.

    Constraints would have to be evaluated, generated and identity columns computed, mapped columns renamed.
    """
    protocol = table.protocol()
    listed = protocol.writer_features
    features = set(listed or ())
    if protocol.min_writer_version < 7:
        features |= {
            name for version, name in _FEATURES_BY_VERSION.items() if version <= protocol.min_writer_version
        }
    properties = dict(table.metadata().configuration)
    # Its texts are Spark's, and name what a field is.
    fields = table.schema().to_json()
    used = sorted(name for name in features if _asks_something(name, properties, fields))
    if used:
        raise SinkError(
            f"{place} has {', '.join(used)}, which DeltaSink does not do; write to a table without, or drop the feature"
        )


def _asks_something(feature: str, properties: dict[str, Any], fields: str) -> bool:
    if feature == "columnMapping":
        return str(properties.get("delta.columnMapping.mode", "none")) != "none"
    sign = _SIGNS.get(feature)
    if sign is not None:
        return any(name.startswith(sign) for name in properties) or sign in fields
    return feature not in _MAY_BE_ON


@dataclass(frozen=True)
class StagedFile:
    """A Parquet file of a table that no commit names yet: what the commit will say about it."""

    path: str
    size: int
    partition_values: tuple[tuple[str, str | None], ...]
    stats: str


@dataclass(frozen=True)
class DeltaMessage(WriterCommitMessage):
    """The result of one `DeltaSink.write`. ``query``: see `streaming_query`.

    ``writer`` and ``number``: see `WriterNumbers`. ``schema``: of the table then, as Arrow writes it.
    """

    writer: str
    number: int
    written_ms: int
    files: tuple[StagedFile, ...]
    rows: int
    schema: bytes
    partition_by: tuple[str, ...]
    query: str

    @property
    def id(self) -> str:
        return f"{self.writer}-{self.number}"


HOUR_MS = 3_600_000
"""Clocks of slots and driver are at most so far apart, and application transactions are kept for longer."""

PAGES = (100, 1_000, None)
"""How many commits are looked through, newest first, before all that there are."""

RETENTION = "delta.setTransactionRetentionDuration"
ENTRY = "ftlayer"
"""Of the information about a commit: which messages it has, and of which checkpoint or batch."""


class DeltaLog:
    """The log as it was when it was read, or as `refresh` has found it; not for several threads at once.

    A commit for a writer (`WriterNumbers`) has the application transaction ``ftlayer-<writer>``, whose version is the
    highest number committed. A message with a higher one was never committed. One with a number up to it nearly
    always was; the information about commits has the names of their messages and decides.

    Two that commit for the same writer at once conflict: what is looked up here is still so when it is committed
    from here, or the commit fails.
    """

    def __init__(self, url: str, options: dict[str, str], place: str) -> None:
        self._table = delta_library().DeltaTable(url, storage_options=options or None, skip_stats=True)
        self._place = place
        self._pages: dict[int | None, list[dict[str, Any]]] = {}
        # Each look-up asks the storage. These hold for this version.
        self._known: dict[str, int | None] = {}
        check_can_add(self._table, place)

    def refresh(self) -> None:
        before = self.version
        self._table.update_incremental()
        if self.version != before:
            self._known = {}
        self._pages = {}
        check_can_add(self._table, self._place)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema(self._table.schema())

    @property
    def partition_by(self) -> tuple[str, ...]:
        return tuple(self._table.metadata().partition_columns)

    @property
    def version(self) -> int:
        return int(self._table.version())

    def batch_of(self, query: str) -> int | None:
        return self._last(_query_id(query))

    def is_committed(self, message: DeltaMessage) -> bool:
        """Whether a message of a topology is committed; `UncommittableError` if nothing can tell any more."""
        last = self._last(_writer_id(message.writer))
        if (last is None or message.number > last) and not self._may_be_forgotten(message):
            return False
        found = self.has(message)
        if found is None:
            raise UncommittableError(
                f"{self._place}: whether rows that were staged {_days_ago(message)} are committed cannot be told any "
                "more: their files are not in the table, and its log does not reach back so far "
                "(delta.logRetentionDuration)"
            )
        return found

    def has(self, message: DeltaMessage) -> bool | None:
        """Whether a commit has just this message; None: the log does not reach back so far."""
        since = message.written_ms - HOUR_MS
        for most in PAGES:
            commits = self._commits(most)
            for commit in commits:
                if message.id in _messages_of(commit):
                    return True
                if commit.get("timestamp", since) < since:
                    return False
            if commits and commits[-1].get("version") == 0:
                return False
        live = set(self._table.file_uris())
        # What was compacted or deleted since is in neither.
        return True if any(uri.endswith(f"/{message.files[0].path}") for uri in live) else None

    def all_names(self) -> tuple[set[str], int]:
        """Return the names of all messages that the log has, and from when on it has them all (ms since 1970)."""
        commits = self._commits(None)
        names = {name for commit in commits for name in _messages_of(commit)}
        if not commits or commits[-1].get("version") == 0:
            return names, 0
        return names, int(commits[-1].get("timestamp", 1 << 62)) + HOUR_MS

    def check_takes(self, message: DeltaMessage) -> None:
        """Raise `UncommittableError` if the table has changed so that a message's files do not fit it any more."""
        then = pa.ipc.read_schema(pa.py_buffer(message.schema))
        now = {field.name: field for field in self.schema}
        gone = [
            field.name
            for field in then
            if field.name not in now or not fitting.is_held_by(field.type, now[field.name].type)
        ]
        if gone or message.partition_by != self.partition_by:
            changed = (
                f"column {gone[0]!r}" if gone else f"how it is partitioned ({', '.join(self.partition_by)})"
            )
            raise UncommittableError(
                f"{self._place} has changed since rows were staged for it: {changed}; change it back to commit them"
            )

    def add(self, adding: Sequence[DeltaMessage], number: int) -> None:
        """Commit messages of a checkpoint or batch, all of them or none. Raises deltalake's errors."""
        deltalake = delta_library()
        versions = {_query_id(message.query): number for message in adding if message.query}
        for message in adding:
            if not message.query:
                name = _writer_id(message.writer)
                versions[name] = max(versions.get(name, 0), message.number, self._last(name) or 0)
        now_ms = time.time_ns() // 1_000_000
        self._table.create_write_transaction(
            [
                deltalake.transaction.AddAction(
                    file.path, file.size, dict(file.partition_values), message.written_ms, True, file.stats
                )
                for message in adding
                for file in message.files
            ],
            "append",
            self._table.schema(),
            list(self.partition_by),
            commit_properties=deltalake.CommitProperties(
                custom_metadata={ENTRY: {"number": number, "messages": [message.id for message in adding]}},
                app_transactions=[
                    deltalake.Transaction(name, version, now_ms) for name, version in versions.items()
                ],
            ),
        )
        before, known = self.version, self._known | versions
        self.refresh()
        if self.version == before + 1:  # There is no commit of others.
            self._known = known

    def _last(self, name: str) -> int | None:
        if name not in self._known:
            self._known[name] = self._table.transaction_version(name)
        return self._known[name]

    def _commits(self, most: int | None) -> list[dict[str, Any]]:
        if most not in self._pages:
            self._pages[most] = self._table.history(most)
        return self._pages[most]

    def _may_be_forgotten(self, message: DeltaMessage) -> bool:
        # Without this property all application transactions are kept for good.
        has_end = RETENTION in self._table.metadata().configuration
        return has_end and time.time_ns() // 1_000_000 - message.written_ms > HOUR_MS


def _writer_id(writer: str) -> str:
    return f"ftlayer-{writer}"


def _query_id(query: str) -> str:
    return f"ftlayer-query-{query}"


def _messages_of(commit: dict[str, Any]) -> list[str]:
    entry = commit.get(ENTRY)
    messages = entry.get("messages") if isinstance(entry, dict) else None
    return messages if isinstance(messages, list) else []


def _days_ago(message: DeltaMessage) -> str:
    days = (time.time_ns() // 1_000_000 - message.written_ms) / 86_400_000
    return f"{days:,.1f} days ago"


MOST_COLUMNS = 32
"""Columns that have statistics, as Delta's default is."""

MOST_CHARACTERS = 32
"""Texts longer than this are no bounds."""

MILLISECOND = timedelta(milliseconds=1)

_PARTITIONING = ("string", "integer", "boolean", "date", "timestamp", "decimal")

PartitionValues = tuple[tuple[str, str | None], ...]


def check_partitions(schema: pa.Schema, partition_by: tuple[str, ...], place: str) -> None:
    for name in partition_by:
        if name not in schema.names:
            raise SinkTargetError(
                f"{place}: partition column {name!r} is not in the rows ({', '.join(schema.names)})"
            )
        if not fitting.is_any(schema.field(name).type, *_PARTITIONING):
            raise SinkTargetError(
                f"{place}: partition column {name!r} is {schema.field(name).type}; partition by a text, an integer, a "
                "truth value, a date, a timestamp or a decimal"
            )
    if partition_by and len(partition_by) == len(schema.names):
        raise SinkTargetError(f"{place}: all columns are partition columns; a file would have none")


def partitions(rows: pa.Table, partition_by: tuple[str, ...]) -> Iterator[tuple[PartitionValues, pa.Table]]:
    if not partition_by:
        yield (), rows
        return
    keys = list(zip(*(rows.column(name).to_pylist() for name in partition_by), strict=True))
    found: dict[tuple[Any, ...], list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    others = rows.drop_columns(list(partition_by))
    for key, numbers in found.items():
        values = tuple(zip(partition_by, map(_partition_value, key), strict=True))
        yield values, others.take(pa.array(numbers, pa.int64()))


def statistics(rows: pa.Table) -> str:
    """Return the statistics of a file, as the log has them: how many rows, and bounds that readers skip files by."""
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for field in list(rows.schema)[:MOST_COLUMNS]:
        if pa.types.is_nested(field.type):
            continue
        column = rows.column(field.name)
        nulls[field.name] = column.null_count
        if column.null_count == len(column) or not _has_bounds(column):
            continue
        try:
            bounds = pc.min_max(column).as_py()
        except (OverflowError, ValueError):  # A time that Python has none for.
            continue
        low, high = _bound(bounds["min"], up=False), _bound(bounds["max"], up=True)
        if low is not None and high is not None:
            lowest[field.name], highest[field.name] = low, high
    return json.dumps(
        {"numRecords": rows.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    )


def _has_bounds(column: pa.ChunkedArray) -> bool:
    if pa.types.is_floating(column.type):
        # Spark takes NaN for the greatest number, and JSON has none.
        return bool(pc.all(pc.is_finite(column)).as_py())
    return fitting.is_any(column.type, "integer", "string", "date", "timestamp")


def _bound(value: Any, *, up: bool) -> Any:
    if isinstance(value, datetime):
        # In milliseconds, as others write it; what is finer is within the bounds.
        cut = value.replace(microsecond=value.microsecond // 1_000 * 1_000)
        if up and cut != value:
            if cut > cut.max.replace(tzinfo=cut.tzinfo) - MILLISECOND:
                return None
            cut += MILLISECOND
        text = cut.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return text if cut.tzinfo is None else f"{text}Z"
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, str):
        return value if len(value) <= MOST_CHARACTERS else None
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _partition_value(value: Any) -> str | None:
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        at = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return at.isoformat(" ", timespec="microseconds")
    if isinstance(value, date):
        return value.isoformat()
    return str(value)


# The files of a Delta table: of this machine, synced, or of a store that speaks S3.
#
# deltalake has a file system of its own, which is not used: it holds Python's lock while the store answers.


class TableFiles:
    """Files in the directory of a table. Paths are relative to it. Raises OSError and Arrow's errors."""

    def __init__(self, url: str, options: dict[str, str]) -> None:
        """``url``: of the table; ``options`` as deltalake takes them."""
        from pyarrow.fs import LocalFileSystem

        self._is_local = is_local(url)
        self._fs = LocalFileSystem() if self._is_local else s3_file_system(options)
        self._root = url if self._is_local else url.partition("://")[2]

    def write(self, path: str, rows: pa.Table) -> int:
        """Write a Parquet file that lasts; returns its size. If it raises there is none, or one that no commit has."""
        import pyarrow.parquet as pq

        try:
            # An object is there once its upload has ended.
            with self._fs.open_output_stream(f"{self._root}/{path}") as file:
                pq.write_table(rows, file)
            self.sync(path)
            size = self.size(path)
        except BaseException:
            self.delete(path)
            raise
        if size is None:
            raise FileNotFoundError(f"{path} was written, and is not there")
        return size

    def size(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        (found,) = self._fs.get_file_info([f"{self._root}/{path}"])
        return None if found.type == FileType.NotFound else int(found.size)

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(f"{self._root}/{path}")

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        found = self._fs.get_file_info(FileSelector(self._root, recursive=False))
        return [each.base_name for each in found if each.type == FileType.File]

    def sync(self, path: str) -> None:
        """Make a file of this machine last; an object does as it is written."""
        if self._is_local:
            with (target := Path(self._root, path)).open("rb") as file:
                os.fsync(file.fileno())
            sync_directory(target.parent)


_STAGED = re.compile(
    r"part-(?P<written>[0-9a-f]{12})-(?P<execution>[0-9a-f]{16})-(?P<message>[0-9a-f]{16}-[0-9]+)-[0-9]+\.ftlayer\.parquet"
)
"""A file that a sink has staged: when, and of which message."""

Result = TypeVar("Result")


@known_options
@hides_secrets(lambda sink: sink._secrets)
class DeltaSink(table_commits.CleaningSink[DeltaMessage]):
    """Appends rows to a Delta table.

    ``write`` puts them into Parquet files in the table's directory, which no reader sees; the commit adds those of all
    messages to the table, in one commit of its log that has their ids. A commit that was called before changes
    nothing; an abort leaves alone what is committed. A table that is missing is made when the first rows come.

    Columns are found by name. A column that the table lacks, or one of a type that it cannot hold, fails the ``write``
    before anything is staged; one that the rows lack is null. Rows with a null where the table takes none, or a value
    that its column cannot hold, are refused by `RowsRejected`. Tables with constraints, generated or identity columns,
    or mapped columns are refused.
    """

    _kind = DeltaMessage
    _connections = ("_log",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        partition_by: Sequence[str] = (),
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """Make the sink; nothing is touched before the first rows come.

        Args:
            path: of the table, a directory or a URL ``s3://bucket/path``.
            partition_by: columns that a table is partitioned by that this makes; one that is there keeps its own.
            storage_options: of S3, as deltalake names them (``aws_access_key_id``, ``aws_endpoint_url``, …). Slots and
                driver use them for log and files. What they lack comes from the environment of each.

        Raises `ConfigError` if deltalake is missing, and for an option that will not do.
        """
        super().__init__()
        delta_library()
        where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        check_text(where, "path", "a path or URL of a table")
        table_commits.check_partition_by(partition_by)
        if storage_options is not None:
            check_instance(storage_options, "storage_options", Mapping)
            check_texts(chain(storage_options, storage_options.values()), "storage_options", "texts by name")
        check_location(str(where), "path")
        self._url = normal(str(where))
        if not is_local(self._url):
            check_choice(scheme_of(self._url), "path: scheme", SCHEMES)
            check_s3_options(storage_options or {})
        self._place = f"Delta table {shown_url(self._url)}"
        self._partition_by = tuple(partition_by)
        self._options = dict(storage_options or {})
        self._secrets = [*secrets_in(self._options), *secrets_of(self._url)]
        self._numbers = WriterNumbers()
        self._log: DeltaLog | None = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> DeltaMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = table_commits.streaming_query()
        writer, number, written_ms = self._numbers.writer, self._numbers.next(), time.time_ns() // 1_000_000
        chunks = fitting.chunked(iterator)
        first = next(chunks, None)
        if first is None:
            return DeltaMessage(writer, number, written_ms, (), 0, b"", (), query)
        log = self._doing("staged", lambda: self._table_for(first.schema))
        schema, partition_by = log.schema, log.partition_by
        # Names sort by the time of writing, as far as clocks agree.
        name = f"part-{written_ms:012x}-{self._execution}-{writer}-{number}"
        staged: list[StagedFile] = []
        rows = 0
        try:
            for chunk in chain([first], chunks):
                fitting.check_fits(chunk.schema, schema, self._place)
                fitting.refuse_nulls(chunk, schema, rows)
                whole = fitting.fitted(chunk, schema, self._place, rows)
                for values, part in fitting.whole_or_refused(
                    chunk.num_rows,
                    rows,
                    lambda start, end: list(partitions(whole.slice(start, end - start), partition_by)),  # noqa: B023
                ):
                    path = f"{name}-{len(staged)}.ftlayer.parquet"
                    staged.append(self._doing("staged", lambda: self._stage(path, values, part)))  # noqa: B023
                rows += chunk.num_rows
        except BaseException:
            self._remove(one.path for one in staged)
            raise
        packed = schema.serialize().to_pybytes()
        return DeltaMessage(writer, number, written_ms, tuple(staged), rows, packed, partition_by, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Add the staged rows to the table, in one commit.

        Raises `UncommittableError` if files are gone that were never committed, if the table has changed so that they
        do not fit it, and if they were staged so long ago that nothing can tell whether they are committed. Raises
        `SinkError` if the table cannot be reached (it is tried some times); then it is unknown whether it happened:
        call it again.
        """
        found = table_commits.by_query(messages, DeltaMessage)
        if not found:
            return
        try:
            self._trying("committed", lambda: self._commit(found, batch_id))
        except SinkError as error:
            if not isinstance(error.__cause__, delta_library().exceptions.TableNotFoundError):
                raise
            way = ": bring its directory back, with its log and files, and start again"
            raise table_commits.uncommittable(
                f"{self._place} is not there any more", found, batch_id, way
            ) from error.__cause__

    def _abort(self, written: list[DeltaMessage], batch_id: int) -> None:
        self._trying("aborted", lambda: self._remove_uncommitted(self._fresh(), written))

    def _clean(self, keep: list[DeltaMessage], older_than_ms: int) -> list[str]:
        """Leave those that are older than the table's log to ``VACUUM``."""
        kept = {one.id for one in keep}

        def clean() -> list[str]:
            horizon_ms = int(time.time() * 1_000 - older_than_ms)
            # Before the log is read: what is committed in between is not taken for dead.
            staged = [match for match in map(_STAGED.fullmatch, self._files().names()) if match is not None]
            names, since_ms = self._fresh().all_names()
            dead = [
                match[0]
                for match in staged
                if since_ms <= int(match["written"], 16) <= horizon_ms
                and match["execution"] != self._execution
                and match["message"] not in names | kept
            ]
            self._remove(dead)
            return dead

        return self._trying("cleaned", clean)

    def _stage(self, path: str, values: PartitionValues, rows: pa.Table) -> StagedFile:
        return StagedFile(path, self._files().write(path, rows), values, statistics(rows))

    def _commit(self, found: dict[str, list[DeltaMessage]], number: int) -> None:
        log = self._fresh()
        adding, again = table_commits.divided(found, number, log.is_committed, log.batch_of)
        if adding:
            self._check_there(adding)
            for message in adding:
                log.check_takes(message)
            before = log.version
            log.add(adding, number)
            # A checkpoint that relied on the commit is forgotten next.
            for version in range(before + 1, log.version + 1):
                self._files().sync(f"_delta_log/{version:020}.json")
        self._remove_uncommitted(log, again)

    def _check_there(self, messages: list[DeltaMessage]) -> None:
        staged = [file for message in messages for file in message.files]
        for file, size in zip(
            staged, table_commits.for_all(self._files().size, (one.path for one in staged)), strict=True
        ):
            if size != file.size:
                raise UncommittableError(
                    f"{self._place}: {file.path} is gone or changed, which was staged and not committed: did VACUUM "
                    "or DeltaSink.clean remove it while a checkpoint was kept that has it, or was the table made anew?"
                )

    def _table_for(self, rows: pa.Schema) -> DeltaLog:
        """Return the log, of a table that is made for these rows if there is none."""
        deltalake = delta_library()
        if self._log is None:
            try:
                self._log = DeltaLog(self._url, self._options, self._place)
            except deltalake.exceptions.TableNotFoundError:
                check_partitions(_as_created(rows), self._partition_by, self._place)
                self._create(_as_created(rows))
                self._log = DeltaLog(self._url, self._options, self._place)
        else:
            self._log.refresh()
        fitting.check_fits(rows, self._log.schema, self._place)
        check_partitions(self._log.schema, self._log.partition_by, self._place)
        return self._log

    def _create(self, schema: pa.Schema) -> None:
        deltalake = delta_library()
        for left in reversed(range(table_commits.TRIES)):
            try:
                deltalake.DeltaTable.create(
                    self._url,
                    schema,
                    mode="ignore",
                    partition_by=list(self._partition_by),
                    storage_options=self._options or None,
                )
            except deltalake.exceptions.DeltaError:
                # Another subtask may just have made it.
                if deltalake.DeltaTable.is_deltatable(self._url, self._options or None):
                    return
                if not left:
                    raise
            else:
                return

    def _fresh(self) -> DeltaLog:
        if self._log is None:
            self._log = DeltaLog(self._url, self._options, self._place)
        else:
            self._log.refresh()
        return self._log

    def _files(self) -> TableFiles:
        return TableFiles(self._url, self._options)

    def _remove(self, paths: Iterable[str]) -> None:
        table_commits.for_all(self._files().delete, paths)

    def _remove_uncommitted(self, log: DeltaLog, written: Iterable[DeltaMessage]) -> None:
        self._remove(file.path for one in written if log.has(one) is False for file in one.files)

    def _said(self, error: Exception) -> str:
        # In one line and without the stack that deltalake puts behind it.
        return f"{type(error).__name__}: {' '.join(str(error).split()).partition(' 0: <unknown>')[0]}"

    def _trying(self, doing: str, work: Callable[[], Result]) -> Result:
        conflict = delta_library().exceptions.CommitFailedError
        return table_commits.tried(lambda: self._doing(doing, work), self._secrets, conflict=conflict)


def _as_created(rows: pa.Schema) -> pa.Schema:
    return pa.schema([pa.field(field.name, fitting.as_column(field.type)) for field in rows])


class DeltaDataSource(OptionsDataSource):
    """``spark.dataSource.register(DeltaDataSource)``, then ``df.writeStream.format("ftlayer-delta")``.

    Options: ``path``, ``partitionBy`` (names with commas between them), and those of the storage behind ``storage.``
    (``storage.AWS_REGION``). A batch that Spark runs again adds nothing.
    """

    format = "ftlayer-delta"

    def sink(self, options: DataSourceOptions) -> DeltaSink:
        path, storage = options.required("path"), options.below("storage.")
        return options.made(DeltaSink, path=path, storage_options=storage)
