"""Subtasks of a source and of a sink, which read, take and write when they are told to."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from once_outside import ID, KEY, NOW, Table

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.errors import JobError
from ftlayer.runtime.connectors.lane import SplitProgress
from ftlayer.runtime.connectors.offset_reader import (
    PositionChain,
    SplitPosition,
    partition_key,
    read_split,
    unpack_split,
)
from ftlayer.runtime.protocol.messages import AssignSplits, Split, SplitDone, unseal
from ftlayer.runtime.task.actions import ElementCame, TaskStart
from ftlayer.topology.job_graph import Channel


def no_cancel() -> bool:
    return False


class SourceSlot:
    """A source's subtask with a reader that reads when it is told to."""

    def __init__(self, world: Any, subtask: int, restore: SubtaskRestore, before: frozenset[int]) -> None:
        self.world, self.subtask = world, subtask
        self.task, self.checkpoints = world.build("src", subtask, restore)
        self.positions = PositionChain(restore.positions)
        self.todo: deque[tuple[SplitProgress, Iterator[Any], AssignSplits, Split]] = deque()
        self.control: deque[Any] = deque()
        self.emitted = set(before)

    def assign(self, message: AssignSplits) -> None:
        for split in message.mine:
            key = partition_key(split.number)
            last = self.positions.last(key)
            position = None if last is None else unpack_split("src", last)
            if position is not None and position.range.number == message.range.number:
                assert (position.rows, position.done) == (split.rows, False)
            else:
                assert split.rows == 0

            def position_of(rows: int, done: bool, message: AssignSplits = message) -> bytes:
                return SplitPosition(message.range, rows, done).pack()

            progress = SplitProgress(key, 0, split.rows, self.positions, position_of, tells_done=True)
            rows = itertools.islice(
                read_split(self.world.reader, unseal(split.payload, KEY)), split.rows, None
            )
            self.todo.append((progress, rows, message, split))

    def read(self, most: int) -> None:
        if not self.todo:
            return
        progress, iterator, message, split = self.todo[0]
        rows = [row for (row,) in itertools.islice(iterator, most)]
        done = len(rows) < most
        payload = pa.record_batch([pa.array(rows, pa.int64())], schema=ID)
        self.world.send(self.task.handle(progress.advance(payload, done=done), NOW))
        assert not self.emitted & set(rows), "a row was read twice"
        self.emitted |= set(rows)
        if done:
            self.todo.popleft()
            self.world.planners.split_done(SplitDone("src", message.range.number, split.number))

    def take_control(self) -> None:
        if not self.control:
            return
        barrier = self.control.popleft()
        if isinstance(barrier, int):
            self.checkpoints.completed(barrier)
            return
        actions, pending = self.checkpoints.snapshot(barrier, NOW)
        assert actions == []
        part = pending.write(None, no_cancel)
        pending.release()
        for receiver in range(self.world.parallelism):
            self.world.channels[self.subtask, receiver].append(barrier)
        self.world.acked(barrier.checkpoint, part, self.emitted)


class SinkSlot:
    """A sink's subtask that aligns its channels."""

    def __init__(self, world: Any, subtask: int) -> None:
        self.world, self.subtask = world, subtask
        self.table = Table(world.outside)
        self.task, self.checkpoints = world.build("out", subtask, None, self.table)
        self.task.handle(TaskStart(), NOW)
        self.arrived: set[int] = set()
        self.control: deque[int] = deque()
        self.writing: list[tuple[int, Any]] = []

    def take(self, place: int) -> None:
        world = self.world
        ready = [
            sender
            for sender in range(world.parallelism)
            if sender not in self.arrived and world.channels[sender, self.subtask]
        ]
        if not ready:
            return
        sender = ready[place % len(ready)]
        element = world.channels[sender, self.subtask].popleft()
        if not isinstance(element, Barrier):
            self.task.handle(ElementCame(Channel(0, sender, self.subtask), element), NOW)
            return
        self.arrived.add(sender)
        if len(self.arrived) == world.parallelism:
            self.arrived.clear()
            _, pending = self.checkpoints.snapshot(element, NOW)
            self.writing.append((element.checkpoint, pending))

    def write(self, place: int) -> None:
        if not self.writing:
            return
        checkpoint, pending = self.writing.pop(place % len(self.writing))
        try:
            part = pending.write(None, no_cancel)
        except JobError:
            self.world.give_up(checkpoint)
        else:
            self.world.acked(checkpoint, part, set())
        pending.release()

    def take_control(self) -> None:
        if self.control:
            self.checkpoints.completed(self.control.popleft())
