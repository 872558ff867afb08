"""Messages of AMQP as record batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

VALUE, ROUTING_KEY, MESSAGE_ID, TIMESTAMP, HEADERS, REDELIVERED = SCHEMA_NAMES = (
    "value",
    "routing_key",
    "message_id",
    "timestamp",
    "headers",
    "redelivered",
)

_TEXTS = pa.map_(pa.string(), pa.string())
_TIME = pa.timestamp("us", "UTC")

SCHEMA = pa.schema(
    [
        pa.field(VALUE, pa.binary()),
        pa.field(ROUTING_KEY, pa.string()),
        pa.field(MESSAGE_ID, pa.string()),
        pa.field(TIMESTAMP, _TIME),
        pa.field(HEADERS, _TEXTS),
        pa.field(REDELIVERED, pa.bool_()),
    ]
)

Delivery = tuple[Any, Any, bytes]
"""What pika delivers: method, properties, body."""


def to_rows(deliveries: Sequence[Delivery]) -> pa.RecordBatch:
    """Return deliveries as rows of `SCHEMA`."""
    methods = list(map(itemgetter(0), deliveries))
    properties = list(map(itemgetter(1), deliveries))
    seconds = pa.array(list(map(attrgetter("timestamp"), properties)), pa.int64())
    columns = [
        pa.array(list(map(itemgetter(2), deliveries)), pa.binary()),
        pa.array(list(map(attrgetter("routing_key"), methods)), pa.string()),
        pa.array(list(map(attrgetter("message_id"), properties)), pa.string()),
        seconds.cast(pa.timestamp("s", "UTC")).cast(_TIME),
        _headers(list(map(attrgetter("headers"), properties))),
        pa.array(list(map(attrgetter("redelivered"), methods)), pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(found: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    if not any(found):
        return pa.array([()] * len(found), _TEXTS)
    return pa.array([[(name, _text(it)) for name, it in (each or {}).items()] for each in found], _TEXTS)


def _text(value: Any) -> str | None:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return None if value is None else str(value)
