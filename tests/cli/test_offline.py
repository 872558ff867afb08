"""What `ftlayer inspect` sees of a store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftlayer.cli.offline import TableReport, inspect_store
from ftlayer.errors import StoreError, StorePathError
from ftlayer.vertex.store import LmdbStore
from ftlayer.vertex.store.lmdb_store import FORMAT_VERSION

INSPECT = """
import sys
from ftlayer.cli.offline import inspect_store
report = inspect_store(sys.argv[1])
print(report.holder, report.tables["dead"].entries)
"""


def fill(path: Path) -> LmdbStore:
    store = LmdbStore.open(path, max_store_bytes=16 << 20)
    with store.write(intake=True) as transaction:
        transaction.put("segments", b"a", bytes(100_000))
        transaction.put("segments", b"b", bytes(11))
        for number in range(10):
            transaction.put("dead", b"%d" % number, b"letter %d" % number)
    return store


def test_a_report_says_what_a_store_holds(tmp_path: Path) -> None:
    fill(tmp_path / "s").close()
    report = inspect_store(tmp_path / "s")
    assert report.tables["segments"] == TableReport(2, 100_011)
    assert report.tables["dead"] == TableReport(10, 80)
    assert report.tables["waiting"] == TableReport(0, 0)
    assert (report.format_version, report.incarnation, report.holder) == (FORMAT_VERSION, 1, None)
    assert 100_000 < report.used_bytes < 300_000
    assert report.used_share == report.used_bytes / (16 << 20)
    assert report.file_bytes >= report.used_bytes


def test_a_live_store_can_be_inspected(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    for entries in (10, 11):
        command = [sys.executable, "-c", INSPECT, str(tmp_path / "s")]
        child = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert child.stdout.split() == [str(os.getpid()), str(entries)], child.stderr
        with store.write(intake=True) as transaction:
            transaction.put("dead", b"more", b"x")
    store.close()


def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match="does not exist"):
        inspect_store(tmp_path / "s")
    with pytest.raises(StorePathError, match="no store"):
        inspect_store(tmp_path)


def test_a_store_of_the_same_process_says_why_not(tmp_path: Path) -> None:
    store = fill(tmp_path / "s")
    with pytest.raises(StoreError, match="already open in this process"):
        inspect_store(tmp_path / "s")
    store.close()
