"""Messages of AMQP as record batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

from ftlayer.sources import beside

VALUE, ROUTING_KEY, MESSAGE_ID, TIMESTAMP, HEADERS, REDELIVERED = SCHEMA_NAMES = (
    "value",
    "routing_key",
    "message_id",
    "timestamp",
    "headers",
    "redelivered",
)

_TEXTS = pa.map_(pa.string(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field(VALUE, pa.binary()),
        pa.field(ROUTING_KEY, pa.string()),
        pa.field(MESSAGE_ID, pa.string()),
        pa.field(TIMESTAMP, beside.STAMP),
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
    columns = [
        pa.array(list(map(itemgetter(2), deliveries)), pa.binary()),
        beside.texts(list(map(attrgetter("routing_key"), methods)), "AMQP", "a routing key"),
        beside.texts(list(map(attrgetter("message_id"), properties)), "AMQP", "a message's id"),
        beside.times(list(map(attrgetter("timestamp"), properties)), "s", "AMQP", "a timestamp"),
        _headers(list(map(attrgetter("headers"), properties))),
        pa.array(list(map(attrgetter("redelivered"), methods)), pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(found: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    if not any(found):
        return pa.array([()] * len(found), _TEXTS)
    return pa.array(
        [[(beside.valid(name), _text(it)) for name, it in (each or {}).items()] for each in found], _TEXTS
    )


def _text(value: Any) -> str | None:
    if isinstance(value, bytes | bytearray):
        return bytes(value).decode("utf-8", "replace")
    return None if value is None else beside.valid(str(value))
