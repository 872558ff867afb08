"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and those with a Data Source (`KafkaDataSource` is that of
`KafkaSource`) for wrapped queries and plain Structured Streaming too.
"""

from ftlayer.sources.amqp.data_source import AmqpDataSource, AmqpSource
from ftlayer.sources.files.data_source import FilesDataSource, FilesSource
from ftlayer.sources.from_json import FromJson
from ftlayer.sources.http_pull.data_sources import (
    PolledJsonDataSource,
    PolledJsonSource,
    SseDataSource,
    SseSource,
)
from ftlayer.sources.kafka.data_source import KafkaDataSource, KafkaSource
from ftlayer.sources.mqtt.data_source import MqttDataSource, MqttSource
from ftlayer.sources.nats.data_source import NatsDataSource, NatsSource
from ftlayer.sources.postgres.changes_reader import PostgresChangesSource
from ftlayer.sources.postgres.data_source import (
    PostgresChangesDataSource,
    PostgresTableDataSource,
    PostgresTableSource,
)
from ftlayer.sources.redis.data_source import RedisDataSource, RedisSource
from ftlayer.sources.tail.data_source import TailDataSource, TailSource
from ftlayer.sources.webhook.data_source import HmacSignature, WebhookDataSource, WebhookSource

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
