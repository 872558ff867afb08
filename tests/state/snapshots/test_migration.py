"""State whose type or name has changed since it was written: migrated, or refused with names and versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig, StateMigration
from ftlayer.checkpoint.snapshots import SubtaskRestore
from ftlayer.errors import ConfigError, IncompatibleCheckpointError
from ftlayer.state.contract import BackendSnapshot, BackendSpec
from ftlayer.state.opening import open_backend

SPEC = BackendSpec(0, 16, 16, {"op": pa.schema([("k", pa.int64())])})
TTL = " (ttl)"


class Program:
    """One version of a program: a backend, its options, and what it writes."""

    def __init__(
        self, storage: Any, where: Path, restore: BackendSnapshot | None = None, **options: Any
    ) -> None:
        self.storage = storage
        self.config = CheckpointConfig(directory="/chk", state_directory=str(where), **options)
        keyed = () if restore is None or restore.keyed is None else (restore.keyed,)
        found = None if restore is None else SubtaskRestore("op", 0, keyed, ())
        self.backend = open_backend(self.config, SPEC, found, storage, "")
        self.tables: Any = self.backend.state("op")
        self.number = 0

    def snapshot(self, kind: SnapshotKind = SnapshotKind.CHECKPOINT) -> BackendSnapshot:
        self.number += 1
        barrier = Barrier(self.number, 0, kind=kind)
        frozen = self.backend.freeze(barrier)
        writer = self.storage.writer(barrier)
        written = frozen.write(writer, lambda: False)
        frozen.release()
        if kind is SnapshotKind.CHECKPOINT:
            self.backend.completed(self.number)
        self.backend.tend(self.number * 1_000)
        return written

    def close(self) -> None:
        self.backend.close()


def to_tuple(value: Any, version: int) -> Any:
    assert version == 1
    return value, "since 2"


def to_dict(value: Any, version: int) -> Any:
    if version == 1:
        value = to_tuple(value, 1)
    return {"value": value[0], "said": value[1]}


SECOND = [StateMigration("op", name, 2, to_tuple) for name in ("v", "l", "m", "t")]
THIRD = [StateMigration("op", name, 3, to_dict) for name in ("v", "l", "m", "t")]


def fill(tables: Any, numbers: range, make: Any) -> None:
    for key in numbers:
        tables.values("v")[key] = make(key)
        tables.lists("l").extend(key, [make(key), make(-key)])
        tables.maps("m").put(key, "field", make(key))
        tables.values("t" + TTL)[key] = (10**15, make(key))


def contents(tables: Any, key: int) -> list[Any]:
    return [
        tables.values("v").get(key),
        tables.lists("l").get(key),
        dict(tables.maps("m").items(key)),
        tables.values("t" + TTL).get(key),
    ]


@pytest.mark.parametrize("kind", list(SnapshotKind))
@pytest.mark.parametrize("mode", ["full", "incremental", "changelog"])
@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_values_of_all_kinds_are_migrated_over_several_versions(
    storage: Any, tmp_path: Path, backend: Any, mode: str, kind: SnapshotKind, make_storage: Any
) -> None:
    options = {"backend": backend, "incremental": mode == "incremental", "changelog": mode == "changelog"}
    first = Program(storage, tmp_path, **options)
    fill(first.tables, range(40), lambda key: key)
    first.snapshot()
    fill(first.tables, range(40, 50), lambda key: key)
    written = first.snapshot(kind)
    first.close()
    second = Program(storage, tmp_path, written, migrations=SECOND, **options)
    assert contents(second.tables, 7) == [
        (7, "since 2"),
        [(7, "since 2"), (-7, "since 2")],
        {"field": (7, "since 2")},
        (10**15, (7, "since 2")),
    ]
    # What it writes is of its own version, and is not migrated once more.
    fill(second.tables, range(30, 60), lambda key: (key, "new"))
    again = second.snapshot(kind)
    second.close()
    same = Program(storage, tmp_path, again, migrations=SECOND, **options)
    assert same.tables.values("v")[7] == (7, "since 2")
    assert same.tables.values("v")[35] == (35, "new")
    same.close()
    third = Program(storage, tmp_path, again, migrations=THIRD, **options)
    assert contents(third.tables, 45)[:2] == [{"value": 45, "said": "new"}, [*contents(third.tables, 45)[1]]]
    assert third.tables.values("v")[7] == {"value": 7, "said": "since 2"}
    third.close()
    # Straight from the first version to the third one.
    straight = Program(storage, tmp_path, written, migrations=THIRD, **options)
    assert straight.tables.values("v")[7] == {"value": 7, "said": "since 2"}
    straight.close()
    with pytest.raises(IncompatibleCheckpointError, match=r"'op', state 'v'.* version 2 .*has version 1"):
        Program(storage, tmp_path, again, **options)


@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_a_migration_that_fails_names_operator_state_key_and_versions(
    storage: Any, tmp_path: Path, backend: Any
) -> None:
    first = Program(storage, tmp_path, backend=backend)
    first.tables.values("v")[3] = "three"
    written = first.snapshot()
    first.close()
    broken = StateMigration("op", "v", 4, lambda value, version: int(value))
    with pytest.raises(
        IncompatibleCheckpointError, match=r"'op', state 'v', key 3.* from version 1 to 4 .*ValueError"
    ):
        Program(storage, tmp_path, written, backend=backend, migrations=[broken])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_a_renamed_state_is_refused_until_its_new_name_is_given(
    storage: Any, tmp_path: Path, backend: Any
) -> None:
    first = Program(storage, tmp_path, backend=backend)
    first.tables.values("sum")[3] = 5
    first.tables.values("other")[3] = 6
    written = first.snapshot()
    first.close()
    silent = Program(storage, tmp_path, written, backend=backend)
    silent.tables.values("other")
    silent.tables.values("total")
    with pytest.raises(IncompatibleCheckpointError) as refused:
        silent.backend.opened()
    assert "StateMigration('op', 'total', renamed_from='sum')" in str(refused.value)
    assert "allow_unclaimed_state=['op/sum']" in str(refused.value)
    silent.close()
    renamed = Program(
        storage,
        tmp_path,
        written,
        backend=backend,
        migrations=[StateMigration("op", "total", 2, lambda value, version: value * 10, renamed_from="sum")],
    )
    assert renamed.tables.values("total")[3] == 50
    assert renamed.tables.values("other")[3] == 6
    renamed.backend.opened()
    later = renamed.snapshot()
    renamed.close()
    # The migration may stay in the program: there is nothing of the old name any more.
    kept = Program(storage, tmp_path, later, backend=backend, migrations=list(renamed.config.migrations))
    assert kept.tables.values("total")[3] == 50
    kept.close()
    dropped = Program(storage, tmp_path, written, backend=backend, allow_unclaimed_state=["op/sum"])
    dropped.tables.values("total")[3] = 1
    dropped.tables.values("other")
    dropped.backend.opened()
    dropped.snapshot()
    assert dict(dropped.tables.values("sum").items()) == {}
    dropped.close()


def test_a_renamed_operator_state_is_refused_or_dropped_by_name(storage: Any, tmp_path: Path) -> None:
    first = Program(storage, tmp_path)
    first.backend.operators("op").list("offsets").append(7)
    written = first.snapshot()
    first.close()

    def again(**options: Any) -> Any:
        config = CheckpointConfig(directory="/chk", state_directory=str(tmp_path), **options)
        restore = SubtaskRestore("op", 0, (), written.operators)
        return open_backend(config, SPEC, restore, storage, "")

    renamed = again()
    assert renamed.operators("op").list("positions") == []
    with pytest.raises(IncompatibleCheckpointError, match="'op/offsets'"):
        renamed.opened()
    renamed.close()
    used = again()
    assert used.operators("op").list("positions") == []
    assert used.operators("op").list("offsets") == [7]
    used.opened()
    used.close()
    dropped = again(allow_unclaimed_state=["op/offsets"])
    assert dropped.operators("op").list("positions") == []
    dropped.opened()
    assert dropped.operators("op").list("offsets") == []
    dropped.close()


def test_a_state_that_is_new_beside_all_that_was_there_is_fine(storage: Any, tmp_path: Path) -> None:
    first = Program(storage, tmp_path)
    first.tables.values("v")[3] = 5
    first.tables.values("empty")
    written = first.snapshot()
    first.close()
    more = Program(storage, tmp_path, written)
    more.tables.values("new")[3] = 1
    more.tables.values("v")
    more.backend.opened()
    more.snapshot()
    more.close()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: StateMigration("op", "v", 2), "migrate function"),
        (lambda: StateMigration("op", "v"), "changes nothing"),
        (lambda: StateMigration("op", "", 2, to_tuple), "state"),
        (lambda: StateMigration("op", "v", 1.5, to_tuple), "version"),  # type: ignore[arg-type]
        (lambda: StateMigration("op", "v", 2, 3), "migrate"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(migrations=[SECOND[0], SECOND[0]]), "two for op/v"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(migrations=["v"]), "StateMigration"),  # type: ignore[arg-type]
        (lambda: CheckpointConfig(allow_unclaimed_state="op/v"), "list of names"),  # type: ignore[arg-type]
    ],
)
def test_what_makes_no_sense_is_said_at_once(make: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make()
