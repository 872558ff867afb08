"""An exactly-once sink of a PostgreSQL table: the commit id is written in the transaction of the rows."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checks import LONGEST_MS, Duration, check_text, duration_ms
from ftlayer.clients.postgres import (
    Fault,
    check_dsn,
    database_of,
    fault_of,
    psycopg_library,
    reason,
    refusal,
)
from ftlayer.data_sources import DataSourceOptions, DataSourceStreamArrowWriter, OptionsDataSource
from ftlayer.errors import SinkError, SinkTargetError, UncommittableError
from ftlayer.failures import RowsRejected
from ftlayer.printable import hidden, hides_secrets, secrets_of
from ftlayer.sinks.copying import SUFFIX
from ftlayer.sinks.fitting import chunked

if TYPE_CHECKING:
    from ftlayer.sinks.staging import Tables

logger = logging.getLogger(__name__)


class StagedRows(Protocol):
    """A message of a sink. ``query``: see `streaming_query`."""

    @property
    def rows(self) -> int:
        """How many rows it is about."""

    @property
    def query(self) -> str:
        """Of which query they are."""


Message = TypeVar("Message", bound=StagedRows)


def by_query(messages: Iterable[Any], kind: type[Message]) -> dict[str, list[Message]]:
    """Return the messages that have rows, by query; tasks that failed have no message.

    Raises `UncommittableError` for what is no message of this ``kind``.
    """
    found: dict[str, list[Message]] = {}
    for message in messages:
        if message is None:
            continue
        if not isinstance(message, kind):
            raise UncommittableError(
                f"expected messages of {kind.__name__.replace('Message', 'Sink')}, got a {type(message).__name__}"
            )
        if message.rows:
            found.setdefault(message.query, []).append(message)
    return found


def uncommittable(
    said: str, found: Mapping[str, Sequence[StagedRows]], number: int, way: str
) -> UncommittableError:
    """Return the error for what was ``found`` by query and has no place to go any more; ``way`` says where it is."""
    rows = sum(one.rows for written in found.values() for one in written)
    of = "batch" if any(found) else "checkpoint"
    return UncommittableError(f"{said}. {rows:,} rows of {of} {number} are staged{way}")


def streaming_query() -> str:
    """Return the id of the Structured Streaming query that this task belongs to; "" for a topology's.

    It stays the same over restarts from the query's checkpoint. Within a query a batch id says what is committed: a
    batch that is run again writes the same rows, with other messages. Without a query the messages say it.
    """
    return _property("sql.streaming.queryId")


def streaming_batch() -> str:
    return _property("streaming.sql.batchId")


def _property(name: str) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty(name) or ""


TRIES = 3
"""How often a commit or abort is tried whose connection is lost; each has its effect once."""
TRY_AGAIN_S = 0.2
Result = TypeVar("Result")


@dataclass(frozen=True)
class PostgresMessage(WriterCommitMessage):
    """The rows that one `PostgresSink.write` has staged under ``id``. ``query``: see `streaming_query`."""

    id: str
    rows: int
    columns: tuple[str, ...]
    query: str


@dataclass(frozen=True)
class RefusedRow:
    """A staged row that the table refuses: of which message, its number there, why, and what it is, as JSON."""

    message: str
    row: int
    why: str
    values: str


@hides_secrets(lambda sink: secrets_of(sink._dsn))
class PostgresSink(DataSourceStreamArrowWriter):
    """Writes rows into a table of PostgreSQL.

    ``write`` copies them into a staging table, in a transaction of its own; the commit moves them into the table and
    writes the commit ids, in one transaction. A commit that was called before changes nothing; an abort leaves alone
    what is committed. The tables that it takes (`ftlayer.sinks.staging`) are made in the schema of the table.

    A row that the table refuses is refused by `RowsRejected`: one that its columns' types lack when it is staged, one
    that a constraint, a trigger, a policy or the lack of a partition keeps out when the staged rows are moved into the
    table to try, and back. What two writes have, or comes into the table afterwards, only the commit finds: it fails
    with an `UncommittableError`.
    """

    def __init__(self, dsn: str, table: str, *, name: str = "") -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            dsn: connection string or URL, as libpq takes it; slots and driver connect.
            table: ``"table"`` or ``"schema.table"``, which is there, with a column for each of the rows'.
            name: of the sink in ``ftlayer_commits``; "": the table's. Two jobs have different ones, and a job keeps
                its own: what was committed is known by it.

        Raises `ConfigError` if psycopg is missing, or a name that will not do.
        """
        check_dsn(dsn)
        if name != "":
            check_text(name, "name")
        self._dsn = dsn
        self._table = table
        self._name = name or table
        self._place = f"table {table} of {database_of(dsn)}"
        self._execution = secrets.token_hex(8)
        self._tables()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PostgresMessage:
        """Stage rows, all or none. Raises `SinkError`, `RowsRejected`, and `ConfigError` for a generated column."""
        query = streaming_query()
        chunks = chunked(iterator)
        first = next(chunks, None)
        message = secrets.token_hex(16)
        if first is None:
            return PostgresMessage(message, 0, (), query)
        from ftlayer.sinks.staging import note_staged, prepare, refused_rows, stage

        tables, columns = self._tables(), list(first.schema.names)
        rows, refused = 0, dict[int, str]()
        with self._transaction("staged") as connection:
            types = prepare(connection, tables, columns)
            for chunk in chain([first], chunks):
                refused |= stage(connection, tables, chunk, message, rows, types)
                rows += chunk.num_rows
            written = PostgresMessage(message, rows, tuple(columns), query)
            if self._is_new(connection, query):
                found = refused_rows(connection, tables, [written])
                refused |= {row: why for (_, row), why in found.items()}
            if refused:
                raise RowsRejected(dict(sorted(refused.items())))
            note_staged(connection, tables, message, self._name, self._execution, rows)
        return written

    def _is_new(self, connection: Any, query: str) -> bool:
        """Whether rows are not in the table yet, for sure: a batch that is run again may have been committed."""
        from ftlayer.sinks.staging import is_entered

        if not query:
            return True
        batch = streaming_batch()
        return bool(batch) and not is_entered(connection, self._tables(), self._name, f"{query}/{batch}")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Move the staged rows into the table, all of them or none.

        Raises `UncommittableError` if rows are gone that were never committed, the table refuses some, or it is not
        there, closed, or another one than it was. Raises `SinkError` if the database cannot be reached (it is tried
        some times); then it is unknown whether it happened: call it again.
        """
        found = by_query(messages, PostgresMessage)
        if not found:
            return
        try:
            self._trying(lambda: self._commit(found, batch_id))
        except SinkError as error:
            if fault_of(error.__cause__) not in (Fault.TARGET, Fault.ROW):
                raise
            way = (
                f" in {self._table}{SUFFIX}: make the table take them (as it was, with its columns and rights) and "
                "start again; or see which it refuses, and drop or divert them, by `ftlayer checkpoints refused`"
            )
            raise uncommittable(str(error), found, batch_id, way) from error.__cause__

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged rows of messages; what is committed stays."""
        from ftlayer.sinks.staging import drop

        ids = [one.id for written in by_query(messages, PostgresMessage).values() for one in written]
        if not ids:
            return

        def abort() -> None:
            with self._transaction("aborted") as connection:
                drop(connection, self._tables(), ids)

        self._trying(abort)

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than: Duration = "1d"
    ) -> list[str]:
        """Remove rows that writers have staged that died before they could abort; returns their messages' ids.

        That is: what other executions than this object's have staged under the sink's name, longer ago than
        ``older_than``, and what ``keep`` (messages of checkpoints that may still be restored) does not name.
        Checkpoints and savepoints that hold other rows cannot be restored any more, if their commit had not come.
        """
        older_than_s = duration_ms(older_than, "clean: older_than", least=-LONGEST_MS) / 1_000
        from ftlayer.sinks.staging import dead_messages, drop, prepare

        kept = {one.id for written in by_query(keep, PostgresMessage).values() for one in written}
        with self._transaction("cleaned") as connection:
            tables = self._tables()
            prepare(connection, tables)
            found = dead_messages(connection, tables, self._name, self._execution, older_than_s)
            dead = [message for message in found if message not in kept]
            drop(connection, tables, dead)
        return dead

    def refused(
        self,
        messages: Sequence[WriterCommitMessage | None],
        take_out: Callable[[list[RefusedRow]], bool] = lambda _: False,
    ) -> list[RefusedRow]:
        """Return the staged rows of messages that the table, as it is now, refuses if they are committed together.

        All of them if it is not there, closed, or another one than it was. They are removed if ``take_out`` says so,
        which is called with them in the same transaction: a commit of the messages moves the others. Raises
        `SinkError`, and `ConfigError` where they are not staged for this table.
        """
        from ftlayer.sinks import staging

        psycopg, tables = psycopg_library(), self._tables()
        staged = list(chain.from_iterable(by_query(messages, PostgresMessage).values()))
        with self._transaction("looked at") as connection:
            staging.check_staged(connection, tables, self._name, staged)
            with contextlib.suppress(SinkTargetError, psycopg.Error), connection.transaction():
                staging.prepare(connection, tables)
            written = staging.uncommitted(connection, tables, self._name, staged)
            why = staging.refused_rows(connection, tables, written, wait=False)
            refused = [
                RefusedRow(id, row, why[id, row], values)
                for (id, row), values in staging.staged_rows(connection, tables, written, why).items()
            ]
            if refused and take_out(refused):
                staging.take_out(connection, tables, why)
        return refused

    def _commit(self, found: dict[str, list[PostgresMessage]], batch_id: int) -> None:
        with self._transaction("committed") as connection:
            for query, written in found.items():
                if query:
                    self._commit_batch(connection, f"{query}/{batch_id}", written, batch_id)
                else:
                    self._commit_messages(connection, written, batch_id)

    def _commit_messages(self, connection: Any, written: list[PostgresMessage], checkpoint: int) -> None:
        from ftlayer.sinks.staging import enter

        new = enter(connection, self._tables(), self._name, [one.id for one in written], checkpoint)
        self._move(connection, [one for one in written if one.id in new])

    def _commit_batch(self, connection: Any, batch: str, written: list[PostgresMessage], number: int) -> None:
        """A batch that is run again has other messages, of the same rows: they are dropped."""
        from ftlayer.sinks.staging import drop, enter

        if enter(connection, self._tables(), self._name, [batch], number):
            self._move(connection, written)
        else:
            drop(connection, self._tables(), [one.id for one in written])

    def _move(self, connection: Any, written: list[PostgresMessage]) -> None:
        from ftlayer.sinks.staging import move

        by_columns: dict[tuple[str, ...], list[PostgresMessage]] = {}
        for one in written:
            by_columns.setdefault(one.columns, []).append(one)
        for columns, alike in by_columns.items():
            moved, noted = move(connection, self._tables(), list(columns), [one.id for one in alike])
            expected = sum(noted.get(one.id, one.rows) for one in alike)
            if moved != expected:
                raise UncommittableError(
                    f"{self._place}: {expected:,} rows were staged and {moved:,} are there, which were not committed: "
                    "did something else remove them (PostgresSink.clean with a checkpoint that was kept, say), or had "
                    f"the sink another name than {self._name!r} when they were committed?"
                )

    def _tables(self) -> Tables:
        from ftlayer.sinks.staging import tables_of

        return tables_of(self._table)

    def _trying(self, work: Callable[[], Result]) -> Result:
        """Do it, again if the connection is lost: each transaction has its effect once."""
        for left in reversed(range(TRIES)):
            try:
                return work()
            except SinkError as error:
                if not left or fault_of(error.__cause__) not in (Fault.AWAY, Fault.PASSES):
                    raise
                logger.warning("%s; it is tried again", hidden(error, secrets_of(self._dsn)))
                time.sleep(TRY_AGAIN_S)
        raise AssertionError

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[Any]:
        psycopg = psycopg_library()
        try:
            with psycopg.connect(self._dsn) as connection:
                yield connection
        except psycopg.Error as error:
            fault = fault_of(error)
            kind = SinkTargetError if fault in (Fault.CLOSED, Fault.TARGET) else SinkError
            said = (refusal if fault is Fault.ROW else reason)(error)
            raise kind(f"{self._place}: rows cannot be {doing}: {said}") from error


class PostgresDataSource(OptionsDataSource):
    """``spark.dataSource.register(PostgresDataSource)``, then ``df.writeStream.format("ftlayer-postgres")``.

    Options: ``dsn``, ``table``, ``name``; see `PostgresSink`.
    """

    format = "ftlayer-postgres"

    def sink(self, options: DataSourceOptions) -> PostgresSink:
        dsn, table = options.required("dsn"), options.required("table")
        return options.made(PostgresSink, dsn=dsn, table=table)
