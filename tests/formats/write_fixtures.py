"""Writes what an upgrade has to read, by the ftlayer that is installed: ``python write_fixtures.py DIRECTORY [NAME…]``.

A release runs it, and keeps what it wrote in a directory of its version beside this file, which later versions are
tested with. A fixture is a directory in a ``.tar.xz``: checkpoints and a savepoint of barrier mode, a spool, and a
store of two shards with the Spark checkpoints that belong to it.
"""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession

from ftlayer import CheckpointConfig, FailurePolicy, FTLayer, NoRestart, Retention, StreamEnvironment
from ftlayer.connectors.queue_stream import Spool

PAUSE = "2m"
"""What waits in a fixture is due so long after it was written."""

PAUSE_MS = 120_000

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "heap": {},
    "lmdb": {"backend": "lmdb"},
    "incremental": {"backend": "lmdb", "incremental": True},
    "changelog": {"changelog": True},
    "unaligned": {"unaligned": True},
}
"""What the checkpoints are taken with."""


def load_programs() -> ModuleType:
    """Load `programs` from beside this file; what workers run of it travels whole."""
    spec = importlib.util.spec_from_file_location("programs", Path(__file__).with_name("programs.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["programs"] = module
    spec.loader.exec_module(module)
    cloudpickle.register_pickle_by_value(module)
    return module


def until(holds: Callable[[], Any], running: Any) -> None:
    """Wait for a condition; a job or query that is over meanwhile says why."""
    over = running.over if hasattr(running, "over") else running.awaitTermination
    while not holds():
        if over(0.02):
            raise RuntimeError(f"it is over: {running.exception()}")


def pack(directory: Path, target: Path) -> None:
    """Pack a directory so that the same content gives the same bytes; locks and sockets are left out."""
    with tarfile.open(target, "w:xz", preset=9) as tar:
        for path in sorted(directory.rglob("*")):
            if path.is_file() and path.name not in ("lock.mdb", "vertex.log"):
                data = path.read_bytes()
                entry = tarfile.TarInfo(str(path.relative_to(directory)))
                entry.size, entry.mode = len(data), 0o600
                tar.addfile(entry, io.BytesIO(data))


# ---------------------------------------------------------------- barrier mode


def write_checkpoint(spark: Any, programs: Any, work: Path, name: str, options: dict[str, Any]) -> None:
    """Run the topology to its second gate; a checkpoint is taken at both. ``savepoint`` leaves that instead."""
    gates = programs.Gates(work / "gates")
    gates.directory.mkdir(parents=True)
    kept = work / "kept"
    config = CheckpointConfig(
        interval="1h",
        directory=str(kept / "checkpoints"),
        retention=Retention.RETAIN_ON_CANCELLATION,
        failures=FailurePolicy(max_attempts=3, backoff=PAUSE, jitter=0),
        **options,
    )
    env = StreamEnvironment(spark, name="fixture", parallelism=2, checkpointing=config, restart=NoRestart())
    due_ms = int(time.time() * 1_000) + PAUSE_MS
    # Records are in flight where they come faster than they are taken.
    pace_s = 0.04 if options.get("unaligned") else 0.0
    spilling = options.get("backend") == "lmdb"
    programs.build(
        env, kept / "out", due_ms=due_ms, gates=gates, waiting=True, pace_s=pace_s, spilling=spilling
    )
    kept.mkdir(exist_ok=True)
    (kept / "due_ms").write_text(str(due_ms))
    job = env.execute_async()
    first, second = programs.STOPS
    until(lambda: gates.arrived(first), job)
    job.checkpoint()
    gates.open(first)
    until(lambda: gates.arrived(second), job)
    if name == "savepoint":
        shutil.move(job.stop_with_savepoint(str(kept / "savepoints")), kept / "savepoint")
        shutil.rmtree(kept / "savepoints")
    else:
        job.checkpoint()
        assert job.cancel()


# ---------------------------------------------------------------- a vertex, and Spark checkpoints


def write_store(spark: Any, programs: Any, work: Path) -> None:
    """Leave records in every state, of a query, a topology and an ingest."""
    kept, gates = work / "kept", programs.Gates(work / "gates")
    gates.directory.mkdir(parents=True)
    kept.mkdir()
    spark.dataSource.register(programs.Counted)
    layer = FTLayer.embedded(kept / "store", shards=2, max_attempts=3, backoff=PAUSE, jitter=0)
    query = programs.start_query(spark, layer, kept, programs.BATCH, waiting=True)
    until(lambda: (kept / "query" / "0.json").exists(), query)
    query.stop()
    query = programs.start_query(spark, layer, kept, 2 * programs.BATCH, waiting=True, held=1)
    until(lambda: (kept / "query" / "held").exists(), query)
    (kept / "query" / "held").unlink()
    layer.ingest("clicks", programs.SCHEMA).put_many(programs.CLICKS)
    env = StreamEnvironment(spark, layer, name="tracked", parallelism=2)
    programs.build_tracked(env, kept, gates=gates, waiting=True, held=work / "gates")
    job = env.execute_async()
    first, second = programs.STOPS
    passing = {
        row[:3] for each in range(programs.PARTITIONS) for row in programs.read(each, None) if row[2] < first
    }
    passing = {row for row in passing if programs.fate(row) == "passes"}
    until(lambda: programs.tracked_rows(kept) == passing, job)
    gates.open(first)
    until(lambda: gates.arrived(second) and any((work / "gates").glob("held-*")), job)
    layer.close()


# ---------------------------------------------------------------- a spool


def write_spool(directory: Path) -> None:
    """Leave what a queue connector leaves for a streaming query: a file that is committed, and two that are not."""
    spool = Spool(str(directory))
    schema = pa.schema([("body", pa.binary()), ("at", pa.timestamp("us", "UTC"))])
    for number in range(3):
        rows = [{"body": f"{number}/{row}".encode(), "at": row} for row in range(4)]
        spool.put(number, pa.RecordBatch.from_pylist(rows, schema=schema), {0: b"position %d" % number})
    spool.forget(1)


def main(target: Path, names: list[str]) -> None:
    """Write fixtures: those of ``names``, or all."""
    target.mkdir(parents=True, exist_ok=True)
    programs = load_programs()
    spark = (
        SparkSession.builder.master("local[4]")
        .config("spark.ui.enabled", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    place = Path(tempfile.mkdtemp(prefix="fixtures-"))
    for name in names or [*CHECKPOINTS, "savepoint", "spool", "store"]:
        if name == "spool":
            write_spool(place / name / "kept")
        elif name == "store":
            write_store(spark, programs, place / name)
        else:
            write_checkpoint(spark, programs, place / name, name, CHECKPOINTS.get(name, {}))
        pack(place / name / "kept", target / f"{name}.tar.xz")
        print(f"{name}: {(target / name).with_suffix('.tar.xz').stat().st_size:,} bytes", flush=True)
    shutil.rmtree(place, ignore_errors=True)
    # Functions that are held up never return: there is no other way out.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
