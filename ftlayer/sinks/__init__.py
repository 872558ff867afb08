"""Ready-made sinks that hold each record exactly once: files, PostgreSQL, Redis Streams.

They are stream writers of Python Data Sources, for `KeyedStream` and `DataStream` sinks in barrier mode, for wrapped
queries, and (`FileDataSource`, `PostgresDataSource`, `ftlayer.sources.RedisDataSource`) for plain Structured Streaming.
"""

from ftlayer.sinks.data_sources import FileDataSource, PostgresDataSource
from ftlayer.sinks.files import FileMessage, FileSink
from ftlayer.sinks.postgres import PostgresMessage, PostgresSink
from ftlayer.sinks.redis import RedisMessage, RedisSink

__all__ = [
    "FileDataSource",
    "FileMessage",
    "FileSink",
    "PostgresDataSource",
    "PostgresMessage",
    "PostgresSink",
    "RedisMessage",
    "RedisSink",
]
