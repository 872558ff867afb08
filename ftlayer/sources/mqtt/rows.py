"""Messages of MQTT as record batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

_TEXTS = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))
_TIME = pa.timestamp("us", "UTC")

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("qos", pa.int8()),
        pa.field("retained", pa.bool_()),
        pa.field("redelivered", pa.bool_()),
        pa.field("received", _TIME),
        pa.field("headers", _TEXTS),
    ]
)
"""``headers``: the user properties of MQTT 5, in which a name may come twice."""


def to_rows(messages: Sequence[Any]) -> pa.RecordBatch:
    """Return paho's messages as rows of `SCHEMA`, as received now."""
    now = pa.scalar(time.time_ns() // 1_000, pa.int64()).cast(_TIME)
    columns = [
        pa.array(list(map(attrgetter("payload"), messages)), pa.binary()),
        pa.array(list(map(attrgetter("topic"), messages)), pa.string()),
        pa.array(list(map(attrgetter("qos"), messages)), pa.int8()),
        pa.array(list(map(attrgetter("retain"), messages)), pa.bool_()),
        pa.array(list(map(attrgetter("dup"), messages)), pa.bool_()),
        pa.repeat(now, len(messages)),
        pa.array([_headers(message.properties) for message in messages], _TEXTS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(properties: Any) -> list[dict[str, str]]:
    pairs = getattr(properties, "UserProperty", ())
    return [{"name": name, "value": value} for name, value in pairs]
