"""Readers of sources beside the slot's loop: threads that run the user's blocking iterators."""

from __future__ import annotations

import hashlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import compress, islice
from operator import not_
from typing import Any, Protocol

from ftlayer.errors import SourceError
from ftlayer.printable import text_of
from ftlayer.runtime.connectors.lane import BatchLimits, OpenSplits, PartitionLane, SplitProgress
from ftlayer.runtime.connectors.offset_reader import read_split
from ftlayer.runtime.connectors.positions import (
    PositionChain,
    SplitPosition,
    pack_rows,
    partition_key,
    unpack_rows,
    unpack_split,
)
from ftlayer.runtime.connectors.push import PushReader
from ftlayer.runtime.connectors.queue_reader import QueueSourceReader
from ftlayer.runtime.connectors.rows import RowMaker, SparkRowMaker, skipped
from ftlayer.runtime.protocol.elements import NAMED_SPLIT, Splits
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone
from ftlayer.runtime.protocol.sealed import unseal
from ftlayer.runtime.task.events import SourceRows, TakenRows
from ftlayer.topology.operators import IterableSource, QueueSource, ReaderSource, Source
from ftlayer.topology.queues import Member

MOST_IN_TURN = 16
"""A subtask reads as many splits of a range in turns; another one begins when one ends. Each may need a connection."""

# Splits of one range; with the number of the range above it, a split's number is unique in a source.
_SPLIT_BITS = 20

_END = object()


class SourceReader(Protocol):
    """One subtask of a source, for the slot's loop. All methods belong to the loop's thread, and none blocks."""

    def start(self) -> None:
        """Begin to read; called once."""

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

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        """Rows that were taken need not be read again: the vertex has accepted them (or they were emitted).

        In barrier mode that is when they are emitted, and for a `QueueSource` when a checkpoint is complete that has
        them. Rows of a partition are accepted in their order.
        """

    @property
    def lag(self) -> int | None:
        """How many records of its system were not read lately; None if that is not known here."""

    @property
    def is_away(self) -> bool:
        """Whether its system could not be reached the last time, or has not been yet."""

    @property
    def ended(self) -> bool:
        """Whether everything was taken and nothing comes any more."""

    def finish(self) -> None:
        """Read no further; what is read can still be taken."""

    def stop(self) -> None:
        """End now; what was not taken is forgotten. Threads that block in the user's code end when it returns."""

    def abandon(self) -> None:
        """It has failed: read no further, as after `stop`. What was taken can still be accepted; it has `ended`."""


def mono_ms() -> int:
    """Return the monotone clock of batches' ages."""
    return time.monotonic_ns() // 1_000_000


class IterableReader:
    """A subtask of an `IterableSource`: partitions i with i % parallelism == subtask, a thread and a lane each."""

    lag: int | None = None
    """See `SourceReader.lag`; an iterable does not tell."""
    is_away = False
    """See `SourceReader.is_away`; what an iterable raises is a failure."""

    def __init__(
        self,
        source: Source,
        subtask: int,
        parallelism: int,
        positions: Mapping[str, bytes],
        limits: BatchLimits,
        wake: Callable[[], None],
        clock: Callable[[], int] = mono_ms,
    ) -> None:
        assert isinstance(source.connector, IterableSource)
        self._source = source
        self._partitions = source.connector.partitions
        self._chain = PositionChain(positions)
        maker = RowMaker(source.uid, source.schema)
        mine = range(subtask, len(self._partitions), parallelism)
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

    def accepted(self, rows: TakenRows) -> SplitDone | None:
        return None

    @property
    def ended(self) -> bool:
        return all(lane.ended for _, lane in self._lanes)

    def finish(self) -> None:
        for _, lane in self._lanes:
            lane.close(discard=False)

    def stop(self) -> None:
        for _, lane in self._lanes:
            lane.close(discard=True)

    def abandon(self) -> None:
        self.stop()

    def _read(self, index: int, lane: PartitionLane) -> None:
        key = partition_key(index)
        last = self._chain.last(key)
        rows = 0 if last is None else unpack_rows(self._source.uid, last)
        split = SplitProgress(
            key, index, rows, self._chain, lambda rows, done: pack_rows(rows), tells_done=False
        )
        lane.pump(skipped(iter(self._partitions[index]()), rows), split)


class SplitReader:
    """A subtask of a `ReaderSource`: reads the splits that it is assigned in turns, range by range."""

    lag: int | None = None
    """See `SourceReader.lag`; the driver knows."""
    is_away = False
    """See `SourceReader.is_away`; the driver knows."""

    def __init__(
        self,
        source: Source,
        subtask: int,
        positions: Mapping[str, bytes],
        key: bytes,
        limits: BatchLimits,
        wake: Callable[[], None],
        clock: Callable[[], int] = mono_ms,
    ) -> None:
        assert isinstance(source.connector, ReaderSource)
        self._uid = source.uid
        self._subtask = subtask
        self._reader = source.connector.reader
        # That of a `LogReader`.
        self._offset_column: str = getattr(self._reader, "offset_column", "")
        self._key = key
        self._chain = PositionChain(positions)
        self._lane = PartitionLane(SparkRowMaker(source.uid, source.schema), limits, clock, wake)
        self._todo: queue.SimpleQueue[AssignSplits | None] = queue.SimpleQueue()
        self._known: tuple[int, set[int]] = (-1, set())

    def start(self) -> None:
        _start_thread(f"{self._uid}-{self._subtask}", self._lane, self._read_all)

    def assign(self, splits: AssignSplits) -> None:
        """See `SourceReader.assign`. A message that says there are no splits (`splits` 0) ends the source."""
        if splits.splits == 0:
            self._todo.put(None)
            return
        if self._known[0] != splits.range:
            self._known = splits.range, set()
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
        return SplitDone(self._uid, position.range, rows.number & ((1 << _SPLIT_BITS) - 1))

    @property
    def ended(self) -> bool:
        return self._lane.ended

    def finish(self) -> None:
        self._lane.close(discard=False)
        self._todo.put(None)

    def stop(self) -> None:
        self._lane.close(discard=True)
        self._todo.put(None)

    def abandon(self) -> None:
        self.stop()

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
        """Return what is to be read of each split, and where it is."""
        parts = [unseal(split.payload, self._key) for split in assigned.mine]
        numbers = [assigned.range << _SPLIT_BITS | split.number for split in assigned.mine]
        names = [
            number_of_name(part.split) if isinstance(getattr(part, "split", None), str) else number
            for part, number in zip(parts, numbers, strict=True)
        ]
        quiet = [self._offset_column != "" and part.start == part.end for part in parts]
        beside = OpenSplits(compress(names, map(not_, quiet)), compress(names, quiet))
        for split, part, number, name in zip(assigned.mine, parts, numbers, names, strict=True):
            yield self._begin(assigned, split, part, number, name, beside)

    def _begin(
        self, assigned: AssignSplits, split: Split, part: Any, number: int, name: int, beside: OpenSplits
    ) -> tuple[Iterator[Any], SplitProgress]:
        rows, done = self._accepted_rows(assigned, split)

        def position_of(rows: int, done: bool) -> bytes:
            return SplitPosition(
                assigned.range, assigned.start, assigned.end, assigned.splits, assigned.digest, rows, done
            ).pack()

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
                items = skipped(read_split(self._reader, part), rows)
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
        """Return how many rows of a split are accepted, and whether those are all.

        What this subtask itself was told of its positions counts: its own go on from there.
        """
        last = self._chain.last(partition_key(split.number))
        if last is not None:
            position = unpack_split(self._uid, last)
            if position.range == assigned.range:
                return position.rows, position.done
        return split.rows, False


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
        raise SourceError(
            f"source {source!r} cannot be read on: {type(error).__name__}: {text_of(error)}"
        ) from error


def open_reader(
    source: Source,
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
        source: the source.
        subtask, parallelism: which of how many.
        positions: what `OpenStream` answered for the source's stream; empty with FTStatus.OFF.
        limits: how batches are cut. ``rows`` may not be more than the stream's ``max_pending``.
        key: the job's key, which splits are sealed by.
        wake: called from the reader's threads when the loop should ask `take` and `ended` again.
        job: the topology's name.
        again: the reader before this one has failed: ``positions`` are what was taken of it, and not all stored.
    """
    if isinstance(source.connector, IterableSource):
        return IterableReader(source, subtask, parallelism, positions, limits, wake)
    if isinstance(source.connector, ReaderSource):
        return SplitReader(source, subtask, positions, key, limits, wake)
    if isinstance(source.connector, QueueSource):
        member = Member(f"{job}/{source.uid}", subtask, parallelism)
        return QueueSourceReader(source, member, positions, limits, wake, stored=not again)
    return PushReader(source, subtask, limits, wake)
