"""A topology with exact state and a transactional sink, and the ledger of what became visible.

Partitions of numbered records → a map → by key → a count a key (and the last number seen of each partition, which
has to grow) → a writer whose files are renamed on commit.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer import Context, ProcessFunction, current_record, partitions
from ftlayer.checkpoint.storage.dead_letters import stored_letters
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter
from ftlayer.records.ipc import read_one_batch

NUMBERED = pa.schema([("key", pa.string()), ("partition", pa.int64()), ("number", pa.int64())])
COUNTED = pa.schema([*NUMBERED, ("count", pa.int64())])


@dataclass
class Staged(WriterCommitMessage):
    """A file that was written and is not visible yet."""

    name: str


class StagingWriter(DataSourceStreamArrowWriter):
    """Writes files aside and renames them on commit; committing twice does no harm."""

    def __init__(self, directory: Path) -> None:
        self.staged, self.out = directory / "staged", directory / "out"
        self.log = directory / "commits.log"
        for path in (self.staged, self.out):
            path.mkdir(parents=True, exist_ok=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        name = uuid.uuid4().hex
        with (self.staged / name).open("w") as file:
            for batch in iterator:
                file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())
        return Staged(name)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for message in messages:
            assert isinstance(message, Staged)
            if not (self.out / message.name).exists():
                (self.staged / message.name).rename(self.out / message.name)
        with self.log.open("a") as log:
            log.write(f"{batchId} {len(messages)}\n")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        for message in messages:
            if isinstance(message, Staged):
                (self.staged / message.name).unlink(missing_ok=True)


class Counting(ProcessFunction):
    """Counts a key, and checks that the numbers of a partition come in order."""

    def process(self, record: Any, ctx: Context) -> Iterator[Any]:
        key, partition, number = record
        count = ctx.value("count", 0)
        last = ctx.map("last")
        if last.get(partition, -1) >= number:
            raise AssertionError(f"{record}: {last[partition]} came before it")
        last[partition] = number
        count.set(count.get() + 1)
        yield key, partition, number, count.get()


def numbers(partition: int, count: int, keys: int, pace_s: float, gate: Path | None = None) -> Iterator[Any]:
    """The records of one partition; ``pace_s`` is the time of 100 of them, the half waits until ``gate`` is there."""
    for number in range(count):
        while gate is not None and number == count // 2 and not gate.exists():
            time.sleep(0.02)
        if pace_s and number % 100 == 99:
            time.sleep(pace_s)
        yield f"k{(number * 7 + partition) % keys}", partition, number


class Tallying(ProcessFunction):
    """Counts a key. (Records that were tried again come in any order.)"""

    def process(self, record: Any, ctx: Context) -> Iterator[Any]:
        key, partition, number = record
        count = ctx.value("count", 0)
        count.set(count.get() + 1)
        yield key, partition, number, count.get()
        if fate(partition, number + 1) == "stumbles" and current_record().attempt < 2:
            raise ValueError(f"half way through {record}")


def fate(partition: int, number: int) -> str:
    """Return what becomes of a record at `stumble`: 2 in 100 fail once, 1 in 250 always."""
    if (number + partition) % 250 == 11:
        return "dies"
    return "stumbles" if (number + partition) % 50 == 3 else "passes"


def stumble(record: Any) -> Any:
    """Pass a record on, unless it fails."""
    its = fate(*record[1:])
    if its == "dies" or (its == "stumbles" and current_record().attempt < 2):
        raise ValueError(f"{record} {its}")
    return record


@dataclass
class FailOnce:
    """Passes records on, and raises once for a number; a file says that it has."""

    mark: Path
    number: int

    def __call__(self, record: Any) -> Any:
        if record[2] == self.number and record[1] == 0 and not self.mark.exists():
            self.mark.touch()
            raise RuntimeError(f"meant to fail once at {record}")
        return record


def build(
    env: Any,
    directory: Path,
    *,
    count: int = 3_000,
    keys: int = 40,
    sources: int = 2,
    pace_s: float = 0.0,
    function: Callable[[Any], Any] = lambda record: record,
    process: ProcessFunction | None = None,
    passing: int | None = None,
    gate: Path | None = None,
) -> None:
    """Build the topology in an environment.

    ``passing``: parallelism of the map, which has to be the source's: records of a partition keep their order only
    where none is dealt out.
    """
    made = [partial(numbers, partition, count, keys, pace_s, gate) for partition in range(sources)]
    (
        env.source(partitions(*made), NUMBERED, uid="numbers")
        .map(function, NUMBERED, uid="passing", parallelism=passing)
        .key_by("key")
        .process(process or Counting(), COUNTED, uid="counting")
        .sink(StagingWriter(directory), uid="staging")
    )


class Ledger:
    """What is visible, against what was put in."""

    def __init__(self, directory: Path, *, count: int = 3_000, keys: int = 40, sources: int = 2) -> None:
        self.directory = directory
        self.expected = {
            (key, partition, number)
            for partition in range(sources)
            for key, _, number in numbers(partition, count, keys, 0)
        }

    def rows(self) -> list[dict[str, Any]]:
        """All rows that readers of the sink see."""
        out = self.directory / "out"
        names = os.listdir(out) if out.exists() else []
        return [json.loads(line) for name in names for line in (out / name).read_text().splitlines()]

    def check_dead(self, checkpoints: Path) -> None:
        """Each record that always fails is a dead letter once, and no other is; `check` asks for all others."""
        rows = [
            read_one_batch(letter.payload).to_pylist()[0]
            for stored in stored_letters(str(checkpoints))
            for _, letter in stored.letters()
        ]
        dead = [(row["key"], row["partition"], row["number"]) for row in rows]
        expected = {each for each in self.expected if fate(*each[1:]) == "dies"}
        assert len(dead) == len(set(dead)), f"{len(dead) - len(set(dead))} letters are doubled"
        assert set(dead) == expected
        self.expected -= expected

    def check(self, *, in_order: bool = True) -> None:
        """Lost, duplicated and (unless that is not asked for) out of order within a key are 0; every count is exact."""
        rows = self.rows()
        seen = [(row["key"], row["partition"], row["number"]) for row in rows]
        assert len(seen) == len(set(seen)), f"{len(seen) - len(set(seen))} duplicated"
        assert not self.expected - set(seen), f"{len(self.expected - set(seen))} lost"
        assert set(seen) == self.expected
        counts: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            counts[row["key"]].append(row)
        for key, its in counts.items():
            assert sorted(row["count"] for row in its) == list(range(1, len(its) + 1)), key
            by_partition: dict[int, list[dict[str, Any]]] = defaultdict(list)
            for row in sorted(its, key=lambda row: row["count"]) if in_order else ():
                by_partition[row["partition"]].append(row["number"])
            for order in by_partition.values():
                assert order == sorted(order), f"{key} is out of order"

    def commits(self) -> list[int]:
        """Ids of the commits, in their order."""
        log = self.directory / "commits.log"
        return [int(line.split()[0]) for line in log.read_text().splitlines()] if log.exists() else []
