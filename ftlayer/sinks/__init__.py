"""Ready-made sinks. Files, PostgreSQL, Redis Streams and NATS hold each record exactly once; HTTP at least once.

The first four are stream writers of Python Data Sources, for sinks of topologies in barrier mode, for wrapped queries,
and (`FileDataSource`, `PostgresDataSource`, and those of `ftlayer.sources` for Redis and NATS) for plain
Structured Streaming.
"""

from ftlayer.sinks.data_sources import FileDataSource, PostgresDataSource
from ftlayer.sinks.files import FileMessage, FileSink
from ftlayer.sinks.http import HttpSink
from ftlayer.sinks.nats import NatsMessage, NatsSink
from ftlayer.sinks.postgres import PostgresMessage, PostgresSink
from ftlayer.sinks.redis import RedisMessage, RedisSink

__all__ = [
    "FileDataSource",
    "FileMessage",
    "FileSink",
    "HttpSink",
    "NatsMessage",
    "NatsSink",
    "PostgresDataSource",
    "PostgresMessage",
    "PostgresSink",
    "RedisMessage",
    "RedisSink",
]
