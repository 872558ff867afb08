"""What cannot work is refused when it is asked for, with its name and a way out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import functions as f

from ftlayer.config import FTStatus
from ftlayer.errors import (
    CheckpointMismatchError,
    ConfigError,
    InvalidTopologyError,
    UnhashableKeyError,
    UnsupportedError,
)
from ftlayer.spark.deliveries.source import DeliverySource
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.plan.stream_plan import check_session

pytestmark = pytest.mark.spark


@pytest.fixture
def idle(tmp_path: Path) -> FTLayer:
    """A layer for what is refused before any vertex starts."""
    return FTLayer.embedded(tmp_path / "never")


@pytest.fixture(autouse=True)
def _starts_no_vertex(idle: FTLayer) -> Any:
    yield
    assert idle.vertex is None


def test_operators_with_state_before_the_source(idle: FTLayer, rows: Any) -> None:
    events = rows.stream("at timestamp, k string")
    marked = events.withWatermark("at", "1 minute")
    late = marked.dropDuplicatesWithinWatermark(["k"])
    for frame, name in [
        (marked, "withWatermark"),
        (late, "(?:withWatermark|dropDuplicatesWithinWatermark)"),
        (events.dropDuplicates(["k"]), "dropDuplicates"),
        (events.groupBy("k").count(), "a streaming aggregation"),
    ]:
        with pytest.raises(
            UnsupportedError, match=f"source 'events' is read through {name}.*behind the sink"
        ):
            idle.source(frame, name="events")


def test_operators_with_state_behind_the_source(idle: FTLayer, rows: Any) -> None:
    stream = idle.source(rows.stream("at timestamp, k string"), name="events")

    def marked(frame: Any) -> Any:
        return frame.withWatermark("at", "1 minute")

    def late(frame: Any) -> Any:
        return frame.withWatermark("at", "1 minute").dropDuplicatesWithinWatermark(["k"])

    with pytest.raises(
        UnsupportedError, match=r"transform 'marked' uses withWatermark.*deduplicate in the sink"
    ):
        stream.transform(marked)
    with pytest.raises(UnsupportedError, match=r"Watermark"):
        stream.transform(late)


def test_transforms_that_lose_the_ids(idle: FTLayer, numbers: Any) -> None:
    stream = idle.source(numbers, name="numbers")
    with pytest.raises(InvalidTopologyError, match=r'transform .cut. does not keep .*select\("\*"'):
        stream.transform(lambda frame: frame.select("n"), name="cut")
    with pytest.raises(InvalidTopologyError, match=r"'count' does not keep .*aggregations in the sink"):
        stream.transform(lambda frame: frame.groupBy().count(), name="count")
    with pytest.raises(InvalidTopologyError, match=r"'bent' changed the column '_ft' to string"):
        stream.transform(lambda frame: frame.withColumn("_ft", f.lit("x")), name="bent")
    with pytest.raises(InvalidTopologyError, match=r"'none' returned a NoneType, not a DataFrame"):
        stream.transform(lambda frame: None, name="none")
    with pytest.raises(InvalidTopologyError, match=r"transform: expected a function"):
        stream.transform("n + 1")  # type: ignore[arg-type]


def test_names(idle: FTLayer, numbers: Any) -> None:
    stream = idle.source(numbers, name="numbers").map(lambda r: r, "n bigint", name="one")
    with pytest.raises(InvalidTopologyError, match=r"two operators of this query are named 'one'.*name="):
        stream.key_by("n").filter(lambda r: True, name="one")
    for name in ("", "a b", "a/b"):
        with pytest.raises(ConfigError, match=r"no name of a source|a source needs one that stays the same"):
            idle.source(numbers, name=name)
    with pytest.raises(InvalidTopologyError, match=r"expected a function, got int"):
        stream.map(3, "n int")  # type: ignore[arg-type]


def test_reserved_and_double_columns(idle: FTLayer, numbers: Any) -> None:
    for name in ("_ft", "_FT_root", "_ft_row"):
        with pytest.raises(InvalidTopologyError, match=f"{name!r} has a reserved name"):
            idle.source(numbers.withColumn(name, f.lit(1)), name="numbers")
    stream = idle.source(numbers, name="numbers")
    with pytest.raises(InvalidTopologyError, match=r"schema of 'm': column '_ft_id' has a reserved name"):
        stream.map(lambda r: r, "n int, _ft_id bigint", name="m")
    with pytest.raises(InvalidTopologyError, match=r"two columns are named 'n'"):
        stream.map(lambda r: r, "n int, n int", name="m")
    with pytest.raises(InvalidTopologyError, match=r"two columns are named 'n'"):
        idle.source(numbers.select("n", f.lit(1).alias("n")), name="numbers")
    with pytest.raises(ConfigError, match=r"emit: the rows have a column 'n' already"):
        stream.emit(lambda rows, batch: None, checkpoint="ck", carrier="n")


def test_schemas(idle: FTLayer, numbers: Any) -> None:
    stream = idle.source(numbers, name="numbers")
    for schema in ("n notatype", "int", 7):
        with pytest.raises(ConfigError, match=r"schema of 'm'"):
            stream.map(lambda r: r, schema, name="m")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"kind: expected one of arrow, pandas, got 'numpy'"):
        stream.map_batches(lambda b: b, "n int", kind="numpy")  # type: ignore[arg-type]


def test_keys_are_found_as_spark_finds_columns(idle: FTLayer, spark: Any, rows: Any) -> None:
    frame = rows.stream("Host string, at struct<Zone string>, `a.b` int, big BIGINT, m map<string, int>")
    keys = ["host", "AT.zone", "a.b", "BIG"]
    assert idle.source(frame, name="logs", key=keys)._plan.source.key == ("Host", "at.Zone", "a.b", "big")
    for key in ("hosts", "at.x", "Host.x", ""):
        with pytest.raises(
            ConfigError, match=f"source 'logs': key: there is no column {key!r}; there are Host"
        ):
            idle.source(frame, name="logs", key=key)
    with pytest.raises(UnhashableKeyError, match=r"'m'"):
        idle.source(frame, name="logs", key="M")
    stream = idle.source(frame, name="logs")
    assert len(stream.key_by("HOST").repartition(3, "at.zone")._plan.steps) == 2
    with pytest.raises(ConfigError, match=r"key_by: there is no column 'hosts'"):
        stream.key_by("hosts")
    with pytest.raises(ConfigError, match=r"repartition: give a number"):
        stream.repartition()
    spark.conf.set("spark.sql.caseSensitive", "true")
    try:
        with pytest.raises(ConfigError, match=r"no column 'host'"):
            idle.source(frame, name="logs", key="host")
        two = rows.stream("n int, N int")
        assert idle.source(two, name="two", key="N")._plan.source.key == ("N",)
    finally:
        spark.conf.unset("spark.sql.caseSensitive")
    with pytest.raises(InvalidTopologyError, match=r"'n' and 'N' are one to Spark"):
        idle.source(two, name="two", key="N")


@pytest.mark.parametrize("kind", ["string", "array<string>", "struct<x: string>"])
def test_keys_with_a_collation(idle: FTLayer, rows: Any, kind: str) -> None:
    frame = rows.stream("k " + kind.replace("string", "string collate UTF8_LCASE"))
    with pytest.raises(
        UnhashableKeyError, match=r"key: column 'k' has the collation UTF8_LCASE.*UTF8_BINARY"
    ):
        idle.source(frame, name="logs", key="K")
    assert idle.source(frame, name="logs").key_by("k")._plan.steps  # Spark's own shuffle knows what to do


def test_what_is_no_stream(idle: FTLayer, spark: Any) -> None:
    with pytest.raises(InvalidTopologyError, match=r"the DataFrame is not a stream; .*readStream"):
        idle.source(spark.range(3), name="numbers")
    with pytest.raises(InvalidTopologyError, match=r"expected a streaming DataFrame.*got list"):
        idle.source([1], name="numbers")  # type: ignore[arg-type]


def test_ends(idle: FTLayer, numbers: Any, tmp_path: Path) -> None:
    stream = idle.source(numbers, name="numbers")
    with pytest.raises(ConfigError, match=r"checkpoint: expected a directory, of this query alone"):
        stream.sink(lambda rows, batch: None, checkpoint="")
    with pytest.raises(ConfigError, match=r"sink: function.rows, batch id.: expected a function, got a str"):
        stream.sink("parquet", checkpoint="ck")  # type: ignore[arg-type]
    writer = stream.sink(lambda rows, batch: None, checkpoint=str(tmp_path / "ck"))
    for trigger in ({"once": True}, {"continuous": "1 second"}, {}):
        with pytest.raises(
            ConfigError, match=r"trigger: (there is no option|expected one of processingTime)"
        ):
            writer.trigger(**trigger)
    for interval in ("soon", "1 month", "-1 seconds", 5):
        with pytest.raises(
            ConfigError, match=r"trigger: processingTime: expected an interval like '2 seconds'"
        ):
            writer.trigger(processingTime=interval)
    with pytest.raises(ConfigError, match=r"checkpoint="):
        writer.option("checkpointLocation", "x")
    with pytest.raises(UnsupportedError, match=r"write_stream\('parquet'\): no Python Data Source.*sink\("):
        stream.write_stream("parquet", checkpoint="ck")
    with pytest.raises(UnsupportedError, match=r"write_stream\('nobody'\)"):
        stream.write_stream("nobody", checkpoint="ck")
    with pytest.raises(ConfigError, match=r"is not a pyspark.sql.datasource.DataSource"):
        stream.write_stream(dict, checkpoint="ck")


def test_resume_needs_a_binary_column(idle: FTLayer, rows: Any) -> None:
    frame = rows.stream("n bigint, FT binary, text string")
    assert idle.resume(frame, name="second", carrier="ft")._plan.source.carrier == "FT"
    with pytest.raises(ConfigError, match=r"resume 'second': column 'text' is string, not binary"):
        idle.resume(frame, name="second", carrier="text")
    with pytest.raises(ConfigError, match=r"resume 'second': carrier: there is no column 'header'"):
        idle.resume(frame, name="second", carrier="header")


def test_spark_connect() -> None:
    session = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(UnsupportedError, match=r"needs a classic Spark session.*spark-submit"):
        check_session(session)


def test_options_of_the_delivery_source(spark: Any) -> None:
    spark.dataSource.register(DeliverySource)
    good = {"address": "grpc://127.0.0.1:1", "token": "x" * 20, "stream": "s/s", "query": "s"}

    def load(**options: str) -> Any:
        return spark.readStream.format("ftlayer").schema("n int").options(**options).load()

    assert load(**good).isStreaming
    for name in good:
        with pytest.raises(ConfigError, match=f"option '{name}' is missing"):
            DeliverySource({**good, name: ""}).streamReader(load(**good).schema)
    for name, value in [("max_rows", "0"), ("max_rows", "many"), ("partitions", "-1")]:
        with pytest.raises(ConfigError, match=f"option '{name}' must be a number from 1, not '{value}'"):
            DeliverySource({**good, name: value}).streamReader(load(**good).schema)
    with pytest.raises(Exception, match=r"needs .schema"):
        spark.readStream.format("ftlayer").options(**good).load()


def test_options_of_a_layer(tmp_path: Path) -> None:
    for option, value in [
        ("timeout", "soon"),
        ("max_attempts", 0),
        ("backoff", ()),
        ("backoff", ("1s", "x")),
        ("jitter", 2),
        ("max_pending", 0),
        ("max_rows", 0),
        ("max_rows", "many"),
        ("durability", "maybe"),
        ("shards", 3),
        ("colour", "red"),
        ("status", "offline"),
    ]:
        with pytest.raises(ConfigError, match=option):
            FTLayer.embedded(tmp_path / "ft", **{option: value})  # type: ignore[arg-type]
    assert not FTLayer.embedded(tmp_path / "ft", status="off").enabled  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"address"):
        FTLayer.connect("http://localhost", token="x" * 20)


def test_checkpoints_of_others(
    idle: FTLayer, spark: Any, numbers: Any, tmp_path: Path, layer: FTLayer, kept: Any, tools: Any
) -> None:
    """Of a plain query, of another source, of another store or of one that is gone; and with OFF, of ON."""
    plain = str(tmp_path / "plain")
    numbers.writeStream.foreachBatch(kept).trigger(availableNow=True).start(
        checkpointLocation=plain
    ).awaitTermination()
    with pytest.raises(CheckpointMismatchError, match=r"written without ftlayer .*new checkpoint directory"):
        layer.source(numbers, name="numbers").sink(kept, checkpoint=plain).start()
    tools.run(layer.source(numbers, name="numbers"), kept)
    with pytest.raises(
        CheckpointMismatchError, match=r"belongs to source 'numbers', this query reads 'others'"
    ):
        layer.source(numbers, name="others").sink(kept, checkpoint=tools.checkpoint).start()
    off = FTLayer.embedded(tmp_path / "never", status=FTStatus.OFF)
    with pytest.raises(CheckpointMismatchError, match=r"written with ftlayer on.*FTStatus.OFF"):
        off.source(numbers, name="numbers").sink(kept, checkpoint=tools.checkpoint).start()
    for log in ("commits", "offsets"):
        for file in (Path(tools.checkpoint) / log).iterdir():
            file.unlink()
    with pytest.raises(CheckpointMismatchError, match=r"ends at batch -1, .* has committed batch 0"):
        layer.source(numbers, name="numbers").sink(kept, checkpoint=tools.checkpoint).start()


def test_a_store_that_is_gone(
    spark: Any, numbers: Any, tmp_path: Path, layer: FTLayer, kept: Any, tools: Any
) -> None:
    tools.run(layer.source(numbers, name="numbers"), kept)
    with (
        FTLayer.embedded(tmp_path / "another") as other,
        pytest.raises(
            CheckpointMismatchError, match=r"has committed batch 0, and the vertex .* knows of -1 only"
        ),
    ):
        other.source(numbers, name="numbers").sink(kept, checkpoint=tools.checkpoint).start()


def test_columns_that_differ_in_case_alone(idle: FTLayer, rows: Any) -> None:
    stream = idle.source(rows.stream("k string"), name="events")
    with pytest.raises(InvalidTopologyError, match=r"'host' and 'Host' are one to Spark.*caseSensitive"):
        stream.map(lambda record: record, "host string, Host string")


def test_a_function_that_cannot_be_pickled(idle: FTLayer, rows: Any, tmp_path: Path) -> None:
    lock = threading.Lock()
    stream = idle.source(rows.stream("k string"), name="events").filter(lambda record: lock, name="locked")
    with pytest.raises(InvalidTopologyError, match=r"'locked' cannot be sent.*cannot pickle '_thread.lock'"):
        stream.sink(print, checkpoint=str(tmp_path / "ck")).start()
