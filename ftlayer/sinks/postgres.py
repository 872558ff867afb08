"""An exactly-once sink of a PostgreSQL table: the commit id is written in the transaction of the rows."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ftlayer.checks import check_text
from ftlayer.clients.postgres import check_dsn, database_of, psycopg_library, reason
from ftlayer.errors import SinkError, UncommittableError
from ftlayer.sinks.copying import to_csv
from ftlayer.sinks.origin import by_query, streaming_query

if TYPE_CHECKING:
    from ftlayer.sinks.staging import Tables

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
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


class PostgresSink(DataSourceStreamArrowWriter):
    """Writes rows into a table of PostgreSQL.

    ``write`` copies them into a staging table, in a transaction of its own; the commit moves them into the table and
    writes the commit ids, in one transaction. A commit that was called before changes nothing; an abort leaves alone
    what is committed. The tables that it takes (`ftlayer.sinks.staging`) are made in the schema of the table.

    A row that the table refuses (by a constraint) fails the commit, and every later one: staged rows have none. A row
    that cannot be staged (a value that its column's type lacks) fails its ``write``. It refuses no row by
    `RowsRejected`, so a `FailurePolicy` makes no dead letter of either: check such rows in a function before.
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
        """Stage rows. Raises `SinkError`; nothing is staged then."""
        query = streaming_query()
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        message = secrets.token_hex(16)
        if first is None:
            return PostgresMessage(message, 0, (), query)
        from ftlayer.sinks.staging import copy_statement, note_staged, prepare

        tables, columns = self._tables(), list(first.schema.names)
        rows = 0
        with self._transaction("staged") as connection:
            types = prepare(connection, tables)
            missing = [name for name in columns if name not in types]
            if missing:
                raise SinkError(
                    f"{self._place} has no column {', '.join(map(repr, missing))}; add it, or leave it out of the rows"
                )
            with connection.cursor() as cursor, cursor.copy(copy_statement(tables, columns)) as copy:
                for batch in chain([first], batches):
                    copy.write(to_csv(batch, message, types))
                    rows += batch.num_rows
            note_staged(connection, tables, message, self._name, self._execution, rows)
        return PostgresMessage(message, rows, tuple(columns), query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Move the staged rows into the table, all of them or none.

        Raises `SinkError` if rows are gone that were never committed, or the database cannot be reached (is tried
        some times); then it is unknown whether it happened: call it again.
        """
        found = by_query(messages, PostgresMessage, "PostgresSink")
        if found:
            self._trying(lambda: self._commit(found, batch_id))

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged rows of messages; what is committed stays."""
        from ftlayer.sinks.staging import drop

        ids = [
            one.id
            for written in by_query(messages, PostgresMessage, "PostgresSink").values()
            for one in written
        ]
        if not ids:
            return

        def abort() -> None:
            with self._transaction("aborted") as connection:
                drop(connection, self._tables(), ids)

        self._trying(abort)

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than_s: float = DAY_S
    ) -> list[str]:
        """Remove rows that writers have staged that died before they could abort; returns their messages' ids.

        That is: what other executions than this object's have staged under the sink's name, longer ago than
        ``older_than_s``, and what ``keep`` (messages of checkpoints that may still be restored) does not name.
        Checkpoints and savepoints that hold other rows cannot be restored any more, if their commit had not come.
        """
        from ftlayer.sinks.staging import dead_messages, drop, prepare

        kept = {
            one.id for written in by_query(keep, PostgresMessage, "PostgresSink").values() for one in written
        }
        with self._transaction("cleaned") as connection:
            tables = self._tables()
            prepare(connection, tables)
            found = dead_messages(connection, tables, self._name, self._execution, older_than_s)
            dead = [message for message in found if message not in kept]
            drop(connection, tables, dead)
        return dead

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
            moved = move(connection, self._tables(), list(columns), [one.id for one in alike])
            expected = sum(one.rows for one in alike)
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
        psycopg = psycopg_library()
        for left in reversed(range(TRIES)):
            try:
                return work()
            except SinkError as error:
                if not left or not isinstance(error.__cause__, psycopg.OperationalError):
                    raise
                logger.warning("%s; it is tried again", error)
                time.sleep(TRY_AGAIN_S)
        raise AssertionError

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[Any]:
        psycopg = psycopg_library()
        try:
            with psycopg.connect(self._dsn) as connection:
                yield connection
        except psycopg.Error as error:
            raise SinkError(f"{self._place}: rows cannot be {doing}: {reason(error)}") from error
