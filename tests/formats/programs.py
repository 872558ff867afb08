"""The programs whose stores and checkpoints are fixtures: a topology in barrier mode, and what has a vertex.

They use public names alone, so that a later version can run them as they are. **What is here is part of the
fixtures**: a change that is more than a later name for the same thing makes those of earlier versions useless.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

import ftlayer
from ftlayer import Context, PermanentFailure, ProcessFunction, StateTtl, partitions
from ftlayer.sinks import FileSink

PARTITIONS, NUMBERS, KEYS = 2, 60, 5
STOPS = (15, 30)
"""Before these numbers each partition waits until it is told to go on."""

RECORD = "key string, partition long, number long, at timestamp"
BEGIN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
LAST_MS = int(BEGIN.timestamp() * 1_000) + 10 * 365 * 86_400_000
"""Event time that no record reaches: a timer that is set for it fires at the end of the input."""

ODD: dict[Any, Any] = {
    "none": None,
    "numbers": [True, 1, -(2**40), 2**70, 1.5, 1 + 2j, Decimal("1.50"), Fraction(1, 3)],
    "texts": ["é", b"\xff\x00", bytearray(b"ab"), UUID(int=7)],
    "times": [
        dt.datetime(2026, 10, 25, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2), "x")),
        dt.date(2026, 1, 1),
        dt.time(1, 2, 3, 4),
        dt.timedelta(days=-1, microseconds=5),
    ],
    "containers": [(1, (2, "x")), {3}, frozenset({4}), {(5, "six"): [7, {8: 9}]}],
    "arrays": [np.int16(-3), np.arange(6, dtype=">f4").reshape(2, 3).T.tolist()],
    ("a", 1): "a key that is a tuple",
}
"""A value of each kind that state is written as."""


def fate(record: Any) -> str:
    """Return what becomes of a record: of each partition's first half one dies and two wait."""
    return {7: "dies", 4: "waits", 12: "waits"}.get(record[2], "passes")


class Judge:
    """Fails records; those that wait do so for as long as ``waiting``."""

    def __init__(self, *, waiting: bool) -> None:
        self.waiting = waiting

    def __call__(self, record: Any) -> Any:
        its = fate(record)
        if its == "dies":
            raise PermanentFailure(f"{record[1]}/{record[2]} dies")
        if its == "waits" and self.waiting:
            raise ValueError(f"{record[1]}/{record[2]} waits")
        return record


class Gates:
    """Files by which a program is held where its checkpoint is to be taken."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def pass_on(self, stop: int, partition: int) -> None:
        """Say that a partition has come here, and wait for leave to go on."""
        (self.directory / f"here-{stop}-{partition}").touch()
        while not (self.directory / f"go-{stop}").exists():
            time.sleep(0.01)

    def arrived(self, stop: int) -> bool:
        """Whether all partitions are here."""
        return all((self.directory / f"here-{stop}-{each}").exists() for each in range(PARTITIONS))

    def open(self, *stops: int) -> None:
        """Let them go on."""
        for stop in stops:
            (self.directory / f"go-{stop}").touch()


def read(partition: int, gates: Gates | None, pace_s: float = 0.0) -> Iterator[Any]:
    """Read the records of one partition."""
    for number in range(NUMBERS):
        if gates is not None and number in STOPS:
            gates.pass_on(number, partition)
        time.sleep(pace_s)
        yield f"k{number % KEYS}", partition, number, BEGIN + dt.timedelta(minutes=number)


# ---------------------------------------------------------------- barrier mode


class Remembering(ProcessFunction):
    """Has keyed state of every kind, and tells all of it at the end."""

    def __init__(self, due_ms: int, pace_s: float = 0.0, *, spilling: bool = False) -> None:
        """``due_ms``: of a timer of processing time. ``pace_s``: a record takes so long.

        ``spilling``: the LMDB backend of the process that it comes to keeps next to nothing in memory.
        """
        self.due_ms, self.pace_s, self.spilling = due_ms, pace_s, spilling

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.spilling:
            from ftlayer.state.tables import layers as memory

            memory.MAX_BYTES = 2_000

    def open(self, ctx: Context) -> None:
        self.count = ctx.value("count", 0)
        self.numbers = ctx.list("numbers")
        self.last = ctx.map("last")
        self.odd = ctx.value("odd")
        self.total = ctx.reducing("total", lambda one, other: one + other)
        self.most = ctx.aggregating("most", lambda: 0, max)
        self.lasting = ctx.value("lasting", 0, ttl=StateTtl("366d"))

    def process(self, record: Any, ctx: Context) -> Iterable[Any]:
        _, partition, number, _ = record
        time.sleep(self.pace_s)
        self.count.set(self.count.get() + 1)
        self.numbers.append((partition, number))
        self.last[partition] = number
        self.total.add(number)
        self.most.add(number)
        self.lasting.set(self.lasting.get() + 1)
        if self.odd.get() is None:
            self.odd.set(ODD)
            ctx.timers.processing(self.due_ms)
        ctx.timers.event(LAST_MS)
        return ()

    def on_timer(self, time_ms: int, ctx: Context) -> Iterator[Any]:
        if time_ms == self.due_ms:
            yield ctx.key, "rang"
            return
        told = {
            "count": self.count.get(),
            "numbers": sorted(self.numbers.get()),
            "last": sorted(self.last.items()),
            "total": self.total.get(),
            "most": self.most.get(),
            "lasting": self.lasting.get(),
            "odd": repr(self.odd.get()) == repr(ODD),
        }
        yield ctx.key, json.dumps(told)


class Numbering(ProcessFunction):
    """Has state of every kind that belongs to no key."""

    def open(self, ctx: Context) -> None:
        self.some = ctx.operator_list("some")
        self.all = ctx.union_list("all")
        self.known = ctx.broadcast("known")

    def process(self, record: Any, ctx: Context) -> Iterator[Any]:
        place = (record[1], record[2])
        self.some.append(place)
        self.all.append(place)
        self.known[place] = len(self.some)
        yield len(self.some), len(self.all), len(self.known)


OUTPUTS = ("told", "hours", "totals", "numbered")


def build(
    env: Any,
    directory: Path,
    *,
    due_ms: int,
    gates: Gates | None = None,
    waiting: bool = False,
    pace_s: float = 0.0,
    spilling: bool = False,
) -> None:
    """Build the topology in an environment of barrier mode; its sinks write JSON below ``directory``.

    ``waiting``: records that are to wait fail. ``pace_s``: what a keyed record takes; its source is faster.
    ``spilling``: see `Remembering`.
    """
    made = [partial(read, each, gates, pace_s / 4) for each in range(PARTITIONS)]
    judged = (
        env.source(partitions(*made), RECORD, uid="numbers", parallelism=PARTITIONS)
        .map(Judge(waiting=waiting), RECORD, uid="judged", parallelism=PARTITIONS)
        .assign_watermarks("at", "0s", uid="timed", parallelism=PARTITIONS)
    )
    keyed = judged.key_by("key")
    remembering = Remembering(due_ms, pace_s, spilling=spilling)
    told = keyed.process(remembering, "key string, told string", uid="remembering")
    hours = keyed.window(ftlayer.tumbling("1h")).aggregate(
        lambda: (0, 0),
        lambda made, record: (made[0] + 1, made[1] + record[2]),
        "key string, start_ms long, n long, total long",
        result=lambda key, window, made: (key, window.start_ms, *made),
        uid="hours",
    )
    totals = keyed.aggregate(ftlayer.count(name="n"), ftlayer.sum("number", name="total"), uid="totals")
    numbered = judged.process(
        Numbering(), "some long, every long, known long", uid="numbering", parallelism=1
    )
    for name, stream in zip(OUTPUTS, (told, hours, totals, numbered), strict=True):
        stream.sink(FileSink(directory / name, "json"), uid=f"{name}-files", parallelism=1)


def written(directory: Path) -> list[dict[str, Any]]:
    """Return the rows that a sink shows."""
    files = sorted(directory.glob("part-*.json"))
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def check_outputs(directory: Path) -> None:
    """Compare what the sinks show with what a run without any stop writes."""
    passing = [record for each in range(PARTITIONS) for record in read(each, None) if fate(record) != "dies"]
    by_key: dict[str, list[Any]] = {}
    for record in passing:
        by_key.setdefault(record[0], []).append(record)

    told = written(directory / "told")
    assert Counter(row["key"] for row in told if row["told"] == "rang") == Counter(by_key.keys())
    ends = [row for row in told if row["told"] != "rang"]
    assert sorted(row["key"] for row in ends) == sorted(by_key)
    for row in ends:
        its = by_key[row["key"]]
        assert json.loads(row["told"]) == {
            "count": len(its),
            "numbers": sorted([record[1], record[2]] for record in its),
            "last": [[each, max(r[2] for r in its if r[1] == each)] for each in range(PARTITIONS)],
            "total": sum(record[2] for record in its),
            "most": max(record[2] for record in its),
            "lasting": len(its),
            "odd": True,
        }, row["key"]

    assert sorted((row["key"], row["n"], row["total"]) for row in written(directory / "hours")) == sorted(
        (key, len(its), sum(record[2] for record in its)) for key, its in by_key.items()
    )
    totals = written(directory / "totals")
    assert Counter((row["key"], row["n"]) for row in totals) == Counter(
        (key, place) for key, its in by_key.items() for place in range(1, len(its) + 1)
    )
    assert {row["key"]: row["total"] for row in sorted(totals, key=lambda row: row["n"])} == {
        key: sum(record[2] for record in its) for key, its in by_key.items()
    }
    places = [(place,) * 3 for place in range(1, len(passing) + 1)]
    assert sorted(tuple(row.values()) for row in written(directory / "numbered")) == places


# ---------------------------------------------------------------- with a vertex

SCHEMA = "key string, number long"
BATCH = 20
"""Rows of a batch of the wrapped query; it is stopped within its second."""

CLICKS = [{"key": f"c{number}", "number": number} for number in range(6)]
"""What an ingest takes, and no query has read."""


class Counted(DataSource):
    """A stream of numbered rows up to the option ``until``, in one batch from where it stands."""

    @classmethod
    def name(cls) -> str:
        return "counted"

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: Any) -> Any:
        return CountedReader(int(self.options["until"]))


class CountedReader(DataSourceStreamReader):
    """See `Counted`."""

    def __init__(self, until: int) -> None:
        self.until = until

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self) -> dict[str, int]:  # type: ignore[override]
        return {"next": self.until}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["next"], end["next"]))]

    def read(self, partition: Any) -> Iterator[Any]:
        for number in range(*partition.value):
            yield f"k{number % KEYS}", number


def judge_row(record: dict[str, Any], *, waiting: bool) -> dict[str, Any]:
    """Fail one row of a batch for good; two wait, as long as ``waiting``."""
    its = fate((record["key"], 0, record["number"] % BATCH))
    if its == "dies":
        raise PermanentFailure(f"row {record['number']} dies")
    if its == "waits" and waiting:
        raise ValueError(f"row {record['number']} waits")
    return record


def show_batch(directory: Path, held: int, rows: Any, batch: int) -> None:
    """Write a batch into a file of its own; batch ``held`` never gets there."""
    data = [row.asDict() for row in rows.collect()]
    if batch == held:
        (directory / "held").touch()
        time.sleep(3_600)
    (directory / f"{batch}.json").write_text(json.dumps(data), "utf-8")


def start_query(spark: Any, layer: Any, directory: Path, until: int, *, waiting: bool, held: int = -1) -> Any:
    """Start the wrapped query."""
    (directory / "query").mkdir(exist_ok=True)
    rows = spark.readStream.format("counted").option("until", until).load()
    return (
        layer.source(rows, name="counted")
        .map(partial(judge_row, waiting=waiting), SCHEMA)
        .sink(partial(show_batch, directory / "query", held), checkpoint=str(directory / "query-checkpoint"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )


def start_clicks(layer: Any, directory: Path) -> Any:
    """Start the query that reads the ingest."""
    (directory / "clicks").mkdir(exist_ok=True)
    return (
        layer.source(layer.ingest("clicks", SCHEMA))
        .sink(partial(show_batch, directory / "clicks", -1), checkpoint=str(directory / "clicks-checkpoint"))
        .trigger(processingTime="100 milliseconds")
        .start()
    )


def shown(directory: Path) -> list[dict[str, Any]]:
    """Return the rows that `show_batch` wrote."""
    return [row for file in directory.glob("*.json") for row in json.loads(file.read_text("utf-8"))]


class Hold:
    """Keeps records from a number on from going through, if it is to."""

    def __init__(self, first: int, directory: Path | None) -> None:
        self.first, self.directory = first, directory

    def __call__(self, record: Any) -> Any:
        if self.directory is not None and record[2] >= self.first:
            (self.directory / f"held-{record[1]}").touch()
            time.sleep(3_600)
        return record


class Lines:
    """A sink that appends to a file of its process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, batch: Any) -> None:
        with (self.directory / f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            for row in batch.select(["key", "partition", "number"]).to_pylist():
                file.write(json.dumps(row) + "\n")


def build_tracked(
    env: Any, directory: Path, *, gates: Gates | None = None, waiting: bool = False, held: Path | None = None
) -> None:
    """Build the topology of acker mode; ``held``: a directory that says which partitions are held up."""
    (directory / "lines").mkdir(exist_ok=True)
    made = [partial(read, each, gates) for each in range(PARTITIONS)]
    (
        env.source(partitions(*made), RECORD, uid="numbers", parallelism=PARTITIONS)
        .map(Judge(waiting=waiting), RECORD, uid="judged")
        .map(Hold(STOPS[0], held), RECORD, uid="held")
        .sink(Lines(directory / "lines"), uid="lines")
    )


def tracked_rows(directory: Path) -> set[tuple[str, int, int]]:
    """Return what the topology of acker mode has put out."""
    files = (directory / "lines").glob("*.jsonl")
    rows = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
    return {(row["key"], row["partition"], row["number"]) for row in rows}
