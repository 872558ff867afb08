"""An exactly-once sink of a Delta table: the commit of the table has the ids of what it commits."""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ftlayer.checkpoint.storage.deleting import StoragePool
from ftlayer.checkpoint.storage.layout import check_location, is_local, normal, scheme_of
from ftlayer.checks import check_choice, check_instance, check_text, check_texts
from ftlayer.clients.delta import delta_library
from ftlayer.clients.s3 import SCHEMES, check_s3_options
from ftlayer.errors import ConfigError, FTLayerError, SinkError, UncommittableError
from ftlayer.printable import shown_url
from ftlayer.sinks.delta.log import DeltaLog
from ftlayer.sinks.delta.message import DeltaMessage, StagedFile, by_query
from ftlayer.sinks.delta.rows import check_partitions, partitions, statistics
from ftlayer.sinks.delta.storage import TableFiles, open_table_files
from ftlayer.sinks.fitting import as_column, check_fits, chunked, fitted, refuse_nulls
from ftlayer.sinks.numbering import WriterNumbers
from ftlayer.sinks.origin import streaming_query
from ftlayer.sinks.table_commits import TRIES, tried

logger = logging.getLogger(__name__)

DAY_S = 86_400.0

_STAGED = re.compile(
    r"part-(?P<written>[0-9a-f]{12})-(?P<execution>[0-9a-f]{16})-(?P<message>[0-9a-f]{16}-[0-9]+)-[0-9]+\.ftlayer\.parquet"
)
"""A file that a sink has staged: when, and of which message."""

Result = TypeVar("Result")


class DeltaSink(DataSourceStreamArrowWriter):
    """Appends rows to a Delta table.

    ``write`` puts them into Parquet files in the table's directory, which no reader sees; the commit adds those of all
    messages to the table, in one commit of its log that has their ids. A commit that was called before changes
    nothing; an abort leaves alone what is committed. A table that is missing is made when the first rows come.

    Columns are found by name. A column that the table lacks, or one of a type that it cannot hold, fails the ``write``
    before anything is staged; one that the rows lack is null. Rows with a null where the table takes none are refused
    by `RowsRejected`. Tables with constraints, generated or identity columns, or mapped columns are refused.
    """

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
        delta_library()
        where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else path
        check_text(where, "path", "a path or URL of a table")
        if isinstance(partition_by, str):
            raise ConfigError(f"partition_by: expected names of columns in a list, got {partition_by!r}")
        check_texts(partition_by, "partition_by", "names of columns")
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
        # Copies of this object share it: what other executions have left is told by it.
        self._execution = secrets.token_hex(8)
        self._numbers = WriterNumbers()
        self._log: DeltaLog | None = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> DeltaMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = streaming_query()
        number, written_ms = self._numbers.next(), time.time_ns() // 1_000_000
        chunks = chunked(iterator)
        first = next(chunks, None)
        if first is None:
            return DeltaMessage(self._numbers.writer, number, written_ms, (), 0, b"", (), query)
        log = self._doing("staged", lambda: self._table_for(first.schema))
        schema, partition_by = log.schema, log.partition_by
        # Names sort by the time of writing, as far as clocks agree.
        name = f"part-{written_ms:012x}-{self._execution}-{self._numbers.writer}-{number}"
        staged: list[StagedFile] = []
        rows = 0
        try:
            for chunk in chain([first], chunks):
                check_fits(chunk.schema, schema, self._place)
                refuse_nulls(chunk, schema, rows)
                whole = fitted(chunk, schema, self._place)
                for values, part in partitions(whole, partition_by):
                    path = f"{name}-{len(staged)}.ftlayer.parquet"
                    staged.append(self._doing("staged", lambda: self._stage(path, values, part)))  # noqa: B023
                rows += chunk.num_rows
        except BaseException:
            self._remove(one.path for one in staged)
            raise
        return DeltaMessage(
            self._numbers.writer,
            number,
            written_ms,
            tuple(staged),
            rows,
            schema.serialize().to_pybytes(),
            partition_by,
            query,
        )

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Add the staged rows to the table, in one commit.

        Raises `UncommittableError` if files are gone that were never committed, if the table has changed so that they
        do not fit it, and if they were staged so long ago that nothing can tell whether they are committed. Raises
        `SinkError` if the table cannot be reached (it is tried some times); then it is unknown whether it happened:
        call it again.
        """
        found = by_query(messages)
        if found:
            self._trying("committed", lambda: self._commit(found, batch_id))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged files of messages; what is committed stays, and what may be."""
        written = [one for found in by_query(messages).values() for one in found]
        if not written:
            return

        def abort() -> None:
            log = self._fresh()
            self._remove(
                file.path for message in written if log.has(message) is False for file in message.files
            )

        self._trying("aborted", abort)

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than_s: float = DAY_S
    ) -> list[str]:
        """Remove files that writers have staged that died before they could abort; returns their names.

        That is: files of a sink's in the table's directory, of other copies than this object, staged longer ago than
        ``older_than_s``, which no commit has and ``keep`` (messages of checkpoints that may still be restored) does not
        name. Those that are older than the table's log are left to ``VACUUM``. Checkpoints and savepoints that hold
        other files cannot be restored any more, if their commit had not come.
        """
        kept = {one.id for found in by_query(keep).values() for one in found}

        def clean() -> list[str]:
            horizon_ms = int((time.time() - older_than_s) * 1_000)
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

    # ------------------------------------------------------------ steps

    def _stage(self, path: str, values: tuple[tuple[str, str | None], ...], rows: pa.Table) -> StagedFile:
        return StagedFile(path, self._files().write(path, rows), values, statistics(rows))

    def _commit(self, found: dict[str, list[DeltaMessage]], number: int) -> None:
        log = self._fresh()
        adding: list[DeltaMessage] = []
        again: list[DeltaMessage] = []
        batches: dict[str, int] = {}
        for query, written in found.items():
            if not query:
                adding += [one for one in written if not log.is_committed(one)]
                continue
            last = log.batch_of(query)
            if last is None or last < number:
                adding += written
                batches[query] = number
            else:
                again += written
        if adding:
            self._check_there(adding)
            for message in adding:
                log.check_takes(message)
            before = log.version
            log.add(adding, batches, number)
            for version in range(before + 1, log.version + 1):
                self._files().sync_commit(version)
        # A batch that is run again has other messages, of the same rows.
        self._remove(file.path for one in again if log.has(one) is False for file in one.files)

    def _check_there(self, messages: list[DeltaMessage]) -> None:
        staged = [file for message in messages for file in message.files]
        for file, size in zip(
            staged, self._for_all(self._files().size, (one.path for one in staged)), strict=True
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
        check_fits(rows, self._log.schema, self._place)
        check_partitions(self._log.schema, self._log.partition_by, self._place)
        return self._log

    def _create(self, schema: pa.Schema) -> None:
        deltalake = delta_library()
        for left in reversed(range(TRIES)):
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
        return open_table_files(self._url, self._options)

    def _remove(self, paths: Iterable[str]) -> None:
        self._for_all(self._files().delete, paths)

    def _for_all(self, work: Callable[[str], Result], paths: Iterable[str]) -> list[Result]:
        crew = StoragePool()
        try:
            return crew.map(work, paths)
        finally:
            crew.close()

    # ------------------------------------------------------------ errors

    def _doing(self, doing: str, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except FTLayerError:
            raise
        except Exception as error:  # deltalake raises some of Python's own, too.
            self._log = None
            raise SinkError(
                f"{self._place}: rows cannot be {doing}: {type(error).__name__}: {_reason(error)}"
            ) from error

    def _trying(self, doing: str, work: Callable[[], Result]) -> Result:
        return tried(lambda: self._doing(doing, work), delta_library().exceptions.CommitFailedError)

    def __getstate__(self) -> dict[str, Any]:
        # A copy reads the table by itself.
        return {**self.__dict__, "_log": None}


def _reason(error: Exception) -> str:
    """Return what an error says, in one line and without the stack that deltalake puts behind it."""
    return re.split(r" 0: <unknown>", " ".join(str(error).split()))[0]


def _as_created(rows: pa.Schema) -> pa.Schema:
    """Return the columns of a table that is made for rows: all may be null."""
    return pa.schema([pa.field(field.name, as_column(field.type)) for field in rows])
