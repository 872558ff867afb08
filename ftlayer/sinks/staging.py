"""Tables of `PostgresSink`, and the statements that move rows between them.

In the target's schema:

| table | what |
| --- | --- |
| ``<table>_ftlayer_staging`` | rows that are written and not committed, with their message; columns as the target's |
| ``ftlayer_staged`` | a row for each message with staged rows |
| ``ftlayer_commits`` | a row for each commit id: (sink, id), checkpoint, time |

Values are literals in these statements, not parameters: where there are parameters, psycopg looks for placeholders in
quoted names too, and a column called ``"%"`` is none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psycopg import sql

from ftlayer.errors import ConfigError, SinkError
from ftlayer.sinks.copying import MESSAGE_COLUMN

SUFFIX = "_ftlayer_staging"
STAGED = "ftlayer_staged"
COMMITS = "ftlayer_commits"
MOST_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""

_COLUMNS = """
    SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
# Two that make the same table at once do not wait for each other; one of them fails.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('ftlayer sinks', 0))"


@dataclass(frozen=True)
class Tables:
    """Names of the tables of one target, quoted where they are used."""

    table: str
    schema: str = ""
    target: sql.Identifier = field(init=False)
    staging: sql.Identifier = field(init=False)
    staged: sql.Identifier = field(init=False)
    commits: sql.Identifier = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", self._name(self.table))
        object.__setattr__(self, "staging", self._name(self.table + SUFFIX))
        object.__setattr__(self, "staged", self._name(STAGED))
        object.__setattr__(self, "commits", self._name(COMMITS))

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self.schema, table) if self.schema else sql.Identifier(table)


def tables_of(name: str) -> Tables:
    """Return the tables for ``"table"`` or ``"schema.table"``; `ConfigError` for a name that will not do."""
    schema, _, table = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not table or "." in schema or len((table + SUFFIX).encode()) > MOST_NAME_BYTES:
        raise ConfigError(
            f"table: expected 'table' or 'schema.table', the table's name with at most "
            f"{MOST_NAME_BYTES - len(SUFFIX)} bytes, got {name!r}"
        )
    return Tables(table, schema)


def prepare(connection: Any, tables: Tables) -> dict[str, str]:
    """Make what is missing of the tables; returns the target's columns with their types.

    Raises `SinkError` if there is no target.
    """
    columns = _columns(connection, tables.target)
    if not columns:
        name = tables.target.as_string(connection)
        raise SinkError(
            f"table {name} is not there, or not in the search_path: create it before the job starts"
        )
    if not columns.items() <= _columns(connection, tables.staging).items() or not _has_bookkeeping(
        connection, tables
    ):
        _make(connection, tables, columns)
    return columns


def move(connection: Any, tables: Tables, columns: list[str], messages: list[str]) -> int:
    """Move the staged rows of messages into the target; returns how many there were."""
    if not messages:
        return 0
    names = _names(columns)
    moved = connection.execute(
        sql.SQL(
            "WITH moved AS (DELETE FROM {staging} WHERE {message} = ANY({messages}) RETURNING {names}) "
            "INSERT INTO {target} ({names}) SELECT {names} FROM moved"
        ).format(
            staging=tables.staging,
            message=sql.Identifier(MESSAGE_COLUMN),
            messages=_texts(messages),
            names=names,
            target=tables.target,
        )
    )
    _forget(connection, tables, messages)
    return int(moved.rowcount)


def drop(connection: Any, tables: Tables, messages: list[str]) -> None:
    """Remove the staged rows of messages."""
    if not messages:
        return
    connection.execute(
        sql.SQL("DELETE FROM {} WHERE {} = ANY({})").format(
            tables.staging, sql.Identifier(MESSAGE_COLUMN), _texts(messages)
        )
    )
    _forget(connection, tables, messages)


def enter(connection: Any, tables: Tables, sink: str, ids: list[str], checkpoint: int) -> set[str]:
    """Write commit ids; returns those that were not there. Waits for a transaction that is just writing the same."""
    if not ids:
        return set()
    # In one order, so that two who do the same do not wait for each other.
    new = connection.execute(
        sql.SQL(
            "INSERT INTO {} (sink, id, checkpoint) SELECT {}, unnest({}), {} "
            "ON CONFLICT (sink, id) DO NOTHING RETURNING id"
        ).format(tables.commits, sql.Literal(sink), _texts(sorted(ids)), sql.Literal(checkpoint))
    )
    return {row[0] for row in new}


def copy_statement(tables: Tables, columns: list[str]) -> sql.Composed:
    return sql.SQL("COPY {} ({}, {}) FROM STDIN (FORMAT csv)").format(
        tables.staging, sql.Identifier(MESSAGE_COLUMN), _names(columns)
    )


def note_staged(connection: Any, tables: Tables, message: str, sink: str, execution: str, rows: int) -> None:
    """Say that a message has staged rows."""
    connection.execute(
        sql.SQL("INSERT INTO {} (message, sink, execution, rows) VALUES ({})").format(
            tables.staged, sql.SQL(", ").join(map(sql.Literal, (message, sink, execution, rows)))
        )
    )


def dead_messages(
    connection: Any, tables: Tables, sink: str, execution: str, older_than_s: float
) -> list[str]:
    """Return the messages that other executions of the sink have staged longer ago than this."""
    found = connection.execute(
        sql.SQL(
            "SELECT message FROM {} WHERE sink = {} AND execution <> {} "
            "AND staged_at <= clock_timestamp() - make_interval(secs => {})"
        ).format(tables.staged, *map(sql.Literal, (sink, execution, older_than_s)))
    )
    return [row[0] for row in found]


def _forget(connection: Any, tables: Tables, messages: list[str]) -> None:
    connection.execute(
        sql.SQL("DELETE FROM {} WHERE message = ANY({})").format(tables.staged, _texts(messages))
    )


def _texts(values: list[str]) -> sql.Composed:
    return sql.SQL("{}::text[]").format(sql.Literal(values))


def _names(columns: list[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _columns(connection: Any, table: sql.Identifier) -> dict[str, str]:
    return dict(connection.execute(_COLUMNS, (table.as_string(connection),)).fetchall())


def _has_bookkeeping(connection: Any, tables: Tables) -> bool:
    return all(_columns(connection, table) for table in (tables.staged, tables.commits))


def _make(connection: Any, tables: Tables, columns: dict[str, str]) -> None:
    connection.execute(_LOCK)
    staged = _columns(connection, tables.staging)
    if not staged:
        message = sql.Identifier(MESSAGE_COLUMN)
        # Without the target's constraints and defaults: they are for the rows that arrive there.
        connection.execute(
            sql.SQL("CREATE TABLE {} AS SELECT NULL::text AS {}, t.* FROM {} t WITH NO DATA").format(
                tables.staging, message, tables.target
            )
        )
        connection.execute(sql.SQL("CREATE INDEX ON {} ({})").format(tables.staging, message))
        staged = _columns(connection, tables.staging)
    for name, kind in columns.items():
        if name not in staged:
            connection.execute(
                sql.SQL("ALTER TABLE {} ADD COLUMN {} {}").format(
                    tables.staging, sql.Identifier(name), sql.SQL(kind)
                )
            )
        elif staged[name] != kind:
            raise SinkError(
                f"column {name!r} of {tables.target.as_string(connection)} is of type {kind} and was {staged[name]} "
                f"when rows were staged: change it in {tables.staging.as_string(connection)} too"
            )
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} (message text PRIMARY KEY, sink text NOT NULL, execution text NOT NULL, "
            "rows bigint NOT NULL, staged_at timestamptz NOT NULL DEFAULT clock_timestamp())"
        ).format(tables.staged)
    )
    connection.execute(
        sql.SQL(
            "CREATE TABLE IF NOT EXISTS {} (sink text, id text, checkpoint bigint NOT NULL, "
            "committed_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (sink, id))"
        ).format(tables.commits)
    )
