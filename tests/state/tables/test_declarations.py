"""States that functions ask for in `open`, and later: a restore refuses what was renamed, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig, StateMigration
from ftlayer.checkpoint.snapshots import KeyedSnapshot, OperatorState, SubtaskRestore
from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.records.partitioning import groups_of
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend
from ftlayer.state.tables.layers import KeyGroups

GROUPS = 4
KEYS = {"op": pa.schema([("k", pa.int64())])}
NAMES = ("a", "b", "c")


class Subtask:
    """An operator in one subtask: asks for some states when it is opened, for others with its records."""

    def __init__(
        self,
        storage: Any,
        declared: tuple[str, ...] = (),
        groups: range = range(GROUPS),
        keyed: tuple[KeyedSnapshot, ...] = (),
        operators: tuple[OperatorState, ...] = (),
        **options: Any,
    ) -> None:
        self.storage = storage
        config = CheckpointConfig(directory="/chk", **options)
        spec = BackendSpec(groups.start, groups.stop, GROUPS, KEYS)
        restore = SubtaskRestore("op", 0, keyed, operators)
        self.backend: Any = open_backend(config, spec, restore, storage, "")
        self.tables = self.backend.state("op")
        self.lists = self.backend.operators("op")
        for name in declared:
            self.tables.values(name)
        try:
            self.backend.opened()
        except BaseException:
            self.backend.close()
            raise

    def put(self, name: str, key: int = 1) -> None:
        self.tables.values(name)[key] = key
        self.backend.tend(1)

    def snapshot(self, checkpoint: int) -> Any:
        frozen = self.backend.freeze(Barrier(checkpoint, 0))
        written = frozen.write(self.storage.writer(Barrier(checkpoint, 0)), lambda: False)
        frozen.release()
        return written

    def end(self, checkpoint: int = 1) -> tuple[KeyedSnapshot, ...]:
        """Return the last snapshot."""
        written = self.snapshot(checkpoint)
        self.backend.close()
        return () if written.keyed is None else (written.keyed,)


def test_a_function_that_asks_with_its_records_goes_on_with_whatever_comes_first(
    storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = Subtask(storage)
    first.put("seldom")
    written = first.end()
    again = Subtask(storage, keyed=written)
    again.put("often")  # new, while the other lies idle
    written = again.end(2)
    assert "'op' begins the state 'often'" in caplog.text
    assert "'seldom', which was not asked for yet" in caplog.text
    later = Subtask(storage, keyed=written)
    assert later.tables.values("seldom")[1] == 1
    assert later.tables.values("often")[1] == 1
    later.end(3)


def test_a_declared_state_that_was_renamed_is_refused_before_the_first_record(storage: Any) -> None:
    first = Subtask(storage, ("sum",))
    first.put("sum")
    written = first.end()
    with pytest.raises(IncompatibleCheckpointError) as refused:
        Subtask(storage, ("total",), keyed=written)
    assert "StateMigration('op', 'total', renamed_from='sum')" in str(refused.value)
    assert "ask for it in `open`" in str(refused.value)
    assert "allow_unclaimed_state=['op/sum']" in str(refused.value)
    Subtask(storage, ("total",), keyed=written, allow_unclaimed_state=["op/sum"]).end(2)


def twice(value: Any, version: int) -> Any:
    return value * 2


def test_a_migration_of_a_state_that_there_is_not_is_refused_with_those_there_are(storage: Any) -> None:
    misspelled = [StateMigration("op", "totl", 2, twice)]
    with pytest.raises(
        ConfigError, match=r"operator 'op' has no state 'totl': did you mean 'total'\?.*in `open`"
    ):
        Subtask(storage, ("total", "last"), migrations=misspelled)
    first = Subtask(storage, ("total", "last"))
    first.put("total")
    written = first.end()
    far = [StateMigration("op", "x", renamed_from="total")]
    with pytest.raises(ConfigError, match=r"has no state 'y'; there are last, total"):
        Subtask(storage, ("total", "last"), keyed=written, migrations=[StateMigration("op", "y", 2, twice)])
    Subtask(storage, ("x", "last"), keyed=written, migrations=far).end(2)
    Subtask(storage, ("total (ttl)",), migrations=[StateMigration("op", "total", 2, twice)]).end()


def test_a_migration_of_a_state_that_is_asked_for_with_records_is_taken(storage: Any) -> None:
    migrations = [StateMigration("op", "seldom", 2, twice)]
    first = Subtask(storage, migrations=migrations)
    first.put("often")
    written = first.end()
    # Nothing is known of what an operator has that declares nothing: not here, and not when it is restored.
    second = Subtask(storage, keyed=written, migrations=migrations)
    second.put("seldom")
    written = second.end(2)
    # It is in the checkpoint, so it is a state that there is.
    Subtask(storage, ("often",), keyed=written, migrations=migrations).end(3)


def test_a_declared_state_that_is_gone_is_refused_also_where_none_is_new(storage: Any) -> None:
    first = Subtask(storage, ("sum", "empty"))
    first.put("sum")
    written = first.end()
    with pytest.raises(IncompatibleCheckpointError, match="'sum'"):
        Subtask(storage, ("empty",), keyed=written)
    Subtask(storage, ("sum",), keyed=written).end(2)  # the other one held nothing


def test_a_state_that_got_a_time_to_live_is_another_one_and_stays_when_the_old_one_may_be_dropped(
    storage: Any,
) -> None:
    first = Subtask(storage, ("seen",))
    first.put("seen")
    written = first.end()
    with pytest.raises(IncompatibleCheckpointError, match="With a time to live it is another state"):
        Subtask(storage, ("seen (ttl)",), keyed=written)
    allowed = {"allow_unclaimed_state": ["op/seen"]}
    second = Subtask(storage, ("seen (ttl)",), keyed=written, **allowed)
    second.tables.values("seen (ttl)")[1] = (10**15, "x")
    recovered = Subtask(storage, ("seen (ttl)",), keyed=second.end(2), **allowed)
    assert recovered.tables.values("seen (ttl)")[1] == (10**15, "x")
    recovered.end(3)


def test_operator_state_follows_the_same_rule(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = Subtask(storage)
    first.lists.list("late").append(7)
    written = first.snapshot(1)
    first.backend.close()
    lazy = Subtask(storage, operators=written.operators)
    lazy.lists.list("other").append(1)
    lazy.backend.tend(1)
    assert "'late', which was not asked for yet" in caplog.text
    assert lazy.lists.list("late") == [7]
    lazy.backend.close()
    declared = tuple(OperatorState("op", s.name, s.redistribution, s.items, True) for s in written.operators)
    with pytest.raises(IncompatibleCheckpointError, match=r"allow_unclaimed_state=\['op/late'\]"):
        Subtask(storage, operators=declared)
    Subtask(storage, operators=declared, allow_unclaimed_state=["op/late"]).end(2)


class Job:
    """A program in some subtasks, run again and again from its own snapshots."""

    def __init__(
        self, declared: tuple[str, ...], snapshots: tuple[KeyedSnapshot, ...], checkpoint: int
    ) -> None:
        self.declared = declared
        self.snapshots = snapshots
        self.checkpoint = checkpoint

    def run(self, storage: Any, parallelism: int, records: list[tuple[int, str]]) -> None:
        """Handle records, each for a key and a state that `process` asks for, and take a checkpoint."""
        self.checkpoint += 1
        subtasks: list[Subtask] = []
        try:
            for number in range(parallelism):
                groups = groups_of(number, parallelism, GROUPS)
                subtasks.append(Subtask(storage, self.declared, groups, self._of(groups)))
            for key, name in records:
                group = int(KeyGroups("op", KEYS["op"], GROUPS).of([key])[0])
                owner = next(i for i in range(parallelism) if group in groups_of(i, parallelism, GROUPS))
                subtasks[owner].put(name, key)
            self.snapshots = tuple(self._snapshots(subtasks))
        finally:
            for subtask in subtasks:
                subtask.backend.close()

    def _of(self, groups: range) -> tuple[KeyedSnapshot, ...]:
        return tuple(s for s in self.snapshots if s.first_group < groups.stop and s.end_group > groups.start)

    def _snapshots(self, subtasks: list[Subtask]) -> Iterator[KeyedSnapshot]:
        for subtask in subtasks:
            keyed = subtask.snapshot(self.checkpoint).keyed
            if keyed is not None:
                yield keyed


programs = st.sets(st.sampled_from(NAMES)).map(lambda names: tuple(sorted(names)))
records = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(NAMES)), max_size=4)
runs = st.lists(st.tuples(st.integers(1, 3), records), min_size=1, max_size=3)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(programs, runs, programs, runs)
def test_a_restore_ends_for_a_declared_state_that_is_gone_and_for_no_other_reason(
    make_storage: Any, before: tuple[str, ...], first: Any, after: tuple[str, ...], second: Any
) -> None:
    storage = make_storage()
    job = Job(before, (), 0)
    for parallelism, handled in first:
        job.run(storage, parallelism, handled)  # its own checkpoints never refuse a program
    filled = {name for _, handled in first for _, name in handled}
    gone = filled & set(before) - set(after)
    changed = Job(after, job.snapshots, job.checkpoint)
    if gone:
        with pytest.raises(IncompatibleCheckpointError, match="|".join(f"'{name}'" for name in gone)):
            changed.run(storage, *second[0])
        return
    for parallelism, handled in second:
        changed.run(storage, parallelism, handled)
