"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and (`RedisDataSource`) for wrapped queries and plain Structured
Streaming.
"""

from ftlayer.sources.data_sources import RedisDataSource
from ftlayer.sources.redis import RedisSource
from ftlayer.sources.webhook.signature import HmacSignature
from ftlayer.sources.webhook.source import WebhookSource

__all__ = ["HmacSignature", "RedisDataSource", "RedisSource", "WebhookSource"]
