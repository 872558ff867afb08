"""Options of the rules, as opposed to those of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ftlayer.checks import LONGEST_MS, check_choice, check_int
from ftlayer.records.ids import shard_bits


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options of one `FTLayerCore`.

    ``shard`` of ``shards`` (a power of two) is in the top bits of its root ids. ``tracker`` "exact"
    remembers every id, some hundred times slower, so that `Explain` can tell what a root waits for.
    A root expires between its stream's timeout and timeout x (1 + 1 / (buckets - 1)). What completed is
    written down ``flush_ms`` after it did; what is not written when the vertex is lost is replayed.
    ``traced`` is the share of records whose attempts are followed (`FollowedAttempts`), 0 for none.

    Raises `ConfigError` for a value out of range.
    """

    shard: int = 0
    shards: int = 1
    tracker: Literal["table", "exact"] = "table"
    buckets: int = 3
    flush_ms: int = 100
    traced: float = 0.0

    def __post_init__(self) -> None:
        shard_bits(self.shards)
        check_int(self.shard, "shard", least=0, most=self.shards - 1)
        check_choice(self.tracker, "tracker", ("table", "exact"))
        check_int(self.buckets, "buckets", least=2, most=1_000)
        check_int(self.flush_ms, "flush_ms", least=0, most=LONGEST_MS)
