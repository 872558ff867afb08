"""How often a record was tried, and since when it fails, in 64 bits: they travel with the ids of a replay.

Layout: the attempt (from 1) in the high 20 bits, the wall time of the first failure (milliseconds since 1970, 0: it
has not failed) in the low 44, which is enough until the year 2527.
"""

from __future__ import annotations

import numpy as np

from ftlayer.records.ids import I32Array, I64Array, U64Array

_TIME_BITS = 44
_MAX_ATTEMPT = (1 << 64 - _TIME_BITS) - 1
_MAX_TIME = (1 << _TIME_BITS) - 1

FIRST_TRY = 1 << _TIME_BITS
"""The first attempt of a record that has not failed."""


def pack_tries(attempts: I32Array, first_failed_ms: U64Array | None) -> U64Array:
    """Return one number a record. Attempts beyond a million, and times out of range, stand at the bound."""
    counted = np.clip(attempts, 1, _MAX_ATTEMPT).astype(np.uint64) << np.uint64(_TIME_BITS)
    if first_failed_ms is None:
        return counted
    packed: U64Array = counted | np.minimum(first_failed_ms, np.uint64(_MAX_TIME))
    return packed


def attempts_of(tries: U64Array) -> I32Array:
    return (tries >> np.uint64(_TIME_BITS)).astype(np.int32)


def first_failed_of(tries: U64Array) -> I64Array:
    """Return the time of each one's first failure (ms since 1970), 0 where there is none."""
    return (tries & np.uint64(_MAX_TIME)).astype(np.int64)


def unpacked(tries: int) -> tuple[int, int]:
    """Return the attempt of one record, and the time of its first failure as `first_failed_of`."""
    return tries >> _TIME_BITS, tries & _MAX_TIME


def tries_or_first(tries: U64Array | None, n: int) -> U64Array:
    """Return ``tries``, or those of ``n`` records that have not failed."""
    return np.full(n, FIRST_TRY, np.uint64) if tries is None else tries


def concat_tries(parts: list[tuple[U64Array | None, int]]) -> U64Array | None:
    """Put tries together, each with the number of its records; None where no part has any."""
    if all(tries is None for tries, _ in parts):
        return None
    return np.concatenate([tries_or_first(tries, n) for tries, n in parts])
