"""A wrapped query without Spark: the real protocol and runner, a vertex in memory, sinks that keep all they get."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from ftlayer.common.failures import RowsRejected
from ftlayer.errors import QueryError
from ftlayer.functions.steps import FlatMap, Map
from ftlayer.spark.batch.runner import SourceOfQuery, SparkRunner
from ftlayer.spark.batch.sinks import BatchFunctionSink
from ftlayer.spark.deliveries.source import delivered_rows
from ftlayer.spark.protocol import BatchProtocol
from ftlayer.spark.stages.run import QueryPlan
from ftlayer.spark.stages.task import FT, Repartition, plan_stages
from ftlayer.vertex import calls

SOURCE = pa.schema([("v", pa.int64())])
OUT = pa.schema([("v", pa.int64()), ("copy", pa.int64())])
DELIVERED = SOURCE.append(pa.field(FT, pa.binary()))
MAX_ATTEMPTS = 3
POISON = 0
"""Rows with this value fail always."""

Values = list[int]


class CrashError(BaseException):
    """The query's process dies: no code of its own may handle that."""


class Functions:
    """The user's functions for one run: each record fails or not, as this run has it."""

    def __init__(self, seed: int, failing: float, *, by_call: bool) -> None:
        self._random = random.Random(seed)
        self._failing = failing
        self._by_call = by_call
        self._kept: dict[Any, bool] = {}

    def check(self, key: Any) -> None:
        if self._by_call or key not in self._kept:
            self._kept[key] = self._random.random() < self._failing
        if key[0] == POISON or self._kept[key]:
            raise ValueError(f"record {key}")

    def copies(self, record: Any) -> Iterator[Any]:
        yield {"v": record["v"], "copy": 0}
        self.check((record["v"], "first"))
        yield {"v": record["v"], "copy": 1}

    def each(self, record: Any) -> Any:
        self.check((record["v"], record["copy"]))
        return record


class Sinks:
    """Three of them, fed alike: one appends, one overwrites by batch id, one skips ids it knows.

    ``refuses`` says by value whether they set a record aside, by one of its rows.
    """

    def __init__(self) -> None:
        self.refuses: Callable[[int], bool] = lambda value: False
        self.appended: Counter[int] = Counter()
        self.overwritten: dict[int, Counter[int]] = {}
        self.skipping: dict[int, Counter[int]] = {}
        self.writes: dict[int, list[Counter[int]]] = {}
        self.die_half_way = False

    def write(self, batch: int, result: Any, incarnation: int) -> Any:
        try:
            return BatchFunctionSink(self.take, "sinks", tagged=True).write(batch, result, incarnation)
        except QueryError as error:
            if isinstance(error.__cause__, CrashError):
                raise error.__cause__ from None  # A process that dies reports nothing.
            raise

    def take(self, frame: Any, batch: int) -> None:
        tagged = list(frame.toLocalIterator())
        if refused := {tag: "refused" for v, copy, tag in tagged if copy and self.refuses(v)}:
            raise RowsRejected(refused)
        found = [(v, copy) for v, copy, _ in tagged]
        copies = [Counter(v for v, copy in found if copy == number) for number in (0, 1)]
        assert copies[0] == copies[1], "all or nothing"
        rows = copies[0]
        if self.die_half_way:
            half = Counter(dict(list(rows.items())[: len(rows) // 2]))
            self.appended += half
            self.overwritten[batch] = half
            raise CrashError
        self.writes.setdefault(batch, []).append(rows)
        self.appended += rows
        self.overwritten[batch] = rows
        self.skipping.setdefault(batch, rows)


class Query:
    """A wrapped query on a simulated Spark."""

    def __init__(self, kit: SimpleNamespace, *, rewindable: bool, shuffled: bool) -> None:
        self.kit = kit
        self.rewindable = rewindable
        self.shuffled = shuffled
        self.stream = "q/files" if rewindable else "ingest/clicks"
        self.vertex = kit.Vertex(MAX_ATTEMPTS)
        self.sinks = Sinks()
        self.arrived: Values = []
        self.runs = 0
        self.opened: Any = None
        # Spark's checkpoint: the end offsets of each batch, and how many are committed.
        self.offsets: list[tuple[int, int]] = []
        self.commits = 0
        self.max_rows = 4
        self.start()

    # ------------------------------------------------------------ Spark

    def call(self, call: Any) -> Any:
        return self.vertex.call(call, f"client-{self.runs}")

    def start(self) -> None:
        """Start the query's process, and the Spark query in it."""
        self.runs += 1
        options = calls.StreamOptions(max_attempts=MAX_ATTEMPTS, backoff_ms=(100,), jitter=0.0)
        self.opened = self.call(calls.OpenQuery("q", f"run-{self.runs}", (self.stream,), options))
        assert self.opened.last_committed >= self.commits - 1

    def arrive(self, values: Values) -> None:
        self.arrived += values
        if not self.rewindable:
            payload = pa.RecordBatch.from_pylist([{"v": value} for value in values], schema=SOURCE)
            self.vertex.call(calls.Ingest(self.stream, payload), "producer")

    @property
    def in_flight(self) -> bool:
        """Whether Spark has a batch planned that it does not know to be committed."""
        return len(self.offsets) > self.commits

    def plan_batch(self) -> bool:
        """Write the next batch into the offset log, unless there is nothing new."""
        if self.in_flight:
            return True
        source, delivered = self.offsets[-1] if self.offsets else (0, 0)
        end = self.call(calls.Deliverable(self.stream, delivered, self.max_rows)).end
        up_to = min(len(self.arrived), source + self.max_rows) if self.rewindable else 0
        if (up_to, end) == (source, delivered):
            return False
        self.offsets.append((up_to, end))
        return True

    def frame(self, batch: int, seed: int) -> Any:
        """The batch's rows, in partitions and an order of this run."""
        start = self.offsets[batch - 1] if batch else (0, 0)
        end = self.offsets[batch]
        parts = []
        if self.rewindable:
            rows = [{"v": value} for value in self.arrived[start[0] : end[0]]]
            parts.append(self.kit.source_rows(rows, SOURCE))
        if end[1] > start[1]:
            reply = self.call(calls.ReadDeliveries(self.stream, start[1], end[1]))
            parts += [delivered_rows(records, DELIVERED, start[1], end[1]) for records in reply.batches]
        chance = random.Random(seed)
        partitions: list[list[Any]] = [[] for _ in range(chance.randint(1, 3))]
        singles = [part.slice(row, 1) for part in parts for row in range(part.num_rows)]
        chance.shuffle(singles)
        for single in singles:
            chance.choice(partitions).append(single)
        # Spark hands over batches, not rows.
        return self.kit.FakeFrame([[pa.concat_batches(part)] if part else [] for part in partitions])

    def process(
        self, functions: Functions, seed: int, *, crash: str = "", restart: str = "", refusing: float = 0.0
    ) -> calls.BatchDetails | None:
        """Run the next batch; None if there is nothing to do, or the process died."""
        if self.opened is None:
            self.start()
        if not self.plan_batch():
            return None
        batch = len(self.offsets) - 1
        steps: list[Any] = [FlatMap("copies", functions.copies, OUT)]
        if self.shuffled:
            steps += [Repartition(2, ()), Map("each", functions.each, OUT)]
        schema = SimpleNamespace(names=OUT.names)
        stages = plan_stages(steps)
        plan = QueryPlan(stages, (schema,) * len(stages.stages), rejects=True)  # type: ignore[arg-type]
        chance = random.Random(seed)
        self.sinks.refuses = lambda value: chance.random() < refusing
        runner = SparkRunner(
            self.frame(batch, seed),
            plan,
            self.sinks,
            SourceOfQuery("files", self.stream),
            self.opened,
            lambda: self.vertex.incarnation,
            "q",
            f"run-{self.runs}",
            self.call,
        )

        def watch(step: str, number: int) -> None:
            assert number == batch
            if step == restart:
                self.vertex.restart()
            if step == crash:
                raise CrashError

        self.sinks.die_half_way = crash == "sink"
        try:
            with patch("ftlayer.spark.stages.run.with_column", lambda schema, *more: schema):
                report = BatchProtocol("q", self.opened.epoch, self.call, runner, watch).process(batch)
        except CrashError:
            self.opened = None
            return None
        finally:
            self.sinks.die_half_way = False
        self.commits = batch + 1
        return report

    # ------------------------------------------------------------ what must hold

    def status(self) -> Any:
        return self.call(calls.QueryStatusCall("q"))

    def accounted(self) -> Counter[int]:
        """Every record where it is: in the sink, dead, on its way in the vertex, not read yet."""
        found = sum((rows for rows in self.sinks.overwritten.values()), Counter())
        for state in ("dead", "waiting", "delivery"):
            found += self.vertex.values(state)
        read = self.offsets[-1][0] if self.offsets else 0
        return found + Counter(self.arrived[read:] if self.rewindable else ())

    def check_sinks(self) -> None:
        for batch, written in self.sinks.writes.items():
            for earlier, later in pairwise(written):
                # What failed once stays out: else a sink that skips would never get it.
                assert not later - earlier, f"batch {batch}: {later - earlier} passed only when run again"

    def drain(self) -> None:
        """Go on in peace until nothing is left to do."""
        good = Functions(0, 0.0, by_call=True)
        for seed in range(200):
            if self.process(good, seed) is None:
                if self.status().drained:
                    break
                self.vertex.advance(50)
        assert self.status().drained
        dead = self.vertex.values("dead")
        wanted = Counter(self.arrived) - dead
        assert not dead - Counter(self.arrived)
        assert sum((rows for rows in self.sinks.overwritten.values()), Counter()) == wanted
        assert not wanted - self.sinks.appended
        assert not wanted - sum((rows for rows in self.sinks.skipping.values()), Counter())
        assert dead[POISON] == Counter(self.arrived)[POISON]
        again = Counter(batch for batch, written in self.sinks.writes.items() if len(written) > 1)
        if not again:
            assert sum((rows for rows in self.sinks.skipping.values()), Counter()) == wanted
        self.check_sinks()
        # The next batch removes the last one's rows; what is left in the store are the dead.
        self.call(calls.BeginBatch("q", self.opened.epoch, len(self.offsets)))
        with self.vertex.inner.read() as read:
            assert (read.count("delivery"), read.count("segments")) == (0, 0)
