"""The rows that a table has when its slot is made, read by the slot's snapshot."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from ftlayer.clients.postgres import connect, psycopg_library
from ftlayer.sources.postgres.catalog import TableName
from ftlayer.sources.postgres.slots import MadeSlot, make_slot
from ftlayer.sources.postgres.transactions import ChangedRow

READ_ROWS = 10_000
"""The cursor is read so many rows at a time."""

OPERATION = "read"


class InitialCopy:
    """Reads a table once, as it was when the slot was made. It holds two connections until it is closed."""

    def __init__(
        self, dsn: str, replication: Any, slot: str, table: TableName, columns: Sequence[str]
    ) -> None:
        """Make the slot. ``replication`` is used for nothing else until this is closed."""
        self.made: MadeSlot = make_slot(replication, slot, exports=True)
        self.token = secrets.token_bytes(8)
        self.rows = 0
        self._connection = connect(dsn)
        self._ahead: list[tuple[str | None, ...]] = []
        self.is_over = False
        try:
            self._open(table, columns)
        except BaseException:
            self.close()
            raise

    def _open(self, table: TableName, columns: Sequence[str]) -> None:
        sql = psycopg_library().sql
        texts = sql.SQL(", ").join(sql.SQL("{}::text").format(sql.Identifier(name)) for name in columns)
        self._connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        self._connection.execute(
            sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self.made.snapshot))
        )
        statement = sql.SQL("SELECT {} FROM {}").format(texts, sql.SQL(table.quoted))
        self._cursor = self._connection.cursor("ftlayer")
        self._cursor.execute(statement)
        self._read(1)

    def take(self, max_rows: int) -> list[ChangedRow]:
        """Return the next rows; `is_over` says whether these are the last."""
        self._read(max_rows + 1)
        taken, self._ahead = self._ahead[:max_rows], self._ahead[max_rows:]
        first = self.rows + 1
        self.rows += len(taken)
        self.is_over = not self._ahead
        return [
            ChangedRow(OPERATION, self.made.lsn, place, None, None, columns)
            for place, columns in enumerate(taken, first)
        ]

    def close(self) -> None:
        """Disconnect; the slot stays."""
        self._connection.close()

    def _read(self, rows: int) -> None:
        """Have so many rows ahead, if there are."""
        while len(self._ahead) < rows and (more := self._cursor.fetchmany(max(rows, READ_ROWS))):
            self._ahead += more
        self.is_over = not self._ahead
