"""A queue's messages as a source of a slot: one thread fetches and acknowledges."""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ftlayer.errors import SourceError
from ftlayer.printable import text_of
from ftlayer.runtime.connectors.lane import BATCH_BYTES, READY_BATCHES, BatchLimits
from ftlayer.runtime.connectors.positions import PositionChain, partition_index, partition_key
from ftlayer.runtime.protocol.messages import AssignSplits
from ftlayer.runtime.task.events import SourceRows, TakenRows
from ftlayer.topology.operators import QueueSource, Source
from ftlayer.topology.queues import Fetched, Member, QueueReader
from ftlayer.vertex.calls import SourcePosition

LAG_EVERY_S = 5.0
"""The queue is asked so often how many messages wait."""

WAIT_S = 0.1
"""A fetch waits this long for messages, and acknowledgements for it, unless `QueueReader.wake_up` ends it."""

# How many messages are fetched before their size is known, and how much more each time until it is.
_FIRST_ROWS = 16
_GROWTH = 4


class QueueSourceReader:
    """`SourceReader` of a `QueueSource`. Rows that are accepted are acknowledged by the thread that fetched them.

    Accepted means: the vertex has them, or a checkpoint that is complete.
    """

    due_ms: int | None = None
    """See `SourceReader.due_ms`; nothing waits for others."""
    lag: int | None = None
    """See `SourceReader.lag`."""
    is_away = True
    """See `SourceReader.is_away`."""

    def __init__(
        self,
        source: Source,
        member: Member,
        positions: Mapping[str, bytes],
        limits: BatchLimits,
        wake: Callable[[], None],
        *,
        stored: bool,
    ) -> None:
        """``stored``: see `Queue.open`."""
        assert isinstance(source.connector, QueueSource)
        self._uid = source.uid
        self._queue = source.connector.queue
        self._member = member
        self._stored = stored
        by_subtask = {partition_index(key): position for key, position in positions.items()}
        self._positions = {
            subtask: position for subtask, position in by_subtask.items() if member.reads_for(subtask)
        }
        self._chain = PositionChain(positions)
        self._limits = limits
        self._wake = wake
        # Another instance of this subtask numbers other records: its roots must not be these.
        self._number = secrets.randbits(48)
        self._rows = 0
        self._next_rows = _FIRST_ROWS
        self._unacknowledged: dict[SourcePosition, Any] = {}
        self._reader: QueueReader | None = None
        # Guards what follows.
        self._changed = threading.Condition()
        self._ready: deque[Fetched] = deque()
        self._accepted: list[Any] = []
        self._failure: BaseException | None = None
        self._fetches = True
        self._closed = False

    # ------------------------------------------------------------ the loop's thread

    def start(self) -> None:
        threading.Thread(
            target=self._run, name=f"ftlayer-{self._uid}-{self._member.subtask}", daemon=True
        ).start()

    def assign(self, splits: AssignSplits) -> None:
        raise SourceError(f"source {self._uid!r} is a queue and was assigned a reader's splits")

    def take(self, mono_ms: int) -> SourceRows | None:
        with self._changed:
            if not self._ready:
                if self._failure is not None:
                    raise self._failed(self._failure)
                return None
            fetched = self._ready.popleft()
            first = self._rows
            self._rows += fetched.rows.num_rows
            self._changed.notify()
        position = self._chain.advance(partition_key(fetched.of), fetched.position)
        self._unacknowledged[position] = fetched.receipt
        return SourceRows(position.partition, self._number, first, fetched.rows, position)

    def accepted(self, rows: TakenRows) -> None:
        assert rows.position is not None
        receipt = self._unacknowledged.pop(rows.position)
        with self._changed:
            self._accepted.append(receipt)
            self._changed.notify()
        if self._reader is not None:
            self._reader.wake_up()

    @property
    def ended(self) -> bool:
        with self._changed:
            return not self._fetches and not self._ready and self._failure is None

    def finish(self) -> None:
        """See `SourceReader.finish`. What is accepted from here on is acknowledged still."""
        with self._changed:
            self._fetches = False
            self._changed.notify()

    def stop(self) -> None:
        """See `SourceReader.stop`. What was accepted is acknowledged behind this; all else comes again."""
        with self._changed:
            self._closed, self._fetches = True, False
            self._ready.clear()
            self._failure = None
            self._changed.notify()

    def abandon(self) -> None:
        """See `SourceReader.abandon`. The next reader acknowledges what is accepted from here on."""
        self.stop()

    def _failed(self, error: BaseException) -> SourceError:
        if isinstance(error, SourceError):
            return error
        failure = SourceError(
            f"source {self._uid!r} cannot be read on: {type(error).__name__}: {text_of(error)}"
        )
        failure.__cause__ = error
        return failure

    # ------------------------------------------------------------ the reader's thread

    def _run(self) -> None:
        try:
            reader = self._queue.open(self._member, self._positions, stored=self._stored)
            self._reader = reader
            try:
                self._read(reader)
            finally:
                reader.close()
        except BaseException as error:  # noqa: BLE001 - the loop raises it; a thread's end would not be seen
            with self._changed:
                # What a reader raises that is not read on is of no interest.
                if not self._closed:
                    self._failure = error
        self._wake()

    def _read(self, reader: QueueReader) -> None:
        lag_at = time.monotonic()
        while True:
            fetches, receipts = self._next(lag_at)
            self.is_away = reader.is_away
            if time.monotonic() >= lag_at:
                waiting = reader.waiting()
                # What it knew before has changed since.
                self.lag = None if reader.is_away else waiting
                lag_at = time.monotonic() + LAG_EVERY_S
            if receipts:
                reader.acknowledge(receipts)
            elif self._closed:
                return
            if fetches and (fetched := reader.fetch(self._next_rows, WAIT_S)) is not None:
                self._put(fetched)

    def _next(self, at: float) -> tuple[bool, list[Any]]:
        """Wait until there is something to do, or the monotone time (s): whether to fetch, and what to acknowledge."""
        with self._changed:
            while not (self._closed or self._accepted or self._has_room or time.monotonic() >= at):
                self._changed.wait(max(0.0, at - time.monotonic()))
            receipts, self._accepted = self._accepted, []
            return self._has_room, receipts

    @property
    def _has_room(self) -> bool:
        return self._fetches and len(self._ready) < READY_BATCHES

    def _put(self, fetched: Fetched) -> None:
        size = max(1, fetched.rows.nbytes)
        fitting = max(1, BATCH_BYTES * fetched.rows.num_rows // size)
        self._next_rows = min(self._limits.rows, self._next_rows * _GROWTH, fitting)
        with self._changed:
            if self._closed:
                return
            idle = not self._ready
            self._ready.append(fetched)
        if idle:
            self._wake()
