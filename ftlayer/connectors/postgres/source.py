"""`PostgresChangesSource` and `PostgresTableSource` as Python Data Sources."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import msgpack
import pyarrow as pa

from ftlayer.common.checks import Duration, check_text, duration_ms, known_options
from ftlayer.common.printable import hides_secrets, secrets_of
from ftlayer.connectors.connections import ServerReader
from ftlayer.connectors.postgres import catalog
from ftlayer.connectors.postgres.changes_reader import PostgresChangesSource
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import ConfigError, SourceChangedError, SourceError
from ftlayer.topology.operators import Fetched, Member, Queue

# When no transaction can commit a row any more below one that is there. Rules alone: no I/O.
#
# A transaction takes its number from a sequence, or its time, before it commits, and others commit meanwhile: their
# rows are seen first, and have higher values. All that may still come below a row were running when it was seen.


Row = TypeVar("Row")


class Settling(Generic[Row]):
    """Waits for the transactions that were running when a row was seen."""

    def __init__(self, row: Row, running: AbstractSet[str]) -> None:
        """``running``: the virtual ids of transactions, asked for after the row was seen."""
        self.row = row
        self._running = frozenset(running)
        # A transaction that is prepared has another name, and may be one of those.
        self._prepared: frozenset[str] | None = None

    def is_settled(self, running: AbstractSet[str], prepared: AbstractSet[str]) -> bool:
        """Whether they have all ended. ``prepared``: prepared transactions, asked for after those that run now."""
        if self._running & running:
            return False
        if self._prepared is None:
            self._prepared = frozenset(prepared)
        return not self._prepared & prepared


MOST_COUNTED = 1_000_000
"""Rows that wait are counted up to here."""

_KIND = "postgres-table"
_ALIAS = "read"
_FIRST_S = 0.01
"""The pause until transactions are looked at again, which doubles up to ``poll_interval``."""

# All transactions of this database that run, also those that have no number yet as they have not written; not our own.
_RUNNING = """
    SELECT l.virtualtransaction FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
    WHERE l.locktype = 'virtualxid' AND l.granted AND l.pid <> pg_backend_pid()
        AND (a.datid IS NULL OR a.datid = (SELECT oid FROM pg_database WHERE datname = current_database()))
        AND a.backend_type IS DISTINCT FROM 'autovacuum worker'
"""
_PREPARED = "SELECT transaction::text FROM pg_prepared_xacts WHERE database = current_database()"

_NEWEST_XID = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint - 1"
_CHECK_S = 1.0
"""So often at most it is asked whether new rows still come behind those that were read."""

Values = tuple[str, ...]


@dataclass(frozen=True)
class Growing:
    """The columns by which a table is read.

    Attributes:
        names: the column, and those of the key.
        types: as PostgreSQL names them.
        is_xid: the column is the number of the transaction.
        hold_s: rows with a time younger than this wait; None: the column is no time.
    """

    names: tuple[str, ...]
    types: tuple[str, ...]
    is_xid: bool
    hold_s: float | None


@hides_secrets(lambda reader: reader._secrets)
class PostgresTableReader(ServerReader):
    """Of a table, which keeps its rows. A position is the last row's values of the columns by which it is read."""

    def __init__(
        self, source: PostgresTableSource, growing: Growing, subtask: int, position: bytes | None
    ) -> None:
        errors, hidden = (catalog.psycopg_library().Error,), secrets_of(source.dsn)
        super().__init__(source.place, source.patience_ms, hidden, errors, catalog.is_away)
        self._source = source
        self._growing = growing
        self._schema = source.schema
        self._subtask = subtask
        self._last = None if position is None else self._unpack(position)
        self._connection: Any = None
        # Rows are read up to here, before anything else is asked.
        self._bound: Any = None
        self._settling: Settling[Values] | None = None
        self._due = self._checked_s = 0.0
        self._pause_s = _FIRST_S

    def _count(self) -> int | None:
        """See `waiting`: also rows that wait for transactions, or for their delay; up to a million."""
        sql = catalog.psycopg_library().sql
        statement = sql.SQL("SELECT count(*) FROM (SELECT FROM {} WHERE {} LIMIT {}) rows").format(
            self._table, self._behind(), sql.Literal(MOST_COUNTED + 1)
        )
        (found,) = self._connection.execute(statement).fetchone()
        return int(found) if found <= MOST_COUNTED else None

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        until = time.monotonic() + wait_s
        while True:
            if self._bound is not None and (rows := self._read(max_rows)):
                return self._fetched(rows)
            left_s = until - time.monotonic()
            if self._due - time.monotonic() > left_s:
                time.sleep(max(0.0, left_s))
                return None
            time.sleep(max(0.0, self._due - time.monotonic()))
            self._bound = self._next_bound()
            if self._bound is None:
                self._check_grows()
                self._due = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, self._source.poll_s)
            else:
                self._pause_s = _FIRST_S

    def _read(self, max_rows: int) -> list[tuple[str | None, ...]]:
        sql = catalog.psycopg_library().sql
        names = self._growing.names
        wanted = sql.SQL(", ").join(
            sql.SQL("{}::text").format(sql.Identifier(name)) for name in (*self._schema.names, *names)
        )
        statement = sql.SQL("SELECT {} FROM {} WHERE {} AND {} ORDER BY {} LIMIT {}").format(
            wanted, self._table, self._behind(), self._bound, self._order(""), sql.Literal(max_rows)
        )
        rows: list[tuple[str | None, ...]] = self._connection.execute(statement).fetchall()
        if len(rows) < max_rows:
            self._bound = None
        return rows

    def _fetched(self, rows: list[tuple[str | None, ...]]) -> Fetched:
        count = len(self._schema)
        columns = list(zip(*rows, strict=True))
        arrays = [
            catalog.to_column(texts, field)
            for texts, field in zip(columns[:count], self._schema, strict=True)
        ]
        self._last = tuple(str(value) for value in rows[-1][count:])
        batch = pa.RecordBatch.from_arrays(arrays, schema=self._schema)
        return Fetched(batch, self._subtask, pack_position(self._named, msgpack.packb(self._last)), None)

    def _next_bound(self) -> Any:
        """Return a condition of rows before which nothing can come any more; None: there are none now."""
        sql = catalog.psycopg_library().sql
        growing = self._growing
        if growing.is_xid:
            if self._newest(None) is None:
                return None
            (xmin,) = self._connection.execute(
                "SELECT pg_snapshot_xmin(pg_current_snapshot())::text"
            ).fetchone()
            bound = sql.SQL("{} < {}::xid8").format(sql.Identifier(growing.names[0]), sql.Literal(xmin))
            return bound if self._newest(bound) is not None else None
        if self._settling is None:
            newest = self._newest(self._held_back())
            if newest is None:
                return None
            # In this order: who begins from here on takes a higher value.
            self._settling = Settling(newest, self._asked(_RUNNING))
        if not self._settling.is_settled(self._asked(_RUNNING), self._asked(_PREPARED)):
            return None
        settled, self._settling = self._settling.row, None
        return self._compared("<=", settled)

    def _newest(self, condition: Any) -> Values | None:
        sql = catalog.psycopg_library().sql
        names = sql.SQL(", ").join(
            sql.SQL("{}::text").format(sql.Identifier(name)) for name in self._growing.names
        )
        conditions = [self._behind(), *([] if condition is None else [condition])]
        statement = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT 1").format(
            names, self._table, sql.SQL(" AND ").join(conditions), self._order(" DESC")
        )
        found: Values | None = self._connection.execute(statement).fetchone()
        return found

    def _check_grows(self) -> None:
        """Raise `SourceChangedError` where new rows come below the last one, and would never be read."""
        growing, now_s = self._growing, time.monotonic()
        if self._last is None or growing.hold_s is not None or now_s < self._checked_s + _CHECK_S:
            return
        self._checked_s, read = now_s, int(self._last[0])
        sql, connection = catalog.psycopg_library().sql, self._connection
        if growing.is_xid:
            newest = int(connection.execute(_NEWEST_XID).fetchone()[0])
        else:
            _, last = catalog.sequence_of(connection, self._source.table.quoted, growing.names[0])
            at = sql.SQL("SELECT FROM {} WHERE {} >= {}").format(
                self._table, sql.Identifier(growing.names[0]), sql.Literal(read)
            )
            newest = read if last is None or connection.execute(at).fetchone() is not None else last
        if newest < read:
            raise SourceChangedError(
                f"{self._source.place}: it was read up to {growing.names[0]!r} {read}, and the last one given out is "
                f"{newest}: they begin again (TRUNCATE … RESTART IDENTITY, a dump that was restored), and rows that "
                "come would never be read. Let the sequence go on behind it (setval), or give the source another uid, "
                "with which it is read from its start"
            )

    def _asked(self, statement: str) -> set[str]:
        return {name for (name,) in self._connection.execute(statement)}

    @property
    def _table(self) -> Any:
        sql = catalog.psycopg_library().sql
        return sql.SQL("{} AS {}").format(sql.SQL(self._source.table.quoted), sql.Identifier(_ALIAS))

    def _behind(self) -> Any:
        sql = catalog.psycopg_library().sql
        source = self._source
        if self._last is not None:
            return self._compared(">", self._last)
        if source.after is None:
            return sql.SQL("TRUE")
        column, kind = self._growing.names[0], self._growing.types[0]
        return sql.SQL("{} > {}::{}").format(sql.Identifier(column), sql.Literal(source.after), sql.SQL(kind))

    def _compared(self, how: str, values: Values) -> Any:
        sql = catalog.psycopg_library().sql
        growing = self._growing
        names = sql.SQL(", ").join(map(sql.Identifier, growing.names))
        literals = sql.SQL(", ").join(
            sql.SQL("{}::{}").format(sql.Literal(value), sql.SQL(kind))
            for value, kind in zip(values, growing.types, strict=True)
        )
        return sql.SQL("({}) {} ({})").format(names, sql.SQL(how), literals)

    def _held_back(self) -> Any:
        sql = catalog.psycopg_library().sql
        growing = self._growing
        if growing.hold_s is None:
            return None
        # The session is in UTC, and so is a time without a zone taken to be.
        return sql.SQL("{} < (clock_timestamp() - make_interval(secs => {}))::{}").format(
            sql.Identifier(growing.names[0]),
            sql.Literal(growing.hold_s),
            sql.SQL("timestamp" if "without" in growing.types[0] else "timestamptz"),
        )

    def _order(self, direction: str) -> Any:
        # A bare name would be that of the text that is selected, whose order is another.
        sql = catalog.psycopg_library().sql
        return sql.SQL(", ").join(
            sql.SQL("{}{}").format(sql.Identifier(_ALIAS, name), sql.SQL(direction))
            for name in self._growing.names
        )

    def _connect(self) -> None:
        if self._connection is None:
            self._connection = catalog.connect(self._source.dsn)
            (is_standby,) = self._connection.execute("SELECT pg_is_in_recovery()").fetchone()
            if is_standby:
                raise catalog.psycopg_library().OperationalError(
                    "a standby answers, which does not know what runs"
                )

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        # What was running there was seen by a server that may be another now.
        self._settling = self._bound = None

    def _refusal(self, error: Exception) -> SourceError:
        return SourceError(f"{self._source.place}: {catalog.reason(error)}")

    def _unpack(self, position: bytes) -> Values:
        (packed,) = unpack_position(position, self._named, self._source.place)
        return tuple(msgpack.unpackb(packed))

    @property
    def _named(self) -> tuple[str, ...]:
        return (_KIND, self._source.table.quoted, *self._growing.names)


POLL = "200ms"
DELAY_MS = 1_000

_NUMBERS = ("smallint", "integer", "bigint")
_XID = "xid8"
_TIME = re.compile(r"timestamp(?:\((\d)\))? with(?:out)? time zone")
_MOST_DIGITS = 6


@known_options
@hides_secrets(lambda source: secrets_of(source.dsn))
class PostgresTableSource(Queue):
    """Reads the rows of a table by a column that grows, and then those that come.

    A row is read once no transaction can commit one before it any more, so that none is left out: see the connector's
    page for what the column has to be. An update is read if it makes the column grow; deletes are not seen.

    Where a source has come to is kept with its rows: in the vertex, in the checkpoint, in the spool. Nothing is written
    to the database. One subtask reads.
    """

    most_subtasks = 1

    def __init__(
        self,
        dsn: str,
        table: str,
        column: str,
        *,
        key: Sequence[str] = (),
        columns: Sequence[str] = (),
        as_text: Sequence[str] = (),
        after: str | None = None,
        delay: Duration | None = None,
        poll_interval: Duration = POLL,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read, or asked for its `schema`.

        Args:
            dsn: connection string or URL, as libpq takes it; driver and slots connect. Not a standby's.
            table: ``"table"`` or ``"schema.table"``.
            column: an integer from a sequence, a timestamp of the transaction (``now()``), or an ``xid8`` that is
                ``pg_current_xact_id()``; it is never null, and has an index, together with the key.
            key: columns that tell rows with the same value apart; none: those of the primary key, if the column is not
                unique itself.
            columns: of the table; none: all that there are when the source is given to a topology or a query.
            as_text: columns that are texts, as PostgreSQL writes them, whatever their type is.
            after: a source that was never read begins behind this value, a text as PostgreSQL reads it.
            delay: rows with a time younger than this wait; for columns with a time, by default a second.
            poll_interval: how often the table is asked for new rows.
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if psycopg is missing, and for an option that will not do.
        """
        catalog.check_dsn(dsn)
        check_text(column, "column", "the name of a column")
        if after is not None:
            check_text(after, "after", "a value of the column as a text")
        self.dsn = dsn
        self.table = catalog.named(table)
        self._column = column
        self._key = catalog.check_names(key, "key")
        if column in self._key:
            raise ConfigError(f"key: {column!r} is the column itself")
        self._wanted = catalog.check_names(columns, "columns")
        self._as_text = catalog.check_names(as_text, "as_text")
        self.after = after
        self._delay_ms = None if delay is None else duration_ms(delay, "delay", least=0)
        self.poll_s = duration_ms(poll_interval, "poll_interval") / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the table's rows; the server is asked for it.

        Raises `ConfigError` for a table or column that is not there or cannot be read by, `SourceError` if the server
        cannot be reached.
        """
        return pa.schema(self._opened[0])

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PostgresTableReader:
        if member.parallelism > 1:
            raise ConfigError(
                f"parallelism: {self.place} is read by one subtask, and there are {member.parallelism}"
            )
        return PostgresTableReader(self, self._opened[1], member.subtask, positions.get(member.subtask))

    @property
    def place(self) -> str:
        return f"table {self.table.quoted} of {catalog.database_of(self.dsn)}"

    @cached_property
    def _opened(self) -> tuple[list[pa.Field], Growing]:
        try:
            with catalog.connect(self.dsn) as connection:
                table = catalog.describe(connection, self.table)
                (is_standby,) = connection.execute("SELECT pg_is_in_recovery()").fetchone()
                cache, _ = catalog.sequence_of(connection, self.table.quoted, self._column)
        except catalog.psycopg_library().Error as error:
            raise SourceError(
                f"{self.place}: its columns cannot be asked for: {catalog.reason(error)}"
            ) from error
        if is_standby:
            raise ConfigError(
                f"dsn: {self.place} is a standby, which does not know what runs at its primary: rows would be left out"
            )
        if cache > 1:
            raise ConfigError(
                f"column: {self._column!r} is from a sequence of which each session takes {cache} values at once: rows "
                "would be left out. ALTER SEQUENCE … CACHE 1"
            )
        return table.fields(self._wanted, self._as_text), self._growing(table)

    def _growing(self, table: catalog.TableDescription) -> Growing:
        column = table.column(self._column, "column")
        time = _TIME.fullmatch(column.type)
        if column.type not in (*_NUMBERS, _XID) and time is None:
            raise ConfigError(
                f"column: expected an integer, a timestamp or xid8, and {self._column!r} is {column.type}"
            )
        if time is None and self._delay_ms is not None:
            raise ConfigError(f"delay: is for columns with a time, and {self._column!r} is {column.type}")
        key = tuple(table.column(name, "key") for name in self._key_of(table))
        for each in (column, *key):
            if not each.is_required:
                raise ConfigError(
                    f"column: {each.name!r} may be null, and rows without a value would be left out: SET NOT NULL"
                )
        hold_s = None
        if time is not None:
            digits = _MOST_DIGITS if time[1] is None else int(time[1])
            hold_s = (DELAY_MS if self._delay_ms is None else self._delay_ms) / 1_000 + 10.0**-digits
        names = tuple(each.name for each in (column, *key))
        types = tuple(each.type for each in (column, *key))
        return Growing(names, types, column.type == _XID, hold_s)

    def _key_of(self, table: catalog.TableDescription) -> tuple[str, ...]:
        if not self._key and (self._column,) in table.keys:
            return ()
        primary = table.keys[0] if table.has_primary_key else ()
        names = self._key or tuple(name for name in primary if name != self._column)
        if not any(set(unique) <= {self._column, *names} for unique in table.keys):
            raise ConfigError(
                f"key: expected columns that tell rows with the same {self._column!r} apart, by a unique index of "
                f"table {self.table.quoted}; it has {' and '.join(map(str, map(list, table.keys))) or 'none'}"
            )
        return names


class PostgresChangesDataSource(QueueDataSource):
    """``spark.dataSource.register(PostgresChangesDataSource)``, then ``format("ftlayer-postgres-changes")`` to read.

    Options are the parameters of `PostgresChangesSource`, in camel case (``asText``), with commas between names;
    ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    format = "ftlayer-postgres-changes"
    _queue_class = PostgresChangesSource


class PostgresTableDataSource(QueueDataSource):
    """``readStream.format("ftlayer-postgres-table")``, options as of `RedisDataSource`."""

    format = "ftlayer-postgres-table"
    _queue_class = PostgresTableSource
