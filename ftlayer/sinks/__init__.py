"""Ready-made sinks. Files, tables, PostgreSQL, Redis Streams, NATS and Kafka hold each record exactly once.

They are stream writers of Python Data Sources, for sinks of topologies in barrier mode, for wrapped queries, and
(`FileDataSource` and its like, and those of `ftlayer.sources` for Redis, NATS and Kafka) for plain Structured
Streaming. AMQP, HTTP and MQTT are sent each record at least once, by functions; the Data Sources of `ftlayer.sources`
for AMQP and MQTT write, too.
"""

from ftlayer.sinks.amqp import AmqpSink
from ftlayer.sinks.delta.sink import DeltaDataSource, DeltaMessage, DeltaSink
from ftlayer.sinks.files import FileDataSource, FileMessage, FileSink
from ftlayer.sinks.http import HttpSink
from ftlayer.sinks.iceberg.sink import IcebergDataSource, IcebergMessage, IcebergSink
from ftlayer.sinks.kafka.messages import KafkaMessage
from ftlayer.sinks.kafka.sink import KafkaSink
from ftlayer.sinks.mqtt import MqttSink
from ftlayer.sinks.nats import NatsMessage, NatsSink
from ftlayer.sinks.postgres import PostgresDataSource, PostgresMessage, PostgresSink
from ftlayer.sinks.redis import RedisMessage, RedisSink

__all__ = [
    "AmqpSink",
    "DeltaDataSource",
    "DeltaMessage",
    "DeltaSink",
    "FileDataSource",
    "FileMessage",
    "FileSink",
    "HttpSink",
    "IcebergDataSource",
    "IcebergMessage",
    "IcebergSink",
    "KafkaMessage",
    "KafkaSink",
    "MqttSink",
    "NatsMessage",
    "NatsSink",
    "PostgresDataSource",
    "PostgresMessage",
    "PostgresSink",
    "RedisMessage",
    "RedisSink",
]
