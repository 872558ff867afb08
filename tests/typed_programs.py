"""Programs as users write them, for `test_types`: type checkers are run over them, and nobody runs them.

Where a line says ``type: ignore`` a type checker has to find something.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, assert_type

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

import ftlayer
from ftlayer import (
    CheckpointConfig,
    Context,
    CoProcessFunction,
    DataStream,
    DeadLetter,
    FailurePolicy,
    FTLayer,
    Job,
    KeyedStream,
    ListHandle,
    MapHandle,
    ProcessFunction,
    Push,
    PushSource,
    ReducingHandle,
    StateTtl,
    StreamEnvironment,
    TrackedQuery,
    TrackedStream,
    ValueHandle,
    WindowedStream,
    current_record,
    session,
    sliding,
    tumbling,
)
from ftlayer.sinks import FileSink, KafkaSink
from ftlayer.sources import FromJson, KafkaSource

# ---------------------------------------------------------------- a wrapped query


def parse(record: dict[str, Any]) -> dict[str, Any]:
    if current_record().attempt > 1:
        raise ftlayer.RetryLater("busy", after="1m")
    return {"id": int(record["value"])}


def write(rows: DataFrame, batch_id: int) -> None:
    rows.write.mode("overwrite").parquet(f"out/{batch_id}")


def a_query(spark: SparkSession) -> None:
    with FTLayer.embedded("state", timeout="1m", retry_on=(OSError,), on_dead=print) as layer:
        frame = spark.readStream.format("rate").load()
        stream = assert_type(layer.source(frame, name="rates", key="value"), TrackedStream)
        layer.source(frame)  # type: ignore[call-overload]
        intake = layer.ingest("orders", "value string")
        intake.put({"value": "1"})
        layer.source(intake, max_failing="5%")
        layer.source(intake, key="value")  # type: ignore[call-overload]
        spread = stream.repartition(4, "value").repartition(None, "value").key_by("value", partitions=2)
        spread.repartition()  # type: ignore[call-overload]
        parsed = spread.map(parse, "id long", rate_limit=10).filter(lambda record: record["id"] > 1)
        stream.map(parse, "id long", rate=10)  # type: ignore[call-arg]
        writer = parsed.sink(write, checkpoint="cp").trigger(processingTime="1 second")
        parsed.sink(write)  # type: ignore[call-arg]
        writer.trigger()  # type: ignore[call-overload]
        writer.trigger(availableNow=False)  # type: ignore[call-overload]
        query = assert_type(writer.option("a", "b").start(), TrackedQuery)
        assert_type(query.awaitTermination("1m"), bool)
        query.awaitTerminaton()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- dead letters


def letters(spark: SparkSession, layer: FTLayer) -> None:
    def late(letter: DeadLetter) -> bool:
        return "late" in letter.reason

    found = [letter for letter in layer.list_dead() if late(letter)]
    assert_type(layer.requeue(letter.key for letter in found), int)
    assert_type(layer.dead_letters(spark), DataFrame)
    layer.dead_letters()  # type: ignore[call-arg]
    streaming = layer.dead_letter_stream(spark, "rates")
    layer.source(streaming, name="letters").map(parse, "id long")


# ---------------------------------------------------------------- topologies


def append(numbers: list[int], number: int) -> list[int]:
    return [*numbers, number]


def mean(numbers: list[int]) -> float:
    return sum(numbers) / len(numbers)


class LastSeen(ProcessFunction):
    """Keyed state and timers."""

    def __init__(self, hour_ms: int) -> None:
        self.hour_ms = hour_ms

    def process(self, record: tuple[str, int], ctx: Context) -> Iterator[tuple[str, int]]:
        name, amount = record
        count = assert_type(ctx.value("count", 0), ValueHandle[int])
        count.set(assert_type(count.get(), int) + 1)
        count.set("1")  # type: ignore[arg-type]
        rate: ValueHandle[float] = ctx.value("rate", 0)
        rate.set(amount / 2)
        last: ValueHandle[str | None] = ctx.value("last")
        assert_type(last.get(), str | None)
        assert_type(ctx.value("any").get(), Any)
        total = ctx.reducing("total", lambda a, b: a + b)
        total.add(amount)
        most: ReducingHandle[int] = ctx.reducing("most", max)
        assert_type(most.get(), int | None)
        names = ctx.aggregating("names", lambda: "", lambda aggregate, name: f"{aggregate} {name}")
        names.add(name)
        average = ctx.aggregating("average", lambda: [0], append, mean)
        average.add(name)  # type: ignore[arg-type]
        assert_type(average.get(), float | None)
        seen: ListHandle[int] = ctx.list("seen", ttl=StateTtl("1h"))
        assert_type(seen.get(), list[int])
        seen.append(name)  # type: ignore[arg-type]
        by_name: MapHandle[str, int] = ctx.map("by_name")
        by_name[name] = by_name.get(name, 0) + amount
        assert_type(by_name.get(name), int | None)
        by_name[amount] = 1  # type: ignore[index]
        ctx.timers.processing(ctx.now_ms + self.hour_ms)
        if ctx.timestamp is not None:
            ctx.timers.event(ctx.timestamp + self.hour_ms)
        ctx.output("late", record)
        yield name, amount

    def on_timer(self, time_ms: int, ctx: Context) -> Iterable[tuple[str, int]] | None:
        return [(str(ctx.key), time_ms)] if time_ms < ftlayer.LAST_WATERMARK_MS else None


class Matched(CoProcessFunction):
    def open(self, ctx: Context) -> None:
        self.left: ValueHandle = ctx.value("left")

    def process_left(self, record: Any, ctx: Context) -> None:
        self.left.set(record)

    def process_right(self, record: Any, ctx: Context) -> list[Any]:
        return [(record, self.left.get())]


def count_all(key: str, window: ftlayer.Window, records: list[Any]) -> Iterator[tuple[str, int, int]]:
    yield key, window.start_ms, len(records)


def acker_mode(spark: SparkSession, layer: FTLayer) -> None:
    env = StreamEnvironment(spark, layer, name="words", parallelism=2)
    lines = env.source([{"line": "a b"}], "line string", uid="lines", retry_on=(OSError,))
    words = assert_type(lines.flat_map(str.split, "word string", uid="words"), DataStream)
    words.map(str.lower, uid="lower", on_failure="fail", parallelism=2).rebalance().sink(print, every="1s")
    words.map(str.lower, uidd="lower")  # type: ignore[call-arg]
    words.set_parallelism(2).uid("split").dead_letters(uid="letters").sink(print)
    status = assert_type(env.execute(stop_at_latest=True), Job).status()
    status.line()


def barrier_mode(spark: SparkSession) -> None:
    config = CheckpointConfig(interval="10s", directory="cp", failures=FailurePolicy(max_attempts=3))
    env = StreamEnvironment(spark, checkpointing=config, name="totals")
    source = KafkaSource("broker:9092", "orders", start="earliest")
    orders = env.source(source, uid="orders").map_batches(FromJson("name string, at timestamp, n long"))
    keyed = assert_type(orders.assign_watermarks("at", "5s", idle="1m").key_by("name"), KeyedStream)
    keyed.process(LastSeen(3_600_000), "name string, n long", side={"late": "name string"}).side_output(
        "late"
    )
    windows = assert_type(keyed.window(tumbling("1h")), WindowedStream)
    windows.allowed_lateness("1m").late_to("late").process(count_all, "name string, start long, n int")
    keyed.window(sliding("1h", every="1m")).aggregate(ftlayer.count(), ftlayer.sum("n", name="total"))
    totals = keyed.window(session("1m")).aggregate(
        lambda: 0, lambda total, record: total + record[2], "n long", merge=lambda a, b: a + b, uid="totals"
    )
    keyed.connect(keyed).process(Matched(), "left string, right string")
    keyed.join(
        keyed, lower="-1m", upper="1m", function=lambda a, b: (a[0], b[2]), schema="name string, n long"
    )
    totals.sink(KafkaSink("broker:9092", "totals", staging="s3://bucket/staging"), uid="kafka")
    totals.sink(FileSink("out"))
    job = assert_type(env.execute_async(restore_from="latest"), Job)
    assert_type(job.savepoint("savepoints", timeout="1m"), str)
    job.wait("1h")


# ---------------------------------------------------------------- a source and a sink of one's own


class Numbers(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"next": start["next"] + 10}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(range(start["next"], end["next"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        return ((number,) for number in partition.value)


def listen(push: Push) -> Callable[[], None]:
    push([{"n": 1}])
    push.push_async([{"n": 2}]).result()
    return lambda: None


class Printed(DataSourceStreamWriter):
    def write(self, iterator: Iterator[Any]) -> WriterCommitMessage:
        for row in iterator:
            print(row)
        return WriterCommitMessage()


def of_ones_own(env: StreamEnvironment) -> None:
    pushed = env.source(PushSource(listen), "n long")
    pushed.union(env.source(Numbers(), "n long")).sink(Printed())
    env.source(ftlayer.partitions([1, 2], lambda: iter([3])), "n long").sink(
        lambda batch: print(batch.num_rows)
    )
