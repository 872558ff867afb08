"""Records that are acknowledged only when a sink has settled their rows."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

import numpy as np

from ftlayer.functions.chains.chain import RowFailure
from ftlayer.records.ids import NO_ROOTS, I64Array, U64Array
from ftlayer.runtime.protocol.elements import RecordIds
from ftlayer.runtime.task.contract import Settled
from ftlayer.runtime.task.lineages import BoolArray, ids_mask


@dataclass(slots=True)
class _BatchAtSink:
    """The records of one batch whose rows are at the sink.

    Attributes:
        lineage: of all records of the batch.
        row_record: int64[r], which record each row at the sink comes from.
        first_row: number of the first of these rows among all the rows the sink ever got.
        open: bool[n], neither done nor failed yet.
    """

    lineage: RecordIds
    row_record: I64Array
    first_row: int
    open: BoolArray

    @property
    def end_row(self) -> int:
        return self.first_row + len(self.row_record)


@dataclass(frozen=True, slots=True)
class Done:
    """Records of one batch that a sink has settled: which, and the failures of those that failed.

    ``failures`` count in records of the batch; a failed record is not among ``records``. No record is named
    twice, neither here nor in a later answer.
    """

    lineage: RecordIds
    records: I64Array
    failures: tuple[RowFailure, ...] = ()


@dataclass(slots=True)
class SettleQueue:
    """Maps what a sink says of its rows back to the records they come from.

    A record is done when all its rows are settled, and fails with the first of them that fails. ``held`` are
    the roots of the records that are still open, replaced with every change.
    """

    held: U64Array = field(default_factory=lambda: NO_ROOTS)
    _waiting: deque[_BatchAtSink] = field(default_factory=deque)
    _given: int = 0
    _settled: int = 0

    @property
    def given(self) -> int:
        """How many rows were added in all."""
        return self._given

    @property
    def settled(self) -> int:
        """How many of them the sink has settled."""
        return self._settled

    @property
    def empty(self) -> bool:
        """Whether the sink has settled all it was given."""
        return not self._waiting

    def add(self, lineage: RecordIds, row_record: I64Array, alive: I64Array) -> Done:
        """Take the records ``alive`` of a batch, whose rows go to the sink in this order, one a ``row_record``.

        Returns those that have no row there: they are done at once.
        """
        without_rows = np.zeros(len(lineage), np.bool_)
        without_rows[alive] = True
        without_rows[row_record] = False
        if len(row_record):
            is_open = np.zeros(len(lineage), np.bool_)
            is_open[row_record] = True
            self._waiting.append(_BatchAtSink(lineage, row_record, self._given, is_open))
            self._given += len(row_record)
            self._publish()
        return Done(lineage, np.flatnonzero(without_rows))

    def settle(self, settled: Settled) -> list[Done]:
        """Take what the sink said; return what is done by it, batch by batch."""
        failures = [
            (self._settled + failure.row, failure)
            for failure in sorted(settled.failures, key=lambda failure: failure.row)
        ]
        self._settled += settled.rows
        if self._settled > self._given:
            raise ValueError(f"the sink settled {self._settled} rows and was given {self._given}")
        if not settled.rows:
            return []
        done = []
        while self._waiting and self._waiting[0].first_row < self._settled:
            waiting = self._waiting[0]
            mine = []
            while failures and failures[0][0] < waiting.end_row:
                mine.append(failures.pop(0))
            done.append(self._settle_batch(waiting, mine))
            if waiting.end_row > self._settled:
                break
            self._waiting.popleft()
        self._publish()
        return done

    def _settle_batch(self, waiting: _BatchAtSink, failures: list[tuple[int, RowFailure]]) -> Done:
        failed = []
        for row, failure in failures:
            record = int(waiting.row_record[row - waiting.first_row])
            if waiting.open[record]:
                waiting.open[record] = False
                failed.append(replace(failure, row=record))
        finished = waiting.open.copy()
        finished[waiting.row_record[self._settled - waiting.first_row :]] = False
        waiting.open &= ~finished
        return Done(waiting.lineage, np.flatnonzero(finished), tuple(failed))

    def _publish(self) -> None:
        parts = []
        for waiting in self._waiting:
            parts.append(waiting.lineage.roots[ids_mask(waiting.lineage, waiting.open)])
        self.held = np.concatenate(parts) if parts else NO_ROOTS
