"""Records that come by callback: whoever pushes them waits until they are persisted."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.errors import SourceError
from ftlayer.functions.conversion import concat, text_of
from ftlayer.runtime.connectors.lane import BATCH_BYTES, BatchLimits
from ftlayer.runtime.connectors.rows import RowMaker, slices
from ftlayer.runtime.messages import AssignSplits, SplitDone
from ftlayer.runtime.task.contract import SourceRows
from ftlayer.stream.operators import PushSource, Source


class _Push:
    """One call of ``push``; over when all its rows are accepted, or with an error."""

    def __init__(self, rows: int) -> None:
        self.missing = rows
        self.error: SourceError | None = None
        self.over = threading.Event()

    def accepted(self, rows: int) -> None:
        self.missing -= rows
        if not self.missing:
            self.over.set()

    def fail(self, error: SourceError) -> None:
        self.error = error
        self.over.set()


@dataclass(frozen=True)
class _Part:
    """Rows of one push that travel together."""

    push: _Push
    payload: pa.RecordBatch


class PushReader:
    """A subtask of a `PushSource`. Pushes of several threads travel together while the loop is busy.

    What was pushed cannot be had again: there are no positions. A push that was not answered when its slot got
    lost may have been persisted or not.
    """

    def __init__(self, source: Source, subtask: int, limits: BatchLimits, wake: Callable[[], None]) -> None:
        assert isinstance(source.connector, PushSource)
        self._uid = source.uid
        self._subtask = subtask
        self._start = source.connector.start
        self._maker = RowMaker(source.uid, source.schema)
        self._schema = source.schema
        self._limits = limits
        self._wake = wake
        # Another instance of this subtask numbers other records: its roots must not be these.
        self._number = secrets.randbits(48)
        self._rows = 0
        self._lock = threading.Lock()
        self._waiting: deque[_Part] = deque()
        self._taken: dict[int, list[_Part]] = {}
        self._refusal: SourceError | None = None
        self._failure: SourceError | None = None
        self._stopper: Callable[[], None] | None = None

    def start(self) -> None:
        """See `SourceReader.start`. The user's function runs in a thread: it may stay in it and push."""
        self._in_thread(self._run)

    def assign(self, splits: AssignSplits) -> None:
        """See `SourceReader.assign`."""
        raise SourceError(f"source {self._uid!r} is pushed to and was assigned a reader's splits")

    def take(self, mono_ms: int) -> SourceRows | None:
        """See `SourceReader.take`."""
        with self._lock:
            parts = list(self._next_parts())
            if parts:
                first, rows = self._rows, sum(part.payload.num_rows for part in parts)
                self._rows += rows
                self._taken[first] = parts
            elif self._failure is not None:
                raise self._failure
            else:
                return None
        payload = concat([part.payload for part in parts], self._schema)
        return SourceRows(f"push-{self._subtask}", self._number, first, payload, None)

    @property
    def due_ms(self) -> int | None:
        """See `SourceReader.due_ms`; nothing waits for others."""
        return None

    def accepted(self, rows: SourceRows) -> SplitDone | None:
        """See `SourceReader.accepted`; whose rows are all accepted may go on."""
        for part in self._taken.pop(rows.first_ordinal):
            part.push.accepted(part.payload.num_rows)
        return None

    @property
    def ended(self) -> bool:
        """See `SourceReader.ended`."""
        with self._lock:
            return self._refusal is not None and self._failure is None and not self._waiting

    def finish(self) -> None:
        """See `SourceReader.finish`. Who pushes from here on gets a `SourceError`."""
        self._refuse(SourceError(f"source {self._uid!r} has been told to end: nothing was taken"))

    def stop(self) -> None:
        """See `SourceReader.stop`. Pushes that wait get a `SourceError`: their records may be persisted or not."""
        self._refuse(SourceError(f"source {self._uid!r} has ended: nothing was taken"))
        with self._lock:
            waiting, taken = list(self._waiting), list(itertools.chain(*self._taken.values()))
            self._waiting.clear()
            self._taken.clear()
        lost = SourceError(
            f"source {self._uid!r} ended before these records were known to be persisted; they may be or not"
        )
        for part in (*waiting, *taken):
            part.push.fail(lost)

    # ------------------------------------------------------------ the user's threads

    def push(self, records: list[Any]) -> None:
        """Have records persisted; returns once they are. All of them fit the schema, or none is taken.

        Raises `SourceError` for records that do not fit, and when the source ends.
        """
        if not records:
            return
        batch = self._maker.batch(records)
        push = _Push(batch.num_rows)
        with self._lock:
            if self._refusal is not None:
                raise self._refusal
            parts = slices(batch, self._limits.rows, BATCH_BYTES)
            self._waiting.extend(_Part(push, part) for part in parts)
        self._wake()
        push.over.wait()
        if push.error is not None:
            raise push.error

    def _run(self) -> None:
        try:
            stopper = self._start(self.push)
        except BaseException as error:  # noqa: BLE001 - the loop raises it; a thread's end would not be seen
            failure = SourceError(
                f"source {self._uid!r} cannot be started: {type(error).__name__}: {text_of(error)}"
            )
            failure.__cause__ = error
            with self._lock:
                if self._refusal is None:
                    self._refusal = self._failure = failure
            self._wake()
            return
        with self._lock:
            late = self._refusal is not None
            self._stopper = None if late else stopper
        if late and stopper is not None:
            stopper()

    # ------------------------------------------------------------ the loop's thread

    def _next_parts(self) -> Iterator[_Part]:
        """Take parts that have room in one batch, the first in any case."""
        rows = size = 0
        while self._waiting:
            payload = self._waiting[0].payload
            rows += payload.num_rows
            size += payload.nbytes
            if rows > payload.num_rows and (rows > self._limits.rows or size > BATCH_BYTES):
                return
            yield self._waiting.popleft()

    def _refuse(self, refusal: SourceError) -> None:
        with self._lock:
            if self._refusal is None:
                self._refusal = refusal
            stopper, self._stopper = self._stopper, None
        self._wake()
        if stopper is not None:
            # It may wait for a push that waits for the loop.
            self._in_thread(stopper)

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"ftlayer-{self._uid}-{self._subtask}", daemon=True).start()
