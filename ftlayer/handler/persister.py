"""Source records become roots: their ids, and the call that has the vertex keep them."""

from __future__ import annotations

from typing import Protocol

import pyarrow as pa

from ftlayer.errors import UnsupportedError
from ftlayer.records.ids import I32Array, RootRange, RootSeed, RowRoots, U64Array, root_ids, root_range
from ftlayer.vertex.calls import EventIds, Persist, SourcePosition


class Persister(Protocol):
    """Gives roots, and builds `Persist`."""

    def roots(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> U64Array | None:
        """Name ``n`` records of a source by their place: ordinals from ``first_ordinal`` on.

        ``batch`` and ``partition`` (0 or more) together name what is counted in. Returns uint64[n], None with
        fault tolerance off. Unique as far as the arguments (and the handler's job and run) are: see `RootSeed`.
        """

    def root_range(
        self, source: str, batch: int, partition: int, first_ordinal: int, n: int
    ) -> RootRange | None:
        """Name ``n`` records of a source by a range: that of a first id, which `roots` gives the first of them."""

    def persist(
        self,
        stream: str,
        payload: pa.RecordBatch,
        roots: RowRoots,
        values: U64Array | None,
        *,
        key_hashes: I32Array | None = None,
        position: SourcePosition | None = None,
        ids: EventIds | None = None,
    ) -> Persist:
        """Build the call: the arguments are its fields. `UnsupportedError` with fault tolerance off."""


class FTPersister:
    """`Persister` with fault tolerance on."""

    def __init__(self, job: str, run: str, shard: int, shards: int) -> None:
        self._job, self._run = job, run
        self._shard, self._shards = shard, shards

    def roots(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> U64Array:
        seed = RootSeed(self._job, self._run, source, batch, partition)
        return root_ids(seed, first_ordinal, n, shard=self._shard, shards=self._shards)

    def root_range(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> RootRange:
        seed = RootSeed(self._job, self._run, source, batch, partition)
        return root_range(seed, first_ordinal, n, shard=self._shard, shards=self._shards)

    def persist(
        self,
        stream: str,
        payload: pa.RecordBatch,
        roots: RowRoots,
        values: U64Array | None,
        *,
        key_hashes: I32Array | None = None,
        position: SourcePosition | None = None,
        ids: EventIds | None = None,
    ) -> Persist:
        return Persist(stream, payload, roots, values, key_hashes, position, ids)


class NonFTPersister:
    """`Persister` with fault tolerance off."""

    def roots(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> None:
        """Return None."""

    def root_range(self, source: str, batch: int, partition: int, first_ordinal: int, n: int) -> None:
        """Return None."""

    def persist(
        self,
        stream: str,
        payload: pa.RecordBatch,
        roots: RowRoots,
        values: U64Array | None,
        *,
        key_hashes: I32Array | None = None,
        position: SourcePosition | None = None,
        ids: EventIds | None = None,
    ) -> Persist:
        """Raise `UnsupportedError`."""
        raise UnsupportedError(
            f"{stream!r}: with fault tolerance off there is no vertex to persist records in"
        )
