"""Messages of JetStream as record batches, and what their replies say of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import pyarrow as pa

from ftlayer.sources import beside
from ftlayer.sources.nats.window import StreamDelivery

_TEXTS = pa.map_(pa.string(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("subject", pa.string()),
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", beside.STAMP),
        pa.field("headers", _TEXTS),
        pa.field("redelivered", pa.bool_()),
    ]
)

_V1_TOKENS = 9
"""``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>``; longer ones have domain and
account before the stream."""


def delivery_of(reply: str) -> StreamDelivery:
    """Return what the subject says that acknowledges a message."""
    tokens = reply.split(".")
    first = 4 if len(tokens) == _V1_TOKENS else 6
    delivered, sequence, consumer_sequence, time_ns = map(int, tokens[first : first + 4])
    return StreamDelivery(sequence, consumer_sequence, time_ns, delivered, reply)


def reply_to(like: str, sequence: int, consumer_sequence: int) -> str:
    """Return the subject that acknowledges another message of the same consumer."""
    tokens = like.split(".")
    first = 4 if len(tokens) == _V1_TOKENS else 6
    tokens[first + 1 : first + 3] = str(sequence), str(consumer_sequence)
    return ".".join(tokens)


def to_rows(messages: Sequence[Any], deliveries: Sequence[StreamDelivery]) -> pa.RecordBatch:
    """Return messages of nats-py as rows of `SCHEMA`."""
    microseconds = [delivery.time_ns // 1_000 for delivery in deliveries]
    columns = [
        pa.array(list(map(attrgetter("data"), messages)), pa.binary()),
        beside.texts(list(map(attrgetter("subject"), messages)), "NATS", "a subject"),
        pa.array(list(map(attrgetter("sequence"), deliveries)), pa.int64()),
        beside.times(microseconds, "us", "NATS", "a timestamp"),
        _headers(list(map(attrgetter("headers"), messages))),
        pa.array([delivery.delivered > 1 for delivery in deliveries], pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(found: Sequence[Mapping[str, str] | None]) -> pa.Array:
    valid = beside.valid
    pairs = ([(valid(name), valid(text)) for name, text in each.items()] if each else () for each in found)
    return pa.array(list(pairs), _TEXTS)
