"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and (`KafkaDataSource`, `RedisDataSource`) for wrapped queries
and plain Structured Streaming.
"""

from ftlayer.sources.data_sources import KafkaDataSource, RedisDataSource
from ftlayer.sources.kafka import KafkaSource
from ftlayer.sources.redis import RedisSource
from ftlayer.sources.webhook.signature import HmacSignature
from ftlayer.sources.webhook.source import WebhookSource

__all__ = [
    "HmacSignature",
    "KafkaDataSource",
    "KafkaSource",
    "RedisDataSource",
    "RedisSource",
    "WebhookSource",
]
