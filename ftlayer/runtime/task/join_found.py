"""The rows that a batch of one side of a join has found in the other side's buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from ftlayer.records.ids import I64Array, U64Array
from ftlayer.runtime.task.join_buffer import JoinRows, Run, concat_rows, same_keys


@dataclass(frozen=True)
class Found:
    """Pairs of rows with equal keys.

    Attributes:
        mine: int64[n], the batch's row of each pair, ascending.
        theirs: int64[n], the other side's row of each, as a place in ``rows``.
        rows: the other side's rows that were found.
        parts: where these lie: runs, and rows of each, one after the other.
    """

    mine: I64Array
    theirs: I64Array
    rows: JoinRows
    parts: tuple[tuple[Run, I64Array], ...]

    @classmethod
    def of(
        cls,
        columns: Sequence[pa.Array],
        their_keys: tuple[str, ...],
        met: list[tuple[Run, I64Array, I64Array]],
    ) -> Found:
        """Sort out the pairs that have just the key's hash in common.

        Args:
            columns: the key's columns in the batch.
            their_keys: the names of the other side's.
            met: what `JoinBuffer.matches` gave: at least one run.
        """
        mine: list[I64Array] = []
        theirs: list[I64Array] = []
        parts: list[tuple[Run, I64Array]] = []
        count = 0
        for run, my_rows, their_rows in met:
            same = same_keys(columns, my_rows, run.keys(their_keys), their_rows)
            rows, places = np.unique(their_rows[same], return_inverse=True)
            mine.append(my_rows[same])
            theirs.append(places + count)
            parts.append((run, rows))
            count += len(rows)
        order = np.argsort(np.concatenate(mine), kind="stable")
        # Rows of replays lie beside others: how long they are held is of no interest here.
        taken = concat_rows([replace(run.rows.take(rows), hold_until=None) for run, rows in parts])
        return cls(np.concatenate(mine)[order], np.concatenate(theirs)[order], taken, tuple(parts))

    def kill(self, places: list[int]) -> None:
        """Take some of the ``rows`` out of the buffer."""
        gone = np.zeros(len(self.rows), np.bool_)
        gone[places] = True
        start = 0
        for run, rows in self.parts:
            run.kill(rows[gone[start : start + len(rows)]])
            start += len(rows)

    def owe(self, owed: U64Array) -> None:
        """Add to what the ``rows`` owe: ``owed`` has a value for each of their RecordIds."""
        start = 0
        for run, rows in self.parts:
            if run.rows.owed is not None and run.rows.lineage is not None:
                places, _ = run.rows.lineage.entries(rows)
                run.rows.owed[places] ^= owed[start : start + len(places)]
                start += len(places)
