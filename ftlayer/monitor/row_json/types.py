"""What writing and reading have to agree on: units of time, how bytes are marked, what has no form in JSON."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa

BASE64 = "base64"
"""The key under which bytes stand."""

IN_A_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
DAY_S = 86_400
EPOCH = datetime(1970, 1, 1)


class UnfitError(Exception):
    """A value does not fit its type; the text says what does."""


def check_fields(kind: pa.StructType) -> None:
    """Raise `UnfitError` for a struct with two fields of one name."""
    names = [kind.field(i).name for i in range(kind.num_fields)]
    if len(set(names)) < len(names):
        raise UnfitError("two of its fields have one name, which JSON has no form for")
