"""Ready-made sinks. Files, tables, PostgreSQL, Redis Streams, NATS and Kafka hold each record exactly once.

They are stream writers of Python Data Sources, for sinks of topologies in barrier mode, for wrapped queries, and
(`FileDataSource` and its like, and those of `ftlayer.sources` for Redis, NATS and Kafka) for plain Structured
Streaming. AMQP, HTTP and MQTT are sent each record at least once, by functions; the Data Sources of `ftlayer.sources`
for AMQP and MQTT write, too.
"""

from ftlayer.connectors.amqp import AmqpSink
from ftlayer.connectors.delta import DeltaDataSource, DeltaMessage, DeltaSink
from ftlayer.connectors.files.sink import FileDataSource, FileMessage, FileSink
from ftlayer.connectors.http.sink import HttpSink
from ftlayer.connectors.iceberg import IcebergDataSource, IcebergMessage, IcebergSink
from ftlayer.connectors.kafka.client import KafkaMessage
from ftlayer.connectors.kafka.sink import KafkaSink
from ftlayer.connectors.mqtt import MqttSink
from ftlayer.connectors.nats.sink import NatsMessage, NatsSink
from ftlayer.connectors.postgres.sink import PostgresDataSource, PostgresMessage, PostgresSink
from ftlayer.connectors.redis import RedisMessage, RedisSink

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
