"""Messages of MQTT as record batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from ftlayer.sources.beside import STAMP, texts, valid

_TEXTS = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("qos", pa.int8()),
        pa.field("retained", pa.bool_()),
        pa.field("redelivered", pa.bool_()),
        pa.field("received", STAMP),
        pa.field("headers", _TEXTS),
    ]
)
"""``headers``: the user properties of MQTT 5, in which a name may come twice."""


def to_rows(messages: Sequence[Any]) -> pa.RecordBatch:
    """Return paho's messages as rows of `SCHEMA`, as received now."""
    now = pa.scalar(time.time_ns() // 1_000, pa.int64()).cast(STAMP)
    columns = [
        pa.array(list(map(attrgetter("payload"), messages)), pa.binary()),
        texts(list(map(attrgetter("topic"), messages)), "MQTT", "a topic"),
        pa.array(list(map(attrgetter("qos"), messages)), pa.int8()),
        pa.array(list(map(attrgetter("retain"), messages)), pa.bool_()),
        pa.array(list(map(attrgetter("dup"), messages)), pa.bool_()),
        pa.repeat(now, len(messages)),
        pa.array([_headers(message.properties) for message in messages], _TEXTS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(properties: Any) -> list[dict[str, str]]:
    pairs = getattr(properties, "UserProperty", ())
    return [{"name": valid(name), "value": valid(value)} for name, value in pairs]
