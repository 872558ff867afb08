"""Ready-made sinks. Files, PostgreSQL and Redis Streams hold each record exactly once; HTTP is sent it at least once.

The first three are stream writers of Python Data Sources, for sinks of topologies in barrier mode, for wrapped queries,
and (`FileDataSource`, `PostgresDataSource`, `ftlayer.sources.RedisDataSource`) for plain Structured Streaming.
"""

from ftlayer.sinks.data_sources import FileDataSource, PostgresDataSource
from ftlayer.sinks.files import FileMessage, FileSink
from ftlayer.sinks.http import HttpSink
from ftlayer.sinks.postgres import PostgresMessage, PostgresSink
from ftlayer.sinks.redis import RedisMessage, RedisSink

__all__ = [
    "FileDataSource",
    "FileMessage",
    "FileSink",
    "HttpSink",
    "PostgresDataSource",
    "PostgresMessage",
    "PostgresSink",
    "RedisMessage",
    "RedisSink",
]
