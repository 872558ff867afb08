"""An exactly-once sink of Delta tables."""

from ftlayer.sinks.delta.message import DeltaMessage
from ftlayer.sinks.delta.sink import DeltaSink

__all__ = ["DeltaMessage", "DeltaSink"]
