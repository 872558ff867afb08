"""What PostgreSQL's catalog says of a table and its keys, of publications and of replication slots."""

from __future__ import annotations

import contextlib
import enum
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ftlayer.common.checks import check_text, check_texts, shown
from ftlayer.common.printable import shown_url
from ftlayer.connectors.connections import client_library
from ftlayer.connectors.postgres.transactions import ChangedRow
from ftlayer.errors import ConfigError, SourceError
from ftlayer.records import beside

logger = logging.getLogger(__name__)


TIMEOUT_S = 10
"""A server that does not answer for this long while it is connected to is taken for away."""

# Texts as the readers of columns expect them, whatever the database or the role sets.
_SESSION = (
    "SET DateStyle = 'ISO, MDY'; SET TimeZone = 'UTC'; SET IntervalStyle = 'postgres'; "
    "SET bytea_output = 'hex'; SET extra_float_digits = 1; SET statement_timeout = 0"
)


class Fault(enum.Enum):
    """What an error of PostgreSQL's is about, and so whether what failed may be tried again."""

    AWAY = "the server cannot be reached now, or cannot serve yet"
    PASSES = "chance, or what else runs: another try may succeed"
    CLOSED = "the server does not let in who connects like that"
    TARGET = "a table, a column, a right: no rows go there until someone mends it"
    ROW = "rows: it comes again with them, wherever they go in"


# By classes and codes of SQLSTATE, of which the longest decides. PASSES are transactions that are read-only, ended or
# rolled back, resources, locks, operators, disks, foreign servers, internal errors (but damaged data and indexes).
# ROW are values, constraints, views' and triggers' checks, and what goes wrong within functions (20, 21, 2F, 38).
_FAULTS = {
    state: fault
    for fault, states in {
        Fault.AWAY: "08 57P01 57P02 57P03 53300 55006",
        Fault.PASSES: "25 40 53 55P03 57 58 72 HV XX",
        Fault.CLOSED: "28",
        Fault.TARGET: "54 55 57P04 XX001 XX002",
        Fault.ROW: "20 21 22 23 2F 38 44 45 54000",
    }.items()
    for state in states.split()
}

# What a server says before there is a SQLSTATE to see, and will say again.
_UNSTATED = {
    "password authentication failed": Fault.CLOSED,
    "no password supplied": Fault.CLOSED,
    "no pg_hba.conf entry": Fault.CLOSED,
    "authentication failed for user": Fault.CLOSED,
    "certificate": Fault.CLOSED,
    "must be superuser or replication role": Fault.CLOSED,
    "permission denied": Fault.TARGET,
    "not permitted to log in": Fault.TARGET,
    "does not exist": Fault.TARGET,
}


def psycopg_library() -> Any:
    return client_library("PostgreSQL", "psycopg 3", "postgres", "psycopg", "psycopg.conninfo")


def check_dsn(dsn: object) -> None:
    psycopg = psycopg_library()
    if not isinstance(dsn, str):
        raise ConfigError(f"dsn: expected a connection string of PostgreSQL's as text, got {shown(dsn)}")
    with contextlib.suppress(psycopg.ProgrammingError):  # What libpq says quotes all of it.
        psycopg.conninfo.conninfo_to_dict(dsn)
        return
    raise ConfigError(
        "dsn: not a connection string of PostgreSQL's: expected 'host=… dbname=… user=…' or "
        f"postgresql://user@host/database, with options that libpq knows, got {shown_url(dsn)}"
    )


def database_of(dsn: str) -> str:
    if "://" in dsn:
        return shown_url(dsn)
    info = psycopg_library().conninfo.conninfo_to_dict(dsn)
    return f"{shown_url(info.get('dbname', 'postgres'))} at {info.get('host', 'this machine')}"


def connect(dsn: str, *, replication: bool = False) -> Any:
    """Return a connection without transactions of its own; texts of values come as the readers of columns expect.

    ``replication``: one that takes replication commands too, as the database's role may (``REPLICATION``).
    """
    more: dict[str, Any] = {"replication": "database"} if replication else {}
    info = psycopg_library().conninfo.conninfo_to_dict(dsn)
    more["connect_timeout"] = info.get("connect_timeout", TIMEOUT_S)
    connection = psycopg_library().connect(dsn, autocommit=True, client_encoding="UTF8", **more)
    try:
        connection.execute(_SESSION)
    except BaseException:
        connection.close()
        raise
    return connection


def fault_of(error: BaseException | None) -> Fault:
    """Return what an error is about; of one that is not psycopg's, or says nothing, that it passes."""
    psycopg = psycopg_library()
    if not isinstance(error, psycopg.Error):
        return Fault.PASSES
    state = error.sqlstate
    if state is None:
        if not isinstance(error, psycopg.OperationalError):
            return Fault.PASSES
        return next((fault for said, fault in _UNSTATED.items() if said in str(error)), Fault.AWAY)
    for end in (5, 2):
        if state[:end] in _FAULTS:
            return _FAULTS[state[:end]]
    # The standard has the classes up to 4 and H; others are chosen by who wrote a trigger.
    return Fault.ROW if "4" < state[0] < "A" or state[0] > "H" else Fault.TARGET


def is_away(error: Exception) -> bool:
    return fault_of(error) is Fault.AWAY


def is_refusal(error: Exception) -> bool:
    return fault_of(error) is Fault.ROW


def refusal(error: Any, columns: Iterable[str] = ()) -> str:
    """Return why rows are refused, without a value of them: what a server says of them may quote all."""
    psycopg, said = psycopg_library(), error.diag
    try:
        name = psycopg.errors.lookup(error.sqlstate).__name__
    except KeyError:
        name = "an error of its own"
    # COPY tells a column by its context alone, behind a line's number and before the value.
    lines = [each.partition(":")[0] for each in (said.context or "").splitlines() if each.startswith("COPY ")]
    line = lines[-1] if lines else ""
    column = said.column_name or max(
        (each for each in columns if line.endswith(f" {each}")), key=len, default=""
    )
    named = {
        "column": column,
        "constraint": said.constraint_name,
        "type": said.datatype_name,
        "table": said.table_name,
    }
    places = "".join(f", {kind} {each!r}" for kind, each in named.items() if each)
    if name == "CheckViolation" and not said.constraint_name:
        places += ", which has no partition for it"
    return f"PostgreSQL refuses it: {name} (SQLSTATE {error.sqlstate}){places}"


def reason(error: Any) -> str:
    """Return what an error of psycopg says, in one line, without the statement and its values."""
    told = (error.diag.message_primary, error.diag.message_hint) if error.sqlstate else (error,)
    said = " ".join(" ".join(str(each) for each in told if each).split()) or type(error).__name__
    return f"{said} (SQLSTATE {error.sqlstate})" if error.sqlstate else said


Texts = Sequence[str | None]

_PLAIN: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "oid": pa.int64(),
    "xid8": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "bytea": pa.binary(),
    "date": pa.date32(),
}
_STAMP = re.compile(r"timestamp(?:\((\d)\))? with(out)? time zone")
_NUMERIC = re.compile(r"numeric\((\d+),(\d+)\)")

MOST_DIGITS = 38
"""Of Spark's decimals."""


def type_of(named: str) -> pa.DataType:
    """Return the Arrow type for a type as PostgreSQL's ``format_type`` names it.

    What has no counterpart is a text as PostgreSQL writes it: numbers without a precision, arrays, JSON, UUIDs,
    intervals, enumerations.
    """
    if named in _PLAIN:
        return _PLAIN[named]
    if stamp := _STAMP.fullmatch(named):
        return pa.timestamp("us") if stamp[2] else pa.timestamp("us", "UTC")
    if (numeric := _NUMERIC.fullmatch(named)) and int(numeric[1]) <= MOST_DIGITS:
        return pa.decimal128(int(numeric[1]), int(numeric[2]))
    return pa.string()


def to_column(texts: Texts, field: pa.Field) -> pa.Array:
    """Return values that came as texts as a column. Raises `SourceError` that names column and value."""
    found = pa.array(texts, pa.string())
    try:
        return _converted(found, field.type)
    except (pa.ArrowException, ValueError) as error:
        bad = next((text for text in texts if not _is_fine(text, field.type)), None)
        raise SourceError(
            f"column {field.name!r}: the value {shown(bad)} is no {field.type}: if the table's column has another type "
            "since (ALTER TABLE … TYPE), start the program again, which reads it as that; else read the column as a "
            f"text, as_text=[{field.name!r}]"
        ) from error


def _is_fine(text: str | None, kind: pa.DataType) -> bool:
    try:
        _converted(pa.array([text], pa.string()), kind)
    except (pa.ArrowException, ValueError):
        return False
    return True


def _converted(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_boolean(kind):
        # Replication sends t and f, a cast to text true and false.
        return pc.starts_with(texts, "t")
    if pa.types.is_binary(kind):
        # \x and hexadecimal digits.
        return pa.array(
            [None if text is None else bytes.fromhex(text[2:]) for text in texts.to_pylist()], kind
        )
    if pa.types.is_floating(kind):
        # Arrow does not read "Infinity".
        values = [np.nan if text is None else float(text) for text in texts.to_pylist()]
        return pa.array(np.array(values), mask=np.asarray(pc.is_null(texts))).cast(kind, safe=False)
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        # 2026-01-02 03:04:05.678+00, as the session is in UTC.
        wrong = pc.invert(pc.ends_with(texts, "+00"))
        if pc.any(wrong).as_py():
            raise ValueError("a time that is not in UTC")
        return pc.utf8_slice_codeunits(texts, 0, -3).cast(pa.timestamp("us")).cast(kind)
    return texts.cast(kind)


OPERATION, LSN, SEQUENCE, XID, TIME = "_operation", "_lsn", "_sequence", "_transaction", "_commit_time"
BEFORE, UNCHANGED = "_before", "_unchanged"

_NAMES = (OPERATION, LSN, SEQUENCE, XID, TIME, BEFORE, UNCHANGED)
_PLACES = attrgetter("operation", "lsn", "place", "xid", "time_us", "columns", "before", "unchanged")


def schema_of_changes(columns: Sequence[pa.Field]) -> pa.Schema:
    """Return the schema of a table's changes. Raises `ConfigError` for a column with a name of ours."""
    taken = [field.name for field in columns if field.name in _NAMES]
    if taken:
        raise ConfigError(f"columns: {taken[0]!r} is also a name of the change's own; leave that column out")
    return pa.schema(
        [
            pa.field(OPERATION, pa.string()),
            pa.field(LSN, pa.int64()),
            pa.field(SEQUENCE, pa.int64()),
            pa.field(XID, pa.int64()),
            pa.field(TIME, pa.timestamp("us", "UTC")),
            *columns,
            pa.field(BEFORE, pa.struct(list(columns))),
            pa.field(UNCHANGED, pa.list_(pa.string())),
        ]
    )


def change_batch(rows: Sequence[ChangedRow], schema: pa.Schema) -> pa.RecordBatch:
    """Return changes as rows of their schema. Raises `SourceError` for a value that its column cannot have."""
    operations, lsns, places, xids, times, columns, before, unchanged = zip(*map(_PLACES, rows), strict=True)
    fields = list(schema)[5:-2]
    after = [to_column(texts, field) for texts, field in zip(zip(*columns, strict=True), fields, strict=True)]
    arrays = [
        pa.array(operations, pa.string()),
        pa.array(lsns, pa.int64()),
        pa.array(places, pa.int64()),
        pa.array(xids, pa.int64()),
        beside.times(times, "us", "PostgreSQL", "the time of a commit"),
        *after,
        _struct(before, fields),
        _name_lists(unchanged),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _struct(rows: Sequence[tuple[str | None, ...] | None], fields: list[pa.Field]) -> pa.Array:
    kind = pa.struct(fields)
    if not any(row is not None for row in rows):
        return pa.nulls(len(rows), kind)
    nothing = (None,) * len(fields)
    texts = zip(*(nothing if row is None else row for row in rows), strict=True)
    arrays = [to_column(column, field) for column, field in zip(texts, fields, strict=True)]
    return pa.StructArray.from_arrays(
        arrays, fields=fields, mask=pa.array([row is None for row in rows], pa.bool_())
    )


def _name_lists(names: Sequence[tuple[str, ...]]) -> pa.Array:
    kind = pa.list_(pa.string())
    if not any(names):
        return pa.nulls(len(names), kind)
    return pa.array([list(each) or None for each in names], kind)


PARTITIONED = "p"
_KINDS = ("r", PARTITIONED)

_TABLE = """
    SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relreplident::text
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""
_STATE = """
    SELECT c.oid::bigint, n.nspname, c.relname, c.oid = to_regclass(%s), (
        SELECT concat_ws(', ', CASE WHEN pubinsert THEN 'insert' END, CASE WHEN pubupdate THEN 'update' END,
            CASE WHEN pubdelete THEN 'delete' END, CASE WHEN pubtruncate THEN 'truncate' END)
        FROM pg_publication p JOIN pg_publication_tables t USING (pubname)
        WHERE pubname = %s AND t.schemaname = n.nspname AND t.tablename = c.relname)
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s OR c.oid = to_regclass(%s)
"""
# A domain is read as what it is a domain of.
_COLUMNS = """
    SELECT a.attname, a.attnotnull, a.attgenerated <> '', CASE t.typtype
        WHEN 'd' THEN format_type(t.typbasetype, t.typtypmod) ELSE format_type(a.atttypid, a.atttypmod) END
    FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
    WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""
_KEYS = """
    SELECT i.indisprimary, array_agg(a.attname::text ORDER BY k.place)
    FROM pg_index i CROSS JOIN unnest(i.indkey::int[]) WITH ORDINALITY k(attnum, place)
    LEFT JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
    WHERE i.indrelid = %s AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
        AND k.place <= i.indnkeyatts
    GROUP BY i.indexrelid, i.indisprimary ORDER BY i.indisprimary DESC
"""
# Sequences that a column owns (serial, identity), and those that its default calls.
_SEQUENCES = """
    SELECT max(s.seqcache), max(
        CASE WHEN has_sequence_privilege(s.seqrelid, 'USAGE, SELECT') THEN pg_sequence_last_value(s.seqrelid) END
    ) FROM pg_sequence s WHERE s.seqincrement > 0 AND s.seqrelid IN (
        SELECT d.objid FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
            AND a.attrelid = %(table)s::regclass AND a.attname = %(column)s
        UNION ALL
        SELECT d.refobjid FROM pg_depend d JOIN pg_attrdef f ON d.objid = f.oid
            JOIN pg_attribute a ON a.attrelid = f.adrelid AND a.attnum = f.adnum
        WHERE d.classid = 'pg_attrdef'::regclass AND d.refclassid = 'pg_class'::regclass
            AND a.attrelid = %(table)s::regclass AND a.attname = %(column)s
    )
"""


@dataclass(frozen=True)
class TableColumn:
    name: str
    is_required: bool
    is_generated: bool
    type: str


@dataclass(frozen=True)
class TableName:
    """A table as it is named: with its schema, or where the role's ``search_path`` finds it ("")."""

    schema: str
    table: str

    @property
    def quoted(self) -> str:
        names = [self.schema, self.table] if self.schema else [self.table]
        return ".".join('"' + name.replace('"', '""') + '"' for name in names)


@dataclass(frozen=True)
class TableDescription:
    """A table as the catalog has it. ``keys``: the columns of unique indexes, those of the primary key first."""

    oid: int
    name: TableName
    kind: str
    identity: str
    columns: tuple[TableColumn, ...]
    keys: tuple[tuple[str, ...], ...]
    has_primary_key: bool

    def column(self, name: str, option: str) -> TableColumn:
        for column in self.columns:
            if column.name == name:
                return column
        raise ConfigError(f"{option}: table {self.name.quoted} has no column {name!r}")

    def fields(self, wanted: Sequence[str], as_text: Sequence[str]) -> list[pa.Field]:
        """Return the columns that are wanted (none: all), as Arrow has them. Raises `ConfigError`."""
        for name in as_text:
            self.column(name, "as_text")
        columns = [self.column(name, "columns") for name in wanted] or list(self.columns)
        return [
            pa.field(column.name, pa.string() if column.name in as_text else type_of(column.type))
            for column in columns
        ]


def named(table: object) -> TableName:
    what = "'table' or 'schema.table'"
    check_text(table, "table", what)
    assert isinstance(table, str)
    schema, dot, name = table.rpartition(".")
    if not name or (dot and not schema) or "." in schema:
        raise ConfigError(f"table: expected {what}, got {shown(table)}")
    return TableName(schema, name)


def check_names(names: object, option: str) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ConfigError(f"{option}: expected a list of names, got {shown(names)}")
    check_texts(names, option, "the name of a column")
    if len(set(names)) < len(names):
        raise ConfigError(f"{option}: {list(names)!r} has a name twice")
    return tuple(names)


def describe(connection: Any, table: TableName) -> TableDescription:
    """Ask the catalog for a table. Raises `ConfigError` if it is not there, or something else (a view)."""
    found = connection.execute(_TABLE, (table.quoted,)).fetchone()
    if found is None:
        raise ConfigError(f"table: there is no table {table.quoted} that this role sees")
    oid, schema, name, kind, identity = found
    if kind not in _KINDS:
        raise ConfigError(f"table: {table.quoted} is no table (pg_class.relkind {kind!r})")
    columns = [TableColumn(*row) for row in connection.execute(_COLUMNS, (oid,)).fetchall()]
    keys = connection.execute(_KEYS, (oid,)).fetchall()
    unique, has_primary = tuple(tuple(names) for _, names in keys), any(is_primary for is_primary, _ in keys)
    own = TableName(schema, name)
    return TableDescription(oid, own, kind, identity, tuple(columns), unique, has_primary)


@dataclass(frozen=True)
class TableState:
    """What has become of a table that is read. ``name``: what it is called now, None: it was dropped.

    ``is_named``: the name by which it was given names it; ``other``: the oid of another one that it names, else 0.
    ``publishes``: what its publication publishes of it.
    """

    name: TableName | None
    is_named: bool
    other: int
    is_published: bool
    publishes: str


def state_of(connection: Any, oid: int, table: TableName, publication: str) -> TableState:
    """Ask the catalog what has become of the table with this oid, which was called ``table``."""
    rows = connection.execute(_STATE, (table.quoted, publication, oid, table.quoted)).fetchall()
    mine = next((row for row in rows if row[0] == oid), None)
    other = next((row[0] for row in rows if row[0] != oid), 0)
    if mine is None:
        return TableState(None, False, other, False, "")
    _, schema, name, is_named, publishes = mine
    return TableState(
        TableName(schema, name), bool(is_named), other, publishes is not None, publishes or "nothing"
    )


ANEW = "give the source a slot and a uid of its own, with initial='copy' for the rows that are there"


def lost_table(state: TableState, oid: int, table: TableName, publication: str) -> str:
    """Return why changes of the table that is read do not come any more, and how to go on; "" if they do."""
    name, given = state.name, table.quoted
    quoted = '"' + publication.replace('"', '""') + '"'
    if name is None:
        other = (
            f", and another one ({state.other}) has its name. To read that" if state.other else ". To go on"
        )
        return (
            f"the table that was read (oid {oid}) was dropped{other}: ALTER PUBLICATION {quoted} SET TABLE {given}, "
            f"and {ANEW}"
        )
    if state.other:
        return (
            f"{given} is another table now (oid {state.other}) than the one that was read ({oid}), which is called "
            f"{name.quoted}. To read the other: ALTER PUBLICATION {quoted} SET TABLE {given}, and {ANEW}. To read "
            f"this one on: table={f'{name.schema}.{name.table}'!r}"
        )
    if not state.is_published:
        return (
            f"publication {publication!r} does not publish the table any more (it was taken out, is unlogged, "
            f"or its partitions are published by themselves): ALTER PUBLICATION {quoted} ADD TABLE {name.quoted}. What "
            f"was changed meanwhile does not come: {ANEW}, or start it again to read on without that"
        )
    return ""


def sequence_of(connection: Any, table: str, column: str) -> tuple[int, int | None]:
    """Return how many values a session takes from the column's sequence at once, and its last one, if that is known.

    Where there is no sequence that is 1. ``table`` is quoted.
    """
    cache, last = connection.execute(_SEQUENCES, {"table": table, "column": column}).fetchone()
    return int(cache or 1), last


PLUGIN = "pgoutput"

_SLOT = """
    SELECT plugin, database, database = current_database(), confirmed_flush_lsn - '0/0'::pg_lsn
    FROM pg_replication_slots WHERE slot_name = %s
"""
_PUBLICATION = "SELECT puballtables, pubviaroot FROM pg_publication WHERE pubname = %s"
_PUBLISHED = "SELECT 1 FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s"


@dataclass(frozen=True)
class Slot:
    """A slot that is there. Changes from ``lsn`` on come: what is before was acknowledged, or before it was made.

    ``snapshot`` of one that was made shows the tables as they were then.
    """

    name: str
    lsn: int
    snapshot: str = ""


def lsn_of(text: str) -> int:
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def lsn_text(lsn: int) -> str:
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def identify(replication: Any) -> tuple[str, int]:
    """Return which server this is (its system identifier), and how far its log goes."""
    system, _timeline, lsn, _database = replication.execute("IDENTIFY_SYSTEM").fetchone()
    return str(system), lsn_of(lsn)


def find_slot(connection: Any, name: str) -> Slot | None:
    """Return a slot of this database, None if there is none. Raises `ConfigError` for one of something else."""
    found = connection.execute(_SLOT, (name,)).fetchone()
    if found is None:
        return None
    plugin, database, is_here, confirmed = found
    if plugin != PLUGIN or not is_here:
        raise ConfigError(
            f"slot: {name!r} is there, and is no slot of {PLUGIN} in this database: it is one of "
            f"{plugin or 'physical replication'}, of database {database!r}; give another name"
        )
    return Slot(name, int(confirmed))


def make_slot(replication: Any, name: str, *, exports: bool) -> Slot:
    """Make a slot. With ``exports`` its snapshot is there until the connection is used for something else."""
    snapshot = "export" if exports else "nothing"
    sql = psycopg_library().sql
    command = sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} (SNAPSHOT {})")
    made = replication.execute(
        command.format(sql.Identifier(name), sql.SQL(PLUGIN), sql.Literal(snapshot))
    ).fetchone()
    logger.info("replication slot %r is made, from %s on", name, made[1])
    return Slot(name, lsn_of(made[1]), made[2] or "")


def copy_slot(connection: Any, old: str, new: str) -> None:
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (old, new))


def drop_slot(connection: Any, name: str) -> None:
    connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))


def prepare_publication(connection: Any, publication: str, table: TableDescription) -> None:
    """Make the publication, if it is not there.

    Raises `ConfigError` if it lacks the table, or if the table's rows could not be changed any more.
    """
    found = connection.execute(_PUBLICATION, (publication,)).fetchone()
    is_partitioned = table.kind == PARTITIONED
    quoted = '"' + publication.replace('"', '""') + '"'
    if found is None:
        _check_identity(table)
        options = " WITH (publish_via_partition_root = true)" if is_partitioned else ""
        connection.execute(f"CREATE PUBLICATION {quoted} FOR TABLE {table.name.quoted}{options}")
        logger.info("publication %r is made, for table %s", publication, table.name.quoted)
        return
    _all, via_root = found
    if is_partitioned and not via_root:
        raise ConfigError(
            f"publication: {publication!r} publishes the partitions of {table.name.quoted}, and not the table: "
            f"ALTER PUBLICATION {quoted} SET (publish_via_partition_root = true)"
        )
    name = table.name
    if connection.execute(_PUBLISHED, (publication, name.schema, name.table)).fetchone() is None:
        raise ConfigError(
            f"publication: {publication!r} does not publish the table: ALTER PUBLICATION {quoted} ADD TABLE "
            f"{name.quoted}"
        )


def _check_identity(table: TableDescription) -> None:
    if table.identity == "n" or (table.identity == "d" and not table.has_primary_key):
        raise ConfigError(
            f"table: {table.name.quoted} has no replica identity: published, its rows could not be updated or deleted "
            "by anyone. Give it a primary key, or ALTER TABLE … REPLICA IDENTITY FULL"
        )


def check_place(slot: str, system: str, of: str, lsn: int, end: int) -> None:
    """Raise `SourceError` if a place of the log is not one of this server's, ``system``, whose log goes to ``end``."""
    if system != of:
        raise SourceError(
            f"slot {slot!r}: this is another server than the one that was read (system identifier {system}, not {of}): "
            "where to go on there is not known; give the source a uid of its own"
        )
    if lsn > end:
        raise SourceError(
            f"slot {slot!r}: the server's log ends at {lsn_text(end)}, and it was read to {lsn_text(lsn)}: the "
            "server is older than what was read of it (a backup, or a standby that was behind). Give the source a uid "
            "of its own"
        )
