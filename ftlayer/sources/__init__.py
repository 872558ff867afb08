"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and (`KafkaDataSource`, `RedisDataSource`, `AmqpDataSource`,
`MqttDataSource`) for wrapped queries and plain Structured Streaming.
"""

from ftlayer.sources.amqp import AmqpSource
from ftlayer.sources.data_sources import AmqpDataSource, KafkaDataSource, MqttDataSource, RedisDataSource
from ftlayer.sources.kafka import KafkaSource
from ftlayer.sources.mqtt import MqttSource
from ftlayer.sources.redis import RedisSource
from ftlayer.sources.webhook.signature import HmacSignature
from ftlayer.sources.webhook.source import WebhookSource

__all__ = [
    "AmqpDataSource",
    "AmqpSource",
    "HmacSignature",
    "KafkaDataSource",
    "KafkaSource",
    "MqttDataSource",
    "MqttSource",
    "RedisDataSource",
    "RedisSource",
    "WebhookSource",
]
