"""Ready-made sources of other systems.

They are for `StreamEnvironment.source` in both modes, and (`RedisDataSource`) for wrapped queries and plain Structured
Streaming.
"""

from ftlayer.sources.data_sources import RedisDataSource
from ftlayer.sources.redis import RedisSource

__all__ = ["RedisDataSource", "RedisSource"]
