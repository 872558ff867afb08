"""`PostgresChangesSource` and `PostgresTableSource` as Python Data Sources."""

from __future__ import annotations

from typing import Any

from ftlayer.sources.data_source import QueueDataSource, option_count
from ftlayer.sources.postgres.changes_source import WHOLE_ROWS, PostgresChangesSource
from ftlayer.sources.postgres.table_source import POLL, PostgresTableSource


class PostgresChangesDataSource(QueueDataSource):
    """``spark.dataSource.register(PostgresChangesDataSource)``, then ``format("ftlayer-postgres-changes")`` to read.

    Options: ``dsn``, ``table``, ``slot``, ``publication``, ``columns`` and ``asText`` (names with commas between them),
    ``initial``, ``maxTransactionRows``, ``reconnectTimeout``, see `PostgresChangesSource`; ``spool`` and
    ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-postgres-changes"

    def source(self) -> PostgresChangesSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return PostgresChangesSource(
            options.get("dsn"),  # type: ignore[arg-type]  # It is checked there.
            options.get("table"),  # type: ignore[arg-type]
            options.get("slot"),  # type: ignore[arg-type]
            publication=str(options.get("publication", "")),
            columns=_names(options, "columns"),
            as_text=_names(options, "asText"),
            initial=str(options.get("initial", "none")),
            max_transaction_rows=option_count(options, "maxTransactionRows", WHOLE_ROWS),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


class PostgresTableDataSource(QueueDataSource):
    """``spark.dataSource.register(PostgresTableDataSource)``, then ``format("ftlayer-postgres-table")`` to read.

    Options: ``dsn``, ``table``, ``column``, ``key``, ``columns`` and ``asText`` (names with commas between them),
    ``after``, ``delay``, ``pollInterval``, ``reconnectTimeout``, see `PostgresTableSource`; ``spool`` and
    ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-postgres-table"

    def source(self) -> PostgresTableSource:
        """See `QueueDataSource.source`."""
        options = self.options
        return PostgresTableSource(
            options.get("dsn"),  # type: ignore[arg-type]  # It is checked there.
            options.get("table"),  # type: ignore[arg-type]
            options.get("column"),  # type: ignore[arg-type]
            key=_names(options, "key"),
            columns=_names(options, "columns"),
            as_text=_names(options, "asText"),
            after=options.get("after"),
            delay=options.get("delay"),
            poll_interval=str(options.get("pollInterval", POLL)),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )


def _names(options: Any, option: str) -> list[str]:
    """Return an option that is names with commas between them."""
    names = str(options.get(option, "")).split(",")
    return [name.strip() for name in names if name.strip()]
