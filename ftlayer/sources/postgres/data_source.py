"""`PostgresChangesSource` and `PostgresTableSource` as Python Data Sources."""

from __future__ import annotations

from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sources.data_source import QueueDataSource
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
        return "ftlayer-postgres-changes"

    def source(self, options: DataSourceOptions) -> PostgresChangesSource:
        return PostgresChangesSource(
            options.get("dsn"),  # type: ignore[arg-type]  # It is checked there.
            options.get("table"),  # type: ignore[arg-type]
            options.get("slot"),  # type: ignore[arg-type]
            publication=options.text("publication", ""),
            columns=options.names("columns"),
            as_text=options.names("asText"),
            initial=options.text("initial", "none"),
            max_transaction_rows=options.count("maxTransactionRows", WHOLE_ROWS),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )


class PostgresTableDataSource(QueueDataSource):
    """``spark.dataSource.register(PostgresTableDataSource)``, then ``format("ftlayer-postgres-table")`` to read.

    Options: ``dsn``, ``table``, ``column``, ``key``, ``columns`` and ``asText`` (names with commas between them),
    ``after``, ``delay``, ``pollInterval``, ``reconnectTimeout``, see `PostgresTableSource`; ``spool`` and
    ``maxRowsPerTrigger`` as of `RedisDataSource`.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-postgres-table"

    def source(self, options: DataSourceOptions) -> PostgresTableSource:
        return PostgresTableSource(
            options.get("dsn"),  # type: ignore[arg-type]  # It is checked there.
            options.get("table"),  # type: ignore[arg-type]
            options.get("column"),  # type: ignore[arg-type]
            key=options.names("key"),
            columns=options.names("columns"),
            as_text=options.names("asText"),
            after=options.get("after"),
            delay=options.get("delay"),
            poll_interval=options.text("pollInterval", POLL),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
