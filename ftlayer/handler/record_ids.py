"""The RecordIds of a batch of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ftlayer.records.ids import I32Array, I64Array, U64Array
from ftlayer.records.tries import concat_tries


@dataclass(frozen=True, slots=True)
class RecordIds:
    """The RecordIds of n records: the source record that each derives from, and its own name. Never 0.

    Attributes:
        roots, ids: uint64[m], m = n while every record has one anchor. They are one object where each record is the
            only copy of its root: a copy that is alone keeps its parent's id, and the first id of a root is itself.
        offsets: int32[n + 1], record i has the RecordIds ``offsets[i]`` up to ``offsets[i + 1]``, with
            distinct roots; None where each has one.
        origins: uint64[m], the first root of each; None where these are the roots themselves (no replays).
        tries: uint64[m], how often each was tried (`ftlayer.records.tries`); None where none has failed.
    """

    roots: U64Array
    ids: U64Array
    offsets: I32Array | None = None
    origins: U64Array | None = None
    tries: U64Array | None = None

    def __len__(self) -> int:
        return len(self.roots) if self.offsets is None else len(self.offsets) - 1

    @property
    def record_of(self) -> I64Array:
        """int64[m]: the record that each RecordId belongs to."""
        if self.offsets is None:
            return np.arange(len(self.roots), dtype=np.int64)
        return np.repeat(np.arange(len(self), dtype=np.int64), np.diff(self.offsets))

    def entries(self, records: I64Array) -> tuple[I64Array, I32Array | None]:
        """Find the RecordIds of ``records`` (int64[k], any order, repeated or not).

        Returns:
            The place of each in `roots`, int64[j], by records; and the offsets into them, int32[k + 1], or
            None where each record has one.
        """
        if self.offsets is None:
            return records, None
        sizes = np.diff(self.offsets)[records]
        offsets = np.zeros(len(records) + 1, np.int32)
        np.cumsum(sizes, out=offsets[1:])
        first = self.offsets[:-1][records].astype(np.int64)
        return np.repeat(first - offsets[:-1], sizes) + np.arange(offsets[-1], dtype=np.int64), offsets

    def take(self, records: I64Array) -> RecordIds:
        """Return the RecordIds of ``records`` (int64[k]), in that order."""
        places, offsets = self.entries(records)
        origins = None if self.origins is None else self.origins[places]
        tries = None if self.tries is None else self.tries[places]
        roots = self.roots[places]
        return RecordIds(
            roots, self.ids[places] if self.ids is not self.roots else roots, offsets, origins, tries
        )


def concat_record_ids(parts: Sequence[RecordIds]) -> RecordIds:
    """Return the records of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = None
    if any(part.offsets is not None for part in parts):
        counts = [_counts(part) for part in parts]
        offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(np.concatenate(counts), dtype=np.int32)])
    origins = None
    if any(part.origins is not None for part in parts):
        origins = np.concatenate([origins_of(part) for part in parts])
    roots = np.concatenate([part.roots for part in parts])
    alone = all(part.ids is part.roots for part in parts)
    return RecordIds(
        roots,
        roots if alone else np.concatenate([part.ids for part in parts]),
        offsets,
        origins,
        concat_tries([(part.tries, len(part.ids)) for part in parts]),
    )


def origins_of(lineage: RecordIds) -> U64Array:
    return lineage.roots if lineage.origins is None else lineage.origins


def _counts(lineage: RecordIds) -> I32Array:
    return np.ones(len(lineage), np.int32) if lineage.offsets is None else np.diff(lineage.offsets)
