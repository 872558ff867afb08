"""Values that are over are in no snapshot, and those that a read would return are in every one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.errors import ConfigError
from ftlayer.functions.keyed import Backend, StateTtl, table_name
from ftlayer.functions.process import ExpiringList, ExpiringMap, ExpiringValue
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend

SCHEMA = pa.schema([("k", pa.string())])
KEYS = ("a", "b", "c")
steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "read", "wait", "tend", "checkpoint", "checkpoint", "savepoint"]),
        st.sampled_from(KEYS),
        st.sampled_from([2, 5, 50]),
    ),
    min_size=10,
    max_size=60,
)


def opened(storage: Any, config: CheckpointConfig, restore: SubtaskRestore | None) -> LayeredBackend:
    return open_backend(config, BackendSpec(0, 16, 16, {"op": SCHEMA}), restore, storage, "")


class Handles:
    """Three states of one operator, each with a time to live of ``time_ms``."""

    def __init__(self, backend: Backend, call: Any, time_ms: int) -> None:
        ttl, state = StateTtl(f"{time_ms}ms"), backend.state("op")
        self.value = ExpiringValue(call, state.values(table_name("v", ttl)), None, ttl)
        self.list = ExpiringList(call, state.lists(table_name("l", ttl)), ttl)
        self.map = ExpiringMap(call, state.maps(table_name("m", ttl)), ttl)

    def seen(self, call: Any) -> dict[str, Any]:
        found = {}
        for call.key in KEYS:
            found[call.key] = self.value.get(), self.list.get(), dict(self.map)
        return found


def raw(backend: LayeredBackend) -> list[int]:
    """Return the times of all that is stored, over or not."""
    state: Any = backend.state("op")
    times = [stamped[0] for _, stamped in state.values("v (ttl)").items()]
    times += [stamped[0] for _, values in state.lists("l (ttl)")._table.items() for stamped in values]
    return times + [s[0] for _, items in state.maps("m (ttl)")._table.items() for s in items.values()]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(mode=st.sampled_from(["full", "incremental", "changelog"]), steps=steps)
def test_a_restored_state_has_what_a_read_at_the_barrier_would_have_returned(
    make_storage: Any, mode: str, steps: list[tuple[str, str, int]]
) -> None:
    storage = make_storage()
    config = CheckpointConfig(directory="x", incremental=mode == "incremental", changelog=mode == "changelog")
    backend = opened(storage, config, None)
    call = SimpleNamespace(key="a", now_ms=1)
    number = 0
    for step, key, amount in steps:
        call.key = key
        if step == "write":
            handles = Handles(backend, call, amount)
            handles.value.set(number)
            handles.list.append(number)
            handles.map[amount] = number
        elif step == "read":
            Handles(backend, call, 5).seen(call)
        elif step == "wait":
            call.now_ms += amount
        elif step == "tend":
            backend.tend(call.now_ms)
        else:
            number += 1
            kind = SnapshotKind(step)
            frozen = backend.freeze(Barrier(number, 0, kind=kind), call.now_ms)
            written = frozen.write(storage.writer(Barrier(number, 0)), lambda: False)
            keyed = () if written.keyed is None else (written.keyed,)
            frozen.release()
            if kind is SnapshotKind.CHECKPOINT:
                backend.completed(number)
            restored = opened(storage, config, SubtaskRestore("op", 0, keyed, ()))
            if mode == "full" or kind is SnapshotKind.SAVEPOINT:
                assert all(time_ms > call.now_ms for time_ms in raw(restored))
            assert Handles(restored, call, 5).seen(call) == Handles(backend, call, 5).seen(call)
            restored.close()
    backend.close()


def test_an_older_value_that_lives_longer_does_not_come_back(storage: Any) -> None:
    config = CheckpointConfig(directory="x", incremental=True)
    backend = opened(storage, config, None)
    call = SimpleNamespace(key="a", now_ms=0)
    written = None
    for number, time_ms in ((1, 1_000), (2, 10)):
        Handles(backend, call, time_ms).value.set(number)
        call.now_ms += 20
        barrier = Barrier(number, 0)
        frozen = backend.freeze(barrier, call.now_ms)
        written = frozen.write(storage.writer(barrier), lambda: False).keyed
        frozen.release()
        backend.completed(number)
    backend.close()
    assert written is not None
    restored = opened(storage, config, SubtaskRestore("op", 0, (written,), ()))
    assert Handles(restored, call, 10).value.get() is None
    restored.close()


def test_a_savepoint_of_lmdb_leaves_out_what_is_over_in_memory(storage: Any, tmp_path: Path) -> None:
    config = CheckpointConfig(backend="lmdb", state_directory=str(tmp_path))
    backend = opened(storage, config, None)
    call = SimpleNamespace(key="a", now_ms=0)
    Handles(backend, call, 10).value.set(1)
    call.key = "b"
    Handles(backend, call, 100).value.set(2)
    barrier = Barrier(1, 0, kind=SnapshotKind.SAVEPOINT)
    frozen = backend.freeze(barrier, 50)
    written = frozen.write(storage.writer(barrier), lambda: False).keyed
    frozen.release()
    backend.close()
    assert written is not None
    assert sum(piece.entries for piece in written.pieces) == 1


def test_a_name_like_that_of_a_table_with_times_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be named"):
        table_name("v (ttl)", None)
