"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and those with a Data Source (`KafkaDataSource` is that of
`KafkaSource`) for wrapped queries and plain Structured Streaming too.
"""

from ftlayer.connectors.amqp import AmqpDataSource, AmqpSource
from ftlayer.connectors.files.source import FilesDataSource, FilesSource
from ftlayer.connectors.from_json import FromJson
from ftlayer.connectors.http.pull import PolledJsonDataSource, PolledJsonSource, SseDataSource, SseSource
from ftlayer.connectors.http.webhook import HmacSignature, WebhookDataSource, WebhookSource
from ftlayer.connectors.kafka.source import KafkaDataSource, KafkaSource
from ftlayer.connectors.mqtt import MqttDataSource, MqttSource
from ftlayer.connectors.nats.source import NatsDataSource, NatsSource
from ftlayer.connectors.postgres.changes_reader import PostgresChangesSource
from ftlayer.connectors.postgres.source import (
    PostgresChangesDataSource,
    PostgresTableDataSource,
    PostgresTableSource,
)
from ftlayer.connectors.redis import RedisDataSource, RedisSource
from ftlayer.connectors.tail import TailDataSource, TailSource

__all__ = [
    "AmqpDataSource",
    "AmqpSource",
    "FilesDataSource",
    "FilesSource",
    "FromJson",
    "HmacSignature",
    "KafkaDataSource",
    "KafkaSource",
    "MqttDataSource",
    "MqttSource",
    "NatsDataSource",
    "NatsSource",
    "PolledJsonDataSource",
    "PolledJsonSource",
    "PostgresChangesDataSource",
    "PostgresChangesSource",
    "PostgresTableDataSource",
    "PostgresTableSource",
    "RedisDataSource",
    "RedisSource",
    "SseDataSource",
    "SseSource",
    "TailDataSource",
    "TailSource",
    "WebhookDataSource",
    "WebhookSource",
]
