"""`AssignWatermarks` in a task: the times of records, and what follows from them for the watermark."""

from __future__ import annotations

import pyarrow as pa

from ftlayer.records.ids import I64Array
from ftlayer.runtime.protocol.elements import MAX_TIME_MS, MIN_TIME_MS, Idle, Watermark
from ftlayer.runtime.task.lineages import BoolArray
from ftlayer.topology.operators import AssignWatermarks

_PER_MS = {"us": 1_000, "ns": 1_000_000}


def times_of(column: pa.Array) -> tuple[I64Array, BoolArray | None]:
    """Return the times of a timestamp column, or of one of int64 milliseconds.

    Returns:
        int64[n], milliseconds since 1970, rounded down (a null's is any number); and bool[n], which are null,
        or None where none is.
    """
    nulls = column.is_null().to_numpy(zero_copy_only=False) if column.null_count else None
    whole = column.cast(pa.int64())
    numbers: I64Array = (whole if nulls is None else whole.fill_null(0)).to_numpy()
    if pa.types.is_timestamp(column.type):
        if column.type.unit == "s":
            numbers = numbers * 1_000
        elif column.type.unit != "ms":
            numbers = numbers // _PER_MS[column.type.unit]
    return numbers, nulls


class WatermarkGenerator:
    """The watermark behind one `AssignWatermarks`: bounded disorder, idleness by processing time.

    ``time_ms`` is the watermark; `MAX_TIME_MS` once the inputs have ended.
    """

    def __init__(self, operator: AssignWatermarks) -> None:
        self.operator = operator
        self.time_ms = MIN_TIME_MS
        self._disorder = operator.out_of_orderness_ms
        self._idle_ms = operator.idle_ms
        self._idle = False
        self._last_ms = 0
        self._untold = False

    def start(self, mono_ms: int) -> None:
        """Begin to wait for records."""
        self._last_ms = mono_ms

    def observe(self, times: I64Array, fresh: bool, mono_ms: int) -> None:
        """Note the times of records that came.

        Replays alone (not ``fresh``) may raise the watermark, as they would have on their first way, but they
        do not end idleness: an old record must not make others wait.
        """
        if not len(times):
            return
        highest = max(int(times.max()) - self._disorder, MIN_TIME_MS)
        advanced = highest > self.time_ms
        if advanced:
            self.time_ms = highest
        if fresh:
            self._last_ms = mono_ms
        if advanced or (fresh and self._idle):
            self._untold = True
            self._idle = False

    def end(self) -> None:
        """Nothing new comes any more."""
        self.time_ms = MAX_TIME_MS
        self._untold = True
        self._idle = False

    def mark(self, mono_ms: int) -> Watermark | Idle | None:
        """Return what is to be said now, once; None: nothing."""
        if self._untold:
            self._untold = False
            return Watermark(self.time_ms)
        due = self.due_ms
        if due is not None and mono_ms >= due:
            self._idle = True
            return Idle()
        return None

    @property
    def due_ms(self) -> int | None:
        """The monotone time (ms) at which this becomes idle; None: never."""
        if self._idle_ms is None or self._idle or self.time_ms == MAX_TIME_MS:
            return None
        return self._last_ms + self._idle_ms
