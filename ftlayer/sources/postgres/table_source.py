"""The rows of a table of PostgreSQL as a source, by a column that grows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import pyarrow as pa

from ftlayer.checks import Duration, check_text, duration_ms
from ftlayer.clients.postgres import check_dsn, connect, database_of, psycopg_library, reason
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources.postgres.catalog import TableDescription, check_names, describe, named, sequence_cache
from ftlayer.sources.postgres.table_reader import Growing, PostgresTableReader, TableOptions
from ftlayer.topology.queues import Member, Queue

POLL = "200ms"
DELAY_MS = 1_000

_NUMBERS = ("smallint", "integer", "bigint")
_XID = "xid8"
_TIME = re.compile(r"timestamp(?:\((\d)\))? with(?:out)? time zone")
_MOST_DIGITS = 6


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
        check_dsn(dsn)
        check_text(column, "column", "the name of a column")
        if after is not None:
            check_text(after, "after", "a value of the column as a text")
        self._dsn = dsn
        self._table = named(table)
        self._column = column
        self._key = check_names(key, "key")
        if column in self._key:
            raise ConfigError(f"key: {column!r} is the column itself")
        self._wanted = check_names(columns, "columns")
        self._as_text = check_names(as_text, "as_text")
        self._after = after
        self._delay_ms = None if delay is None else duration_ms(delay, "delay", least=0)
        self._poll_s = duration_ms(poll_interval, "poll_interval") / 1_000
        self._patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of the table's rows; the server is asked for it.

        Raises `ConfigError` for a table or column that is not there or cannot be read by, `SourceError` if the server
        cannot be reached.
        """
        return pa.schema(self._opened[0])

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PostgresTableReader:
        """See `Queue.open`. The table is read by the first fetch."""
        if member.parallelism > 1:
            raise ConfigError(
                f"parallelism: {self.place} is read by one subtask, and there are {member.parallelism}"
            )
        options = TableOptions(
            self._dsn,
            self.place,
            self._table.quoted,
            self._opened[1],
            self._after,
            self._poll_s,
            self._patience_ms,
        )
        return PostgresTableReader(options, self.schema, member.subtask, positions.get(member.subtask))

    @property
    def place(self) -> str:
        """How errors name it."""
        return f"table {self._table.quoted} of {database_of(self._dsn)}"

    @cached_property
    def _opened(self) -> tuple[list[pa.Field], Growing]:
        try:
            with connect(self._dsn) as connection:
                table = describe(connection, self._table)
                (is_standby,) = connection.execute("SELECT pg_is_in_recovery()").fetchone()
                cache = sequence_cache(connection, table, self._column)
        except psycopg_library().Error as error:
            raise SourceError(f"{self.place}: its columns cannot be asked for: {reason(error)}") from error
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

    def _growing(self, table: TableDescription) -> Growing:
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

    def _key_of(self, table: TableDescription) -> tuple[str, ...]:
        if not self._key and (self._column,) in table.keys:
            return ()
        names = self._key or tuple(name for name in _primary(table) if name != self._column)
        if not any(set(unique) <= {self._column, *names} for unique in table.keys):
            raise ConfigError(
                f"key: expected columns that tell rows with the same {self._column!r} apart, by a unique index of "
                f"table {self._table.quoted}; it has {' and '.join(map(str, map(list, table.keys))) or 'none'}"
            )
        return names


def _primary(table: TableDescription) -> tuple[str, ...]:
    return table.keys[0] if table.has_primary_key else ()
