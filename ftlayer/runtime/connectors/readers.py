"""Readers of sources beside the slot's loop: threads that run the user's blocking iterators."""

from __future__ import annotations

import hashlib
import itertools
import json
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.common.checks import check_ran, shown
from ftlayer.common.clock import mono_ms
from ftlayer.common.printable import described
from ftlayer.config import MIB
from ftlayer.errors import SourceError, SourceRowError
from ftlayer.functions.conversion import concat, schema_text
from ftlayer.runtime.connectors.lane import (
    BATCH_BYTES,
    READY_BATCHES,
    BatchLimits,
    Misfit,
    OpenSplits,
    PartitionLane,
    RowMaker,
    SparkRowMaker,
    SplitProgress,
    skipped,
    slices,
)
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    SplitPosition,
    pack_rows,
    partition_index,
    partition_key,
    read_split,
    unpack_rows,
    unpack_split,
)
from ftlayer.runtime.protocol.messages import NAMED_SPLIT, AssignSplits, Split, SplitDone, Splits, unseal
from ftlayer.runtime.task.actions import SourceRows, TakenRows
from ftlayer.topology import operators
from ftlayer.vertex.calls import SourcePosition


class SourceReader(Protocol):
    """One subtask of a source, for the slot's loop. All methods belong to the loop's thread, and none blocks."""

    def start(self) -> None: ...

    def assign(self, splits: AssignSplits) -> None:
        """Read these splits too (reader sources). Those it has already are not read twice."""

    def take(self, mono_ms: int) -> SourceRows | None:
        """Return rows that are to be persisted now, None if there are none (call again when woken, or `due_ms`).

        Rows of one partition come in order, and their positions are a chain: persist them in this order. A
        batch without rows says that a split has ended; its position is persisted all the same. Raises
        `SourceError` once what was read before the error is taken.
        """

    @property
    def due_ms(self) -> int | None:
        """The monotone time (ms) at which `take` has something, if nothing wakes the loop before; None: unknown."""
        return None

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        """Rows that were taken need not be read again: the vertex has accepted them (or they were emitted).

        In barrier mode that is when they are emitted, and for a `QueueSource` when a checkpoint is complete that has
        them. Rows of a partition are accepted in their order.
        """
        return None

    @property
    def lag(self) -> int | None:
        """How many records of its system were not read lately; None if that is not known here."""
        return None

    @property
    def is_away(self) -> bool:
        """Whether its system could not be reached the last time, or has not been yet."""
        return False

    @property
    def ended(self) -> bool:
        """Whether everything was taken and nothing comes any more."""

    def finish(self) -> None:
        """Read no further; what is read can still be taken."""

    def stop(self) -> None:
        """End now; what was not taken is forgotten. Threads that block in the user's code end when it returns."""

    def abandon(self) -> None:
        """It has failed: read no further, as after `stop`. What was taken can still be accepted; it has `ended`."""
        self.stop()


MAX_WAITING_BYTES = 16 * MIB
"""Records that wait for the loop; beyond that `PushReader.push_async` waits too."""


class _Pushed:
    """The records of one call; ``over`` is done when all of them are accepted, or raises."""

    def __init__(self, rows: int) -> None:
        self._missing = rows
        self.over: Future[None] = Future()
        # Else it could be cancelled, and what is on its way cannot.
        self.over.set_running_or_notify_cancel()

    def accepted(self, rows: int) -> None:
        self._missing -= rows
        if not self._missing:
            self.over.set_result(None)

    def fail(self, error: SourceError) -> None:
        # Its other parts may have done so.
        if not self.over.done():
            self.over.set_exception(error)


@dataclass(frozen=True)
class _PushedBatch:
    pushed: _Pushed
    payload: pa.RecordBatch


class PushReader(SourceReader):
    """A subtask of a `PushSource`. Pushes of several threads travel together while the loop is busy.

    There are no positions: a push that was not answered when its slot got lost may have been persisted or not.
    """

    def __init__(
        self, source: operators.Source, subtask: int, limits: BatchLimits, wake: Callable[[], None]
    ) -> None:
        assert isinstance(source.connector, operators.PushSource)
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
        self._changed = threading.Condition()
        self._waiting: deque[_PushedBatch] = deque()
        self._waiting_bytes = 0
        self._pushed_rows = 0
        self._taken: dict[int, list[_PushedBatch]] = {}
        self._refusal: SourceError | None = None
        self._failure: SourceError | None = None
        self._stopper: Callable[[], None] | None = None

    def start(self) -> None:
        """The user's function runs in a thread: it may stay in it and push."""
        self._in_thread(self._run)

    def assign(self, splits: AssignSplits) -> None:
        raise SourceError(f"source {self._uid!r} is pushed to and was assigned a reader's splits")

    def take(self, mono_ms: int) -> SourceRows | None:
        with self._changed:
            parts = list(self._next_parts())
            if parts:
                first, rows = self._rows, sum(part.payload.num_rows for part in parts)
                self._rows += rows
                self._taken[first] = parts
                self._waiting_bytes -= sum(part.payload.nbytes for part in parts)
                self._changed.notify_all()
            elif self._failure is not None:
                raise self._failure
            else:
                return None
        payload = concat([part.payload for part in parts], self._schema)
        return SourceRows(f"push-{self._subtask}", self._number, first, payload, None)

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        for part in self._taken.pop(rows.first_ordinal):
            part.pushed.accepted(part.payload.num_rows)
        return None

    @property
    def ended(self) -> bool:
        with self._changed:
            return self._refusal is not None and self._failure is None and not self._waiting

    def finish(self) -> None:
        self._refuse(SourceError(f"source {self._uid!r} has been told to end: nothing was taken"))

    def stop(self) -> None:
        """Pushes that wait get a `SourceError`: their records may be persisted or not."""
        self._refuse(SourceError(f"source {self._uid!r} has ended: nothing was taken"))
        with self._changed:
            waiting, taken = list(self._waiting), list(itertools.chain(*self._taken.values()))
            self._waiting.clear()
            self._taken.clear()
        lost = SourceError(
            f"source {self._uid!r} ended before these records were known to be persisted; they may be or not"
        )
        for part in (*waiting, *taken):
            part.pushed.fail(lost)

    def abandon(self) -> None:
        """Pushes of other threads are answered as they are accepted."""
        with self._changed:
            self._failure = None

    def __call__(self, records: list[Any]) -> None:
        self.push_async(records).result()

    def push_async(self, records: list[Any]) -> Future[None]:
        if not isinstance(records, list | tuple):
            raise SourceRowError(
                f"source {self._uid!r}: push takes a list of records of its schema ({schema_text(self._schema)}), got "
                f"{shown(records)}"
            )
        batch = self._maker.batch(records) if records else self._maker.empty()
        pushed = _Pushed(batch.num_rows)
        with self._changed:
            while self._waiting_bytes > MAX_WAITING_BYTES and self._refusal is None:
                self._changed.wait()
            if self._refusal is not None:
                raise self._refusal
            if not records:
                pushed.accepted(0)
                return pushed.over
            parts = [_PushedBatch(pushed, part) for part in slices(batch, self._limits.rows, BATCH_BYTES)]
            self._waiting.extend(parts)
            self._waiting_bytes += sum(part.payload.nbytes for part in parts)
            self._pushed_rows += batch.num_rows
        self._wake()
        return pushed.over

    def _run(self) -> None:
        try:
            stopper = self._start(self)
            check_ran(stopper, "it")
        except BaseException as error:  # noqa: BLE001 - the loop raises it; a thread's end would not be seen
            self._fail(error)
            return
        with self._changed:
            late = self._refusal is not None
            self._stopper = None if late else stopper
        if late and stopper is not None:
            stopper()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            when = f"after {self._pushed_rows} records" if self._pushed_rows else "before its first record"
            failure = SourceError(f"source {self._uid!r}: its listener raised {when}: {described(error)}")
            failure.__cause__ = error
            if self._refusal is None:
                self._refusal = self._failure = failure
            self._changed.notify_all()
        self._wake()

    def _next_parts(self) -> Iterator[_PushedBatch]:
        rows = size = 0
        while self._waiting:
            payload = self._waiting[0].payload
            rows += payload.num_rows
            size += payload.nbytes
            if rows > payload.num_rows and (rows > self._limits.rows or size > BATCH_BYTES):
                return
            yield self._waiting.popleft()

    def _refuse(self, refusal: SourceError) -> None:
        with self._changed:
            if self._refusal is None:
                self._refusal = refusal
            self._changed.notify_all()
            stopper, self._stopper = self._stopper, None
        self._wake()
        if stopper is not None:
            # It may wait for a push that waits for the loop.
            self._in_thread(stopper)

    def _in_thread(self, work: Callable[[], None]) -> None:
        threading.Thread(target=work, name=f"ftlayer-{self._uid}-{self._subtask}", daemon=True).start()


LAG_EVERY_S = 5.0
"""The queue is asked so often how many messages wait."""

WAIT_S = 0.1
"""A fetch waits this long for messages, and acknowledgements for it, unless `QueueReader.wake_up` ends it."""

# How many messages are fetched before their size is known, and how much more each time until it is.
_FIRST_ROWS = 16
_GROWTH = 4


class QueueSourceReader(SourceReader):
    """Of a `QueueSource`. Rows that are accepted are acknowledged by the thread that fetched them.

    Accepted means: the vertex has them, or a checkpoint that is complete.
    """

    lag: int | None = None
    is_away = True

    def __init__(
        self,
        source: operators.Source,
        member: operators.Member,
        positions: Mapping[str, bytes],
        limits: BatchLimits,
        wake: Callable[[], None],
        *,
        stored: bool,
    ) -> None:
        """``stored``: see `Queue.open`."""
        assert isinstance(source.connector, operators.QueueSource)
        self._uid = source.uid
        self._queue = source.connector.queue
        self._schema = source.schema
        self._maker = RowMaker(source.uid, source.schema)
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
        self._reader: operators.QueueReader | None = None
        # Guards what follows.
        self._changed = threading.Condition()
        self._ready: deque[operators.Fetched] = deque()
        self._accepted: list[Any] = []
        self._failure: BaseException | None = None
        self._fetches = True
        self._closed = False

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
            self._changed.notify()
        first = self._rows
        self._rows += fetched.rows.num_rows
        position = self._chain.advance(partition_key(fetched.of), fetched.position)
        self._unacknowledged[position] = fetched.receipt
        made = self._maker.checked(fetched.rows)
        misfits = [part for part in made if isinstance(part, Misfit)]
        fitting = [part for part in made if isinstance(part, pa.RecordBatch)]
        payload = fitting[0] if len(fitting) == 1 else concat(fitting, self._schema)
        rows = SourceRows(position.partition, self._number, first, payload, position)
        of = f"a row of split {position.partition!r}: "
        if misfits and not self._limits.keeps_misfits:
            raise SourceRowError(of + misfits[0].reason)
        aside = [
            replace(rows, first_ordinal=at, payload=odd.payload, position=None, misfit=of + odd.reason)
            for at, odd in enumerate(misfits, first + payload.num_rows)
        ]
        return replace(rows, aside=tuple(aside)) if aside else rows

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
        """What is accepted from here on is acknowledged still."""
        with self._changed:
            self._fetches = False
            self._changed.notify()

    def stop(self) -> None:
        """What was accepted, or is yet, is acknowledged behind this; all else comes again."""
        with self._changed:
            self._closed, self._fetches = True, False
            self._ready.clear()
            self._failure = None
            self._changed.notify()

    def _failed(self, error: BaseException) -> SourceError:
        if isinstance(error, SourceError):
            return error
        failure = SourceError(f"source {self._uid!r} cannot be read on: {described(error)}")
        failure.__cause__ = error
        return failure

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

    def _read(self, reader: operators.QueueReader) -> None:
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

    def _put(self, fetched: operators.Fetched) -> None:
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


MOST_IN_TURN = 16
"""A subtask reads as many splits of a range in turns; another one begins when one ends. Each may need a connection."""

# Splits of one range; with the number of the range above it, a split's number is unique in a source.
_SPLIT_BITS = 20

_END = object()


class IterableReader(SourceReader):
    """A subtask of an `IterableSource`: partitions i with i % parallelism == subtask, a thread and a lane each."""

    def __init__(
        self,
        source: operators.Source,
        subtask: int,
        parallelism: int,
        positions: Mapping[str, bytes],
        limits: BatchLimits,
        wake: Callable[[], None],
        clock: Callable[[], int] = mono_ms,
    ) -> None:
        assert isinstance(source.connector, operators.IterableSource)
        self._source = source
        self._partitions, self._step = source.connector.partitions, source.connector.step
        self._chain = PositionChain(positions)
        self._positions = positions
        maker = RowMaker(source.uid, source.schema)
        # One that was read before and is not there any more is read too: it has fewer records now.
        last = max((partition_index(key) + 1 for key in positions), default=0)
        mine = range(subtask, max(len(self._partitions), last), parallelism)
        self._lanes = [(index, PartitionLane(maker, limits, clock, wake)) for index in mine]
        self._next = 0

    def start(self) -> None:
        for index, lane in self._lanes:
            _start_thread(f"{self._source.uid}-{index}", lane, partial(self._read, index, lane))

    def assign(self, splits: AssignSplits) -> None:
        raise SourceError(f"source {self._source.uid!r} is an iterable and was assigned a reader's splits")

    def take(self, mono_ms: int) -> SourceRows | None:
        for turn in range(len(self._lanes)):
            place = (self._next + turn) % len(self._lanes)
            mine, lane = self._lanes[place]
            rows = _take(self._source.uid, lane, mono_ms)
            if rows is not None:
                self._next = place + 1
                going_on = (index for index, lane in self._lanes if index == mine or not lane.ended)
                return replace(rows, splits=Splits(tuple(going_on)))
        return None

    @property
    def due_ms(self) -> int | None:
        return min((due for _, lane in self._lanes if (due := lane.due_ms) is not None), default=None)

    @property
    def ended(self) -> bool:
        return all(lane.ended for _, lane in self._lanes)

    def finish(self) -> None:
        for _, lane in self._lanes:
            lane.close(discard=False)

    def stop(self) -> None:
        for _, lane in self._lanes:
            lane.close(discard=True)

    def _read(self, index: int, lane: PartitionLane) -> None:
        rows = unpack_rows(self._source.uid, self._positions, index, self._step)
        split = SplitProgress(
            partition_key(index),
            index,
            rows,
            self._chain,
            lambda rows, done: pack_rows(rows, self._step),
            tells_done=False,
        )
        items = iter(self._partitions[index]() if index < len(self._partitions) else ())
        lane.pump(skipped(items, rows, f"source {self._source.uid!r}: partition {index}"), split)


class SplitReader(SourceReader):
    """A subtask of a `ReaderSource`: reads the splits that it is assigned in turns, range by range."""

    def __init__(
        self,
        source: operators.Source,
        subtask: int,
        parallelism: int,
        positions: Mapping[str, bytes],
        key: bytes,
        limits: BatchLimits,
        wake: Callable[[], None],
        clock: Callable[[], int] = mono_ms,
    ) -> None:
        assert isinstance(source.connector, operators.ReaderSource)
        self._uid = source.uid
        self._subtask, self._parallelism = subtask, parallelism
        self._reader = source.connector.reader
        # That of a `LogReader`.
        self._offset_column: str = getattr(self._reader, "offset_column", "")
        self._key = key
        self._chain = PositionChain(positions)
        maker = SparkRowMaker(source.uid, source.schema, self._offset_column)
        self._lane = PartitionLane(maker, limits, clock, wake)
        self._todo: queue.SimpleQueue[AssignSplits | None] = queue.SimpleQueue()
        self._known: tuple[int, set[int]] = (-1, set())

    def start(self) -> None:
        _start_thread(f"{self._uid}-{self._subtask}", self._lane, self._read_all)

    def assign(self, splits: AssignSplits) -> None:
        """A message that says there are no splits (`splits` 0) ends the source."""
        if splits.range.splits == 0:
            self._todo.put(None)
            return
        if self._known[0] != splits.range.number:
            self._known = splits.range.number, set()
        new = tuple(split for split in splits.mine if split.number not in self._known[1])
        if new:
            self._known[1].update(split.number for split in new)
            self._todo.put(replace(splits, mine=new))

    def take(self, mono_ms: int) -> SourceRows | None:
        return _take(self._uid, self._lane, mono_ms)

    @property
    def due_ms(self) -> int | None:
        return self._lane.due_ms

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        assert rows.position is not None
        position = unpack_split(self._uid, rows.position.end)
        if not position.done:
            return None
        return SplitDone(self._uid, position.range.number, rows.number & ((1 << _SPLIT_BITS) - 1))

    @property
    def ended(self) -> bool:
        return self._lane.ended

    def finish(self) -> None:
        self._lane.close(discard=False)
        self._todo.put(None)

    def stop(self) -> None:
        self._lane.close(discard=True)
        self._todo.put(None)

    def _read_all(self) -> None:
        while (todo := self._todo.get()) is not None:
            self._read(todo)

    def _read(self, assigned: AssignSplits) -> None:
        waiting = (self._lane.pieces(*begun) for begun in self._progress(assigned))
        reading = deque(islice(waiting, MOST_IN_TURN))
        while reading:
            pieces = reading.popleft()
            if next(pieces, _END) is not _END:
                reading.append(pieces)
            else:
                reading.extend(islice(waiting, 1))

    def _progress(self, assigned: AssignSplits) -> Iterator[tuple[Iterator[Any], SplitProgress]]:
        parts = [unseal(split.payload, self._key) for split in assigned.mine]
        numbers = [assigned.range.number << _SPLIT_BITS | split.number for split in assigned.mine]
        names = [
            number_of_name(part.split) if isinstance(getattr(part, "split", None), str) else number
            for part, number in zip(parts, numbers, strict=True)
        ]
        quiet: set[int] = set()
        if self._offset_column:
            # All splits of the log that have their places here, also those that are done, or have nothing to be read.
            places = list(json.loads(assigned.range.end))[self._subtask :: self._parallelism]
            quiet = {number_of_name(name) for name in places}.difference(names)
        beside = OpenSplits(names, quiet)
        for split, part, number, name in zip(assigned.mine, parts, numbers, names, strict=True):
            yield self._begin(assigned, split, part, number, name, beside)

    def _begin(
        self, assigned: AssignSplits, split: Split, part: Any, number: int, name: int, beside: OpenSplits
    ) -> tuple[Iterator[Any], SplitProgress]:
        rows, done = self._accepted_rows(assigned, split)

        def position_of(rows: int, done: bool) -> bytes:
            return SplitPosition(assigned.range, rows, done).pack()

        key = partition_key(split.number)
        # One that is done is said to be done again: the planner has not heard of it.
        items: Iterator[Any] = iter(())
        offsets = None
        if not done:
            if self._offset_column:
                offsets = self._offset_column, part.start
                if part.start < part.end:
                    items = read_split(self._reader, self._reader.behind(part, rows))
            else:
                planned = assigned.range
                where = f"source {self._uid!r}: split {split.number} from {planned.start} to {planned.end}"
                items = skipped(read_split(self._reader, part), rows, where)
        progress = SplitProgress(
            key,
            number,
            rows,
            self._chain,
            position_of,
            tells_done=True,
            offsets=offsets,
            beside=beside,
            split=name,
        )
        return items, progress

    def _accepted_rows(self, assigned: AssignSplits, split: Split) -> tuple[int, bool]:
        """Return how many rows of a split are accepted, and whether those are all; by this subtask's own positions."""
        last = self._chain.last(partition_key(split.number))
        if last is not None:
            position = unpack_split(self._uid, last)
            if position.range.number == assigned.range.number:
                return position.rows, position.done
        return split.rows, False


@lru_cache(1 << 16)
def number_of_name(name: str) -> int:
    """Return the number of a split that has a name: the same in all processes and runs."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    return NAMED_SPLIT | int.from_bytes(digest, "little") >> 2


def _start_thread(name: str, lane: PartitionLane, work: Callable[[], None]) -> None:
    # Daemons: an iterator that blocks must not keep the process.
    threading.Thread(target=lane.run, args=(work,), name=f"ftlayer-{name}", daemon=True).start()


def _take(source: str, lane: PartitionLane, mono_ms: int) -> SourceRows | None:
    try:
        return lane.take(mono_ms)
    except SourceError:
        raise
    except BaseException as error:
        raise SourceError(f"source {source!r} cannot be read on: {described(error)}") from error


def open_reader(
    source: operators.Source,
    subtask: int,
    parallelism: int,
    *,
    positions: Mapping[str, bytes],
    limits: BatchLimits,
    key: bytes,
    wake: Callable[[], None],
    job: str = "",
    again: bool = False,
) -> SourceReader:
    """Make the reader of one subtask; `SourceReader.start` starts it.

    Args:
        positions: what `OpenStream` answered for the source's stream; empty with FTStatus.OFF.
        limits: how batches are cut. ``rows`` may not be more than the stream's ``max_pending``.
        key: the job's key, which splits are sealed by.
        wake: called from the reader's threads when the loop should ask `take` and `ended` again.
        job: the topology's name.
        again: the reader before this one has failed: ``positions`` are what was taken of it, and not all stored.
    """
    if isinstance(source.connector, operators.IterableSource):
        return IterableReader(source, subtask, parallelism, positions, limits, wake)
    if isinstance(source.connector, operators.ReaderSource):
        return SplitReader(source, subtask, parallelism, positions, key, limits, wake)
    if isinstance(source.connector, operators.QueueSource):
        member = operators.Member(f"{job}/{source.uid}", subtask, parallelism)
        return QueueSourceReader(source, member, positions, limits, wake, stored=not again)
    return PushReader(source, subtask, limits, wake)
