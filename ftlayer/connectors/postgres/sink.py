"""An exactly-once sink of a PostgreSQL table: the commit id is written in the transaction of the rows."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import check_text, known_options
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import hides_secrets, secrets_of
from ftlayer.connectors import table_commits
from ftlayer.connectors.fitting import chunked
from ftlayer.connectors.postgres import catalog
from ftlayer.errors import SinkError, SinkTargetError
from ftlayer.functions.data_sources import DataSourceOptions, OptionsDataSource

if TYPE_CHECKING:
    from ftlayer.connectors.postgres.staging import Tables


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


@known_options
@hides_secrets(lambda sink: secrets_of(sink._dsn))
class PostgresSink(table_commits.CleaningSink[PostgresMessage]):
    """Writes rows into a table of PostgreSQL.

    ``write`` copies them into a staging table, in a transaction of its own; the commit moves them into the table and
    writes the commit ids, in one transaction. A commit that was called before changes nothing; an abort leaves alone
    what is committed. The tables that it takes (`ftlayer.connectors.postgres.staging`) are made in the schema of the
    table.

    A row that the table refuses is refused by `RowsRejected`: one that its columns' types lack when it is staged, one
    that a constraint, a trigger, a policy or the lack of a partition keeps out when the staged rows are moved into the
    table to try, and back. What two writes have, or comes into the table afterwards, only the commit finds: it fails
    with an `UncommittableError`.
    """

    _kind = PostgresMessage

    def __init__(self, dsn: str, table: str, *, name: str = "") -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            dsn: connection string or URL, as libpq takes it; slots and driver connect.
            table: ``"table"`` or ``"schema.table"``, which is there, with a column for each of the rows'.
            name: of the sink in ``ftlayer_commits``; "": the table's. Two jobs have different ones, and a job keeps
                its own: what was committed is known by it.

        Raises `ConfigError` if psycopg is missing, or a name that will not do.
        """
        super().__init__()
        catalog.check_dsn(dsn)
        if name != "":
            check_text(name, "name")
        self._dsn = dsn
        self._table = table
        self._name = name or table
        self._place = f"table {table} of {catalog.database_of(dsn)}"
        self._tables()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PostgresMessage:
        """Stage rows, all or none. Raises `SinkError`, `RowsRejected`, and `ConfigError` for a generated column."""
        query = table_commits.streaming_query()
        chunks = chunked(iterator)
        first = next(chunks, None)
        message = secrets.token_hex(16)
        if first is None:
            return PostgresMessage(message, 0, (), query)
        from ftlayer.connectors.postgres.staging import note_staged, prepare, refused_rows, stage

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
        from ftlayer.connectors.postgres.staging import is_entered

        if not query:
            return True
        batch = table_commits.streaming_batch()
        return bool(batch) and not is_entered(connection, self._tables(), self._name, f"{query}/{batch}")

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Move the staged rows into the table, all of them or none.

        Raises `UncommittableError` if rows are gone that were never committed, the table refuses some, or it is not
        there, closed, or another one than it was. Raises `SinkError` if the database cannot be reached (it is tried
        some times); then it is unknown whether it happened: call it again.
        """
        found = table_commits.by_query(messages, PostgresMessage)
        if not found:
            return
        try:
            self._trying("committed", lambda connection: self._commit(connection, found, batch_id))
        except SinkError as error:
            if catalog.fault_of(error.__cause__) not in (catalog.Fault.TARGET, catalog.Fault.ROW):
                raise
            from ftlayer.connectors.postgres.staging import SUFFIX

            way = (
                f" in {self._table}{SUFFIX}: make the table take them (as it was, with its columns and rights) and "
                "start again; or see which it refuses, and drop or divert them, by `ftlayer checkpoints refused`"
            )
            raise table_commits.uncommittable(str(error), found, batch_id, way) from error.__cause__

    def _abort(self, written: list[PostgresMessage], batch_id: int) -> None:
        from ftlayer.connectors.postgres.staging import drop

        ids = [one.id for one in written]
        self._trying("aborted", lambda connection: drop(connection, self._tables(), ids))

    def _clean(self, keep: list[PostgresMessage], older_than_ms: int) -> list[str]:
        from ftlayer.connectors.postgres.staging import dead_messages, drop, prepare

        kept, tables = {one.id for one in keep}, self._tables()
        with self._transaction("cleaned") as connection:
            prepare(connection, tables)
            found = dead_messages(connection, tables, self._name, self._execution, older_than_ms / 1_000)
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
        from ftlayer.connectors.postgres import staging

        psycopg, tables = catalog.psycopg_library(), self._tables()
        staged = list(chain.from_iterable(table_commits.by_query(messages, PostgresMessage).values()))
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

    def _commit(self, connection: Any, found: dict[str, list[PostgresMessage]], number: int) -> None:
        from ftlayer.connectors.postgres.staging import drop, enter

        tables = self._tables()
        for query, written in found.items():
            ids = [one.id for one in written]
            if not query:
                new = enter(connection, tables, self._name, ids, number)
                self._move(connection, [one for one in written if one.id in new])
            elif enter(connection, tables, self._name, [f"{query}/{number}"], number):
                self._move(connection, written)
            else:
                # A batch that is run again has other messages, of the same rows.
                drop(connection, tables, ids)

    def _move(self, connection: Any, written: list[PostgresMessage]) -> None:
        from ftlayer.connectors.postgres.staging import move

        by_columns: dict[tuple[str, ...], list[PostgresMessage]] = {}
        for one in written:
            by_columns.setdefault(one.columns, []).append(one)
        for columns, alike in by_columns.items():
            moved, noted = move(connection, self._tables(), list(columns), [one.id for one in alike])
            expected = sum(noted.get(one.id, one.rows) for one in alike)
            if moved != expected:
                raise self._lost(expected, moved)

    def _tables(self) -> Tables:
        from ftlayer.connectors.postgres.staging import tables_of

        return tables_of(self._table)

    def _trying(self, doing: str, work: Callable[[Any], table_commits.Result]) -> table_commits.Result:
        """Do it in a transaction, again if the connection is lost: each has its effect once."""

        def transacted() -> table_commits.Result:
            with self._transaction(doing) as connection:
                return work(connection)

        return table_commits.tried(
            transacted,
            secrets_of(self._dsn),
            may_help=lambda error: (
                catalog.fault_of(error.__cause__) in (catalog.Fault.AWAY, catalog.Fault.PASSES)
            ),
        )

    @contextlib.contextmanager
    def _transaction(self, doing: str) -> Iterator[Any]:
        psycopg = catalog.psycopg_library()
        try:
            with psycopg.connect(self._dsn) as connection:
                yield connection
        except psycopg.Error as error:
            fault = catalog.fault_of(error)
            kind = SinkTargetError if fault in (catalog.Fault.CLOSED, catalog.Fault.TARGET) else SinkError
            said = (catalog.refusal if fault is catalog.Fault.ROW else catalog.reason)(error)
            raise kind(f"{self._place}: rows cannot be {doing}: {said}") from error


class PostgresDataSource(OptionsDataSource):
    """``writeStream.format("ftlayer-postgres")`` with ``dsn``, ``table`` and ``name``, see `PostgresSink`."""

    format = "ftlayer-postgres"

    def sink(self, options: DataSourceOptions) -> PostgresSink:
        dsn, table = options.required("dsn"), options.required("table")
        return options.made(PostgresSink, dsn=dsn, table=table)
