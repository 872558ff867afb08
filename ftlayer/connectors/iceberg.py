"""An exactly-once sink of an Iceberg table: a snapshot comes with the properties that say what is committed."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote_plus, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import (
    Duration,
    check_choice,
    check_instance,
    check_text,
    check_texts,
    duration_ms,
    known_options,
)
from ftlayer.common.printable import hides_secrets, secrets_in
from ftlayer.connectors import table_commits
from ftlayer.connectors.at_least_once import WriterNumbers
from ftlayer.connectors.connections import client_library
from ftlayer.connectors.fitting import as_column, check_fits, chunked, fitted, refuse_nulls, whole_or_refused
from ftlayer.errors import ConfigError, SinkTargetError, UncommittableError
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource

RETRIES = "commit.retry.num-retries"


def iceberg_library() -> Any:
    modules = ("pyiceberg", "pyiceberg.catalog", "pyiceberg.exceptions")
    return client_library("an Iceberg table", "pyiceberg", "iceberg", *modules)


def check_catalog(catalog: object) -> None:
    if isinstance(catalog, str):
        check_text(
            catalog, "catalog", "the name of a catalog in pyiceberg's configuration, or its properties"
        )
        return
    check_instance(catalog, "catalog", Mapping)
    assert isinstance(catalog, Mapping)
    check_texts([*catalog, *catalog.values()], "catalog", "texts by name")
    if not {"type", "uri", "py-catalog-impl"} & set(catalog):
        raise ConfigError(
            "catalog: expected properties of pyiceberg's, 'type' or 'uri' among them, got "
            f"{', '.join(map(repr, catalog)) or 'none'}"
        )
    if "type" in catalog:
        kinds = sorted(kind.value for kind in iceberg_library().catalog.CatalogType)
        check_choice(catalog["type"], "catalog: type", kinds)


def load_catalog(catalog: str | Mapping[str, str]) -> Any:
    load = iceberg_library().catalog.load_catalog
    if isinstance(catalog, str):
        return load(catalog)
    properties = dict(catalog)
    return load(properties.pop("name", "default"), **properties)


def without_retries(table: Any) -> Any:
    """Return a table, just loaded, whose commits fail if there was another one since.

    pyiceberg would commit again on top of that, without another look at whether the same was committed by it. It
    reads how often from the properties of this object, which are not written back.
    """
    table.metadata.properties[RETRIES] = "0"
    return table


def make_local_files_last(urls: Iterable[str]) -> None:
    directories = set()
    for url in urls:
        if urlsplit(url).scheme not in ("", "file"):
            continue
        # As pyiceberg does: what looks quoted in a location is the name itself.
        path = Path(url.removeprefix("file://"))
        with path.open("rb") as file:
            os.fsync(file.fileno())
        directories.add(path.parent)
    for directory in directories:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


COUNTS = (
    "column_sizes",
    "value_counts",
    "null_value_counts",
    "nan_value_counts",
    "lower_bounds",
    "upper_bounds",
)


@dataclass(frozen=True)
class StagedDataFile:
    """A data file that no snapshot has yet. ``metrics``: pyiceberg's, by their names."""

    path: str
    size: int
    rows: int
    partition: tuple[Any, ...]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class IcebergMessage(WriterCommitMessage):
    """The result of one `IcebergSink.write`. ``query``: see `streaming_query`.

    ``writer`` and ``number``: see `WriterNumbers`. ``table`` is the table's UUID, ``spec`` the partition spec then.
    """

    writer: str
    number: int
    written_ms: int
    files: tuple[StagedDataFile, ...]
    rows: int
    table: str
    spec: int
    query: str

    @property
    def id(self) -> str:
        return f"{self.writer}-{self.number}"


def staged(file: Any) -> StagedDataFile:
    partition = tuple(file.partition[at] for at in range(len(file.partition)))
    metrics = {name: getattr(file, name) for name in (*COUNTS, "split_offsets")}
    return StagedDataFile(file.file_path, file.file_size_in_bytes, file.record_count, partition, metrics)


def data_file(file: StagedDataFile, spec: int) -> Any:
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat(file.path.rpartition(".")[2].upper()),
        partition=Record(*file.partition),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=spec,
        equality_ids=None,
        key_metadata=None,
        **file.metrics,
    )


# What is committed, in the table's own properties: they change in the commit that adds the rows.
#
# | property | value |
# | --- | --- |
# | ``ftlayer.commits.<writer>`` | when the last was, and which numbers are committed: ``1795443368603 1-57,60`` |
# | ``ftlayer.commits.query-<id>`` | when it was, the last batch, and its messages: ``1795443368603 12 a-1,b-1`` |


PREFIX = "ftlayer.commits."
HOUR_MS = 3_600_000
"""Clocks of slots and driver are at most so far apart."""

_WRITER = re.compile(r"(\d+) (\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)")
_QUERY = re.compile(r"(\d+) (\d+) (\S*)")


class Commits:
    def __init__(self, properties: Mapping[str, str], remember_ms: int, now_ms: int, place: str) -> None:
        """Read them. ``remember_ms``: for how long a writer, or a query, is known behind its last commit."""
        self._properties = {name: value for name, value in properties.items() if name.startswith(PREFIX)}
        self._remember_ms = remember_ms
        self._now_ms = now_ms
        self._place = place

    def is_committed(self, message: IcebergMessage) -> bool:
        """Whether a message of a topology is committed; `UncommittableError` if that is forgotten."""
        name = _writer_name(message.writer)
        known = self._numbers(name) if name in self._properties else []
        if any(first <= message.number <= last for first, last in known):
            return True
        # What is forgotten was committed long ago, so it was written before.
        if message.written_ms < self._now_ms - self._remember_ms + HOUR_MS:
            raise UncommittableError(
                f"{self._place}: rows were staged longer ago than remember says, so whether they are committed is not "
                "known any more; give the sink a longer time before you take checkpoints to keep"
            )
        return False

    def batch_of(self, query: str) -> int | None:
        value = self._properties.get(_query_name(query))
        return None if value is None else int(self._read(_QUERY, _query_name(query))[2])

    def is_batch_with(self, message: IcebergMessage) -> bool:
        name = _query_name(message.query)
        return name in self._properties and message.id in self._read(_QUERY, name)[3].split(",")

    def with_messages(self, messages: Iterable[IcebergMessage], batch: int) -> dict[str, str]:
        """Return the properties that change when these are committed."""
        numbers: dict[str, set[int]] = {}
        batches: dict[str, list[str]] = {}
        for message in messages:
            if message.query:
                batches.setdefault(_query_name(message.query), []).append(message.id)
            else:
                numbers.setdefault(_writer_name(message.writer), set()).add(message.number)
        changed = {name: f"{self._now_ms} {batch} {','.join(ids)}" for name, ids in batches.items()}
        for name, more in numbers.items():
            known = self._numbers(name) if name in self._properties else []
            changed[name] = f"{self._now_ms} {_spelled([*known, *((one, one) for one in more)])}"
        return changed

    def forgotten(self) -> list[str]:
        horizon_ms = self._now_ms - self._remember_ms - HOUR_MS
        return [
            name for name, value in self._properties.items() if int(value.partition(" ")[0] or 0) < horizon_ms
        ]

    def _numbers(self, name: str) -> list[tuple[int, int]]:
        found = []
        for span in self._read(_WRITER, name)[2].split(","):
            first, _, last = span.partition("-")
            found.append((int(first), int(last or first)))
        return found

    def _read(self, pattern: re.Pattern[str], name: str) -> re.Match[str]:
        match = pattern.fullmatch(self._properties[name])
        if match is None:
            raise UncommittableError(
                f"{self._place}: the property {name!r}, which says what is committed, was changed to "
                f"{self._properties[name]!r}"
            )
        return match


def _spelled(spans: Iterable[tuple[int, int]]) -> str:
    joined: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in joined)


def _writer_name(writer: str) -> str:
    return f"{PREFIX}{writer}"


def _query_name(query: str) -> str:
    return f"{PREFIX}query-{query}"


Result = TypeVar("Result")


@known_options
@hides_secrets(lambda sink: secrets_in(sink._properties))
class IcebergSink(table_commits.StagingSink[IcebergMessage]):
    """Appends rows to an Iceberg table.

    ``write`` puts them into data files of the table, which no reader sees; the commit adds those of all messages in
    one snapshot, and in the same commit sets properties of the table that say so (`ftlayer.connectors.iceberg`). A
    commit that was called before changes nothing; an abort leaves alone what is committed. A table that is missing is
    made when the first rows come, with its namespace.

    Columns are found by name. A column that the table lacks, or one of a type that it cannot hold, fails the ``write``
    before anything is staged; one that the rows lack is null. Rows with a null where the table takes none, or a value
    that its column cannot hold, are refused by `RowsRejected`.

    Files that a killed process has staged stay, and are in no snapshot: Iceberg's ``remove_orphan_files`` removes them.
    """

    _kind = IcebergMessage
    _connections = ("_catalog",)

    def __init__(
        self,
        table: str,
        catalog: str | Mapping[str, str],
        *,
        partition_by: Sequence[str] = (),
        remember: Duration = "30d",
    ) -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            table: ``"namespace.table"``.
            catalog: properties of a catalog as pyiceberg takes them (``{"type": "rest", "uri": …}``), credentials of
                the storage among them, and ``name`` (``"default"``); or the name of one that pyiceberg is configured
                with where driver and slots run, all of which use it.
            partition_by: columns that a table is partitioned by that this makes; one that is there keeps its own.
            remember: for how long commits are known, 30 days. A checkpoint that is restored later, and has rows of
                this sink, fails with an `UncommittableError`.

        Raises `ConfigError` if pyiceberg is missing, and for an option that will not do.
        """
        super().__init__()
        iceberg_library()
        check_text(table, "table", "'namespace.table'")
        if not all(table.split(".")) or "." not in table:
            raise ConfigError(f"table: expected 'namespace.table', got {table!r}")
        check_catalog(catalog)
        table_commits.check_partition_by(partition_by)
        self._remember_ms = duration_ms(remember, "remember", least=2 * 3_600_000)
        self._table = table
        self._place = f"Iceberg table {table}"
        self._properties = catalog if isinstance(catalog, str) else dict(catalog)
        self._partition_by = tuple(partition_by)
        self._numbers = WriterNumbers()
        self._catalog: Any = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> IcebergMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = table_commits.streaming_query()
        writer, number, written_ms = self._numbers.writer, self._numbers.next(), time.time_ns() // 1_000_000
        chunks = chunked(iterator)
        first = next(chunks, None)
        if first is None:
            return IcebergMessage(writer, number, written_ms, (), 0, "", 0, query)
        table = self._doing("staged", lambda: self._table_for(first.schema))
        schema = table.schema().as_arrow()
        files: list[StagedDataFile] = []
        rows = 0
        try:
            for chunk in chain([first], chunks):
                check_fits(chunk.schema, schema, self._place)
                refuse_nulls(chunk, schema, rows)
                whole = fitted(chunk, schema, self._place, rows)
                # pyiceberg fails by them once a file is written, which would stay.
                whole_or_refused(chunk.num_rows, rows, partial(_pythons_times, whole))
                whole_or_refused(chunk.num_rows, rows, partial(_named_partitions, table, whole))
                stage = partial(self._stage, table, whole, files)
                self._doing("staged", partial(whole_or_refused, chunk.num_rows, rows, stage))
                rows += chunk.num_rows
        except BaseException:
            self._remove(table, (file.path for file in files))
            raise
        uuid, spec = str(table.metadata.table_uuid), table.metadata.default_spec_id
        return IcebergMessage(writer, number, written_ms, tuple(files), rows, uuid, spec, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Add the staged rows to the table, in one snapshot.

        Raises `UncommittableError` if files are gone that were never committed, if the table was made anew or is
        partitioned in another way since, and if they were staged longer ago than ``remember``. Raises `SinkError` if
        the table cannot be reached (it is tried some times); then it is unknown whether it happened: call it again.
        """
        found = table_commits.by_query(messages, IcebergMessage)
        if found:
            self._trying("committed", lambda: self._commit(found, batch_id))

    def _abort(self, written: list[IcebergMessage], batch_id: int) -> None:
        def abort() -> None:
            table = self._load()
            self._remove_uncommitted(table, self._commits(table), written, batch_id)

        self._trying("aborted", abort)

    def _stage(self, table: Any, rows: pa.Table, files: list[StagedDataFile], start: int, end: int) -> None:
        from pyiceberg.io.pyarrow import _dataframe_to_data_files

        if start == end:  # pyiceberg divides by their size.
            return
        chosen = rows.slice(start, end - start)
        written = [staged(file) for file in _dataframe_to_data_files(table.metadata, chosen, table.io)]
        files += written
        make_local_files_last(file.path for file in written)

    def _commit(self, found: dict[str, list[IcebergMessage]], number: int) -> None:
        errors = iceberg_library().exceptions
        try:
            table = self._load()
        except (errors.NoSuchTableError, errors.NoSuchNamespaceError) as error:
            way = ": register it again, from its last metadata file, and start again"
            raise table_commits.uncommittable(
                f"{self._place} is not there any more", found, number, way
            ) from error
        commits = self._commits(table)
        adding, again = table_commits.divided(found, number, commits.is_committed, commits.batch_of)
        if adding:
            self._check_takes(table, adding)
            self._check_there(table, adding)
            self._add(table, commits, adding, number)
        self._remove_uncommitted(table, commits, again, number)

    def _add(self, table: Any, commits: Commits, messages: list[IcebergMessage], number: int) -> None:
        merges = str(table.properties.get("commit.manifest-merge.enabled", "false")).lower() == "true"
        with table.transaction() as transaction:
            transaction.set_properties(commits.with_messages(messages, number))
            if forgotten := commits.forgotten():
                transaction.remove_properties(*forgotten)
            update = transaction.update_snapshot(snapshot_properties={"ftlayer.number": str(number)})
            with update.merge_append() if merges else update.fast_append() as append:
                for message in messages:
                    for file in message.files:
                        append.append_data_file(data_file(file, message.spec))
        snapshot = table.current_snapshot()
        mine = [
            manifest.manifest_path
            for manifest in snapshot.manifests(table.io)
            if manifest.added_snapshot_id == snapshot.snapshot_id
        ]
        make_local_files_last([table.metadata_location, snapshot.manifest_list, *mine])

    def _check_takes(self, table: Any, messages: list[IcebergMessage]) -> None:
        for message in messages:
            if message.table != str(table.metadata.table_uuid):
                raise UncommittableError(
                    f"{self._place} was made anew since rows were staged for it; they were of the one before"
                )
            if message.spec != table.metadata.default_spec_id:
                raise UncommittableError(
                    f"{self._place} is partitioned in another way since rows were staged for it; set its partition "
                    f"spec {message.spec} again to commit them"
                )

    def _check_there(self, table: Any, messages: list[IcebergMessage]) -> None:
        files = [file for message in messages for file in message.files]
        for file, size in zip(
            files, table_commits.for_all(lambda file: _size(table.io, file.path), files), strict=True
        ):
            if size != file.size:
                raise UncommittableError(
                    f"{self._place}: {file.path} is gone or changed, which was staged and not committed: did "
                    "remove_orphan_files remove it while a checkpoint was kept that has it?"
                )

    def _commits(self, table: Any) -> Commits:
        return Commits(table.properties, self._remember_ms, time.time_ns() // 1_000_000, self._place)

    def _table_for(self, rows: pa.Schema) -> Any:
        errors = iceberg_library().exceptions
        try:
            table = self._load()
        except (errors.NoSuchTableError, errors.NoSuchNamespaceError):
            table = self._create(pa.schema([pa.field(each.name, as_column(each.type)) for each in rows]))
        check_fits(rows, table.schema().as_arrow(), self._place)
        return table

    def _create(self, schema: pa.Schema) -> Any:
        missing = [name for name in self._partition_by if name not in schema.names]
        if missing:
            raise SinkTargetError(f"{self._place}: partition column {missing[0]!r} is not in the rows")
        errors = iceberg_library().exceptions
        self._catalog.create_namespace_if_not_exists(self._table.rpartition(".")[0])
        # Another subtask may just have made it.
        with (
            contextlib.suppress(errors.TableAlreadyExistsError, errors.CommitFailedException),
            self._catalog.create_table_transaction(self._table, schema) as transaction,
            transaction.update_spec() as spec,
        ):
            for name in self._partition_by:
                spec.add_identity(name)
        return self._load()

    def _load(self) -> Any:
        if self._catalog is None:
            self._catalog = load_catalog(self._properties)
        return without_retries(self._catalog.load_table(self._table))

    def _remove_uncommitted(
        self, table: Any, commits: Commits, written: Iterable[IcebergMessage], number: int
    ) -> None:
        dead = [message for message in written if _is_uncommitted(message, commits, number)]
        self._remove(table, (file.path for message in dead for file in message.files))

    def _remove(self, table: Any, paths: Iterable[str]) -> None:
        def remove(path: str) -> None:
            if _size(table.io, path) is not None:
                table.io.delete(path)

        table_commits.for_all(remove, paths)

    def _trying(self, doing: str, work: Callable[[], Result]) -> Result:
        conflict, secrets = iceberg_library().exceptions.CommitFailedException, secrets_in(self._properties)
        return table_commits.tried(lambda: self._doing(doing, work), secrets, conflict=conflict)


def _is_uncommitted(message: IcebergMessage, commits: Commits, batch: int) -> bool:
    """Whether it is sure that a message is not committed; ``batch``: what it would be committed as, in a query."""
    if not message.query:
        try:
            return not commits.is_committed(message)
        except UncommittableError:
            return False
    last = commits.batch_of(message.query)
    return last is None or last < batch or (last == batch and not commits.is_batch_with(message))


def _pythons_times(rows: pa.Table, start: int, end: int) -> None:
    """Raise `OverflowError` or `ValueError` if a time is one that Python lacks."""
    for field in rows.schema:
        if pa.types.is_date(field.type) or pa.types.is_timestamp(field.type):
            pc.min_max(rows.column(field.name).slice(start, end - start)).as_py()


def _named_partitions(table: Any, rows: pa.Table, start: int, end: int) -> None:
    """Raise `ValueError` if a partition's directory, or its object's key, would have a name that is too long."""
    schema, where = table.schema(), table.location()
    longest = 255 if where.startswith(("file:", "/")) else 900 - len(where.encode())
    for field in table.spec().fields:
        name, kind = schema.find_column_name(field.source_id), schema.find_type(field.source_id)
        if name not in rows.schema.names or str(kind) not in ("string", "binary"):
            continue
        transform = field.transform.transform(kind)
        for value in rows.column(name).slice(start, end - start).unique().to_pylist():
            said = field.transform.to_human_string(field.transform.result_type(kind), transform(value))
            if len(f"{quote_plus(field.name)}={quote_plus(said)}") > longest:
                raise ValueError(f"partition {field.name!r} has a name that is too long")


def _size(io: Any, path: str) -> int | None:
    try:
        return len(io.new_input(path))
    except FileNotFoundError:
        return None


class IcebergDataSource(OptionsDataSource):
    """``spark.dataSource.register(IcebergDataSource)``, then ``df.writeStream.format("ftlayer-iceberg")``.

    Options: ``table``, ``partitionBy`` (names with commas between them), ``remember``, and ``catalog``, the name of a
    configured one, or properties of one (``catalog.uri``). A batch that Spark runs again adds nothing.
    """

    format = "ftlayer-iceberg"

    def sink(self, options: DataSourceOptions) -> IcebergSink:
        table, catalog = options.required("table"), options.below("catalog.") or options.required("catalog")
        return options.made(IcebergSink, table=table, catalog=catalog)
