"""The changes of a table of PostgreSQL as a source, by logical replication."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import pyarrow as pa

from ftlayer.checks import Duration, check_int, check_text, duration_ms, shown
from ftlayer.clients.postgres import check_dsn, connect, database_of, psycopg_library, reason
from ftlayer.errors import ConfigError, SourceError
from ftlayer.printable import hides_secrets, secrets_of
from ftlayer.sources.postgres.catalog import check_names, describe, named
from ftlayer.sources.postgres.change_rows import schema_of_changes
from ftlayer.sources.postgres.changes_reader import ChangesOptions, PostgresChangesReader
from ftlayer.topology.queues import Member, Queue

INITIAL = ("none", "copy")
WHOLE_ROWS = 10_000

_SLOT = re.compile(r"[a-z0-9_]{1,55}")
_ASIDE = "_initial"


@hides_secrets(lambda source: secrets_of(source._dsn))
class PostgresChangesSource(Queue):
    """Reads the changes of a table, in the order of their transactions, from a replication slot (``pgoutput``).

    The slot is confirmed behind what is durable: stored in the vertex, in a completed checkpoint, or in the spool.
    Until then the server keeps the log, and sends it again after a failure; what was stored already is left out by its
    place in the log. So each change enters a topology once. A transaction comes in one piece, unless it has more than
    ``max_transaction_rows`` changes of the table, or 16 MiB of them.

    A row has ``_operation`` (insert, update, delete, truncate; read: of the initial copy), ``_lsn`` of the commit and
    ``_sequence``, which change of its transaction it is: together they are unique, and grow; ``_transaction``,
    ``_commit_time``; then the table's columns as they are afterwards, or, of a row that is gone, as they were;
    ``_before``, a struct of the columns as they were, as far as the replica identity tells (others are null), null for
    none; ``_unchanged``, names of columns whose large value was not sent, as the update left it alone: they are null.

    One subtask reads.
    """

    most_subtasks = 1

    def __init__(
        self,
        dsn: str,
        table: str,
        slot: str,
        *,
        publication: str = "",
        columns: Sequence[str] = (),
        as_text: Sequence[str] = (),
        initial: str = "none",
        max_transaction_rows: int = WHOLE_ROWS,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read, or asked for its `schema`.

        Args:
            dsn: connection string or URL, as libpq takes it; the role needs ``REPLICATION``. Driver and slots connect.
            table: ``"table"`` or ``"schema.table"``.
            slot: name of the replication slot; made if it is missing, and never removed. No one else may read it.
            publication: has the table; made for it if it is missing. "": it is called as the slot is.
            columns: of the table; none: all that there are when the source is given to a topology or a query.
            as_text: columns that are texts, as PostgreSQL writes them, whatever their type is.
            initial: what comes first when the slot is made: ``"none"``: changes from then on; ``"copy"``: the rows
                that the table has then, and the changes from then on.
            max_transaction_rows: a transaction with more changes of the table comes in pieces; no more than the
                topology's ``max_pending``.
            reconnect_timeout: the source fails when the server was away, or another had the slot, for this long.

        Raises `ConfigError` if psycopg is missing, and for an option that will not do.
        """
        check_dsn(dsn)
        if not isinstance(slot, str) or not _SLOT.fullmatch(slot):
            raise ConfigError(f"slot: expected up to 55 of a-z, 0-9 and _, got {shown(slot)}")
        if publication != "":
            check_text(publication, "publication", "the name of a publication")
        if initial not in INITIAL:
            raise ConfigError(f"initial: expected 'none' or 'copy', got {shown(initial)}")
        check_int(max_transaction_rows, "max_transaction_rows", least=1)
        self._dsn = dsn
        self._table = named(table)
        self._slot = slot
        self._publication = publication or slot
        self._wanted = check_names(columns, "columns")
        self._as_text = check_names(as_text, "as_text")
        self._copies = initial == "copy"
        self._whole_rows = max_transaction_rows
        self._patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    @cached_property
    def schema(self) -> pa.Schema:
        """The schema of changes; the server is asked for the table's columns.

        Raises `ConfigError` for a table or column that is not there, `SourceError` if the server cannot be reached.
        """
        try:
            with connect(self._dsn) as connection:
                table = describe(connection, self._table)
        except psycopg_library().Error as error:
            raise SourceError(f"{self.place}: its columns cannot be asked for: {reason(error)}") from error
        wanted = self._wanted or [column.name for column in table.columns if not column.is_generated]
        return schema_of_changes(table.fields(wanted, self._as_text))

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PostgresChangesReader:
        if member.parallelism > 1:
            raise ConfigError(
                f"parallelism: {self.place} is read by one subtask, and there are {member.parallelism}: a slot has one "
                "reader"
            )
        options = ChangesOptions(
            self._dsn,
            self.place,
            self._table,
            self._slot,
            self._slot + _ASIDE,
            self._publication,
            self._copies,
            self._whole_rows,
            self._patience_ms,
        )
        return PostgresChangesReader(options, self.schema, member.subtask, positions, stored=stored)

    @property
    def place(self) -> str:
        return f"slot {self._slot!r}, table {self._table.quoted} of {database_of(self._dsn)}"
