"""Partitioners: which channel of an output edge receives each record.

All of them are frozen values without state, so a re-executed task selects what it selected before, and one
partitioner serves every subtask. The replay twin of each is in `ftlayer.records.partitioning`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ftlayer.common.checks import fast_dataclass
from ftlayer.errors import CodecError, ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.records.ids import I32Array, U64Array, mix64
from ftlayer.records.keyhash import key_column, partition_of
from ftlayer.records.traced import KeySelector

# A selection is int32[n]: for each row the channel in 0..channels-1 that receives it, or `ALL_CHANNELS`.

ALL_CHANNELS = -1
"""In a selection: every channel receives a copy of the row."""


def check_channels(channels: int) -> None:
    if channels < 1:
        raise ConfigError(f"an edge needs at least one channel, not {channels}")


def spread(record_ids: U64Array, channels: int, seed: int = 0) -> I32Array:
    """Spread records evenly over channels by their ids: int32[n] in 0..channels-1, the same at every call."""
    check_channels(channels)
    # The high half of the product of a uniform 32-bit number with `channels`: even, and no slow division.
    high = mix64(record_ids ^ np.uint64(seed)) >> np.uint64(32)
    return ((high * np.uint64(channels)) >> np.uint64(32)).astype(np.int32)


@fast_dataclass
class OutgoingRows:
    """Rows that are about to leave a subtask by one edge.

    Attributes:
        payload: the user's columns of n rows.
        record_ids: uint64[n], their ids before a channel is mixed in; zeros for a partitioner that draws nothing.
        subtask: index of the subtask that sends them.
        first_ordinal: how many rows this subtask sent by this edge before them.
    """

    payload: pa.RecordBatch
    record_ids: U64Array
    subtask: int = 0
    first_ordinal: int = 0


class Partitioner(Protocol):
    """Decides which channels receive the rows that leave a subtask."""

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        """Return a selection: int32[n], see `ftlayer.records.partitioning`.

        Raises ConfigError if there is no channel, and what each partitioner says of its own.
        """

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Return what has to be stored with each row for the replay twin: int32[n], or None for nothing.

        It goes into a column of `ftlayer.vertex.calls.Persist.key_hashes`.
        """


@dataclass(frozen=True)
class Forward:
    """Subtask i sends to channel i. The edge must have as many channels as senders."""

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        if not 0 <= rows.subtask < channels:
            raise InvalidTopologyError(
                f"subtask {rows.subtask} cannot forward to one of {channels} channels; "
                "give both operators the same parallelism or rebalance between them"
            )
        return np.full(len(rows.record_ids), rows.subtask, np.int32)

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Store the channel: nothing else of a record says which subtask read it."""
        return self.select(rows, channels)


class _Anywhere:
    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Store nothing: any channel is as good as the first, or the same one is found again."""
        return None


@dataclass(frozen=True)
class Rebalance(_Anywhere):
    """Channels take turns. Subtask i begins at channel ``start`` + i, so that few rows do not meet in one."""

    start: int = 0

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        first = (self.start + rows.subtask + rows.first_ordinal) % channels
        return ((np.arange(len(rows.record_ids)) + first) % channels).astype(np.int32)


@dataclass(frozen=True)
class Shuffle(_Anywhere):
    """A random channel for each record, drawn from its id and ``seed`` (0 to 2**64-1)."""

    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**64:
            raise ConfigError(f"the seed of a shuffle lies in 0..2**64-1, not {self.seed}")

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        return spread(rows.record_ids, channels, self.seed)


@dataclass(frozen=True)
class HashByKey:
    """Equal keys to the same channel, the one where Spark's ``repartition(channels, *key)`` puts them."""

    selector: KeySelector

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        return partition_of(self.selector.hash(rows.payload), channels)

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Store the key's hash, which serves any number of channels."""
        return self.selector.hash(rows.payload)


@dataclass(frozen=True)
class Broadcast(_Anywhere):
    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        return np.full(len(rows.record_ids), ALL_CHANNELS, np.int32)


@dataclass(frozen=True)
class Global(_Anywhere):
    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        return np.zeros(len(rows.record_ids), np.int32)


REFUSED = -1
"""`Custom.route` gives this in place of a channel for a row for which the function raised."""


@dataclass(frozen=True)
class Custom:
    """A function of the user's decides from the key.

    Attributes:
        selector: the key's columns.
        function: called with the key (the value of a single column, a tuple of several) and the number of
            channels; returns a channel in 0..channels-1. It has to be pure: re-executed tasks call it again.
    """

    selector: KeySelector
    function: Callable[[Any, int], int]

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        return self._chosen(self._keys(rows.payload), channels)

    def route(
        self, payload: pa.RecordBatch, channels: int
    ) -> tuple[I32Array, list[tuple[int, BaseException]]]:
        """Return what `select` does, with `REFUSED` for rows that it raises for, and what it raises for each.

        The function is called again for all rows then.
        """
        check_channels(channels)
        keys = self._keys(payload)
        try:
            return self._chosen(keys, channels), []
        except BaseException:  # noqa: BLE001 - whatever a user's function raises is found again, row by row
            chosen = np.full(len(keys), REFUSED, np.int32)
        refused: list[tuple[int, BaseException]] = []
        for row, key in enumerate(keys):
            try:
                chosen[row] = self._chosen([key], channels)[0]
            except BaseException as error:  # noqa: BLE001 - who describes it raises what a signal's handler did
                refused.append((row, error))
        return chosen, refused

    def _keys(self, payload: pa.RecordBatch) -> list[Any]:
        columns = [key_column(payload, name).to_pylist() for name in self.selector.columns]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def _chosen(self, keys: list[Any], channels: int) -> I32Array:
        chosen = [self.function(key, channels) for key in keys]
        for key, channel in zip(keys, chosen, strict=True):
            if not isinstance(channel, int | np.integer) or not 0 <= channel < channels:
                name = getattr(self.function, "__qualname__", repr(self.function))
                raise ConfigError(
                    f"the partitioner function {name} returned {channel!r} for key {key!r}; "
                    f"it must return an int in 0..{channels - 1}"
                )
        return np.array(chosen, np.int32)

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
        """Store the channel: the function can be asked only where the payload can be read."""
        return self.select(rows, channels)


# Replay twins: where a stored record is sent again, decided from the stored record alone.
#
# The vertex never reads a payload. A twin sees the record's new id and the one number that its partitioner's
# ``routing`` stored. Where that determines the channel (forward, hash by key, broadcast, global, custom), the
# replay takes the channel its original took; where that meant nothing (rebalance, shuffle), it takes any.


# Key groups: the unit in which keyed state moves when the parallelism changes, as Flink defines them.
#
# A key's group is the positive remainder of its hash by ``max_parallelism``; subtask i of p has the groups
# ceil(i · max / p) <= g < ceil((i + 1) · max / p), so that a group's subtask is floor(g · p / max).


def key_groups(hashes: I32Array, max_parallelism: int) -> I32Array:
    return partition_of(hashes, max_parallelism)


def groups_of(subtask: int, parallelism: int, max_parallelism: int) -> range:
    """Return the key groups of a subtask; never empty where ``parallelism <= max_parallelism``."""
    first = -(-subtask * max_parallelism // parallelism)
    end = -(-(subtask + 1) * max_parallelism // parallelism)
    return range(first, end)


def subtasks_of(groups: I32Array, parallelism: int, max_parallelism: int) -> I32Array:
    if max_parallelism & (max_parallelism - 1) == 0 and max_parallelism * parallelism < 2**31:
        return (groups * np.int32(parallelism)) >> np.int32(max_parallelism.bit_length() - 1)
    return (groups.astype(np.int64) * parallelism // max_parallelism).astype(np.int32)


@dataclass(frozen=True)
class HashByKeyGroup:
    """Equal keys go to the subtask that has their key group: `HashByKey` of graphs with checkpoints."""

    selector: KeySelector
    max_parallelism: int

    def select(self, rows: OutgoingRows, channels: int) -> I32Array:
        check_channels(channels)
        if channels > self.max_parallelism:
            raise ConfigError(
                f"{channels} subtasks cannot share {self.max_parallelism} key groups; raise max_parallelism"
            )
        groups = key_groups(self.selector.hash(rows.payload), self.max_parallelism)
        return subtasks_of(groups, channels, self.max_parallelism)

    def routing(self, rows: OutgoingRows, channels: int) -> I32Array | None:
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
        """Return a selection: int32[n], see `ftlayer.records.partitioning`.

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
