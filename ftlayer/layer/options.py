"""Options of the rules, as opposed to those of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftlayer.errors import ConfigError
from ftlayer.records.ids import shard_bits


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of one `FTLayerCore`.

    ``shard`` of ``shards`` (a power of two) is in the top bits of its root ids. ``tracker`` "exact"
    remembers every id, some hundred times slower, so that `Explain` can tell what a root waits for.
    A root expires between its stream's timeout and timeout x (1 + 1 / (buckets - 1)). What completed is
    written down ``flush_ms`` after it did; what is not written when the vertex is lost is replayed.

    Raises `ConfigError` for a value out of range.
    """

    shard: int = 0
    shards: int = 1
    tracker: Literal["table", "exact"] = "table"
    buckets: int = 3
    flush_ms: int = 100

    def __post_init__(self) -> None:
        shard_bits(self.shards)
        if not 0 <= self.shard < self.shards:
            raise ConfigError(f"shard must lie in 0..{self.shards - 1}, not {self.shard}")
        if self.tracker not in ("table", "exact"):
            raise ConfigError(f'tracker must be "table" or "exact", not {self.tracker!r}')
        if not 2 <= self.buckets <= 1_000:
            raise ConfigError(f"buckets must lie in 2..1000, not {self.buckets}")
        if self.flush_ms < 0:
            raise ConfigError(f"flush_ms must not be negative, but is {self.flush_ms}")
