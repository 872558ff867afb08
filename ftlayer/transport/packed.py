"""Msgpack that others have written: what it would cost as objects is counted before one is made.

Sixty megabytes of empty maps are six gigabytes of objects. Here a value may cost `BASE_COST` units and one more for
`BYTES_PER_UNIT` bytes: a number, a text or a nil costs one, an array or a map `msgpack_cost`'s eight. So long texts
and bytes pass whatever their size, and small things in great numbers do not.
"""

from __future__ import annotations

from typing import Any

import msgpack
from pyarrow import Buffer

from ftlayer import _native

BASE_COST = 1 << 20
BYTES_PER_UNIT = 8


def unpack(data: bytes | Buffer) -> Any:
    """Return what was packed; ValueError that says what is wrong with bytes that cannot or should not be read."""
    size = len(data) if isinstance(data, bytes) else data.size
    most = BASE_COST + size // BYTES_PER_UNIT
    cost = _native.msgpack_cost(data, most)
    if cost < 0:
        raise ValueError("arrays and maps are nested too deep")
    if cost > most:
        raise ValueError(f"{size} bytes have too many values in them; send fewer at a time")
    try:
        return msgpack.unpackb(data)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"not msgpack ({error or type(error).__name__})") from None
