"""Publications and replication slots: looking at them, making them, ending them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from ftlayer.clients.postgres import psycopg_library
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources.postgres.catalog import PARTITIONED, TableDescription

logger = logging.getLogger(__name__)

PLUGIN = "pgoutput"

_SLOT = """
    SELECT plugin, database, database = current_database(), confirmed_flush_lsn - '0/0'::pg_lsn
    FROM pg_replication_slots WHERE slot_name = %s
"""
_PUBLICATION = "SELECT puballtables, pubviaroot FROM pg_publication WHERE pubname = %s"
_PUBLISHED = "SELECT 1 FROM pg_publication_tables WHERE pubname = %s AND schemaname = %s AND tablename = %s"


@dataclass(frozen=True)
class SlotState:
    """A slot that is there. ``confirmed``: what is before this was acknowledged."""

    name: str
    confirmed: int


@dataclass(frozen=True)
class MadeSlot:
    """A slot that was made. ``lsn``: changes from here on come; ``snapshot`` shows the tables as they were then."""

    name: str
    lsn: int
    snapshot: str


def lsn_of(text: str) -> int:
    """Return the number of a place in the log, ``16/B374D848``."""
    high, _, low = text.partition("/")
    return (int(high, 16) << 32) + int(low, 16)


def lsn_text(lsn: int) -> str:
    """Return a place in the log as PostgreSQL writes it."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def identify(replication: Any) -> tuple[str, int]:
    """Return which server this is (its system identifier), and how far its log goes."""
    system, _timeline, lsn, _database = replication.execute("IDENTIFY_SYSTEM").fetchone()
    return str(system), lsn_of(lsn)


def find_slot(connection: Any, name: str) -> SlotState | None:
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
    return SlotState(name, int(confirmed))


def make_slot(replication: Any, name: str, *, exports: bool) -> MadeSlot:
    """Make a slot. With ``exports`` its snapshot is there until the connection is used for something else."""
    snapshot = "export" if exports else "nothing"
    command = psycopg_library().sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} (SNAPSHOT {})")
    sql = psycopg_library().sql
    made = replication.execute(
        command.format(sql.Identifier(name), sql.SQL(PLUGIN), sql.Literal(snapshot))
    ).fetchone()
    logger.info("replication slot %r is made, from %s on", name, made[1])
    return MadeSlot(name, lsn_of(made[1]), made[2] or "")


def copy_slot(connection: Any, old: str, new: str) -> None:
    """Make a slot that has what another one has."""
    connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (old, new))


def drop_slot(connection: Any, name: str) -> None:
    """Remove a slot. Fails while someone reads it."""
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
    """Raise `ConfigError` for a table in a publication of which updates and deletes would fail."""
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
