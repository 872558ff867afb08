"""What has some of the state in a form of its own is written back before a snapshot, and tended between batches."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from memory_storage import MemoryStorage

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.functions.chains import record_segment
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.steps import Reduce
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend

KV = pa.schema([("k", pa.string()), ("v", pa.int64())])


@pytest.fixture(params=["heap", "lmdb"])
def backend(request: pytest.FixtureRequest) -> Any:
    spec = BackendSpec(0, 16, 16, {"sum": pa.schema([("k", pa.string())])})
    opened = open_backend(CheckpointConfig(backend=request.param), spec, None, MemoryStorage(), "")
    yield opened
    opened.close()


def sums(backend: LayeredBackend, records: list[tuple[str, int]]) -> TopologyChain:
    step = Reduce("sum", lambda old, new: (new[0], old[1] + new[1]), KV, ("k",))
    chain = TopologyChain([step], [KV], backend)
    backend.opened()
    feed(chain, records)
    return chain


def feed(chain: TopologyChain, records: list[tuple[str, int]]) -> None:
    columns = dict(zip(KV.names, zip(*records, strict=True), strict=True))
    chain.run(
        pa.RecordBatch.from_pydict({name: list(column) for name, column in columns.items()}, schema=KV),
        None,
        0,
        0,
    )


def front(backend: LayeredBackend) -> dict[Any, Any]:
    ((_, _, table),) = backend.subtask.tables
    return dict.copy(table)


def test_a_snapshot_holds_what_a_reduce_has_kept_to_itself(backend: LayeredBackend) -> None:
    chain = sums(backend, [("a", 1), ("b", 2), ("a", 3)])
    ((_, _, table),) = backend.subtask.tables
    frozen = backend.freeze(Barrier(1, 0))
    assert table.layers[0].values == {"a": ("a", 4), "b": ("b", 2)}
    feed(chain, [("a", 5)])
    assert table.layers[0].values["a"] == ("a", 4)
    frozen.release()
    backend.freeze(Barrier(2, 0)).release()
    assert table.layers[0].values["a"] == ("a", 9)


def test_little_is_kept_between_batches(backend: LayeredBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = sums(backend, [("a", 1)])
    backend.tend(0)
    assert front(backend) == {}
    monkeypatch.setattr(record_segment, "MOST_UNWRITTEN", 1)
    feed(chain, [("a", 1), ("b", 1)])
    backend.tend(0)
    assert front(backend) == {"a": ("a", 2), "b": ("b", 1)}
