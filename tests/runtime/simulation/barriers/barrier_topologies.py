"""Topologies whose results are known, with the functions that they run and what is checked at their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any

import pyarrow as pa
from barrier_outside import Outside, Rows, Writer, by_key
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.config import FTStatus
from ftlayer.functions.data_sources import SupportsTriggerAvailableNow
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.streams.windowed_stream import tumbling

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
class Spans(InputPartition):
    """Rows of one partition, from ``first`` to before ``end``."""

    part: int
    first: int
    end: int


class Numbers(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads `numbers`, in ranges and partitions that it plans otherwise each time; forgets what it may."""

    def __init__(self, world: int, source: str, parts: int, count: int, keys: int) -> None:
        self.world, self.source, self.parts, self.count, self.keys = world, source, parts, count, keys

    @property
    def outside(self) -> Outside:
        return Outside.worlds[self.world]

    def prepareForTriggerAvailableNow(self) -> None:
        """All there will be is there."""

    def initialOffset(self) -> Any:
        return {"n": 0}

    def getDefaultReadLimit(self) -> Any:
        return None

    def latestOffset(self, start: Any, limit: Any) -> Any:
        self.outside.trip("plan")
        most = (
            self.count
            if limit is not None
            else min(self.count, start["n"] + self.outside.random.randint(1, 20))
        )
        return {"n": most}

    def partitions(self, start: Any, end: Any) -> list[Spans]:
        self.outside.trip("plan")
        found = []
        for part in range(self.parts):
            cuts = sorted(self.outside.random.sample(range(start["n"] + 1, end["n"] + 1), k=1))
            bounds = [start["n"], *cuts, end["n"]]
            found += [Spans(part, first, last) for first, last in pairwise(bounds) if first < last]
        self.outside.random.shuffle(found)
        return found

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Spans)
        forgotten = self.outside.forgotten.get(self.source, 0)
        self.outside.check(
            partition.first >= forgotten, f"{partition} is read, up to {forgotten} is forgotten"
        )
        yield from numbers(self.source, partition.part, self.count, self.keys)[
            partition.first : partition.end
        ]

    def commit(self, end: Any) -> None:
        self.outside.trip("forget")
        self.outside.forgotten[self.source] = max(self.outside.forgotten.get(self.source, 0), end["n"])


@dataclass
class Passing:
    """Passes records on, and raises when its fault is armed; deadly ones end the process."""

    world: int
    fault: str = "function"

    def __call__(self, record: Any) -> Any:
        outside = Outside.worlds[self.world]
        if record[1:4] in outside.deadly:
            outside.end_itself()
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


class Ringing(ProcessFunction):
    """Keeps records until a timer, and checks that each fires once, in its order, and before what came behind it.

    Some timers are set again at their own time, some are deleted by earlier ones, and some race one of the wall clock.
    """

    def __init__(self, world: int, exact: bool) -> None:
        self.world, self.exact = world, exact

    def process(self, record: Any, ctx: Any) -> Iterator[Any]:
        waiting = ctx.map("waiting")
        over = [time for time in waiting if time <= ctx.watermark]
        self._check(not over, f"{record} came at {ctx.watermark}, before timers {over}")
        time = (record[4] // 400 + 1) * 400
        if time <= ctx.watermark:
            yield record
            return
        waiting[time] = [*waiting.get(time, []), record]
        ctx.timers.event(time)
        if record[3] % 4 == 1:
            soon = ctx.now_ms + record[3] % 3
            races = ctx.map("races")
            races[soon] = [*races.get(soon, []), record]
            ctx.timers.processing(soon)

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        waiting, races = ctx.map("waiting"), ctx.map("races")
        if ctx.timestamp is None:
            self._check(time_ms in races, f"the clock's timer {time_ms} fired, and is not set")
            for record in races.pop(time_ms, []):
                yield record
                # An earlier timer may have moved it on.
                (time,) = (time for time, its in waiting.items() if record in its)
                self._wait(waiting, ctx, time, [each for each in waiting[time] if each != record])
            return
        first = min(waiting, default=None)
        self._check(first == time_ms, f"timer {time_ms} fired, and the first one is {first}")
        here, *rest = waiting.pop(time_ms, [None])
        yield here
        for soon, racing in [*races.items()]:
            left = [each for each in racing if each != here]
            if left:
                races[soon] = left
            elif racing:
                del races[soon]
                ctx.timers.delete_processing(soon)
        self._wait(waiting, ctx, time_ms, rest)
        if here[3] % 3 == 0:
            later = time_ms + 400
            moved = waiting.get(later, [])
            self._wait(waiting, ctx, later, [])
            if moved:
                self._wait(waiting, ctx, later + 400, [*waiting.get(later + 400, []), *moved])

    def _wait(self, waiting: Any, ctx: Any, time: int, records: list[Any]) -> None:
        if records:
            waiting[time] = records
            ctx.timers.event(time)
        elif waiting.pop(time, None) is not None:
            ctx.timers.delete_event(time)

    def _check(self, holds: bool, text: str) -> None:
        Outside.worlds[self.world].check(holds, text)


def _windowed(key: Any, window: Any, records: list[Any]) -> Iterator[Any]:
    for _, source, part, number, _ in records:
        yield key, window.start_ms, source, part, number


class Extent(Enum):
    """How far a job has come: to its end, to where it was drained, or to where it was ended without more ado."""

    WHOLE = auto()
    DRAINED = auto()
    CUT = auto()


SINKS = ("out", "odds", "late")
Counts = Callable[[int, Rows], bool]


def everything(name: int, rows: Rows) -> bool:
    """Count all messages."""
    return True


@dataclass
class Case:
    """A topology, the records of its sources, and what has to be visible at the end."""

    name: str
    outside: Outside
    count: int = 60
    keys: int = 5
    parts: int = 2
    exact: bool = True
    came_back: bool = False
    """Whether users have sent dead letters back into the job."""

    @property
    def ordered(self) -> bool:
        """Whether records of a partition come in order: not from readers that plan each range otherwise."""
        return self.exact and self.name != "reader"

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
            if record[1:4] not in self.outside.deadly
        }

    # ------------------------------------------------------------ building

    def build(self, parallelism: int) -> GraphBuilder:
        """Return the topology; records keep their order within a partition."""
        env = GraphBuilder(
            "simulated", parallelism=parallelism, status=FTStatus.OFF, restart=FixedDelay(10_000, "10ms")
        )
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
        function = Counting(self.outside.number, self.ordered)
        counted = self._read(env, "a", parallelism).key_by("key").process(function, COUNTED, uid="counting")
        self._sink(counted, "out", parallelism)

    def _union(self, env: GraphBuilder, parallelism: int) -> None:
        function = Counting(self.outside.number, self.ordered)
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

    def _timers(self, env: GraphBuilder, parallelism: int) -> None:
        timed = self._read(env, "a", parallelism).assign_watermarks(
            "at", "500ms", uid="times", parallelism=min(self.parts, parallelism)
        )
        function = Ringing(self.outside.number, self.exact)
        rung = timed.key_by("key").process(function, NUMBERED, uid="ringing")
        # What fails behind a timer fails in its chain.
        self._sink(
            rung.map(Passing(self.outside.number, "process"), NUMBERED, uid="rung"), "out", parallelism
        )

    def _forward(self, env: GraphBuilder, parallelism: int) -> None:
        passing = min(self.parts, parallelism)
        self._sink(self._read(env, "a", parallelism), "out", passing)

    def _reader(self, env: GraphBuilder, parallelism: int) -> None:
        reader = Numbers(self.outside.number, "a", self.parts, self.count, self.keys)
        function = Counting(self.outside.number, self.ordered)
        read = env.source(reader, NUMBERED, uid="a").map(
            Passing(self.outside.number), NUMBERED, uid="passing-a"
        )
        self._sink(read.key_by("key").process(function, COUNTED, uid="counting"), "out", parallelism)

    # ------------------------------------------------------------ checking

    def completed(self, checkpoint: Checkpoint, letters: int, key: bytes) -> None:
        """A checkpoint is complete; so many letters are dead by now. ``key`` unseals what users' code made."""

    def check(self, extent: Extent = Extent.WHOLE, counts: Counts = everything) -> None:
        """Lost, duplicated and out of order within a key are 0, and every count is exact.

        ``counts(name, rows)`` says which messages count.
        """
        self._check_places(self._places(counts), extent)
        if self.name == "windows":
            self._check_windows(counts)
        elif self.name not in {"forward", "timers"} and extent is not Extent.CUT:
            self._check_counts([row for sink in SINKS for row in self.outside.visible(sink, counts)])

    def _places(self, counts: Counts) -> Counter[tuple[str, int, int]]:
        """Return how often each record (source, partition, number) is visible."""
        found: Counter[tuple[str, int, int]] = Counter()
        for sink in SINKS:
            # What a window gave has its start in front.
            first = 2 if self.name == "windows" and sink == "out" else 1
            found.update(row[first : first + 3] for row in self.outside.visible(sink, counts))
        return found

    def _check_places(self, places: Counter[tuple[str, int, int]], extent: Extent) -> None:
        wanted = {record[1:4] for record in self.records}
        assert set(places) <= wanted
        if extent is Extent.DRAINED and self.ordered:
            # Each partition was read up to somewhere.
            read = Counter(place[:2] for place in places)
            wanted = {place for place in wanted if place[2] < read[place[:2]]}
        if extent is Extent.WHOLE or (extent is Extent.DRAINED and self.ordered):
            lost = wanted - set(places)
            assert not lost, f"{len(lost)} lost: {sorted(lost)[:5]}"
        twice = {place: times for place, times in places.items() if times > 1}
        assert not self.exact or not twice, f"{len(twice)} duplicated: {sorted(twice)[:5]}"

    def _check_counts(self, rows: list[tuple[Any, ...]]) -> None:
        for key, its in by_key(rows).items():
            reached = sorted(row[-1] for row in its)
            if not self.exact:
                # What is reflected twice is counted twice; what is lost is not there.
                assert reached[-1] >= len({row[1:4] for row in its}), key
                continue
            assert reached == list(range(1, len(its) + 1)), key
            latest: dict[Any, int] = {}
            for row in sorted(its, key=lambda row: row[-1]) if self.ordered else ():
                place = row[1:3]
                assert latest.get(place, -1) < row[3], f"{row} is out of order"
                latest[place] = row[3]

    def _check_windows(self, counts: Counts) -> None:
        times = {record[1:4]: record[4] for record in self.records}
        for row in self.outside.visible("out", counts):
            assert row[1] <= times[row[2:]] < row[1] + 1_000


Build = Callable[[int], GraphBuilder]
CASES = ("counting", "union", "co", "side", "windows", "forward", "reader")
