"""Digests that stand for a row's content, wherever it lies."""

from __future__ import annotations

import hashlib

import pyarrow as pa

from ftlayer.functions.raw_types import raw_type


def row_digests(batch: pa.RecordBatch) -> list[bytes]:
    """Return 16 bytes a row that stand for its content; equal rows have equal ones, NaN equals NaN.

    Text and times are taken as bytes and numbers: what Python cannot hold is what fails.
    """
    columns = [column.view(raw_type(column.type)).to_pylist() for column in batch.columns]
    return [
        hashlib.blake2b(repr(row).encode(), digest_size=16).digest() for row in zip(*columns, strict=True)
    ]
