"""The narrow interface that every store passes: tables of byte keys in order, changed by transactions."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from ftlayer.errors import StoreError

# The rules of the vertex (`ftlayer.vertex.rules`) know nothing else of storage. `MemoryStore` and `LmdbStore`
# pass one conformance suite, so what is tested on one holds on the other.


TABLES = (
    "meta",
    "segments",
    "done",
    "delivery",
    "waiting",
    "batches",
    "dead",
    "groups",
    "by_group",
    "by_root",
    "board",
    "audit",
)

# Intake stops here. The rest of a store is for deletes and moves, which need room before they free any.
INTAKE_SHARE = 0.90

# LMDB's compiled-in limit. `MemoryStore` keeps to it too, or a test could pass where production fails.
MAX_KEY_BYTES = 511


@contextmanager
def alone_in_thread(local: threading.local) -> Iterator[None]:
    """Keep transactions of a store from nesting."""
    if getattr(local, "busy", False):
        raise StoreError("this thread has a transaction open: transactions do not nest")
    local.busy = True
    try:
        yield
    finally:
        local.busy = False


class ReadTransaction(Protocol):
    """A consistent view of all tables. It belongs to the thread that opened it."""

    def get(self, table: str, key: bytes) -> memoryview | bytes | None:
        """Return the value of ``key``, or None.

        A ``memoryview`` reads the store's own pages and must not be touched after the transaction has
        ended: copy what is to stay. A write transaction hands out ``bytes``.

        Raises `StoreDamagedError` when the value fails its checksum, `ValueError` for an unknown table.
        """

    def scan(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[tuple[bytes, memoryview | bytes]]:
        """Iterate over the entries with ``start <= key < stop`` (None: to the end), in lexical key order.

        ``reverse`` gives the same entries from the last to the first. A write transaction may put and
        delete while it scans: what it changes ahead of the scan is seen, what it changes behind is not.
        Values live as long as those of `get`.
        """

    def keys(
        self, table: str, start: bytes = b"", stop: bytes | None = None, *, reverse: bool = False
    ) -> Iterator[bytes]:
        """Iterate over the keys that `scan` comes to. Values are not read, nor are their checksums."""

    def count(self, table: str) -> int:
        """Return the number of entries, in constant time."""


class WriteTransaction(ReadTransaction, Protocol):
    """A read transaction that sees and makes its own changes."""

    def put(self, table: str, key: bytes, value: bytes | memoryview, *, append: bool = False) -> None:
        """Set ``key`` to ``value``, replacing what it had.

        ``append`` promises that ``key`` is above every key of the table, which packs pages densely; a
        promise that does not hold raises `ValueError`. Keys have 1 to `MAX_KEY_BYTES` bytes.

        Raises `StoreFullError` where the change has no room. Whatever is raised, the transaction is lost:
        let the exception leave the ``with`` block.
        """

    def put_keys(self, table: str, keys: Sequence[bytes]) -> None:
        """Set ``keys``, new or empty, to empty values; raises as `put`. Faster, most so in the keys' order."""

    def delete(self, table: str, key: bytes) -> bool:
        """Remove ``key``; return whether it was there."""


class KeyValueStore(Protocol):
    """Tables of byte keys. Any thread may use it; a second writer waits for the first."""

    def write(self, *, intake: bool) -> AbstractContextManager[WriteTransaction]:
        """Change the store: all of it when the ``with`` block ends, nothing when an exception leaves it.

        ``intake=True`` is for what adds records: it raises `StoreFullError` where `used_share` is at `INTAKE_SHARE`, or
        would be. ``intake=False`` is for deletes, moves and bookkeeping and may use the last share as well.

        Once the block has ended without an error, the change outlives the process (SIGKILL included), and the machine
        as the store's durability says. Transactions of one thread do not nest: `StoreError`.
        """

    def read(self) -> AbstractContextManager[ReadTransaction]:
        """Open a snapshot. Keep it short, never wait for a client inside: pages that it sees make the file grow."""

    def sync(self) -> None:
        """Make every change so far outlive the machine."""

    def close(self) -> None:
        """Give up the store; a second call does nothing. Any use after it raises `StoreError`."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use; what was deleted is not counted."""

    @property
    def used_share(self) -> float: ...

    @property
    def max_bytes(self) -> int: ...

    @property
    def incarnation(self) -> int:
        """How many times the store was opened for writing, this time included; durable."""


def check_table(table: str) -> None:
    if table not in TABLES:
        raise ValueError(f"no table {table!r}: the store has {', '.join(TABLES)}")


def check_key(key: bytes) -> None:
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes: keys have 1 to {MAX_KEY_BYTES} bytes")


# The ranges of a source that its planner has opened, and of which rows are not done, in the planner's bytes.


_PLANNED = b"planned/"


def put_planned(txn: WriteTransaction, stream: int, number: int, planned: bytes, *, first: int) -> None:
    """Store range ``number`` of a stream's source, and forget those below ``first``."""
    prefix = _prefix_of_planned(stream)
    for key, _ in list(txn.scan("meta", prefix, _key(stream, first))):
        txn.delete("meta", bytes(key))
    txn.put("meta", _key(stream, number), planned)


def all_planned(txn: ReadTransaction, stream: int) -> tuple[bytes, ...]:
    return tuple(
        bytes(value) for _, value in txn.scan("meta", _prefix_of_planned(stream), _key(stream, 1 << 63))
    )


def _prefix_of_planned(stream: int) -> bytes:
    return _PLANNED + b"%08x/" % stream


def _key(stream: int, number: int) -> bytes:
    return _prefix_of_planned(stream) + number.to_bytes(8, "big")


_KEPT = b"kept/"
_PART_BYTES = 4


def is_kept(txn: ReadTransaction, job: str, file: str, part: int) -> bool:
    return txn.get("meta", _prefix(job, file) + part.to_bytes(_PART_BYTES, "big")) is not None


def put_kept(txn: WriteTransaction, job: str, file: str, part: int) -> None:
    txn.put("meta", _prefix(job, file) + part.to_bytes(_PART_BYTES, "big"), b"1")


def forget_kept(txn: WriteTransaction, job: str, file: str) -> int:
    """Forget a job's file; returns how many parts of it were noted."""
    prefix = _prefix(job, file)
    keys = [bytes(key) for key, _ in txn.scan("meta", prefix, prefix + b"\xff" * (_PART_BYTES + 1))]
    for key in keys:
        txn.delete("meta", key)
    return len(keys)


def _prefix(job: str, file: str) -> bytes:
    # With lengths in front no pair of names is the beginning of another pair.
    parts = [text.encode() for text in (job, file)]
    return _KEPT + b"".join(len(each).to_bytes(2, "big") + each for each in parts)
