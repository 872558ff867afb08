"""What is outside of a job that is to be exact: a broker and a table, with their reader and writer."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition, WriterCommitMessage

from ftlayer.common.clock import Now
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter

ID = pa.schema([("id", pa.int64())])
KEY = b"k" * 32
NOW = Now(0, 0)

OUTSIDE = sys.modules.setdefault("ftlayer_test_outside", ModuleType("ftlayer_test_outside"))
"""By its name, a module means the same to a copy of what refers to it; this one is not imported by name."""


class Outside:
    """The broker and the table. Outlives drivers and slots."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rows = 0
        self.hidden: set[int] = set()  # in ranges that turned out to have no splits: they stay without
        self.forgotten = 0
        self.table: list[int] = []
        self.ids: dict[int, tuple[int, ...]] = {}
        self.aborted: set[int] = set()
        self.staged: dict[int, Any] = {}
        self.numbers = itertools.count()
        self.during: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        setattr(OUTSIDE, f"outside{id(self)}", self)
        return getattr, (OUTSIDE, f"outside{id(self)}")

    def call(self, name: str) -> None:
        """Let happen what is to happen while a user's method is at work."""
        happens = self.during.pop(name, None)
        if happens is not None:
            happens()


class Piece(InputPartition):
    def __init__(self, rows: range) -> None:
        self.rows = rows


class Reader(DataSourceStreamReader):
    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def initialOffset(self) -> Any:
        return {"index": self.outside.forgotten}

    def latestOffset(self, start: Any, limit: Any) -> Any:
        self.outside.call("latestOffset")
        return {"index": self.outside.random.randint(start["index"], self.outside.rows)}

    def getDefaultReadLimit(self) -> Any:
        return None

    def partitions(self, start: Any, end: Any) -> list[Piece]:
        self.outside.call("partitions")
        if self.outside.random.random() < 0.1:
            # Nothing is lost: there is just nothing there that anybody may see.
            self.outside.hidden.update(range(start["index"], end["index"]))
        if self.outside.hidden.issuperset(range(start["index"], end["index"])):
            return []
        count = self.outside.random.randint(1, 4)
        return [Piece(range(start["index"] + i, end["index"], count)) for i in range(count)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Piece)
        for row in partition.rows:
            assert row >= self.outside.forgotten, "the broker has been told that this is not needed any more"
            if row not in self.outside.hidden:
                yield (row,)

    def commit(self, end: Any) -> None:
        self.outside.call("commit")
        self.outside.forgotten = max(self.outside.forgotten, end["index"])


class Message(WriterCommitMessage):
    def __init__(self, number: int, rows: list[int]) -> None:
        self.number, self.rows = number, rows


class Table(DataSourceStreamArrowWriter):
    def __init__(self, outside: Outside) -> None:
        self.outside = outside

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Message:
        self.outside.call("write")
        rows = [row for batch in iterator for row in batch.column(0).to_pylist()]
        assert rows, "there was nothing to write"
        message = Message(next(self.outside.numbers), rows)
        self.outside.staged[message.number] = self
        return message

    def commit(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - pyspark's name
        assert messages
        self.outside.call("before commit")
        numbers = tuple(message.number for message in messages)
        assert len(set(numbers)) == len(numbers)
        if batchId in self.outside.ids:
            assert self.outside.ids[batchId] == numbers, "an id came again with other messages"
            return
        for message in messages:
            assert message.number not in self.outside.aborted
            assert all(message.number not in known for known in self.outside.ids.values())
            self.outside.table += message.rows
        self.outside.ids[batchId] = numbers
        self.outside.call("after commit")

    def abort(self, messages: list[Any], batchId: int) -> None:  # noqa: N803 - pyspark's name
        for message in messages:
            assert all(message.number not in known for known in self.outside.ids.values())
            self.outside.aborted.add(message.number)
