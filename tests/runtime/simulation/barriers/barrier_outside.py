"""What outlives a job's processes: the rows that sinks have made visible, and what functions have seen."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.functions.data_sources import DataSourceStreamArrowWriter


class MeantToFailError(RuntimeError):
    """A fault that the simulation has let happen."""


class Dies(SystemExit):
    """A process dies here and now: no code of it runs any more. ``writer`` names it; "" is the driver.

    ``itself``: by what it has done, and leaves in writing. It is raised by `kill`, the handler of a signal: whatever
    else a function raises fails its record.
    """

    def __init__(self, fault: str, writer: str, *, itself: bool = False) -> None:
        super().__init__(fault)
        self.writer, self.itself = writer, itself


def kill(death: Any, _: object = None) -> None:
    raise death


signal.signal(signal.SIGUSR2, kill)


@dataclass
class Staged(WriterCommitMessage):
    """Rows that were written and are not visible yet."""

    name: int


@dataclass
class Rows:
    """What one ``write`` was given. ``ids``: the checkpoints that it was committed with."""

    sink: str
    rows: list[tuple[Any, ...]]
    writer: str
    ids: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def visible(self) -> bool:
        return bool(self.ids)


class Outside:
    """The world outside of the job.

    Attributes:
        staged: everything that was ever written, by name.
        log: ids of checkpoints in the order of their commits.
        wrong: what must never happen, and did.
        armed: faults that wait for their moment.
        writer: names the process that runs now.
        forgotten: up to where readers were told that they may forget, by source.
        noted: records, by source, partition and number, that a function has been given.
        fired_timers: how often each, by key and time, was fired so that it could fail.
        deadly: records, by source, partition and number, that end the process that works on them.
        stuck: metadata that cannot be removed while its driver lives.
    """

    worlds: dict[int, Outside] = {}  # noqa: RUF012 - processes of one simulation find it by number

    def __init__(self, seed: int = 0, deadly: frozenset[tuple[str, int, int]] = frozenset()) -> None:
        self.random = Random(seed)
        self.deadly = deadly
        self.forgotten: dict[str, int] = {}
        self.number = len(self.worlds) + 1
        self.worlds[self.number] = self
        self.staged: dict[int, Rows] = {}
        self.noted: Counter[tuple[str, int, int]] = Counter()
        self.fired_timers: Counter[tuple[str, int]] = Counter()
        self.log: list[int] = []
        self.wrong: list[str] = []
        self.armed: Counter[str] = Counter()
        self.fired: Counter[str] = Counter()
        self.writer = ""
        self.stuck: set[str] = set()
        self.pause: Callable[[], None] = lambda: None  # others' turn

    def strikes(self, fault: str) -> bool:
        """Whether an armed fault happens now."""
        if not self.armed[fault]:
            return False
        self.armed[fault] -= 1
        self.fired[fault] += 1
        return True

    def trip(self, fault: str) -> None:
        if self.strikes(fault):
            raise MeantToFailError(fault)

    def die(self, fault: str) -> None:
        if self.strikes(fault):
            kill(Dies(fault, self.writer))

    def end_itself(self) -> None:
        kill(Dies("Segmentation fault", self.writer, itself=True))

    def visible(
        self, sink: str, counts: Callable[[int, Rows], bool] = lambda name, rows: True
    ) -> list[tuple[Any, ...]]:
        """Return the rows that readers of a sink see, of the messages that count."""
        return [
            row
            for name, rows in self.staged.items()
            if rows.visible and rows.sink == sink and counts(name, rows)
            for row in rows.rows
        ]

    def check(self, holds: bool, text: str) -> None:
        if not holds:
            self.wrong.append(text)


class Writer(DataSourceStreamArrowWriter):
    """Stages rows; commits are idempotent by message."""

    def __init__(self, world: int, sink: str) -> None:
        self._world, self._sink = world, sink

    @property
    def outside(self) -> Outside:
        return Outside.worlds[self._world]

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        outside = self.outside
        outside.trip("write")
        outside.pause()
        rows = [tuple(row.values()) for batch in iterator for row in batch.to_pylist()]
        name = len(outside.staged)
        outside.staged[name] = Rows(self._sink, rows, outside.writer)
        outside.pause()
        outside.die("die-in-write")
        return Staged(name)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        outside = self.outside
        outside.trip("commit-before")
        for place, message in enumerate(messages):
            if place == len(messages) // 2:
                outside.trip("commit-middle")
                outside.die("die-in-commit")
            assert isinstance(message, Staged)
            rows = outside.staged[message.name]
            outside.check(not rows.aborted, f"{message} is committed with {batchId}, and was aborted")
            rows.ids.append(batchId)
        outside.log.append(batchId)
        outside.trip("commit-after")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for message in messages:
            assert isinstance(message, Staged)
            rows = self.outside.staged[message.name]
            self.outside.check(not rows.visible, f"{message} is aborted, and was committed with {rows.ids}")
            rows.aborted = True


def by_key(rows: list[tuple[Any, ...]]) -> dict[Any, list[tuple[Any, ...]]]:
    """Return rows by their first column."""
    found: dict[Any, list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        found[row[0]].append(row)
    return found
