"""Key groups: the unit in which keyed state moves when the parallelism changes, as Flink defines them.

A key's group is the positive remainder of its hash by ``max_parallelism``; subtask i of p has the groups
ceil(i · max / p) <= g < ceil((i + 1) · max / p), so that a group's subtask is floor(g · p / max).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ftlayer.errors import ConfigError
from ftlayer.partitioning.channels import check_channels
from ftlayer.partitioning.partitioners import OutgoingRows
from ftlayer.records.ids import I32Array
from ftlayer.records.keyhash import partition_of
from ftlayer.records.selector import KeySelector


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

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        """Return the subtask of each row's key group.

        Raises ConfigError or UnhashableKeyError from the selector, and ConfigError for more channels than groups.
        """
        check_channels(channels)
        if channels > self.max_parallelism:
            raise ConfigError(
                f"{channels} subtasks cannot share {self.max_parallelism} key groups; raise max_parallelism"
            )
        groups = key_groups(self.selector.hash(rows.payload), self.max_parallelism)
        return subtasks_of(groups, channels, self.max_parallelism)

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Nothing is stored: nothing is replayed record by record."""
        return None
