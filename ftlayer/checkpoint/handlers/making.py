"""Which handler a task needs."""

from __future__ import annotations

from ftlayer.checkpoint.handlers.aligned import AlignedHandler
from ftlayer.checkpoint.handlers.alternating import AlternatingHandler
from ftlayer.checkpoint.handlers.contract import BarrierHandler
from ftlayer.checkpoint.handlers.tracking import TrackingHandler
from ftlayer.checkpoint.options import CheckpointingMode
from ftlayer.errors import ConfigError


def make_handler(mode: CheckpointingMode, unaligned: bool, channels: int) -> BarrierHandler:
    """Return the handler of a task with so many input channels, over all of its inputs.

    ``unaligned``: some checkpoints may be; whether one begins unaligned, or turns so, is in its barriers.
    Raises ConfigError for no channels at all, and for ``unaligned`` with AT_LEAST_ONCE.
    """
    if channels < 1:
        raise ConfigError(f"channels: a handler needs at least 1, got {channels}")
    if mode is CheckpointingMode.AT_LEAST_ONCE:
        if unaligned:
            raise ConfigError(
                "unaligned, mode: at-least-once never holds a channel up; choose one of the two"
            )
        return TrackingHandler(channels)
    return AlternatingHandler(channels) if unaligned else AlignedHandler(channels)
