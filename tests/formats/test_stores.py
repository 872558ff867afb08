"""Stores, Spark checkpoints and spools that versions have written: each record is as it was, and goes on."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import msgpack
import pyarrow as pa
import pytest

import ftlayer
from ftlayer import FTLayer, StreamEnvironment
from ftlayer.cli.offline import inspect_vertex, stored_records
from ftlayer.connectors import queue_stream as spools
from ftlayer.connectors.queue_stream import Spool
from ftlayer.errors import CheckpointMismatchError, SourceError, StoreVersionError
from ftlayer.spark.facade import list_records
from ftlayer.spark.query.checkpoint import MARK, CheckpointMark
from ftlayer.vertex.service.directory import DESCRIPTION, fix_shards

from fixture_versions import VERSIONS, unpack  # isort: skip
from write_fixtures import PAUSE_MS  # isort: skip

BATCH = 20
"""Rows of a batch, as in `programs`."""


@pytest.fixture(params=VERSIONS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A store, and what lies beside it."""
    unpack(request.param, "store", tmp_path)
    for path in (tmp_path, *tmp_path.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
    return tmp_path


def rows(records: Any) -> list[Any]:
    return sorted(tuple(record.payload.to_pylist()[0].values())[:3] for record in records)


def test_every_record_is_as_it_was(programs: ModuleType, kept: Path) -> None:
    shards = inspect_vertex(kept / "store")
    assert len(shards) == 2
    assert sum(shard.dead for shard in shards) == 3
    dead, waiting = (list(stored_records(kept / "store", state)) for state in ("dead", "waiting"))

    assert rows(dead) == [("k2", 0, 7), ("k2", 1, 7), ("k2", 7)]
    for record in dead:
        assert record.attempt == 1
        assert record.reason in ("0/7 dies", "1/7 dies", "row 7 dies")
        assert record.traceback.splitlines()[-1].endswith(record.reason)
        assert "in judge" in record.traceback or "in __call__" in record.traceback
        assert record.history[0].at_ms > 1_790_000_000_000
    assert Counter(record.source for record in dead) == {"counted": 1, "numbers": 2}

    failed_once = [record for record in waiting if record.history]
    assert rows(failed_once) == [
        ("k2", 0, 12),
        ("k2", 1, 12),
        ("k2", 12),
        ("k4", 0, 4),
        ("k4", 1, 4),
        ("k4", 4),
    ]
    for record in failed_once:
        assert record.attempt == 2
        assert record.reason.startswith("ValueError: ")
        assert record.not_before_ms == record.history[0].at_ms + PAUSE_MS
    # What was in flight is replayed, as if it waited.
    in_flight = [record for record in waiting if not record.history]
    records = {record for partition in range(2) for record in programs.read(partition, None)}
    found = {tuple(record.payload.to_pylist()[0].values()) for record in in_flight}
    assert found <= records
    assert len(found) == len(in_flight) > 0
    assert {record.attempt for record in in_flight} == {1}
    # The ingest's rows are logged, and delivered to no batch yet.
    assert sum(shard.delivery for shard in shards) == 6


@pytest.mark.spark
def test_queries_and_topologies_go_on(spark: Any, programs: ModuleType, kept: Path) -> None:
    spark.dataSource.register(programs.Counted)
    ahead = [record.not_before_ms for record in stored_records(kept / "store", "waiting")]
    while time.time() * 1_000 < max(ahead):  # A fixture that was written just now.
        time.sleep(1)
    with FTLayer.embedded(kept / "store", shards=2, max_attempts=3, backoff="10ms") as layer:
        query = programs.start_query(spark, layer, kept, 2 * BATCH, waiting=False)
        clicks = programs.start_clicks(layer, kept)
        env = StreamEnvironment(spark, layer, name="tracked", parallelism=2)
        programs.build_tracked(env, kept)
        env.execute()
        for each in (query, clicks):
            assert each.await_drained(600)
            each.stop()
        dead = sorted(
            tuple(letter.payload.to_pylist()[0].values())[:3] for letter in list_records(layer.client, "dead")
        )
    assert dead == [("k2", 0, 7), ("k2", 1, 7), ("k2", 7), ("k2", 27)]
    numbers = Counter(row["number"] for row in programs.shown(kept / "query"))
    assert numbers == Counter(number for number in range(2 * BATCH) if number % BATCH != 7)
    assert sorted(row["number"] for row in programs.shown(kept / "clicks")) == list(range(6))
    passing = {
        record[:3]
        for partition in range(programs.PARTITIONS)
        for record in programs.read(partition, None)
        if programs.fate(record) != "dies"
    }
    assert programs.tracked_rows(kept) == passing


@pytest.mark.parametrize("version", VERSIONS)
def test_a_spool_goes_on(tmp_path: Path, version: str) -> None:
    unpack(version, "spool", tmp_path)
    spool = Spool(str(tmp_path))
    assert spool.numbers() == range(3)
    assert [spool.read(number).num_rows for number in spool.numbers()] == [0, 4, 4]
    assert spool.read(2).column("body").to_pylist() == [b"2/0", b"2/1", b"2/2", b"2/3"]
    assert [spool.positions(number) for number in range(3)] == [
        {0: b"position %d" % each} for each in range(3)
    ]
    spool.forget(3)
    assert spool.numbers() == range(2, 3)


# ---------------------------------------------------------------- other formats


@pytest.mark.parametrize(("number", "way"), [(2, "or a later one"), (0, "or move it away")])
def test_a_directory_of_another_vertex_is_refused_by_name(tmp_path: Path, number: int, way: str) -> None:
    fix_shards(tmp_path, 2)
    said = json.loads((tmp_path / DESCRIPTION).read_text("utf-8"))
    (tmp_path / DESCRIPTION).write_text(json.dumps({**said, "format": number, "ftlayer": "9.1.0"}), "utf-8")
    said_so = rf"format {number}, written by ftlayer 9\.1\.0; ftlayer .* reads format 1: .* {way}"
    with pytest.raises(StoreVersionError, match=said_so):
        fix_shards(tmp_path, 2)


def test_a_mark_of_a_later_query_is_refused_by_name() -> None:
    said = json.loads(CheckpointMark("q", "lines").to_json())
    assert said["ftlayer"] == ftlayer.__version__
    with pytest.raises(CheckpointMismatchError, match=r"format 2, written by ftlayer 9\.1\.0"):
        CheckpointMark.from_json(json.dumps({**said, "format": 2, "ftlayer": "9.1.0"}), MARK)


def test_a_spool_of_a_later_version_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spools, "_FORMAT", 2)
    monkeypatch.setattr(spools, "__version__", "9.1.0")
    Spool(str(tmp_path)).put(0, pa.record_batch({"n": [1]}), {0: msgpack.packb(1)})
    monkeypatch.undo()
    with pytest.raises(SourceError, match=r"file 0 has format 2, written by ftlayer 9\.1\.0"):
        Spool(str(tmp_path)).read(0)
