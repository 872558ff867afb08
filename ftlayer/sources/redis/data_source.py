"""`RedisSource` and `RedisSink` as a Python Data Source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftlayer.checks import MOST
from ftlayer.sinks import RedisSink
from ftlayer.sources.data_source import QueueDataSource, option_count
from ftlayer.sources.redis.source import RedisSource

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


class RedisDataSource(QueueDataSource):
    """``spark.dataSource.register(RedisDataSource)``, then ``format("ftlayer-redis")`` to read or to write.

    Options of a reader: ``url``, ``stream``, ``group``, ``fields`` (names with commas between them), ``start``,
    ``claimIdle``, ``reconnectTimeout``, see `RedisSource`; ``spool``, see `ftlayer.sources.spool`: a directory for this
    query alone, a path or any URL of fsspec's, that driver and tasks reach; ``maxRowsPerTrigger`` (100,000).

    Options of a writer: ``url``, ``stream``, ``name``, ``maxLength``, see `RedisSink`. A batch that Spark runs again
    after a restart from the query's checkpoint adds nothing.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format``."""
        return "ftlayer-redis"

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        """Return the sink."""
        options = self.options
        longest = option_count(options, "maxLength", MOST) if "maxLength" in options else None
        return RedisSink(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            name=str(options.get("name", "")),
            max_length=longest,
        )

    def source(self) -> RedisSource:
        """See `QueueDataSource.source`."""
        options = self.options
        names = str(options.get("fields", "")).split(",")
        return RedisSource(
            options.get("url"),  # type: ignore[arg-type]  # It is checked there.
            options.get("stream"),  # type: ignore[arg-type]
            options.get("group"),  # type: ignore[arg-type]
            fields=[name.strip() for name in names if name.strip()],
            start=str(options.get("start", "earliest")),
            claim_idle=options.get("claimIdle"),
            reconnect_timeout=str(options.get("reconnectTimeout", "5m")),
        )
