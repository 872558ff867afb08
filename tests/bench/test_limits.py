"""What stands beside latencies: raw syncs, echoes, and the size of a commit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import limits
from bench.limits import Limits, StoreWrites
from ftlayer.vertex.store import LmdbStore


def test_slices_are_before_and_behind_every_run_and_are_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLICE_S", 0.01)
    monkeypatch.setattr(limits, "FILE_BYTES", 1 << 20)
    with Limits(tmp_path, sync_bytes=40_960, echo_bytes=1_000) as measured:
        found = [measured.around(lambda: "ran") for _ in range(2)]
    assert [returned for returned, _ in found] == ["ran", "ran"]
    metrics = measured.metrics()
    assert metrics["raw_fdatasync_bytes"] == 40_960
    for name in ("raw_fdatasync", "flight_echo"):
        assert 0 < metrics[f"{name}_p50_ms"] <= metrics[f"{name}_p99_ms"]
    assert all(0 < limit.fdatasync.p50 <= limit.fdatasync.p99 for _, limit in found)
    assert len(measured._slices) == 3
    assert not list(tmp_path.iterdir())


def test_a_commit_is_as_large_as_what_it_writes(tmp_path: Path) -> None:
    # A vertex has its stores in directories of this name.
    store = LmdbStore.open(tmp_path / "shard-0", max_store_bytes=64 << 20)
    writes = StoreWrites(tmp_path, os.getpid())
    assert writes.bytes_a_commit() == 4_096
    for number in range(20):
        with store.write(intake=True) as txn:
            txn.put("segments", number.to_bytes(8, "big"), bytes(100_000), append=True)
    assert 100_000 <= writes.bytes_a_commit() < 150_000
    store.close()
