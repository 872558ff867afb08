"""Replay twins: where a stored record is sent again, decided from the stored record alone.

The vertex never reads a payload. A twin sees the record's new id and the one number that its partitioner's
``routing`` stored. Where that determines the channel (forward, hash by key, broadcast, global, custom), the
replay takes the channel its original took; where that meant nothing (rebalance, shuffle), it takes any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import CodecError, ConfigError, UnsupportedError
from ftlayer.records.ids import I32Array, U64Array
from ftlayer.records.keyhash import partition_of
from ftlayer.records.partitioning import partitioners
from ftlayer.records.traced import KeySelector

# Key groups: the unit in which keyed state moves when the parallelism changes, as Flink defines them.
#
# A key's group is the positive remainder of its hash by ``max_parallelism``; subtask i of p has the groups
# ceil(i · max / p) <= g < ceil((i + 1) · max / p), so that a group's subtask is floor(g · p / max).


def key_groups(hashes: I32Array, max_parallelism: int) -> I32Array:
    """Return the key group of each hash (`ftlayer.records.keyhash.spark_hash`): int32[n]."""
    return partition_of(hashes, max_parallelism)


def groups_of(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """Return the key groups of a subtask; never empty where ``parallelism <= max_parallelism``."""
    first = -(-subtask * max_parallelism // parallelism)
    end = -(-(subtask + 1) * max_parallelism // parallelism)
    return range(first, end)


def subtasks_of(groups: I32Array, parallelism: int, max_parallelism: int) -> I32Array:
    """Return the subtask that each group belongs to: int32[n]."""
    if max_parallelism & (max_parallelism - 1) == 0 and max_parallelism * parallelism < 2**31:
        return (groups * np.int32(parallelism)) >> np.int32(max_parallelism.bit_length() - 1)
    return (groups.astype(np.int64) * parallelism // max_parallelism).astype(np.int32)


@dataclass(frozen=True)
class HashByKeyGroup:
    """Equal keys go to the subtask that has their key group: `HashByKey` of graphs with checkpoints."""

    selector: KeySelector
    max_parallelism: int

    def select(self, rows: partitioners.OutgoingRows, channels: int) -> I32Array:
        """Return the subtask of each row's key group.

        Raises ConfigError or UnhashableKeyError from the selector, and ConfigError for more channels than groups.
        """
        partitioners.check_channels(channels)
        if channels > self.max_parallelism:
            raise ConfigError(
                f"{channels} subtasks cannot share {self.max_parallelism} key groups; raise max_parallelism"
            )
        groups = key_groups(self.selector.hash(rows.payload), self.max_parallelism)
        return subtasks_of(groups, channels, self.max_parallelism)

    def routing(self, rows: partitioners.OutgoingRows, channels: int) -> I32Array | None:
        """Nothing is stored: nothing is replayed record by record."""
        return None


@fast_dataclass
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
        """Return a selection: int32[n], see `ftlayer.records.partitioning.partitioners`.

        Raises ConfigError if there is no channel, CodecError if the routing values it needs were not stored.
        """


@dataclass(frozen=True)
class ReplayByRouting:
    """The positive remainder of what was stored: a key's hash, or the channel itself.

    With as many channels as before that is the original's channel; after a change of parallelism a key's hash
    gives the key's new channel, and a stored channel gives one that exists.
    """

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        partitioners.check_channels(channels)
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
        return partitioners.spread(rows.record_ids, channels, self.seed)


@dataclass(frozen=True)
class ReplayEverywhere:
    """Every channel, since the failed attempt may have reached any of them."""

    def select(self, rows: StoredRows, channels: int) -> I32Array:
        partitioners.check_channels(channels)
        return np.full(len(rows.record_ids), partitioners.ALL_CHANNELS, np.int32)


@dataclass(frozen=True)
class ReplayGlobal:
    def select(self, rows: StoredRows, channels: int) -> I32Array:
        partitioners.check_channels(channels)
        return np.zeros(len(rows.record_ids), np.int32)


def replay_twin(partitioner: partitioners.Partitioner) -> ReplayPartitioner:
    """Return the twin of a partitioner; UnsupportedError for a class that this module does not know."""
    match partitioner:
        case partitioners.Forward() | partitioners.HashByKey() | partitioners.Custom():
            return ReplayByRouting()
        case partitioners.Rebalance():
            return ReplayAnywhere()
        case partitioners.Shuffle():
            return ReplayAnywhere(partitioner.seed)
        case partitioners.Broadcast():
            return ReplayEverywhere()
        case partitioners.Global():
            return ReplayGlobal()
    raise UnsupportedError(
        f"{type(partitioner).__name__} has no replay twin; use Custom for a partitioning of your own"
    )
