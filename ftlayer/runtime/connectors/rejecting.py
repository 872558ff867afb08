"""Rows that a writer refuses in barrier mode: they become dead letters, and it gets the others again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import LETTER_BYTES, ChainLetter, LetterKind
from ftlayer.common.failures import RowsRejected
from ftlayer.functions.failures import rejections_of
from ftlayer.records.failures import RowFailure
from ftlayer.records.ipc import as_stream, may_share, row_alone
from ftlayer.vertex.calls import Attempt


class RowRejections:
    """Makes letters of the rows that the writer of one subtask's sink refuses.

    A refused row is dead at once: it is part of a write that is to be whole with this checkpoint. Its letter has no
    checkpoint yet.
    """

    def __init__(
        self,
        uid: str,
        subtask: int,
        place: str,
        *,
        wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """``uid`` is the sink's, and its chain's; ``place`` says in words which process this is."""
        self._uid = uid
        self._subtask = subtask
        self._place = place
        self._wall_ms = wall_ms
        self._draw = draw

    def take_out(
        self, batches: Sequence[pa.RecordBatch], rejected: RowsRejected
    ) -> tuple[list[pa.RecordBatch], list[ChainLetter]]:
        """Return what is left of ``batches`` without the rows that ``rejected`` numbers, and letters of these.

        Rows are numbered from 0 through all batches. Raises `ConfigError` for none, and for a row that is not there:
        the writer would be called without end.
        """
        rows = sum(batch.num_rows for batch in batches)
        failures = {failure.row: failure for failure in rejections_of(rejected, rows, self._uid)}
        left: list[pa.RecordBatch] = []
        letters: list[ChainLetter] = []
        start = 0
        for batch in batches:
            mine = [number - start for number in failures if start <= number < start + batch.num_rows]
            letters += [self._letter(batch, row, failures[start + row]) for row in mine]
            start += batch.num_rows
            keep = np.ones(batch.num_rows, np.bool_)
            keep[mine] = False
            rest = batch.filter(pa.array(keep)) if mine else batch
            left += [rest] if rest.num_rows else []
        return left, letters

    def _letter(self, batch: pa.RecordBatch, row: int, failure: RowFailure) -> ChainLetter:
        alone = row_alone(batch, row, shares=may_share(batch.schema))
        now_ms = self._wall_ms()
        attempt = Attempt(1, now_ms, failure.reason, self._uid, self._place, failure.traceback)
        return ChainLetter(
            letter=self._draw(LETTER_BYTES),
            checkpoint=0,
            chain=self._uid,
            subtask=self._subtask,
            input=0,
            kind=LetterKind.ROW,
            operator=self._uid,
            key=b"",
            payload=as_stream(alone).to_pybytes(),
            event_time_ms=None,
            attempts=(attempt,),
            first_failed_ms=now_ms,
            died_ms=now_ms,
        )
