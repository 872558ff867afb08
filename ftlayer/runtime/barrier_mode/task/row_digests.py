"""Digests of records by their values, the same wherever in a batch a record lies, and of timers."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import pyarrow as pa

from ftlayer.functions.conversion import VALUES, records_in_form
from ftlayer.records.alone import may_share, row_alone

DIGEST_BYTES = 16


def row_digests(rows: pa.RecordBatch, input: int) -> list[bytes]:
    """Return the digest of each row; ``input`` is the chain's that they came by.

    Rows of one schema whose values Python shows alike have the same. (Arrow's own bytes do not serve: what lies below
    a null, or beside a slice, may be anything.) A row that Python cannot hold goes by its bytes, so that two equal ones
    may have different digests.
    """
    records = records_in_form(rows, VALUES)
    salt = input.to_bytes(4, "little")
    digests = []
    for place, record in enumerate(records):
        unreadable = isinstance(record, Exception)
        data = _bytes_of(rows, place) if unreadable else repr(record).encode("utf-8", "surrogatepass")
        digests.append(blake2b(data, digest_size=DIGEST_BYTES, salt=salt, person=b"ftlayer row").digest())
    return digests


def timer_digest(operator: str, kind: str, key: Any, time_ms: int) -> bytes:
    """Return the digest of a timer."""
    data = repr((operator, kind, key, time_ms)).encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=DIGEST_BYTES, person=b"ftlayer timer").digest()


def _bytes_of(rows: pa.RecordBatch, place: int) -> bytes:
    alone = row_alone(rows, place, shares=may_share(rows.schema))
    data: bytes = alone.serialize().to_pybytes()
    return data
