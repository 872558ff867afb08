"""Tables of `PostgresSink`, and the statements that move rows between them.

In the target's schema:

| table | what |
| --- | --- |
| ``<table>_ftlayer_staging`` | rows that are written and not committed, by message and number; the target's columns |
| ``ftlayer_staged`` | a row for each message with staged rows |
| ``ftlayer_commits`` | a row for each commit id: (sink, id), checkpoint, time |

Values are literals in these statements, not parameters: where there are parameters, psycopg looks for placeholders in
quoted names too, and a column called ``"%"`` is none.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from functools import partial
from typing import Any, LiteralString, Protocol

import psycopg
import pyarrow as pa
from psycopg import sql
from pyarrow import csv

from ftlayer.connectors.fitting import MISFITS, halved, is_any
from ftlayer.connectors.postgres.catalog import Fault, fault_of, is_refusal, refusal
from ftlayer.errors import ConfigError, SinkTargetError

SUFFIX = "_ftlayer_staging"
"""Of the staging table's name, behind the target's."""
MESSAGE_COLUMN = "ftlayer_message"
"""Of the staging table: whose rows they are."""
ROW_COLUMN = "ftlayer_row"
"""Of the staging table: the number of a row in its message, from 0."""

_PLAIN = ("integer", "floating", "decimal", "boolean", "string", "large_string", "date", "time", "timestamp")
"""Types that Arrow writes as PostgreSQL reads them."""

_OPTIONS = csv.WriteOptions(include_header=False, quoting_style="needed")


def to_csv(batch: pa.RecordBatch, message: str, first: int, types: dict[str, str]) -> bytes:
    """Return rows behind the name of their message and their numbers from ``first`` on, for COPY … (FORMAT csv).

    ``types``: of the target's columns, as PostgreSQL names them.
    """
    columns = [pa.repeat(message, batch.num_rows), pa.array(range(first, first + batch.num_rows), pa.int64())]
    columns += [_copyable(batch.column(name), types[name]) for name in batch.schema.names]
    table = pa.Table.from_arrays(columns, names=[MESSAGE_COLUMN, ROW_COLUMN, *batch.schema.names])
    out = io.BytesIO()
    csv.write_csv(table, out, _OPTIONS)
    return out.getvalue()


def _copyable(column: pa.Array, target: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        return _copyable(column.dictionary_decode(), target)
    if pa.types.is_string_view(column.type):
        return column.cast(pa.string())
    if is_any(column.type, *_PLAIN):
        return column
    text: Callable[[Any], str] = _array_literal if target.endswith("[]") else _text
    if target in ("json", "jsonb"):
        text = _json
    values = column.to_pylist(maps_as_pydicts="lossy")
    return pa.array([None if value is None else text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, timedelta):
        return f"{value // timedelta(microseconds=1)} microseconds"
    if isinstance(value, (dict, list)):
        return _json(value)
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    return str(value)


def _json(value: Any) -> str:
    # A decimal, which may have no exact float, stays a text.
    return json.dumps(value, ensure_ascii=False, default=_text)


def _array_literal(value: Any) -> str:
    """Return ``{1,"two",NULL}``: every element but numbers and arrays in quotes."""
    if not isinstance(value, list):
        return _text(value)
    return "{" + ",".join(map(_element, value)) + "}"


def _element(value: Any) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, list):
        return _array_literal(value)
    escaped = _text(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


STAGED = "ftlayer_staged"
COMMITS = "ftlayer_commits"
_MESSAGE, _ROW = sql.Identifier(MESSAGE_COLUMN), sql.Identifier(ROW_COLUMN)
MOST_NAME_BYTES = 63
"""PostgreSQL cuts longer names off."""

_COLUMNS = """
    SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum
"""
_COMPUTED = """
    SELECT attname, attgenerated <> '' FROM pg_attribute
    WHERE attrelid = to_regclass(%s) AND attname = ANY(%s) AND (attgenerated <> '' OR attidentity = 'a')
"""
# Whether a table takes rows back, and whether more than the types of its columns can make it refuse one.
_JUDGES = """
    SELECT relkind <> 'f'
        AND NOT EXISTS (SELECT FROM pg_partition_tree(c.oid) JOIN pg_class p ON p.oid = relid WHERE p.relkind = 'f'),
        (relkind <> 'r' OR relhastriggers OR relhasrules OR relrowsecurity OR relhasindex
            OR EXISTS (SELECT FROM pg_constraint WHERE conrelid = c.oid)
            OR EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND attnotnull))
    FROM pg_class c WHERE oid = to_regclass(%s)
"""
_POLICY = "SELECT row_security_active(to_regclass(%s)) AND has_table_privilege(to_regclass(%s), 'INSERT')"
# Whether the rows that a foreign key asks for may be staged, too.
_PARENT_IS_STAGED = f"""
    SELECT FROM pg_constraint k JOIN pg_class c ON c.oid = confrelid JOIN pg_namespace n ON n.oid = relnamespace
    WHERE conname = %s AND conrelid = to_regclass(format('%%I.%%I', %s::text, %s::text))
        AND to_regclass(format('%%I.%%I', nspname, relname || '{SUFFIX}')) IS NOT NULL
"""
# Two that make the same table at once do not wait for each other; one of them fails.
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('ftlayer sinks', 0))"


@dataclass(frozen=True)
class Tables:
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

    def run(self, connection: Any, statement: LiteralString, **parts: Any) -> Any:
        """Execute a statement with the names of these tables and columns, and more: what is no SQL is a literal."""
        own = {each: getattr(self, each) for each in ("target", "staging", "staged", "commits")}
        return connection.execute(sql.SQL(statement).format(**own, message=_MESSAGE, row=_ROW, **parts))

    def _name(self, table: str) -> sql.Identifier:
        return sql.Identifier(self.schema, table) if self.schema else sql.Identifier(table)


def tables_of(name: str) -> Tables:
    schema, _, table = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    if not table or "." in schema or len((table + SUFFIX).encode()) > MOST_NAME_BYTES:
        raise ConfigError(
            f"table: expected 'table' or 'schema.table', the table's name with at most "
            f"{MOST_NAME_BYTES - len(SUFFIX)} bytes, got {name!r}"
        )
    return Tables(table, schema)


def prepare(connection: Any, tables: Tables, rows: Iterable[str] = ()) -> dict[str, str]:
    """Make what is missing of the tables; returns the target's columns with their types.

    ``rows``: the columns that are to be staged. Raises `SinkTargetError` if there is no target, or it lacks one of
    them, and `ConfigError` for one that only PostgreSQL itself may fill.
    """
    columns, name = _columns(connection, tables.target), tables.target.as_string(connection)
    if not columns:
        raise SinkTargetError(
            f"table {name} is not there, or not in the search_path: create it before the job starts"
        )
    missing = [each for each in rows if each not in columns]
    if missing:
        raise SinkTargetError(
            f"table {name} has no column {', '.join(map(repr, missing))}; add it, or leave it out of the rows"
        )
    for column, is_generated in connection.execute(_COMPUTED, (name, list(rows))):
        what = "a generated column" if is_generated else "GENERATED ALWAYS AS IDENTITY"
        raise ConfigError(
            f"table {name}: column {column!r} is {what}, which takes no values from elsewhere: leave it out of the rows"
            + ("" if is_generated else f", or ALTER TABLE {name} ALTER {column} SET GENERATED BY DEFAULT")
        )
    if not _staged_as(columns).items() <= _columns(
        connection, tables.staging
    ).items() or not _has_bookkeeping(connection, tables):
        _make(connection, tables, columns)
    return columns


def stage(
    connection: Any, tables: Tables, rows: pa.Table, message: str, first: int, types: dict[str, str]
) -> dict[int, str]:
    """Copy rows into the staging table, numbered from ``first`` on.

    Returns, by number, why PostgreSQL does not take a row, which is left out; others are found by halving.
    """
    names = rows.schema.names
    copy_rows = sql.SQL("COPY {} ({}) FROM STDIN (FORMAT csv)").format(
        tables.staging, _names([MESSAGE_COLUMN, ROW_COLUMN, *names])
    )

    def copied(start: int, end: int) -> str:
        try:
            with connection.transaction(), connection.cursor() as cursor, cursor.copy(copy_rows) as copy:
                for batch in rows.slice(start, end - start).to_batches():
                    copy.write(to_csv(batch, message, first + start, types))
                    start += batch.num_rows
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
            return refusal(error, names)
        except MISFITS as error:
            return f"it has a value that cannot be written as text for PostgreSQL ({type(error).__name__})"
        return ""

    return {first + row: why for row, why in halved(rows.num_rows, copied).items()}


class Staged(Protocol):
    @property
    def id(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> tuple[str, ...]: ...


def refused_rows(
    connection: Any, tables: Tables, messages: Iterable[Staged], *, wait: bool = True
) -> dict[tuple[str, int], str]:
    """Move staged rows into the target, one message after the other, and back.

    Returns by message and number why the target takes a row not: found by halving; those before it are there meanwhile,
    so of rows that exclude each other the first one passes. ``wait``: for rows that a foreign key asks for in a table
    that has a `PostgresSink`, too; they may come, so that it is no reason. Without it a target that takes none at all
    refuses each.
    """
    name = tables.target.as_string(connection)
    found: dict[tuple[str, int], str] = {}
    goes_back, judges = connection.execute(_JUDGES, (name,)).fetchone() or (False, False)
    if wait and not (goes_back and judges):
        return found

    def moved(message: Staged, start: int, end: int) -> str:
        try:
            with connection.transaction():
                tables.run(
                    connection,
                    "INSERT INTO {target} ({names}) SELECT {names} FROM {staging} "
                    "WHERE {message} = {id} AND {row} >= {start} AND {row} < {end}",
                    names=_names(message.columns),
                    id=message.id,
                    start=start,
                    end=end,
                )
                connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        except psycopg.Error as error:
            if isinstance(error, psycopg.errors.DeadlockDetected) or (
                wait and _comes_later(connection, error)
            ):
                return ""
            is_shut = not wait and fault_of(error) is Fault.TARGET
            if not is_shut and not is_refusal(error) and not _is_policys(connection, name, error):
                raise
            return refusal(error, message.columns)
        return ""

    with connection.transaction(force_rollback=True):
        for message in messages:
            closed = "" if wait else moved(message, 0, 0)
            if closed:
                refused = dict.fromkeys(range(message.rows), closed)
            else:
                refused = halved(message.rows, partial(moved, message)) if goes_back else {}
            found |= {(message.id, row): why for row, why in refused.items()}
    return found


def check_staged(connection: Any, tables: Tables, sink: str, messages: Sequence[Staged]) -> None:
    """Raise `ConfigError` where messages that are not committed have their rows elsewhere: it is another's table."""
    needed = {MESSAGE_COLUMN}.union(*(one.columns for one in messages))
    if needed <= _columns(connection, tables.staging).keys() and _has_bookkeeping(connection, tables):
        elsewhere = tables.run(
            connection,
            "SELECT FROM unnest({ids}::text[]) AS m (id) WHERE NOT EXISTS (SELECT FROM {commits} WHERE sink = {sink} "
            "AND id = m.id) AND NOT EXISTS (SELECT FROM {staged} WHERE message = m.id AND (rows = 0 OR EXISTS "
            "(SELECT FROM {staging} WHERE {message} = m.id)))",
            ids=[one.id for one in messages],
            sink=sink,
        )
        if not elsewhere.rowcount:
            return
    raise ConfigError(
        f"table: the rows that are yet to be committed are not staged for {tables.target.as_string(connection)} by a "
        f"sink named {sink!r}; give the database, table and name of the PostgresSink that has written them"
    )


def uncommitted(connection: Any, tables: Tables, sink: str, messages: Iterable[Staged]) -> list[Staged]:
    """Return those that are staged and not committed, and keep others from committing them meanwhile."""
    open_still = [one for one in messages if not is_entered(connection, tables, sink, one.id)]
    ids = [one.id for one in open_still]
    tables.run(connection, "SELECT FROM {staged} WHERE message = ANY({ids}::text[]) FOR UPDATE", ids=ids)
    return open_still


def staged_rows(
    connection: Any, tables: Tables, messages: Iterable[Staged], numbers: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], str]:
    """Return those of the rows, by message and number, that are there, as PostgreSQL writes them as JSON."""
    columns = {one.id: one.columns for one in messages}
    found: dict[tuple[str, int], str] = {}
    for id, rows in _by_message(numbers).items():
        there = tables.run(
            connection,
            "SELECT {row}, (SELECT row_to_json(r)::text FROM (SELECT {names}) r) FROM {staging} "
            "WHERE {message} = {id} AND {row} = ANY({rows}) ORDER BY {row}",
            names=_names(columns[id]),
            id=id,
            rows=rows,
        )
        found |= {(id, row): values for row, values in there}
    return found


def take_out(connection: Any, tables: Tables, numbers: Iterable[tuple[str, int]]) -> None:
    for id, rows in _by_message(numbers).items():
        remove: LiteralString = "DELETE FROM {staging} WHERE {message} = {id} AND {row} = ANY({rows})"
        gone = tables.run(connection, remove, id=id, rows=rows).rowcount
        count: LiteralString = "UPDATE {staged} SET rows = rows - {gone} WHERE message = {id}"
        tables.run(connection, count, gone=gone, id=id)


def _by_message(numbers: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for message, row in numbers:
        found.setdefault(message, []).append(row)
    return found


def move(
    connection: Any, tables: Tables, columns: list[str], messages: list[str]
) -> tuple[int, dict[str, int]]:
    """Move the staged rows of messages into the target; returns how many there were, and had to be of each message."""
    # Two statements: how many the table has taken, rules and triggers may say otherwise.
    tables.run(
        connection,
        "INSERT INTO {target} ({names}) SELECT {names} FROM {staging} WHERE {message} = ANY({ids}::text[])",
        names=_names(columns),
        ids=messages,
    )
    return drop(connection, tables, messages)


def drop(connection: Any, tables: Tables, messages: list[str]) -> tuple[int, dict[str, int]]:
    """Remove the staged rows of messages; returns how many there were, and had to be of each message."""
    if not messages:
        return 0, {}
    gone = tables.run(connection, "DELETE FROM {staging} WHERE {message} = ANY({ids}::text[])", ids=messages)
    forgotten = tables.run(
        connection,
        "DELETE FROM {staged} WHERE message = ANY({ids}::text[]) RETURNING message, rows",
        ids=messages,
    )
    return gone.rowcount, dict(forgotten.fetchall())


def enter(connection: Any, tables: Tables, sink: str, ids: list[str], checkpoint: int) -> set[str]:
    """Write commit ids; returns those that were not there. Waits for a transaction that is just writing the same."""
    if not ids:
        return set()
    # In one order, so that two who do the same do not wait for each other.
    new = tables.run(
        connection,
        "INSERT INTO {commits} (sink, id, checkpoint) SELECT {sink}, unnest({ids}::text[]), {checkpoint} "
        "ON CONFLICT (sink, id) DO NOTHING RETURNING id",
        sink=sink,
        ids=sorted(ids),
        checkpoint=checkpoint,
    )
    return {row[0] for row in new}


def is_entered(connection: Any, tables: Tables, sink: str, commit_id: str) -> bool:
    found = tables.run(
        connection, "SELECT FROM {commits} WHERE sink = {sink} AND id = {id}", sink=sink, id=commit_id
    )
    return bool(found.rowcount)


def note_staged(connection: Any, tables: Tables, message: str, sink: str, execution: str, rows: int) -> None:
    values = sql.SQL(", ").join(map(sql.Literal, (message, sink, execution, rows)))
    tables.run(
        connection, "INSERT INTO {staged} (message, sink, execution, rows) VALUES ({values})", values=values
    )


def dead_messages(
    connection: Any, tables: Tables, sink: str, execution: str, older_than_s: float
) -> list[str]:
    found = tables.run(
        connection,
        "SELECT message FROM {staged} WHERE sink = {sink} AND execution <> {execution} "
        "AND staged_at <= clock_timestamp() - make_interval(secs => {age_s})",
        sink=sink,
        execution=execution,
        age_s=older_than_s,
    )
    return [row[0] for row in found]


def _comes_later(connection: Any, error: psycopg.Error) -> bool:
    said = error.diag
    return isinstance(error, psycopg.errors.ForeignKeyViolation) and bool(
        connection.execute(
            _PARENT_IS_STAGED, (said.constraint_name, said.schema_name, said.table_name)
        ).rowcount
    )


def _is_policys(connection: Any, target: str, error: psycopg.Error) -> bool:
    """Whether it is a row that row-level security keeps out, and not the right to insert that is missing."""
    return isinstance(error, psycopg.errors.InsufficientPrivilege) and bool(
        connection.execute(_POLICY, (target, target)).fetchone()[0]
    )


def _staged_as(columns: dict[str, str]) -> dict[str, str]:
    return {**columns, ROW_COLUMN: "bigint"}


def _names(columns: Iterable[str]) -> sql.Composed:
    return sql.SQL(", ").join(map(sql.Identifier, columns))


def _columns(connection: Any, table: sql.Identifier) -> dict[str, str]:
    return dict(connection.execute(_COLUMNS, (table.as_string(connection),)).fetchall())


def _has_bookkeeping(connection: Any, tables: Tables) -> bool:
    return all(_columns(connection, table) for table in (tables.staged, tables.commits))


def _make(connection: Any, tables: Tables, columns: dict[str, str]) -> None:
    connection.execute(_LOCK)
    staged = _columns(connection, tables.staging)
    if not staged:
        # Without the target's constraints and defaults: they are for the rows that arrive there.
        tables.run(
            connection,
            "CREATE TABLE {staging} AS SELECT NULL::text AS {message}, NULL::bigint AS {row}, t.* FROM {target} t "
            "WITH NO DATA",
        )
        tables.run(connection, "CREATE INDEX ON {staging} ({message}, {row})")
        staged = _columns(connection, tables.staging)
    for name, kind in _staged_as(columns).items():
        if name not in staged:
            added = {"name": sql.Identifier(name), "kind": sql.SQL(kind)}
            tables.run(connection, "ALTER TABLE {staging} ADD COLUMN {name} {kind}", **added)
        elif staged[name] != kind:
            raise SinkTargetError(
                f"column {name!r} of {tables.target.as_string(connection)} is of type {kind} and was {staged[name]} "
                f"when rows were staged: change it in {tables.staging.as_string(connection)} too"
            )
    tables.run(
        connection,
        "CREATE TABLE IF NOT EXISTS {staged} (message text PRIMARY KEY, sink text NOT NULL, execution text NOT NULL, "
        "rows bigint NOT NULL, staged_at timestamptz NOT NULL DEFAULT clock_timestamp())",
    )
    tables.run(
        connection,
        "CREATE TABLE IF NOT EXISTS {commits} (sink text, id text, checkpoint bigint NOT NULL, "
        "committed_at timestamptz NOT NULL DEFAULT clock_timestamp(), PRIMARY KEY (sink, id))",
    )
