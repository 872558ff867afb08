"""The changelog, where what it writes and what it is told cross."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.state import opening
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend
from ftlayer.state.snapshots.changelog import Changelog
from ftlayer.state.tables import layers as memory

SPEC = BackendSpec(0, 16, 16, {"op": pa.schema([("k", pa.int64())])})


def test_a_log_that_was_given_up_while_the_state_is_materialized_is_not_gone_on_with(
    storage: Any, monkeypatch: Any
) -> None:
    """More waited than may wait, so it was dropped: what is materialized then has a gap behind it."""
    monkeypatch.setattr(memory, "KEPT_BYTES", {"heap": 10_000, "lmdb": 10_000})
    logs: list[Changelog] = []

    class Noted(Changelog):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            logs.append(self)

    monkeypatch.setattr(opening, "Changelog", Noted)
    config = CheckpointConfig(changelog=True, directory="/chk")
    restored = open_backend(config, SPEC, None, storage, "")
    table = restored.state("op").values("v")
    for key in range(20):
        table[key] = b"old"
    frozen = restored.freeze(Barrier(1, 0))
    written = frozen.write(storage.writer(Barrier(1, 0)), lambda: False)
    frozen.release()
    restored.close()
    assert written.keyed is not None
    backend = open_backend(config, SPEC, SubtaskRestore("op", 0, (written.keyed,), ()), storage, "")
    table = backend.state("op").values("v")
    began, go_on, log = threading.Event(), threading.Event(), storage.log_writer
    plain = type(log()).write

    def slow(writer: Any, chunks: Any, scope: Any) -> Any:
        began.set()
        assert go_on.wait(600)
        return plain(writer, chunks, scope)

    monkeypatch.setattr(type(log()), "write", slow)
    backend.tend(0)  # nothing is materialized yet: the thread begins to
    assert began.wait(600)
    for number in range(2):
        for key in range(10):
            table[key] = bytes([number]) * 2_000
        backend.freeze(Barrier(2 + number, 0)).release()
    table[0] = b"new"
    monkeypatch.setattr(type(log()), "write", plain)
    go_on.set()
    while logs[-1].is_materializing:
        threading.Event().wait(0.001)
    frozen = backend.freeze(Barrier(4, 0))
    written = frozen.write(storage.writer(Barrier(4, 0)), lambda: False)
    frozen.release()
    assert written.keyed is not None
    again = open_backend(config, SPEC, SubtaskRestore("op", 0, (written.keyed,), ()), storage, "")
    assert dict(again.state("op").values("v").items()) == dict(table.items())
    again.close()
    backend.close()
