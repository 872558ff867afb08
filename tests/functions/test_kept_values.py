"""A value that a function keeps and goes on changing: no snapshot, and nothing that is taken back, sees the change."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.functions.chains.firing import REDUCE_TABLE
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.keyed import StateTtl, owned
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Process, Reduce
from ftlayer.functions.undo import UndoLog
from ftlayer.functions.windows import Aggregated, Fixed, Session, window_function
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend

ROW = pa.schema([("k", pa.string()), ("n", pa.int64())])
RESULT = pa.schema([("ns", pa.list_(pa.int64()))])
SPEC = BackendSpec(0, 1, 1, {"op": pa.schema([("k", pa.string())])})
TTL = StateTtl("1h")


class Keeping(ProcessFunction):
    """Counts in a list that it keeps beside its state; ``way`` says how that gets there, ``first`` when."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.kept: dict[str, Any] = {}
        self.fails = False

    def process(self, record: Any, ctx: Any) -> Any:
        key, number = record
        kept = self.kept.get(key)
        if kept is None:
            kept = self.kept[key] = self.read(ctx)
        if number >= 0:
            kept["in"].append(number)
            if self.fails:
                raise ValueError("behind the change")
            self.write(ctx, kept)
        return [self.read(ctx)["in"]]

    def read(self, ctx: Any) -> Any:
        match self.way:
            case "value" | "value ttl":
                found = self.value(ctx).get()
            case "reducing":
                found = ctx.reducing("v", lambda old, new: new).get()
            case "aggregating":
                found = ctx.aggregating("v", list, lambda old, new: new).get()
            case "list" | "list ttl":
                found = next(iter(self.list(ctx).get()), None)
            case _:
                found = next((each for _, each in self.map(ctx).items()), None)
                assert found == self.map(ctx).get("f")
        return {"in": []} if found is None else found

    def write(self, ctx: Any, kept: Any) -> None:
        match self.way:
            case "value" | "value ttl":
                self.value(ctx).set(kept)
            case "reducing":
                ctx.reducing("v", lambda old, new: new).add(kept)
            case "aggregating":
                ctx.aggregating("v", list, lambda old, new: new).add(kept)
            case "list" | "list ttl":
                self.list(ctx).clear()
                self.list(ctx).append(kept)
            case _:
                self.map(ctx)["f"] = kept

    def value(self, ctx: Any) -> Any:
        return ctx.value("v", ttl=TTL if "ttl" in self.way else None)

    def list(self, ctx: Any) -> Any:
        return ctx.list("l", ttl=TTL if "ttl" in self.way else None)

    def map(self, ctx: Any) -> Any:
        return ctx.map("m", ttl=TTL if "ttl" in self.way else None)


class Running:
    """A chain over a backend; `snapshot` takes one, which `restored` begins with."""

    def __init__(self, root: Path, backend: str, mode: str, make: Callable[[], Any], *, logged: bool) -> None:
        self.config = CheckpointConfig(
            backend=backend,  # type: ignore[arg-type]
            directory=str(root / "checkpoints"),
            incremental=mode == "incremental",
            changelog=mode == "changelog",
            memory_threshold=0,
        )
        self.root, self.make, self.logged = root, make, logged
        self.storage = slot_storage(self.config, "job", "run", 0, 1, "a", b"k" * 32)
        self.checkpoint = 0
        self.start(None)

    def start(self, restore: SubtaskRestore | None) -> None:
        self.backend = open_backend(self.config, SPEC, restore, self.storage, self.storage.location)
        self.log = UndoLog() if self.logged else None
        self.operator = self.make()
        self.chain = TopologyChain([self.operator], [ROW], self.backend, self.log)
        self.chain.open()

    def run(self, *rows: tuple[str, int], watermark_ms: int = -(2**63)) -> Any:
        batch = pa.record_batch([list(column) for column in zip(*rows, strict=True)], schema=ROW)
        came = self.chain.run(batch, np.zeros(len(rows), np.int64), watermark_ms, 0)
        if self.log is not None:
            if came.failures:
                self.log.undo()
            self.log.forget()
        self.backend.tend(10_000)
        return came

    def snapshot(self, meanwhile: Callable[[], object]) -> SubtaskRestore:
        self.checkpoint += 1
        barrier = Barrier(self.checkpoint, SnapshotKind.CHECKPOINT, "")
        frozen = self.backend.freeze(barrier)
        meanwhile()
        writer = self.storage.writer(barrier)
        written = frozen.write(writer, lambda: False)
        writer.sync()
        frozen.release()
        self.backend.completed(self.checkpoint)
        assert written.keyed is not None
        return SubtaskRestore("op", 0, (written.keyed,), ())

    def close(self) -> None:
        self.chain.close()
        self.backend.close()
        self.storage.close()


WAYS = ["value", "value ttl", "reducing", "aggregating", "list", "list ttl", "map", "map ttl"]
MODES = ["full", "incremental", "changelog"]


@pytest.mark.parametrize("logged", [False, True], ids=["plain", "undo log"])
@pytest.mark.parametrize("backend", ["heap", "lmdb"])
@pytest.mark.parametrize("way", WAYS)
def test_a_snapshot_does_not_see_what_comes_behind_it(
    tmp_path: Path, way: str, backend: str, logged: bool
) -> None:
    for mode in MODES:
        job = Running(
            tmp_path / mode, backend, mode, lambda: Process("op", Keeping(way), RESULT, ("k",)), logged=logged
        )
        for round_ in range(3):
            begun = list(range(3 * round_))
            # What was there before is only read in this round's first call, and kept.
            job.run(("a", -1))
            kept = job.snapshot(partial(job.run, ("a", 3 * round_)))
            assert job.run(("a", 3 * round_ + 1)).outputs[""].batch.to_pylist()[0]["ns"] == [
                *begun,
                3 * round_,
                3 * round_ + 1,
            ]
            later = job.snapshot(partial(job.run, ("a", 3 * round_ + 2)))
            for restore, wanted in ((kept, begun), (later, [*begun, 3 * round_, 3 * round_ + 1])):
                job.start(restore)
                assert job.run(("a", -1)).outputs[""].batch.to_pylist()[0]["ns"] == wanted, mode
            job.run(("a", 3 * round_ + 2))
        job.close()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_failing_record_does_to_a_kept_value_is_not_in_the_state(tmp_path: Path, way: str) -> None:
    function = Keeping(way)
    job = Running(tmp_path, "heap", "full", lambda: Process("op", function, RESULT, ("k",)), logged=True)
    job.run(("a", 1))
    function.fails = True
    assert job.run(("a", 2)).failures
    function.fails = False
    function.kept.clear()
    assert job.run(("a", -1)).outputs[""].batch.to_pylist() == [{"ns": [1]}]
    job.close()


@pytest.mark.parametrize("logged", [False, True], ids=["plain", "undo log"])
@pytest.mark.parametrize("behind", [False, True], ids=["driver", "fused"])
def test_an_aggregate_that_is_kept(tmp_path: Path, logged: bool, behind: bool) -> None:
    kept: list[list[int]] = []

    def add(numbers: list[int], record: Any) -> list[int]:
        kept.append(numbers)
        for each in kept:
            each.append(record[1])
        return numbers[-1:] if behind else numbers

    reduce_ = Reduce("op", add, RESULT, ("k",), create=list)
    job = Running(tmp_path, "heap", "full", lambda: reduce_, logged=logged)
    for number in range(3):
        job.run(("a", number))
    restore = job.snapshot(lambda: job.run(("a", 3), ("a", 4)))
    wanted = [2] if behind else [0, 1, 2]
    del kept[:]
    job.start(restore)
    assert job.backend.state("op").values(REDUCE_TABLE).get("a") == wanted
    job.close()


@pytest.mark.parametrize("windows", [Fixed(10, 10), Session(10)])
def test_the_content_of_a_window_that_is_kept(tmp_path: Path, windows: Any) -> None:
    kept: list[list[int]] = []

    def add(numbers: list[int], record: Any) -> list[int]:
        numbers.append(record[1])
        kept.append(numbers)
        return numbers

    content = Aggregated(list, add, lambda one, other: one + other, lambda key, window, found: found)
    job = Running(
        tmp_path,
        "heap",
        "full",
        lambda: Process("op", window_function(windows, content), RESULT, ("k",)),
        logged=False,
    )
    job.run(("a", 1), ("a", 2))

    def change() -> None:
        for each in kept:
            each.append(9)

    restore = job.snapshot(change)
    job.start(restore)
    (found,) = job.backend.state("op").maps("windows").items("a").values()
    assert (found if isinstance(windows, Fixed) else found[1]) == [1, 2]
    job.close()


@pytest.mark.parametrize("logged", [False, True], ids=["plain", "undo log"])
@pytest.mark.parametrize("ttl", [None, TTL], ids=["", "ttl"])
def test_keys_do_not_share_a_default(tmp_path: Path, logged: bool, ttl: StateTtl | None) -> None:
    missing = object()

    class Appending(ProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            numbers = ctx.value("v", default, ttl=ttl).get()
            numbers.append(record[1])
            assert ctx.value("w", missing, ttl=ttl).get() is missing
            return [numbers]

    default: list[int] = []
    job = Running(tmp_path, "heap", "full", lambda: Process("op", Appending(), RESULT, ("k",)), logged=logged)
    assert job.run(("a", 0), ("b", 0), ("a", 0)).outputs[""].batch.to_pylist() == [{"ns": [0]}] * 3
    job.close()


def test_a_frame_is_copied_with_the_objects_in_it() -> None:
    frame = pd.DataFrame({"a": [[1], [2]]})
    copied = owned(frame)
    frame.loc[0, "a"].append(3)
    assert copied.equals(pd.DataFrame({"a": [[1], [2]]}))


def test_without_changes_in_place_nothing_is_copied(tmp_path: Path) -> None:
    class Same(ProcessFunction):
        def process(self, record: Any, ctx: Any) -> Any:
            value, list_, map_ = ctx.value("v"), ctx.list("l"), ctx.map("m")
            value.set(record)
            list_.append(record)
            map_["f"] = record
            assert value.get() is list_.get()[0] is map_["f"] is record
            return [[1]]

    process = Process("op", Same(), RESULT, ("k",), in_place=False)
    job = Running(tmp_path, "heap", "full", lambda: process, logged=False)
    assert not job.run(("a", 1)).failures
    job.close()
