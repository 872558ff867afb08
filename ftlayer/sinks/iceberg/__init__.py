"""An exactly-once sink of Iceberg tables."""

from ftlayer.sinks.iceberg.message import IcebergMessage
from ftlayer.sinks.iceberg.sink import IcebergSink

__all__ = ["IcebergMessage", "IcebergSink"]
