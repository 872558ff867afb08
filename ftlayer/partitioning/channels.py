"""Selections: the channel of each row of a batch.

A selection is int32[n]: for each row the channel in 0..channels-1 that receives it, or `ALL_CHANNELS`.
"""

from __future__ import annotations

import numpy as np

from ftlayer.errors import ConfigError
from ftlayer.records.ids import I32Array, U64Array, mix64

ALL_CHANNELS = -1
"""In a selection: every channel receives a copy of the row."""


def check_channels(channels: int) -> None:
    """Raise ConfigError unless there is a channel."""
    if channels < 1:
        raise ConfigError(f"an edge needs at least one channel, not {channels}")


def spread(record_ids: U64Array, channels: int, seed: int = 0) -> I32Array:
    """Spread records evenly over channels by their ids: int32[n] in 0..channels-1, the same at every call."""
    check_channels(channels)
    # The high half of the product of a uniform 32-bit number with `channels`: even, and no slow division.
    high = mix64(record_ids ^ np.uint64(seed)) >> np.uint64(32)
    return ((high * np.uint64(channels)) >> np.uint64(32)).astype(np.int32)
