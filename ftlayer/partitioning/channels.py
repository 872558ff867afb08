"""Selections: the channel of each row of a batch.

A selection is int32[n]: for each row the channel in 0..channels-1 that receives it, or `ALL_CHANNELS`.
"""

from __future__ import annotations

import numpy as np

from ftlayer.errors import ConfigError
from ftlayer.records.ids import I32Array, I64Array, U64Array, mix64

ALL_CHANNELS = -1
"""In a selection: every channel receives a copy of the row."""


def check_channels(channels: int) -> None:
    """Raise ConfigError unless there is a channel."""
    if channels < 1:
        raise ConfigError(f"an edge needs at least one channel, not {channels}")


def copies(selection: I32Array, channels: int) -> tuple[I64Array, I32Array]:
    """Spell out who receives what.

    Returns:
        Row int64[m] and channel int32[m] of each copy, by rows, and the channels of one row in order: what
        `child_ids` needs to give each copy an id of its own.
    """
    check_channels(channels)
    everywhere = selection == ALL_CHANNELS
    if not everywhere.any():
        return np.arange(len(selection), dtype=np.int64), selection
    counts = np.where(everywhere, channels, 1)
    rows = np.repeat(np.arange(len(selection), dtype=np.int64), counts)
    place_in_row = np.arange(len(rows), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    receivers = np.where(everywhere[rows], place_in_row, selection[rows]).astype(np.int32)
    return rows, receivers


def rows_by_channel(selection: I32Array, channels: int) -> list[I64Array]:
    """Return the rows that each channel receives, in their order: for each channel an int64 array."""
    rows, receivers = copies(selection, channels)
    order = np.argsort(receivers, kind="stable")
    ends = np.cumsum(np.bincount(receivers, minlength=channels))
    return np.split(rows[order], ends[:-1])


def spread(record_ids: U64Array, channels: int, seed: int = 0) -> I32Array:
    """Spread records evenly over channels by their ids: int32[n] in 0..channels-1, the same at every call."""
    check_channels(channels)
    # The high half of the product of a uniform 32-bit number with `channels`: even, and no slow division.
    high = mix64(record_ids ^ np.uint64(seed)) >> np.uint64(32)
    return ((high * np.uint64(channels)) >> np.uint64(32)).astype(np.int32)
