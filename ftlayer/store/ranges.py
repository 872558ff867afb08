"""How far the partitions of a source that can be read again are done, and what is done beyond that.

Up to the *floor* of a partition all rows are done or stored. It is the position that `ftlayer.store.streams` keeps.
Beside it are the places of floor and head, and the ranges from the floor up to the last one of which something is done.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ftlayer.errors import StoreDamagedError
from ftlayer.store.kept import ReadTransaction, WriteTransaction
from ftlayer.store.rows import pack, unpack

_RANGES = b"ranges/"
_FORMAT = 2
_FORMAT_WITH_SUMS = 1  # its digests were sums, which say nothing about rows that are other ones

logger = logging.getLogger(__name__)


class StoredRange(NamedTuple):
    """A range, see `ftlayer.vertex.calls.ranges.RowRange`; ``done`` has a bit for each row, the first one lowest."""

    start: bytes | None
    end: bytes
    number: int
    first: int
    rows: int
    span: int
    digest: bytes
    done: bytes


@dataclass(frozen=True, slots=True)
class StoredPartition:
    """A partition: the place of its floor, and its ranges from there on."""

    number: int
    place: int
    ranges: tuple[StoredRange, ...] = ()


def put_ranges(txn: WriteTransaction, stream: int, partition: str, stored: StoredPartition) -> None:
    packed = pack([_FORMAT, stored.number, stored.place, [list(each) for each in stored.ranges]])
    txn.put("meta", _prefix(stream) + partition.encode(), packed)


def delete_ranges(txn: WriteTransaction, stream: int, partition: str) -> None:
    txn.delete("meta", _prefix(stream) + partition.encode())


def all_ranges(txn: ReadTransaction) -> Iterator[tuple[int, str, StoredPartition]]:
    """Iterate over all partitions: (number of the stream, partition, what is stored of it)."""
    for key, value in txn.scan("meta", _RANGES, b"ranges0"):  # "0" comes after "/"
        text = bytes(key)[len(_RANGES) :]
        try:
            yield int(text[:8], 16), text[9:].decode(), _decode(value, text[9:].decode())
        except ValueError as error:
            raise StoreDamagedError(
                f"key {bytes(key).hex()} of the store is no partition's: {error}"
            ) from error


def _prefix(stream: int) -> bytes:
    # The slash ends the number, so that no stream's prefix is the beginning of another's.
    return _RANGES + b"%08x/" % stream


def _decode(value: bytes | memoryview, partition: str) -> StoredPartition:
    try:
        version, number, place, packed = unpack(value)
        if version not in (_FORMAT, _FORMAT_WITH_SUMS):
            raise ValueError(f"format {version}")
        ranges = tuple(StoredRange(*each) for each in packed)
        if version == _FORMAT_WITH_SUMS and ranges:
            ranges = tuple(each._replace(digest=b"") for each in ranges)
            logger.warning(
                "%d rows of partition %r were noted by an older ftlayer, whose digests say nothing to this "
                "one: they are taken as the source has them now, and whether it has changed is not checked",
                sum(each.rows for each in ranges),
                partition,
            )
        return StoredPartition(number, place, ranges)
    except (ValueError, TypeError) as error:
        raise StoreDamagedError(f"the ranges of a partition cannot be read: {error}") from error
