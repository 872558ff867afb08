"""State below memory: what is moved there, in which order, how much at a time, and copies of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SubtaskRestore, TableInfo
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.errors import SnapshotCancelledError
from ftlayer.state import opening as merging
from ftlayer.state.contract import BackendSpec
from ftlayer.state.lmdb import copies as lmdb_copy
from ftlayer.state.lmdb import stores as lmdb
from ftlayer.state.lmdb import stores as sweep
from ftlayer.state.lmdb.stores import LmdbStores
from ftlayer.state.opening import LayeredBackend, open_backend
from ftlayer.state.snapshots.changelog import Pace, giving_way
from ftlayer.state.tables import layers as memory
from ftlayer.state.tables.layers import DELETED, KeyGroups, LayeredTable, Sharing, StateMemory, footprint

SCHEMA = pa.schema([("k", pa.int64())])
INFO = TableInfo(3, "op", "v", "value", "msgpack", 1)
GROUPS = KeyGroups("op", SCHEMA, 16)


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[LmdbStores]:
    made = LmdbStores(str(tmp_path))
    yield made
    made.close()


def table_in(stores: LmdbStores) -> LayeredTable:
    return LayeredTable("a table", Sharing(), stores.store(INFO, GROUPS))


def opened(storage: Any, where: Path, restore: SubtaskRestore | None = None) -> LayeredBackend:
    config = CheckpointConfig(backend="lmdb", state_directory=str(where))
    found = open_backend(config, BackendSpec(0, 16, 16, {"op": SCHEMA}), restore, storage, "")
    assert isinstance(found, LayeredBackend)
    return found


def test_a_sweep_gives_all_keys_in_the_order_of_the_store(
    stores: LmdbStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "SORTED", 7)
    table = table_in(stores)
    table.base.update((key * 7919 % 100, key) for key in range(100))
    found = sweep.Sweep(INFO, GROUPS, table, stores.packed_key)
    calls = 0
    while found.sort():
        calls += 1
    pairs = list(found.in_order)
    assert calls == 15
    assert [stored for stored, _ in pairs] == sorted(stored for stored, _ in pairs)
    assert [key for _, key in pairs] == list(range(100))


def test_one_call_moves_one_slice(stores: LmdbStores) -> None:
    table = table_in(stores)
    table.base.update((key, key) for key in range(5_000))
    tables = [(INFO, GROUPS, table)]
    expected = footprint(range(lmdb.SLICE), [0] * lmdb.SLICE)
    while not (moved := stores.move(tables)):
        assert len(table.base) == 5_000
    assert len(table.base) == 5_000 - lmdb.SLICE
    assert abs(moved - expected) < 10 * lmdb.SLICE
    while table.base:
        stores.move(tables)
    assert {key for key in range(5_000) if table[key] == key} == set(range(5_000))


def test_large_values_are_moved_few_at_a_time(stores: LmdbStores) -> None:
    table = table_in(stores)
    table.base.update((key, bytes(lmdb.SLICE_BYTES // 2)) for key in range(60))
    before = 60
    while before:
        stores.move([(INFO, GROUPS, table)])
        assert before - len(table.base) <= 2
        before = len(table.base)


def test_what_changes_while_a_sweep_is_under_way_is_moved_as_it_is_then(stores: LmdbStores) -> None:
    table = table_in(stores)
    table.base.update((key, "old") for key in range(1_000))
    tables = [(INFO, GROUPS, table)]
    while len(table.base) == 1_000:
        stores.move(tables)
    for key in list(table.base):
        table.base[key] = "new" if key % 2 else DELETED
    left = set(table.base)
    while table.base:
        stores.move(tables)
    for key in left:
        assert table.get(key, "none") == ("new" if key % 2 else "none")


def test_bases_that_are_measured_while_a_layer_is_moved_into_one_count_what_comes_behind_that(
    stores: LmdbStores, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else memory seems free that the rest of the layer takes up, until another layer comes."""
    monkeypatch.setattr(merging, "SLICE", 10)
    table, rule = table_in(stores), StateMemory(1_000)
    merger = merging.Merger(table, Sharing(), rule)

    def measure() -> int:
        return footprint(table.base.keys(), table.base.values())

    for key in range(1, 101):
        table[key] = f"value {key:03}"
    layer = table.freeze()
    assert layer is not None
    layer.measure()
    merger.step()
    assert rule.excess(measure)
    while merger.step():
        assert rule.bases >= measure()
    assert rule.bases >= measure() > 10_000


@pytest.mark.parametrize("kept", [20_000, 10])
def test_a_copy_has_what_was_there_and_is_not_much_larger(
    storage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """With most of it deleted the file is mostly free, and a copy without free pages is made."""
    monkeypatch.setattr(memory, "MAX_BYTES", 2_000)
    monkeypatch.setattr(lmdb_copy, "FEW_PAGES", 10)
    backend = opened(storage, tmp_path)
    table = backend.state("op").values("v")
    for key in range(20_000):
        table[key] = f"value {key}"
    settle(backend, table)
    for key in range(kept, 20_000):
        table.pop(key)
    settle(backend, table)
    frozen = backend.freeze(Barrier(1, 0))
    written = frozen.write(storage.writer(Barrier(1, 0)), lambda: False)
    frozen.release()
    backend.close()
    assert written.keyed is not None
    assert written.keyed.pieces[0].format == "lmdb"
    if kept == 10:
        assert written.keyed.pieces[0].piece.length < 100_000
    restored = opened(storage, tmp_path, SubtaskRestore("op", 0, (written.keyed,), ()))
    assert dict(restored.state("op").values("v").items()) == {key: f"value {key}" for key in range(kept)}
    restored.close()
    assert not list(tmp_path.iterdir())


def settle(backend: LayeredBackend, table: LayeredTable) -> None:
    """Move everything into the store."""
    backend.freeze(Barrier(99, 0)).release()
    for now_ms in range(2_000):
        backend.tend(now_ms)
        if not table.layers and len(table.base) <= 20:
            return
    raise AssertionError(f"{len(table.base)} entries are still in memory")


def test_work_that_gives_way_returns_and_raises_as_if_it_were_called() -> None:
    assert giving_way(lambda: 7) == 7
    with pytest.raises(SnapshotCancelledError, match="given up"):
        giving_way(Pace(lambda: True))


def test_snapshots_that_are_given_up_leave_no_file_open_and_none_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "MAX_BYTES", 2_000)
    monkeypatch.setattr(lmdb_copy, "CHUNK", 4_096)
    config = CheckpointConfig(backend="lmdb", directory=str(tmp_path / "chk"), key=b"k" * 32)
    slot = slot_storage(config, "job", "run", 0, 0, "i", b"k" * 32)
    backend = opened(slot, tmp_path / "state")
    table = backend.state("op").values("v")
    for key in range(5_000):
        table[key] = bytes(1_000)
    settle(backend, table)
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for number in range(1, 6):
        barrier = Barrier(number, 0)
        looks = iter(range(100 * number))
        frozen = backend.freeze(barrier)
        with pytest.raises(SnapshotCancelledError):
            frozen.write(slot.writer(barrier), lambda looks=looks: next(looks, None) is None)
        frozen.release()
        slot.writer(barrier).discard()
    assert len(list(descriptors.iterdir())) == before
    assert not [path for path in (tmp_path / "chk").rglob("*") if path.is_file()]
    backend.close()
    slot.close()
