"""Record ids: how they are derived, and how they are folded.

An id is an unsigned 64-bit number and never 0. Ids are *derived*, not drawn: a task that is executed again
gives its records the ids they had, so what it reports twice is the same event and not a new one. Distinct
copies get distinct ids because everything that tells them apart (operator, edge, ordinal, channel, join
side) is mixed in. Whatever is not excluded exactly collides with probability 2**-64 a pair (2**-(64 - bits of
the shard) for root ids).

The mix is SplitMix64's finalizer (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
2014). It is no cryptography: ids that are chosen on purpose can collide.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ftlayer.common.checks import check_int
from ftlayer.errors import ConfigError
from ftlayer.records.kernels import native

U64Array: TypeAlias = npt.NDArray[np.uint64]
I64Array: TypeAlias = npt.NDArray[np.int64]
I32Array: TypeAlias = npt.NDArray[np.int32]

NO_ROOTS: U64Array = np.zeros(0, np.uint64)

MAX_SHARDS = 1 << 16
"""At most this many shards: 16 bits of a root id, so that 48 are left to tell records apart."""


def mix64(values: U64Array) -> U64Array:
    """Return SplitMix64's finalizer of uint64[n] ``values``.

    A bijection, each output bit of which depends on all input bits. 0 is mapped to 0.
    """
    values = _u64(values)
    out = np.empty(len(values), np.uint64)
    native.mix64(values, out)
    return out


def operator_key(uid: str) -> int:
    """Hash an operator's uid to 64 bits, the same in every process and version."""
    digest = hashlib.blake2b(uid.encode(), digest_size=8, person=b"ftl operator").digest()
    return int.from_bytes(digest, "little")


def child_ids(
    parent_ids: U64Array, *, operator: int, edge: int, ordinals: U64Array, channel: int | U64Array
) -> U64Array:
    """Derive the ids of records from those of their parents, ``parent_ids`` (uint64[n]): uint64[n], never 0.

    ``operator``: `operator_key` of the one that emits them; ``edge``: number of its output edge; ``ordinals``:
    uint64[n], the number of each child among all the outputs of the invocation; ``channel``: the receiving one, one for
    all or uint64[n], a broadcast record being one copy a channel. Children of one parent, operator, edge and channel
    with distinct ordinals have distinct ids for certain, all others save for one pair in 2**64.
    Raises TypeError, ValueError or OverflowError naming an argument of another type, length or range.
    """
    parent_ids = _u64(parent_ids)
    out = np.empty(len(parent_ids), np.uint64)
    native.child_ids(parent_ids, operator, edge, _u64(ordinals), _channel(channel), out)
    return out


def join_ids(
    left: U64Array,
    right: U64Array,
    *,
    side: int,
    operator: int,
    edge: int,
    ordinals: U64Array,
    channel: int | U64Array,
) -> U64Array:
    """Derive the ids of joined records, for the root of one of their sides.

    A joined record has one id for each distinct root it comes from: call this with ``side=0`` for the root of
    ``left`` and ``side=1`` for the root of ``right``, with ``left`` and ``right`` (uint64[n], record ids) in
    the same order both times. The other arguments, the result and the errors are those of `child_ids`.
    """
    left = _u64(left)
    out = np.empty(len(left), np.uint64)
    native.join_ids(left, _u64(right), side, operator, edge, _u64(ordinals), _channel(channel), out)
    return out


@dataclass(frozen=True)
class RootSeed:
    """The name of the records of one partition of one batch, or epoch, of a source within a query or job.

    ``run`` is part of it because a batch run again may number other rows the same.
    """

    query: str
    run: str
    source: str
    batch: int
    partition: int

    @cached_property
    def key(self) -> bytes:
        """16 bytes that stand for all fields; what `root_ids` and the wire need of a seed."""
        digest = hashlib.blake2b(digest_size=16, person=b"ftl root")
        for name in (self.query, self.run, self.source):
            encoded = name.encode()
            digest.update(len(encoded).to_bytes(8, "little") + encoded)
        for number in (self.batch, self.partition):
            digest.update(number.to_bytes(8, "little"))
        return digest.digest()


def root_ids(
    seed: RootSeed | bytes, first_ordinal: int, n: int, *, shard: int = 0, shards: int = 1
) -> U64Array:
    """Derive the root ids of ``n`` records with consecutive ordinals, the first ``first_ordinal``: uint64[n], never 0.

    ``seed`` names the records, or is its 16-byte ``key``; ``shard``, the one in charge of them, becomes the top bits of
    the ids. Those of one seed and shard with distinct ordinals are distinct for certain. Raises ConfigError for
    ``shards`` that are no power of two up to `MAX_SHARDS` or a ``shard`` out of range, ValueError or OverflowError for
    another argument out of range.
    """
    bits = shard_bits(shards)
    _check_shard(shard, shards)
    key0, key1 = _split_key(seed)
    out = np.empty(n, np.uint64)
    native.root_ids(key0, key1, first_ordinal, shard, bits, out)
    return out


@dataclass(frozen=True, slots=True)
class RootRange:
    """The ``count`` root ids from ``first`` on; none is 0, and none above 2^64-1."""

    first: int
    count: int

    def __len__(self) -> int:
        return self.count

    def ids(self) -> U64Array:
        return np.arange(self.count, dtype=np.uint64) + np.uint64(self.first)


RowRoots: TypeAlias = U64Array | RootRange
"""The roots of n rows."""


def ids_of(roots: RowRoots) -> U64Array:
    return roots.ids() if isinstance(roots, RootRange) else roots


def root_range(
    seed: RootSeed | bytes, first_ordinal: int, n: int, *, shard: int = 0, shards: int = 1
) -> RootRange:
    """Give ``n`` records consecutive root ids, from a derived one on: that of the first of them by `root_ids`.

    Takes the arguments of `root_ids` and raises as that does. Two records of two ranges have one id with probability
    2**-(64 - bits of the shard), as if each id had been drawn.
    """
    if n == 0:
        return RootRange(1, 0)
    first = int(root_ids(seed, first_ordinal, 1, shard=shard, shards=shards)[0])
    width = 64 - shard_bits(shards)
    # As far down as the last one would be above the shard's ids: one range in 2**(width - 20) is that close to the end.
    return RootRange(first - max((first & ((1 << width) - 1)) + n - (1 << width), 0), n)


def random_root_ids(n: int, *, shard: int = 0, shards: int = 1) -> U64Array:
    """Draw ``n`` root ids from the operating system's secure source, for records that nothing names.

    The result is uint64[n], never 0, with the shard in its top bits; two are equal with probability
    2**-(64 - bits of the shard).
    """
    bits = shard_bits(shards)
    _check_shard(shard, shards)
    mask = np.uint64((1 << (64 - bits)) - 1)
    drawn: U64Array = np.frombuffer(bytearray(os.urandom(8 * n)), np.uint64) & mask
    while not drawn.all():
        missing = np.flatnonzero(drawn == 0)
        drawn[missing] = np.frombuffer(os.urandom(8 * len(missing)), np.uint64) & mask
    return drawn | np.uint64(shard << (64 - bits) if bits else 0)


def shard_bits(shards: int) -> int:
    """Return how many top bits of a root id name its shard.

    Raises ConfigError unless ``shards`` is a power of two up to `MAX_SHARDS`.
    """
    check_int(shards, "shards", least=1, most=MAX_SHARDS)
    if shards & (shards - 1):
        raise ConfigError(f"shards must be a power of two between 1 and {MAX_SHARDS}, not {shards}")
    return shards.bit_length() - 1


def shard_of(roots: U64Array, shards: int) -> I64Array:
    bits = shard_bits(shards)
    roots = _u64(roots)
    if bits == 0:
        return np.zeros(len(roots), np.int64)
    return (roots >> np.uint64(64 - bits)).astype(np.int64)


def xor_fold_by_root(roots: U64Array, values: U64Array) -> tuple[U64Array, U64Array]:
    """XOR ``values`` (uint64[n]) by their ``roots`` (uint64[n], in any order).

    Returns the distinct roots in the order of their first appearance, and each one's XOR, 0 where its values cancel
    out; both uint64[m].
    """
    roots = _u64(roots)
    unique, folded = np.empty(len(roots), np.uint64), np.empty(len(roots), np.uint64)
    groups = native.xor_fold(roots, _u64(values), unique, folded)
    return unique[:groups], folded[:groups]


def xor_runs(roots: U64Array, values: U64Array) -> tuple[U64Array, U64Array]:
    """Do the same as `xor_fold_by_root`, faster, for equal roots that stand together.

    Every run of equal roots gives one entry: a root in several runs appears several times.
    """
    roots = _u64(roots)
    unique, folded = np.empty(len(roots), np.uint64), np.empty(len(roots), np.uint64)
    groups = native.xor_runs(roots, _u64(values), unique, folded)
    return unique[:groups], folded[:groups]


def _u64(values: U64Array) -> U64Array:
    return np.ascontiguousarray(values)


def _channel(channel: int | U64Array) -> int | U64Array:
    return np.ascontiguousarray(channel) if isinstance(channel, np.ndarray) else int(channel)


def _check_shard(shard: int, shards: int) -> None:
    if not 0 <= shard < shards:
        raise ConfigError(f"shard must lie in 0..{shards - 1}, not {shard}")


def _split_key(seed: RootSeed | bytes) -> tuple[int, int]:
    key = seed.key if isinstance(seed, RootSeed) else seed
    if len(key) != 16:
        raise ValueError(f"a root seed's key has 16 bytes, not {len(key)}")
    return int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")


# Tries, which travel with the ids of a replay, are 64 bits: the attempt (from 1) in the high 20, the wall time of the
# first failure (milliseconds since 1970, 0: it has not failed) in the low 44, which is enough until the year 2527.

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


@dataclass(frozen=True, slots=True)
class OwedId:
    """An id that a root waits for.

    ``emitted``: it was emitted to ``operator``, which has not acknowledged it. Otherwise it was acknowledged,
    and no event has told of its emission yet. ``operator`` is "" where no event named one.
    """

    record_id: int
    operator: str
    emitted: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a pending root waits for: its registration, if not ``registered``, and the ids ``owed``.

    ``value`` is its XOR. ``ids_known`` False: some of its events came without their ids, so ``owed`` does not say it
    all.
    """

    registered: bool = False
    value: int = 0
    ids_known: bool = False
    owed: tuple[OwedId, ...] = ()
