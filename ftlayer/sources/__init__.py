"""Ready-made sources of other systems."""

from ftlayer.sources.redis import RedisSource

__all__ = ["RedisSource"]
