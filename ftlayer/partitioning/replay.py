"""Replay twins: where a stored record is sent again, decided from the stored record alone.

The vertex never reads a payload. A twin sees the record's new id and the one number that its partitioner's
``routing`` stored. Where that determines the channel (forward, hash by key, broadcast, global, custom), the
replay takes the channel its original took; where that meant nothing (rebalance, shuffle), it takes any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ftlayer.errors import CodecError, UnsupportedError
from ftlayer.partitioning.channels import ALL_CHANNELS, check_channels, spread
from ftlayer.partitioning.partitioners import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    Partitioner,
    Rebalance,
    Shuffle,
)
from ftlayer.records.ids import I32Array, U64Array
from ftlayer.records.keyhash import partition_of


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The part of n stored records that a twin may know.

    Attributes:
        record_ids: uint64[n], their ids in this replay; zeros for a twin that draws nothing.
        routing: int32[n], what the partitioner's ``routing`` gave for them; None if it gave nothing.
    """

    record_ids: U64Array
    routing: I32Array | None = None


class ReplayPartitioner(Protocol):
    """Decides which channels receive records that are sent again."""

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        """Return a selection: int32[n], see `ftlayer.partitioning.channels`.

        Raises ConfigError if there is no channel, CodecError if the routing values it needs were not stored.
        """


@dataclass(frozen=True)
class ReplayByRouting:
    """The positive remainder of what was stored: a key's hash, or the channel itself.

    With as many channels as before that is the original's channel; after a change of parallelism a key's hash
    gives the key's new channel, and a stored channel gives one that exists.
    """

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        check_channels(channels)
        if rows.routing is None:
            raise CodecError(
                "the records were stored without the key hash or channel that this edge is replayed by"
            )
        return partition_of(rows.routing, channels)


@dataclass(frozen=True)
class ReplayAnywhere:
    """A channel drawn from the record's id and ``seed``: evenly spread, and the same if asked again."""

    seed: int = 0

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        return spread(rows.record_ids, channels, self.seed)


@dataclass(frozen=True)
class ReplayEverywhere:
    """Every channel, since the failed attempt may have reached any of them."""

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        check_channels(channels)
        return np.full(len(rows.record_ids), ALL_CHANNELS, np.int32)


@dataclass(frozen=True)
class ReplayGlobal:
    """Channel 0."""

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        check_channels(channels)
        return np.zeros(len(rows.record_ids), np.int32)


def replay_twin(partitioner: Partitioner) -> ReplayPartitioner:
    """Return the twin of a partitioner; UnsupportedError for a class that this module does not know."""
    match partitioner:
        case Forward() | HashByKey() | Custom():
            return ReplayByRouting()
        case Rebalance():
            return ReplayAnywhere()
        case Shuffle():
            return ReplayAnywhere(partitioner.seed)
        case Broadcast():
            return ReplayEverywhere()
        case Global():
            return ReplayGlobal()
    raise UnsupportedError(
        f"{type(partitioner).__name__} has no replay twin; use Custom for a partitioning of your own"
    )
