"""Topologies whose results are known, with the functions that they run and what is checked at their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pyarrow as pa
from barrier_outside import Outside, Writer, by_key

from ftlayer.config import FTStatus
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.stream.builder import GraphBuilder
from ftlayer.stream.connectors import partitions
from ftlayer.stream.windows import tumbling

NUMBERED = pa.schema(
    [
        ("key", pa.string()),
        ("source", pa.string()),
        ("part", pa.int64()),
        ("n", pa.int64()),
        ("at", pa.int64()),
    ]
)
COUNTED = pa.schema([*NUMBERED, ("count", pa.int64())])
WINDOWED = pa.schema(
    [
        ("key", pa.string()),
        ("start", pa.int64()),
        ("source", pa.string()),
        ("part", pa.int64()),
        ("n", pa.int64()),
    ]
)


def numbers(source: str, part: int, count: int, keys: int) -> list[tuple[str, str, int, int, int]]:
    """The records of one partition; their times are nearly in order, save a few that are very late."""
    random = Random(f"{source}{part}")
    late = {n for n in range(count) if random.random() < 0.05}
    return [
        (
            f"k{random.randrange(keys)}",
            source,
            part,
            n,
            max(0, 100 * n + random.randrange(300) - (5_000 if n in late else 0)),
        )
        for n in range(count)
    ]


@dataclass
class Passing:
    """Passes records on, and raises when its fault is armed."""

    world: int
    fault: str = "function"

    def __call__(self, record: Any) -> Any:
        outside = Outside.worlds[self.world]
        outside.trip(self.fault)
        outside.die("die-in-function")
        return record


def _count(record: Any, ctx: Any, world: int, exact: bool) -> tuple[Any, ...]:
    key, source, part, number, at = record
    count, last = ctx.value("count", 0), ctx.map("last")
    place = f"{source}{part}"
    if exact and last.get(place, -1) >= number:
        Outside.worlds[world].wrong.append(f"{record} came behind {last[place]}")
    last[place] = number
    count.set(count.get() + 1)
    return key, source, part, number, at, count.get()


class Counting(ProcessFunction):
    """Counts a key, and checks that the numbers of a partition come in order."""

    def __init__(self, world: int, exact: bool) -> None:
        self.world, self.exact = world, exact

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield _count(record, ctx, self.world, self.exact)
        Outside.worlds[self.world].trip("process")


class Meeting(CoProcessFunction):
    """`Counting` of two inputs together."""

    def __init__(self, world: int, exact: bool) -> None:
        self.world, self.exact = world, exact

    def process_left(self, record: Any, ctx: Any) -> Iterator[Any]:
        yield _count(record, ctx, self.world, self.exact)

    def process_right(self, record: Any, ctx: Any) -> Iterator[Any]:
        Outside.worlds[self.world].trip("process")
        yield _count(record, ctx, self.world, self.exact)


class Sorting(ProcessFunction):
    """Odd counts go to a side output."""

    def __init__(self, world: int, exact: bool) -> None:
        self.world, self.exact = world, exact

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        counted = _count(record, ctx, self.world, self.exact)
        if counted[-1] % 2:
            ctx.output("odd", counted)
        else:
            yield counted


def _windowed(key: Any, window: Any, records: list[Any]) -> Iterator[Any]:
    for _, source, part, number, _ in records:
        yield key, window.start_ms, source, part, number


@dataclass
class Case:
    """A topology, the records of its sources, and what has to be visible at the end."""

    name: str
    outside: Outside
    count: int = 60
    keys: int = 5
    parts: int = 2
    exact: bool = True

    @property
    def sources(self) -> tuple[str, ...]:
        return {"union": ("a", "b"), "co": ("a", "b")}.get(self.name, ("a",))

    @property
    def records(self) -> set[tuple[str, str, int, int, int]]:
        return {
            record
            for source in self.sources
            for part in range(self.parts)
            for record in numbers(source, part, self.count, self.keys)
        }

    # ------------------------------------------------------------ building

    def build(self, parallelism: int) -> GraphBuilder:
        """Return the topology; records keep their order within a partition."""
        env = GraphBuilder("simulated", parallelism=parallelism, status=FTStatus.OFF)
        getattr(self, f"_{self.name}")(env, parallelism)
        return env

    def _read(self, env: GraphBuilder, source: str, parallelism: int) -> Any:
        lists = [partial(numbers, source, part, self.count, self.keys) for part in range(self.parts)]
        passing = min(self.parts, parallelism)
        return env.source(partitions(*lists), NUMBERED, uid=source, parallelism=passing).map(
            Passing(self.outside.number), NUMBERED, uid=f"passing-{source}", parallelism=passing
        )

    def _sink(self, stream: Any, uid: str, parallelism: int) -> None:
        stream.sink(Writer(self.outside.number, uid), uid=uid, parallelism=parallelism)

    def _counting(self, env: GraphBuilder, parallelism: int) -> None:
        function = Counting(self.outside.number, self.exact)
        counted = self._read(env, "a", parallelism).key_by("key").process(function, COUNTED, uid="counting")
        self._sink(counted, "out", parallelism)

    def _union(self, env: GraphBuilder, parallelism: int) -> None:
        function = Counting(self.outside.number, self.exact)
        both = self._read(env, "a", parallelism).union(self._read(env, "b", parallelism))
        self._sink(both.key_by("key").process(function, COUNTED, uid="counting"), "out", parallelism)

    def _co(self, env: GraphBuilder, parallelism: int) -> None:
        left, right = (self._read(env, source, parallelism).key_by("key") for source in self.sources)
        function = Meeting(self.outside.number, self.exact)
        self._sink(left.connect(right).process(function, COUNTED, uid="counting"), "out", parallelism)

    def _side(self, env: GraphBuilder, parallelism: int) -> None:
        function = Sorting(self.outside.number, self.exact)
        counted = (
            self._read(env, "a", parallelism)
            .key_by("key")
            .process(function, COUNTED, side={"odd": COUNTED}, uid="counting")
        )
        self._sink(counted, "out", parallelism)
        odd = counted.side_output("odd").map(Passing(self.outside.number, "process"), COUNTED, uid="odd")
        self._sink(odd, "odds", parallelism)

    def _windows(self, env: GraphBuilder, parallelism: int) -> None:
        windowed = (
            self._read(env, "a", parallelism)
            .assign_watermarks("at", "500ms", uid="times", parallelism=min(self.parts, parallelism))
            .key_by("key")
            .window(tumbling("1s"))
            .late_to("late")
            .process(_windowed, WINDOWED, uid="windows")
        )
        self._sink(windowed, "out", parallelism)
        self._sink(windowed.side_output("late"), "late", parallelism)

    def _forward(self, env: GraphBuilder, parallelism: int) -> None:
        passing = min(self.parts, parallelism)
        self._sink(self._read(env, "a", parallelism), "out", passing)

    # ------------------------------------------------------------ checking

    def check(self) -> None:
        """Lost, duplicated and out of order within a key are 0, and every count is exact."""
        if self.name == "windows":
            self._check_windows()
            return
        rows = [*self.outside.visible("out"), *self.outside.visible("odds")]
        seen = Counter(row[:5] for row in rows)
        lost = self.records - set(seen)
        assert not lost, f"{len(lost)} lost: {sorted(lost)[:5]}"
        assert set(seen) == self.records
        if not self.exact:
            return
        twice = {record: times for record, times in seen.items() if times > 1}
        assert not twice, f"{len(twice)} duplicated: {sorted(twice)[:5]}"
        if self.name == "forward":
            return
        for key, its in by_key(rows).items():
            assert sorted(row[-1] for row in its) == list(range(1, len(its) + 1)), key
            latest: dict[Any, int] = {}
            for row in sorted(its, key=lambda row: row[-1]):
                place = row[1:3]
                assert latest.get(place, -1) < row[3], f"{row} is out of order"
                latest[place] = row[3]

    def _check_windows(self) -> None:
        wanted = Counter((record[1], record[2], record[3]) for record in self.records)
        late = Counter((row[1], row[2], row[3]) for row in self.outside.visible("late"))
        inside = Counter(row[2:] for row in self.outside.visible("out"))
        seen = late + inside
        assert not wanted - seen, f"lost: {wanted - seen}"
        assert set(seen) == set(wanted)
        if self.exact:
            assert seen == wanted, f"duplicated: {seen - wanted}"
        times = {(record[1], record[2], record[3]): record[4] for record in self.records}
        for row in self.outside.visible("out"):
            assert row[1] <= times[row[2:]] < row[1] + 1_000


Build = Callable[[int], GraphBuilder]
CASES = ("counting", "union", "co", "side", "windows", "forward")
