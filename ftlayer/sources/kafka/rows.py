"""Messages of Kafka as record batches: columns are made by C functions, without Python for each message."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter, methodcaller
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.sources import beside

HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", beside.STAMP),
        pa.field("headers", pa.list_(HEADER)),
    ]
)
"""Names and types are those of Spark's own source of Kafka, with ``includeHeaders``."""

_key, _value, _offset = methodcaller("key"), methodcaller("value"), methodcaller("offset")
_timestamp, _headers = methodcaller("timestamp"), methodcaller("headers")


def to_rows(messages: Sequence[Any], topic: str, partition: int) -> pa.RecordBatch:
    """Return messages of one partition as rows. Headers are null where there are none."""
    count = len(messages)
    columns = [
        pa.array(list(map(_key, messages)), pa.binary()),
        pa.array(list(map(_value, messages)), pa.binary()),
        pa.repeat(pa.scalar(topic), count),
        pa.repeat(pa.scalar(partition, pa.int32()), count),
        pa.array(np.fromiter(map(_offset, messages), np.int64, count)),
        _times(list(map(_timestamp, messages)), topic),
        _header_lists(_headers_of(messages, topic), topic),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _times(stamps: Sequence[tuple[int, int]], topic: str) -> pa.Array:
    pairs = np.fromiter(chain.from_iterable(stamps), np.int64, 2 * len(stamps)).reshape(-1, 2)
    # Kind 0: the broker keeps none, and the time is -1.
    is_known = pairs[:, 0] != 0
    given = pairs[:, 1] if is_known.all() else pa.array(pairs[:, 1], mask=~is_known).to_pylist()
    return beside.times(given, "ms", f"topic {topic}", "a timestamp")


def _headers_of(messages: Sequence[Any], topic: str) -> list[Any]:
    """Return the headers of each message. The client raises for a name that is not UTF-8: null then."""
    try:
        return list(map(_headers, messages))
    except UnicodeDecodeError as error:
        example = error
    found = []
    for message in messages:
        try:
            found.append(_headers(message))
        except UnicodeDecodeError:
            found.append(None)
            beside.note(
                f"topic {topic}", "a header's name is not UTF-8, and the headers are null", 1, example
            )
    return found


def _header_lists(headers: Sequence[list[tuple[str, bytes | None]] | None], topic: str) -> pa.Array:
    if not any(headers):
        return pa.nulls(len(headers), pa.list_(HEADER))
    missing = [each is None for each in headers]
    lists = [each or () for each in headers]
    flat = list(chain.from_iterable(lists))
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, lists), np.int32, len(lists)), out=offsets[1:])
    keys = beside.texts(list(map(itemgetter(0), flat)), f"topic {topic}", "a header's name")
    values = pa.array(list(map(itemgetter(1), flat)), pa.binary())
    pairs = pa.StructArray.from_arrays([keys, values], fields=list(HEADER))
    return pa.ListArray.from_arrays(pa.array(offsets), pairs, type=pa.list_(HEADER), mask=pa.array(missing))
