"""`RedisSource` and `RedisSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.checks import MOST
from ftlayer.data_source_options import DataSourceOptions
from ftlayer.sinks import RedisSink
from ftlayer.sources.data_source import QueueDataSource
from ftlayer.sources.redis.source import RedisSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class RedisDataSource(QueueDataSource):
    """``spark.dataSource.register(RedisDataSource)``, then ``format("ftlayer-redis")`` to read or to write.

    Options of a reader: ``url``, ``stream``, ``group``, ``fields`` (names with commas between them), ``start``,
    ``claimIdle``, ``reconnectTimeout``, see `RedisSource`; ``spool``, see `ftlayer.sources.queue_stream`: a directory
    for this query alone, a path or any URL of fsspec's, that driver and tasks reach; ``maxRowsPerTrigger`` (100,000).

    Options of a writer: ``url``, ``stream``, ``name``, ``maxLength``, see `RedisSink`. A batch that Spark runs again
    after a restart from the query's checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        return "ftlayer-redis"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        options = DataSourceOptions(self.options, self.name())
        longest = None if options.get("maxLength") is None else options.count("maxLength", MOST)
        sink = RedisSink(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            name=options.text("name", ""),
            max_length=longest,
        )
        options.check_all_known()
        return sink

    def source(self, options: DataSourceOptions) -> RedisSource:
        return RedisSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("group"),  # type: ignore[arg-type]
            fields=options.names("fields"),
            start=options.text("start", "earliest"),
            claim_idle=options.get("claimIdle"),
            reconnect_timeout=options.text("reconnectTimeout", "5m"),
        )
