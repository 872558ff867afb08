"""What the functions of a chain may ask of the lineage of a batch, and masks over it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftlayer.functions.current import UNTRACKED, CurrentRecord, Known, record_of
from ftlayer.functions.failures import I64
from ftlayer.handler.xor import origins_of
from ftlayer.records.ids import FIRST_TRY, U64Array, tries_or_first
from ftlayer.runtime.protocol.elements import RecordIds

BoolArray = npt.NDArray[np.bool_]


def ids_mask(lineage: RecordIds, records: BoolArray) -> BoolArray:
    """Return which RecordIds belong to the records of a mask bool[n]: bool[m]."""
    return records if lineage.offsets is None else np.repeat(records, np.diff(lineage.offsets))


@dataclass(frozen=True, slots=True)
class KnownOf:
    """`ftlayer.functions.current.Known` of a batch; of a record with several anchors, the one tried most often."""

    lineage: RecordIds

    def record(self, row: int) -> CurrentRecord:
        lineage = self.lineage
        first, last = (row, row + 1) if lineage.offsets is None else lineage.offsets[row : row + 2].tolist()
        # The attempt is in the high bits.
        worst = 0 if lineage.tries is None else int(np.argmax(lineage.tries[first:last]))
        tries = FIRST_TRY if lineage.tries is None else int(lineage.tries[first + worst])
        return record_of(tries, int(origins_of(lineage)[first + worst]))

    def tries(self, rows: I64) -> U64Array:
        lineage = self.lineage
        if lineage.tries is None:
            return tries_or_first(None, len(rows))
        if lineage.offsets is None:
            return lineage.tries[rows]
        return np.maximum.reduceat(lineage.tries, lineage.offsets[:-1])[rows]


def known_of(lineage: RecordIds | None) -> Known:
    """Return what the functions of a chain may ask of a batch's records."""
    return UNTRACKED if lineage is None else KnownOf(lineage)


def replayed(lineage: RecordIds) -> BoolArray:
    """Return which records come from a replay (by any of their anchors): bool[n]."""
    if lineage.origins is None:
        return np.zeros(len(lineage), np.bool_)
    again: BoolArray = lineage.origins != lineage.roots
    if lineage.offsets is None:
        return again
    result = np.zeros(len(lineage), np.bool_)
    result[lineage.record_of[again]] = True
    return result
