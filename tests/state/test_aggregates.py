"""Built-in aggregates against the same ones as functions of `aggregate`: with checkpoints, rescaling and undo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftlayer as ft
from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig, StateMigration
from ftlayer.checkpoint.snapshots import KeyedSnapshot, SubtaskRestore
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.functions import aggregates as tables
from ftlayer.functions.aggregates import AggregatePlan, AggregatesPerRecord, KeyedAggregate
from ftlayer.functions.chains.topology import MAIN, TopologyChain, TopologyResult
from ftlayer.functions.steps import Map, Reduce
from ftlayer.functions.undo import UndoLog, in_pieces
from ftlayer.records.partitioning import groups_of, key_groups, subtasks_of
from ftlayer.records.traced import KeySelector
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend

GROUPS = 8
SCHEMA = pa.schema([("k", pa.string()), ("f", pa.float64()), ("v", pa.int64())])
CALLS = [ft.count(), ft.count("v"), ft.min("v"), ft.max("k"), ft.mean("v"), ft.sum("v")]

Row = tuple[Any, ...]


def fail_some(result: Row) -> Row:
    if result[-1] is not None and result[-1] % 7 == 3:
        raise ValueError(result)
    return result


def built_in(plan: AggregatePlan) -> list[Any]:
    return [KeyedAggregate("agg", plan, plan.keys, plan.output)]


def as_functions(plan: AggregatePlan) -> list[Any]:
    """The same as a user writes it: an aggregate of key and state, and a map that makes results of it."""
    model = AggregatesPerRecord(plan)
    places = [SCHEMA.names.index(name) for name in plan.keys]

    def add(old: Row, record: Row) -> Row:
        return tuple(record[place] for place in places), model.add(old[1], record)

    def results(aggregate: Row) -> Row:
        return *aggregate[0], *model.results(aggregate[1])

    reduce = Reduce("agg", add, plan.output, plan.keys, create=lambda: ((), model.create()))
    return [reduce, Map("results", results, plan.output)]


@dataclass
class Piece:
    """`ftlayer.functions.undo.PieceOfWork`."""

    size: int
    result: TopologyResult

    @property
    def has_failures(self) -> bool:
        return bool(self.result.failures)


class Job:
    """A chain in some subtasks, with their state."""

    def __init__(
        self, storage: Any, config: CheckpointConfig, plan: AggregatePlan, operators: list[Any]
    ) -> None:
        self.storage, self.config, self.plan = storage, config, plan
        self.operators = [*operators, Map("fails", fail_some, plan.output)]
        self.checkpoint = 0
        self.deploy(1, ())

    def deploy(self, parallelism: int, snapshots: tuple[KeyedSnapshot, ...]) -> None:
        keys = pa.schema([SCHEMA.field(name) for name in self.plan.keys])
        self.subtasks = []
        for number in range(parallelism):
            groups = groups_of(number, parallelism, GROUPS)
            spec = BackendSpec(groups.start, groups.stop, GROUPS, {"agg": keys})
            restore = SubtaskRestore("agg", number, snapshots, ()) if snapshots else None
            backend = open_backend(self.config, spec, restore, self.storage, "")
            log = UndoLog()
            chain = TopologyChain(self.operators, [SCHEMA], backend, log)
            backend.opened()
            self.subtasks.append((backend, chain, log))

    def run(self, rows: list[Row]) -> tuple[dict[int, Row], set[int]]:
        """Return the result of each row, and the rows that failed."""
        columns = [pa.array([row[place] for row in rows], kind) for place, kind in enumerate(SCHEMA.types)]
        batch = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)
        groups = key_groups(KeySelector(self.plan.keys).hash(batch), GROUPS)
        owners = subtasks_of(groups, len(self.subtasks), GROUPS)
        results: dict[int, Row] = {}
        failed: set[int] = set()
        for number, (backend, chain, log) in enumerate(self.subtasks):
            own = np.flatnonzero(owners == number)
            part = batch.take(pa.array(own))

            def piece(start: int, most: int, chain: Any = chain, part: Any = part) -> Piece | None:
                some = part.slice(start, most)
                return Piece(some.num_rows, chain.run(some, None, 0, 0)) if some.num_rows else None

            for start, each in in_pieces(log, max(part.num_rows, 1), piece):
                output = each.result.outputs[MAIN]
                records = zip(*(column.to_pylist() for column in output.batch.columns), strict=True)
                for parent, record in zip(output.parents.tolist(), records, strict=True):
                    results[int(own[start + parent])] = record
                failed.update(int(own[start + failure.row]) for failure in each.result.failures)
            backend.tend(1, part.num_rows)
        return results, failed

    def snapshot(self, kind: SnapshotKind) -> tuple[KeyedSnapshot, ...]:
        self.checkpoint += 1
        found = []
        for backend, _, _ in self.subtasks:
            barrier = Barrier(self.checkpoint, 0, kind=kind)
            frozen = backend.freeze(barrier)
            keyed = frozen.write(self.storage.writer(barrier), lambda: False).keyed
            frozen.release()
            if kind is SnapshotKind.CHECKPOINT:
                backend.completed(self.checkpoint)
            if keyed is not None:
                found.append(keyed)
        return tuple(found)

    def close(self) -> None:
        for backend, _, _ in self.subtasks:
            backend.close()


rows = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c", None]),
        st.sampled_from([0.0, -0.0, 1.5, float("nan"), None]),
        st.sampled_from([None, 1, 2, 10, -4, 2**62]),
    ),
    min_size=1,
    max_size=30,
)
steps = st.lists(
    st.one_of(
        rows,
        st.tuples(
            st.sampled_from([SnapshotKind.CHECKPOINT, SnapshotKind.SAVEPOINT]), st.sampled_from([0, 1, 2, 3])
        ),
    ),
    min_size=2,
    max_size=10,
)


def plain(value: Any) -> Any:
    return "nan" if isinstance(value, float) and value != value else value


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["full", "incremental", "changelog", "lmdb"]),
    keys=st.sampled_from([("k",), ("f",), ("k", "f")]),
    steps=steps,
)
def test_they_are_what_functions_make(
    make_storage: Any,
    tmp_path_factory: pytest.TempPathFactory,
    mode: str,
    keys: tuple[str, ...],
    steps: list[Any],
) -> None:
    options: dict[str, Any] = {"incremental": mode == "incremental", "changelog": mode == "changelog"}
    if mode == "lmdb":
        options = {"backend": "lmdb", "state_directory": str(tmp_path_factory.mktemp("state"))}
    config = CheckpointConfig(directory="x", **options)
    plan = AggregatePlan.of(CALLS, keys, SCHEMA)
    jobs = [Job(make_storage(), config, plan, made(plan)) for made in (built_in, as_functions)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "MOST_CHANGED", 2)
        for step in steps:
            if isinstance(step, list):
                (results, failed), (expected, failed_too) = [job.run(step) for job in jobs]
                assert failed == failed_too
                assert {row: tuple(map(plain, each)) for row, each in results.items()} == {
                    row: tuple(map(plain, each)) for row, each in expected.items()
                }
                continue
            kind, parallelism = step
            for job in jobs:
                snapshots = job.snapshot(kind)
                if parallelism:
                    job.close()
                    job.deploy(parallelism, snapshots)
    for job in jobs:
        job.close()


def restored_as(
    storage: Any, config: CheckpointConfig, plan: AggregatePlan, operators: list[Any], held: Any
) -> Job:
    job = Job(storage, config, plan, operators)
    job.close()
    job.deploy(1, held)
    return job


def test_other_aggregates_are_refused_or_migrated(storage: Any) -> None:
    config = CheckpointConfig(directory="x")
    plan = AggregatePlan.of([ft.count(), ft.sum("v")], ("k",), SCHEMA)
    job = Job(storage, config, plan, built_in(plan))
    job.run([("a", 1.0, 1), ("a", 1.0, 4)])
    held = job.snapshot(SnapshotKind.SAVEPOINT)
    job.close()
    renamed = AggregatePlan.of([ft.count(name="rows"), ft.sum("v", name="all")], ("k",), SCHEMA)
    job = restored_as(storage, config, renamed, built_in(renamed), held)
    assert job.run([("a", 1.0, 3)])[0] == {0: ("a", 3, 8)}
    job.close()
    other = AggregatePlan.of([ft.sum("v"), ft.max("v")], ("k",), SCHEMA)
    for operators in (built_in(other), as_functions(plan)):
        with pytest.raises(
            IncompatibleCheckpointError, match=r"holds count\(\) int64; sum\(v\) int64.*version="
        ):
            restored_as(storage, config, other, operators, held)
    config = CheckpointConfig(
        directory="x", migrations=[StateMigration("agg", "aggregate", 2, lambda value, _: (value[1], None))]
    )
    job = restored_as(storage, config, other, built_in(other), held)
    assert job.run([("a", 1.0, 1)])[0] == {0: ("a", 6, 1)}
    job.close()


def test_what_a_function_made_is_refused(storage: Any) -> None:
    config = CheckpointConfig(directory="x")
    plan = AggregatePlan.of([ft.count()], ("k",), SCHEMA)
    job = Job(storage, config, plan, as_functions(plan))
    job.run([("a", 1.0, 1)])
    held = job.snapshot(SnapshotKind.CHECKPOINT)
    job.close()
    with pytest.raises(IncompatibleCheckpointError, match="holds what a function made of it"):
        restored_as(storage, config, plan, built_in(plan), held)
    begun_anew = CheckpointConfig(directory="x", allow_unclaimed_state=["agg/aggregate"])
    job = restored_as(storage, begun_anew, plan, built_in(plan), held)
    assert job.run([("a", 1.0, 1)])[0] == {0: ("a", 1)}
    job.close()
