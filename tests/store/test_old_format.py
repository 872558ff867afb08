"""A store of format 1, as the code before format 2 has left it: `format_1.mdb.gz`."""

from __future__ import annotations

import gzip
from pathlib import Path

import lmdb
import pytest

from ftlayer.cli.offline import inspect_store
from ftlayer.clock import Now
from ftlayer.errors import StoreDamagedError
from ftlayer.store import TABLES, LmdbStore, MemoryStore
from ftlayer.store.lmdb_store import FORMAT_VERSION
from ftlayer.store.meta import get_query
from ftlayer.store.rows import pack, unpack
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore
from ftlayer.vertex.rules.source_ranges import StoredPartition, StoredRange, all_ranges, put_ranges
from ftlayer.vertex.rules.state import LayerOptions

NEW = ("groups", "by_group", "by_root", "board", "audit")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    path.mkdir(mode=0o700)
    packed = Path(__file__).with_name("format_1.mdb.gz").read_bytes()
    (path / "data.mdb").write_bytes(gzip.decompress(packed))
    return path


def test_it_is_read_as_it_is_and_lacks_nothing(path: Path) -> None:
    report = inspect_store(path)
    assert report.format_version == 1
    assert (report.tables["dead"].entries, report.tables["waiting"].entries) == (14, 2)
    assert [report.tables[table].entries for table in NEW] == [0] * len(NEW)
    store = LmdbStore.open(path, read_only=True)
    with store.read() as txn:
        assert [list(txn.scan(table)) for table in NEW] == [[]] * len(NEW)
        assert [txn.get(table, b"k") for table in NEW] == [None] * len(NEW)
        assert sum(txn.count(table) for table in TABLES) > 16
    store.close()


def test_a_vertex_goes_on_with_it_in_this_format(path: Path) -> None:
    store = LmdbStore.open(path, max_store_bytes=8 << 20)
    layer = FTLayerCore(store, LayerOptions(), Now(1, 1_700_000_100_000))
    with store.read() as txn:
        listed = layer.read(txn, calls.ListRecords("dead"), Now(1, 1_700_000_100_000))
        record = get_query(txn, "q")
    assert isinstance(listed, calls.RecordList)
    assert len(listed.records) == 14
    assert record is not None
    assert record.title == ""
    now = Now(1_000, 1_700_000_101_000)
    with store.write(intake=False) as txn:
        layer.tick(txn, now)
    with store.read() as txn:
        groups = layer.read(txn, calls.DeadGroups(), now)
    assert isinstance(groups, calls.GroupList)
    assert groups.indexed == 1.0
    assert [(group.stream, group.operator, group.kind, group.count) for group in groups.groups] == [
        ("orders/lines", "parse", "ValueError: could not convert …", 8),
        ("orders/lines", "enrich", "TimeoutError: no answer after … s", 4),
        ("q/files", "clean", "KeyError: …", 2),
    ]
    store.close()
    assert inspect_store(path).format_version == FORMAT_VERSION


def test_a_store_of_format_2_without_one_of_its_tables_is_damaged(path: Path) -> None:
    LmdbStore.open(path, max_store_bytes=8 << 20).close()
    with (
        lmdb.open(str(path), max_dbs=20, map_size=8 << 20) as environment,
        environment.begin(write=True) as txn,
    ):
        txn.drop(environment.open_db(b"audit", txn))
    with pytest.raises(StoreDamagedError, match="its table 'audit' is missing"):
        LmdbStore.open(path, read_only=True)


def test_digests_of_another_kind_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    """Ranges of format 1 had sums for digests: the rows are wanted as before, and the log says what is not checked."""
    store = MemoryStore()
    kept = StoredRange(None, b"60", 0, 0, 60, 60, b"8 octets", b"\1")
    with store.write(intake=False) as txn:
        put_ranges(txn, 5, "p0", StoredPartition(0, 0, (kept,)))
        new = bytes(txn.get("meta", b"ranges/00000005/p0") or b"")
        txn.put("meta", b"ranges/00000006/p1", pack([1, *unpack(new)[1:]]))
    with store.read() as txn:
        found = {partition: stored.ranges for _, partition, stored in all_ranges(txn)}
    assert found == {"p0": (kept,), "p1": (kept._replace(digest=b""),)}
    (said,) = caplog.messages
    assert "60 rows of partition 'p1' were noted by an older ftlayer" in said
