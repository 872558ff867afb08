"""Tables hold each record once, though slots and drivers are killed, and a query's batch that is run again."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer import FTLayer, StreamEnvironment
from ftlayer.sinks import DeltaDataSource, IcebergDataSource

pytestmark = pytest.mark.spark

KINDS = ["delta", "iceberg"]
START_S = 600.0
IN_CAMPAIGN = pytest.param("iceberg", marks=pytest.mark.campaign)


@pytest.fixture(scope="module")
def kit() -> Iterator[ModuleType]:
    """The job of these tests, under a name that slots import it by, too."""
    pytest.importorskip("deltalake")
    pytest.importorskip("pyiceberg")
    path = Path(__file__).with_name("table_job.py")
    spec = importlib.util.spec_from_file_location("table_job", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["table_job"] = module
    spec.loader.exec_module(module)
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    yield module
    cloudpickle.unregister_pickle_by_value(module)
    del sys.modules["table_job"]


def wait_for(running: Any, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        assert not running.over(0.05), running.status()
        assert time.monotonic() < deadline, running.status()


@pytest.mark.parametrize("kind", ["delta", IN_CAMPAIGN])
def test_a_slot_is_killed(spark: Any, kit: ModuleType, tmp_path: Path, kind: str) -> None:
    job = kit.TableJob(str(tmp_path), kind, 2_000, pace_s=0.1)
    running = kit.start(spark, job)
    try:
        wait_for(running, lambda: job.seen() > 100)
        wait_for(running, lambda: running.status().slots[0].pid != 0)
        os.kill(running.status().slots[0].pid, signal.SIGKILL)
        wait_for(running, lambda: bool(running.status().restarts) and job.seen() >= 2_000)
        job.gate.touch()
        assert running.wait(START_S)
    finally:
        running.cancel()
    assert sorted(job.numbers()) == list(range(2_000))


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_a_savepoint_is_restored_behind_others(
    spark: Any, kit: ModuleType, tmp_path: Path, kind: str
) -> None:
    """What it holds was committed by the job that went on; only what is read again behind it comes again."""
    job = kit.TableJob(str(tmp_path), kind, 4_000, pace_s=0.3)
    running = kit.start(spark, job)
    try:
        wait_for(running, lambda: job.seen() > 500)
        savepoint = running.savepoint(str(tmp_path / "savepoints"))
        at_savepoint = job.seen()
        wait_for(running, lambda: job.seen() > at_savepoint + 500)
    finally:
        running.cancel()
    before = Counter(job.numbers())
    assert set(before.values()) == {1}
    running = kit.start(spark, job, savepoint)
    try:
        job.gate.touch()
        assert running.wait(START_S)
    finally:
        running.cancel()
    found = Counter(job.numbers())
    assert set(found) == set(range(4_000))
    for source in range(kit.SOURCES):
        counts = [found[number] for number in range(source, 4_000, kit.SOURCES)]
        again = [number for number, count in enumerate(counts) if count == 2]
        assert set(counts) == {1, 2}
        assert again == list(range(again[0], again[-1] + 1)), "a range behind the savepoint"
        assert again[0] > 0


@pytest.mark.campaign
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_drivers_and_slots_are_killed_at_random(
    kit: ModuleType, tmp_path: Path, kind: str, seed: int
) -> None:
    job = kit.TableJob(str(tmp_path), kind, 12_000, pace_s=0.6)
    draw = random.Random(seed)
    for life in range(5):
        before = job.seen()
        with driver(kit, replace(job, kills=100 * seed + life)) as process:
            wait_with(process, tmp_path, lambda before=before: job.seen() > min(before, job.count - 1))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(draw.uniform(0, 4))
    with driver(kit, replace(job, kills=100 * seed + 99)) as process:
        wait_with(process, tmp_path, lambda: job.seen() >= job.count)
        job.gate.touch()
        assert process.wait(START_S) == 0, (tmp_path / "driver.txt").read_text("utf-8", "replace")[-4_000:]
    assert sorted(job.numbers()) == list(range(job.count))


@contextlib.contextmanager
def driver(kit: ModuleType, job: Any) -> Iterator[Any]:
    """A driver, killed at the end of the block."""
    script = kit.save(job)
    with (Path(job.directory) / "driver.txt").open("ab") as log:
        process = subprocess.Popen([sys.executable, kit.__file__, script], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_with(process: Any, directory: Path, holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not holds():
        log = (directory / "driver.txt").read_text("utf-8", "replace")[-4_000:]
        assert process.poll() is None, log
        assert time.monotonic() < deadline, log
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)


# ---------------------------------------------------------------- queries


def format_of(spark: Any, job: Any) -> tuple[type, dict[str, str]]:
    """The Data Source of a job's table, registered, and its options."""
    if job.kind == "delta":
        source: Any = DeltaDataSource
        options = {"path": job.path, "partitionBy": "key"}
    else:
        source = IcebergDataSource
        options = {"table": "shop.numbers"} | {
            f"catalog.{name}": value for name, value in job.catalog.items()
        }
    spark.dataSource.register(source)
    return source, options


def files_of_numbers(spark: Any, directory: Path) -> Any:
    directory.mkdir(exist_ok=True)
    for number in range(3):
        (directory / f"{number}.json").write_text(
            f'{{"number": {number}, "key": "a"}}\n{{"number": {10 + number}}}\n'
        )
    reader = spark.readStream.schema("number long, key string").option("maxFilesPerTrigger", 1)
    return reader.json(str(directory))


NUMBERS = [0, 1, 2, 10, 11, 12]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_a_query_that_crashed_before_it_noted_its_commit(
    spark: Any, kit: ModuleType, tmp_path: Path, kind: str
) -> None:
    job = kit.TableJob(str(tmp_path), kind, 0)
    source, options = format_of(spark, job)
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        writer = files_of_numbers(spark, tmp_path / "in").writeStream.format(source.name()).options(**options)
        writer = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
        writer.start().awaitTermination()

    run()
    assert sorted(job.numbers()) == NUMBERS
    # As if the driver had died between the sink's commit and Spark's note of it.
    for note in ("2", ".2.crc"):
        (checkpoint / "commits" / note).unlink()
    (tmp_path / "in" / "3.json").write_text('{"number": 3}\n')
    run()
    assert sorted(job.numbers()) == sorted([*NUMBERS, 3])


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_query(spark: Any, kit: ModuleType, tmp_path: Path, kind: str) -> None:
    job = kit.TableJob(str(tmp_path), kind, 0)
    source, options = format_of(spark, job)

    def same(record: dict[str, Any]) -> dict[str, Any]:
        if record["number"] == 11:
            raise ValueError("meant to fail")
        return record

    with FTLayer.embedded(str(tmp_path / "ft"), max_attempts=2, backoff=("10ms",)) as layer:
        numbers = layer.source(files_of_numbers(spark, tmp_path / "in"), name="numbers")
        writer = numbers.map(same, "number long, key string").write_stream(
            source, checkpoint=str(tmp_path / "ck"), **options
        )
        writer.trigger(availableNow=True).start().awaitTermination()
        assert layer.dead_letters(spark).count() == 1
    assert sorted(job.numbers()) == [number for number in NUMBERS if number != 11]


@pytest.mark.campaign
@pytest.mark.parametrize("kind", KINDS)
def test_acker_mode(spark: Any, kit: ModuleType, tmp_path: Path, kind: str) -> None:
    job = kit.TableJob(str(tmp_path), kind, 0)
    schema = pa.schema([("number", pa.int64())])
    with FTLayer.embedded(str(tmp_path / "ft")) as layer:
        env = StreamEnvironment(spark, layer, name="numbers", parallelism=2)
        env.source(range(5_000), schema).map(lambda number: number, schema).sink(
            replace_partitions(job), every="50ms"
        )
        env.execute()
    assert sorted(job.numbers()) == list(range(5_000))


def replace_partitions(job: Any) -> Any:
    """The job's sink, of a table without partitions."""
    sink = job.sink()
    sink._partition_by = ()
    return sink
