"""Backends against plain dicts: state changes while snapshots are out, and every completed one is what was frozen."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import OperatorState, SubtaskRestore
from ftlayer.errors import SnapshotCancelledError
from ftlayer.functions.keyed import NAN
from ftlayer.functions.undo import UndoBackend, UndoLog
from ftlayer.records.partitioning import groups_of
from ftlayer.state import opening as backend
from ftlayer.state import opening as merging
from ftlayer.state.contract import BackendSnapshot, BackendSpec, Frozen
from ftlayer.state.lmdb import copies as lmdb_copy
from ftlayer.state.lmdb import stores as lmdb
from ftlayer.state.lmdb import stores as sweep
from ftlayer.state.opening import LayeredBackend, open_backend
from ftlayer.state.snapshots import changelog, entries
from ftlayer.state.snapshots import entries as view
from ftlayer.state.tables import layers as memory
from ftlayer.state.tables.layers import KeyGroups

GROUPS = 16
KEYS = {"one": pa.schema([("k", pa.string())]), "two": pa.schema([("k", pa.int64()), ("f", pa.float64())])}
one_keys = st.sampled_from([None, "a", "f" * 600])
two_keys = st.sampled_from([(0, NAN), (1, None)])
places = st.tuples(st.just("one"), one_keys) | st.tuples(st.just("two"), two_keys)
atoms = st.sampled_from([0, 1, True, 2**70, 1.5, "x", b"y", None, (1, "t")])
values = (
    atoms
    | st.lists(atoms, max_size=2)
    | st.builds(lambda v: {"in": [v]}, atoms)
    | st.builds(lambda v: (v, [v]), atoms)
)
times = st.integers(0, 2)
KINDS = ("value", "list", "map")


def call(name: str, /, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, dict[str, Any]]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


backends = st.sampled_from(["heap", "lmdb"])
modes = st.sampled_from(["full", "incremental", "changelog"])
fields = st.sampled_from(["x", 1])
timer_kinds = st.sampled_from(["event", "processing"])
WORK = [
    call("set_value", place=places, value=values),
    call("read_value", place=places, how=st.sampled_from(["get", "item", "in", "setdefault"])),
    call("change_in_place", place=places, again=st.booleans()),
    call("remove_value", place=places, how=st.sampled_from(["pop", "must"])),
    call("extend_list", place=places, more=st.lists(values, min_size=1, max_size=2)),
    call("change_in_list", place=places),
    call("put_in_map", place=places, field=fields, value=values),
    call("change_in_map", place=places, field=fields),
    call("remove_from_map", place=places, field=fields),
    call("clear_key", place=places, kind=st.sampled_from(["list", "map"])),
    call("timer", place=places, time=times, kind=timer_kinds, add=st.booleans()),
    call("timer", place=places, time=times, kind=timer_kinds, add=st.just(True)),
    call(
        "take_timers", uid=st.sampled_from(["one", "two"]), kind=timer_kinds, until=st.sampled_from([0, 0, 3])
    ),
    call("operator_state", value=values),
]
# A timer that was deleted, and is set again, fires behind the others of its time: not as if nothing had been.
TAKEN_BACK = [work for work in WORK if "add=booleans()" not in repr(work)]
UNDONE = call("undone", steps=st.lists(st.one_of(*TAKEN_BACK), min_size=1, max_size=8))
picks = st.integers(0, 7)
SNAPSHOTS = [
    call("freeze", savepoint=st.sampled_from([False, False, False, True])),
    call("freeze", savepoint=st.just(False)),
    call("write", cancel_after=st.sampled_from([None, None, None, 0, 2, 5]), release=st.booleans()),
    call("write", cancel_after=st.none(), release=st.booleans()),
    call("complete", pick=picks),
    call("complete", pick=picks),
    call("tell_completed"),
    call("restore_elsewhere", pick=picks, parallelism=st.integers(1, 4), name=backends),
    call("abort_or_restart", pick=picks, restart=st.booleans()),
    call("tend", times=st.integers(1, 12)),
    call("tend", times=st.integers(1, 12)),
    call("everything_is_there"),
]
STEPS = st.lists(st.one_of(*WORK, *WORK, UNDONE, UNDONE, *SNAPSHOTS), min_size=100, max_size=150)


@pytest.fixture(autouse=True, scope="module")
def _small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "SLICE", 3)
        patch.setattr(entries, "BLOCK_ENTRIES", 3)
        patch.setattr(entries, "RUN_ENTRIES", 7)
        patch.setattr(merging, "SLICE", 2)
        patch.setattr(merging, "MAX_LAYERS", 1)
        patch.setattr(backend, "MAX_FRONT", 12)
        patch.setattr(memory, "KEPT_BYTES", {"heap": 9_000, "lmdb": 18_000})
        patch.setattr(backend, "LOG_ENTRIES", 2)
        patch.setattr(changelog, "MAX_PIECES", 4)
        patch.setattr(changelog, "MAX_SNAPSHOT_PIECES", 4)
        patch.setattr(memory, "MAX_BYTES", 600)
        patch.setattr(lmdb, "SLICE", 1)
        patch.setattr(lmdb, "FIRST_MAP_BYTES", 32 << 10)
        patch.setattr(lmdb_copy, "BLOCK_ENTRIES", 3)
        patch.setattr(lmdb_copy, "CHUNK", 5_000)
        patch.setattr(lmdb_copy, "FEW_PAGES", 0)
        patch.setattr(sweep, "MOST_KEYS", 3)
        patch.setattr(sweep, "SORTED", 2)
        yield


@dataclass
class Model:
    """What a backend holds, in plain dicts: tables by (operator, kind), timers by (operator, kind) in order."""

    tables: dict[tuple[str, str], dict[Any, Any]] = field(default_factory=dict)
    timers: dict[tuple[str, str], list[tuple[int, Any]]] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)
    rules: dict[Any, Any] = field(default_factory=dict)

    def table(self, uid: str, kind: str) -> dict[Any, Any]:
        return self.tables.setdefault((uid, kind), {})


@dataclass
class Out:
    """A snapshot that is under way."""

    barrier: Barrier
    frozen: Frozen | None
    model: Model
    written: BackendSnapshot | None = None
    failed: bool = False


def shown(table: Any) -> dict[str, str]:
    """Return keys and values with their types, so that 1, 1.0 and True are told apart."""
    return {repr(key): repr(value) for key, value in table.items()}


def contents(found: LayeredBackend, uid: str, kind: str) -> dict[str, str]:
    state = found.state(uid)
    if kind == "value":
        return shown(state.values("v"))
    table: Any = state.lists("l") if kind == "list" else state.maps("m")
    keys = list(state.restored("l" if kind == "list" else "m", kind))
    return shown({key: table.get(key) if kind == "list" else dict(table.items(key)) for key in keys})


class KeptUndoBackend(UndoBackend):
    """Operators are asked for once, and kept by what asks."""

    def __init__(self, backend: LayeredBackend, log: UndoLog) -> None:
        super().__init__(backend, log)
        self.state = functools.cache(self.state)  # type: ignore[method-assign]
        self.operators = functools.cache(self.operators)  # type: ignore[method-assign]


class Run:
    """Everything runs in one thread; each rule is a step of the task, of the writing thread, or of the driver."""

    def __init__(self, storage: Any, name: str, mode: str) -> None:
        self.storage = storage
        self.model = Model()
        self.out: list[Out] = []
        self.completed: list[Out] = []
        self.savepoints: list[Out] = []
        self.untold: list[int] = []
        self.next = 0
        self.now = 0
        self.config = CheckpointConfig(
            backend=name, directory="x", incremental=mode == "incremental", changelog=mode == "changelog"
        )  # type: ignore[arg-type]
        self.backend = self._open(self.config, 0, 1, None)

    def _open(
        self, config: CheckpointConfig, subtask: int, parallelism: int, restore: SubtaskRestore | None
    ) -> LayeredBackend:
        own = groups_of(subtask, parallelism, GROUPS)
        spec = BackendSpec(own.start, own.stop, GROUPS, KEYS)
        return open_backend(config, spec, restore, self.storage, "")

    # ------------------------------------------------------------ the task

    def set_value(self, place: tuple[str, Any], value: Any) -> None:
        uid, key = place
        self.backend.state(uid).values("v")[key] = value
        self.model.table(uid, "value")[key] = copy.deepcopy(value)

    def read_value(self, place: tuple[str, Any], how: str) -> None:
        uid, key = place
        table, model = self.backend.state(uid).values("v"), self.model.table(uid, "value")
        if how == "in":
            assert (key in table) == (key in model)
        elif how == "setdefault":
            assert repr(table.setdefault(key, 7)) == repr(model.setdefault(key, 7))
        elif how == "get" or key in model:
            assert repr(table.get(key, "?") if how == "get" else table[key]) == repr(model.get(key, "?"))
        else:
            with pytest.raises(KeyError):
                table[key]

    def change_in_place(self, place: tuple[str, Any], again: bool) -> None:
        uid, key = place
        table, model = self.backend.state(uid).values("v"), self.model.table(uid, "value")
        for _ in range(1 + again):
            value = table.get(key)
            if isinstance(value, list):
                value.append("more")
                model[key].append("more")
            elif isinstance(value, dict):
                value["in"].append("more")
                model[key]["in"].append("more")
            elif isinstance(value, tuple) and isinstance(value[1], list):
                value[1].append("more")
                model[key][1].append("more")
            else:
                return
            table[key] = value

    def remove_value(self, place: tuple[str, Any], how: str) -> None:
        uid, key = place
        table, model = self.backend.state(uid).values("v"), self.model.table(uid, "value")
        if how == "pop":
            assert repr(table.pop(key, None)) == repr(model.pop(key, None))
        elif key in model:
            assert repr(table.pop(key)) == repr(model.pop(key))
        else:
            with pytest.raises(KeyError):
                table.pop(key)

    def extend_list(self, place: tuple[str, Any], more: list[Any]) -> None:
        uid, key = place
        self.backend.state(uid).lists("l").extend(key, more)
        self.model.table(uid, "list").setdefault(key, []).extend(copy.deepcopy(more))

    def change_in_list(self, place: tuple[str, Any]) -> None:
        uid, key = place
        table, model = self.backend.state(uid).lists("l"), self.model.table(uid, "list")
        found = table.get(key)
        assert repr(found) == repr(model.get(key, []))
        if found and isinstance(found[0], list):
            found[0].append("more")
            model[key][0].append("more")
            table.clear(key)
            table.extend(key, found)

    def put_in_map(self, place: tuple[str, Any], field: Any, value: Any) -> None:
        uid, key = place
        self.backend.state(uid).maps("m").put(key, field, value)
        self.model.table(uid, "map").setdefault(key, {})[field] = copy.deepcopy(value)

    def change_in_map(self, place: tuple[str, Any], field: Any) -> None:
        uid, key = place
        table, model = self.backend.state(uid).maps("m"), self.model.table(uid, "map")
        assert repr(dict(table.items(key))) == repr(model.get(key, {}))
        value = table.items(key).get(field)
        if isinstance(value, list):
            value.append("more")
            model[key][field].append("more")
            table.put(key, field, value)

    def remove_from_map(self, place: tuple[str, Any], field: Any) -> None:
        uid, key = place
        table, model = self.backend.state(uid).maps("m"), self.model.table(uid, "map")
        if field not in model.get(key, {}):
            with pytest.raises(KeyError):
                table.remove(key, field)
            return
        table.remove(key, field)
        del model[key][field]
        if not model[key]:
            del model[key]

    def clear_key(self, place: tuple[str, Any], kind: str) -> None:
        uid, key = place
        state = self.backend.state(uid)
        (state.lists("l") if kind == "list" else state.maps("m")).clear(key)
        self.model.table(uid, kind).pop(key, None)

    def timer(self, place: tuple[str, Any], time: int, kind: str, add: bool) -> None:
        uid, key = place
        timers, model = self.backend.timers(uid), self.model.timers.setdefault((uid, kind), [])
        getattr(getattr(timers, kind), "add" if add else "delete")(key, time)
        if add and (time, key) not in model:
            model.append((time, key))
        elif not add and (time, key) in model:
            model.remove((time, key))

    def take_timers(self, uid: str, kind: str, until: int) -> None:
        model = self.model.timers.get((uid, kind), [])
        due = [timer for timer in model if timer[0] <= until]
        taken = getattr(self.backend.timers(uid), kind).take(until)
        if not due:
            assert taken is None
            return
        first = min(time for time, _ in due)
        assert taken is not None
        assert taken[0] == first
        assert list(map(repr, taken[1])) == [repr(key) for time, key in due if time == first]
        model[:] = [timer for timer in model if timer[0] != first]

    def operator_state(self, value: Any) -> None:
        states = self.backend.operators("one")
        states.list("items").append(value)
        states.broadcast("rules")[repr(value)] = value
        self.model.items.append(copy.deepcopy(value))
        self.model.rules[repr(value)] = copy.deepcopy(value)

    def undone(self, steps: list[tuple[str, dict[str, Any]]]) -> None:
        """Change things through an undo log, and take all of it back."""
        found, model, log = self.backend, copy.deepcopy(self.model), UndoLog()
        self.backend = cast(LayeredBackend, KeptUndoBackend(found, log))
        for step, arguments in steps:
            getattr(self, step)(**copy.deepcopy(arguments))
        log.undo()
        self.backend, self.model = found, model

    def tend(self, times: int) -> None:
        for _ in range(times):
            self.now += 100
            self.backend.tend(self.now)

    def everything_is_there(self) -> None:
        for uid in KEYS:
            for kind in KINDS:
                assert contents(self.backend, uid, kind) == shown(self.model.table(uid, kind))
            assert len(self.backend.state(uid).values("v")) == len(self.model.table(uid, "value"))

    # ------------------------------------------------------------ snapshots

    def freeze(self, savepoint: bool) -> None:
        self.next += 1
        kind = SnapshotKind.SAVEPOINT if savepoint else SnapshotKind.CHECKPOINT
        barrier = Barrier(self.next, 0, kind=kind)
        self.out.append(Out(barrier, self.backend.freeze(barrier), copy.deepcopy(self.model)))

    def write(self, cancel_after: int | None, release: bool) -> None:
        """The writing thread: it takes snapshots in the order of their barriers."""
        out = next((out for out in self.out if out.written is None and not out.failed and out.frozen), None)
        if out is None:
            return
        looks = iter(range(1000 if cancel_after is None else cancel_after))
        assert out.frozen is not None
        with suppress(SnapshotCancelledError):
            out.written = out.frozen.write(
                self.storage.writer(out.barrier),
                lambda: next(looks, None) is None and cancel_after is not None,
            )
        out.failed = out.written is None
        if out.written is not None:
            self._check_restored(out, 1 + out.barrier.checkpoint % 2, self.config)
        if release:
            self._release(out)

    def _release(self, out: Out) -> None:
        if out.frozen is not None:
            out.frozen.release()
            out.frozen = None

    def complete(self, pick: int) -> None:
        """The driver: older ones are given up, and what only the last completed one referred to is removed."""
        found = [out for out in self.out if out.written]
        if not found:
            return
        out = found[pick % len(found)]
        self._release(out)
        self.out.remove(out)
        if out.barrier.kind is SnapshotKind.SAVEPOINT:
            self.savepoints.append(out)
            return
        for older in [o for o in self.out if o.barrier.checkpoint < out.barrier.checkpoint]:
            if older.barrier.kind is not SnapshotKind.SAVEPOINT:
                self._abort(older, told=False)
        self._check_restored(out, 1, self.config)
        keep = self._paths(out)
        assert keep <= self.storage.files.keys()
        for path in {path for old in self.completed for path in self._paths(old)} - keep:
            del self.storage.files[path]
        self.completed = [out]
        self.untold.append(out.barrier.checkpoint)

    @staticmethod
    def _paths(out: Out) -> set[str]:
        assert out.written is not None
        return {part.piece.path for part in out.written.keyed.pieces} if out.written.keyed else set()

    def tell_completed(self) -> None:
        if self.untold:
            self.backend.completed(self.untold.pop(0))

    def abort(self, pick: int) -> None:
        if self.out:
            self._abort(self.out[pick % len(self.out)], told=True)

    def abort_or_restart(self, pick: int, restart: bool) -> None:
        if restart:
            self.restart(pick)
        else:
            self.abort(pick)

    def _abort(self, out: Out, *, told: bool) -> None:
        self._release(out)
        self.out.remove(out)
        self.storage.aborted(out.barrier.checkpoint)
        if told:
            self.backend.aborted(out.barrier.checkpoint)

    # ------------------------------------------------------------ restore

    def restore_elsewhere(self, pick: int, parallelism: int, name: str) -> None:
        found = self.completed + self.savepoints
        if not found:
            return
        out = found[pick % len(found)]
        self._check_restored(out, parallelism, CheckpointConfig(backend=name))  # type: ignore[arg-type]

    def _check_restored(self, out: Out, parallelism: int, config: CheckpointConfig) -> None:
        parts = [self._restored(out, config, i, parallelism) for i in range(parallelism)]
        try:
            self._check(out.model, parts)
        finally:
            for part in parts:
                part.close()

    def restart(self, pick: int) -> None:
        found = self.completed + self.savepoints
        if not found:
            return
        out = found[pick % len(found)]
        while self.out:
            self._abort(self.out[0], told=False)
        self.backend.close()
        self.untold = []
        self.backend = self._restored(out, self.config, 0, 1)
        self.model = copy.deepcopy(out.model)

    def _restored(self, out: Out, config: CheckpointConfig, subtask: int, parallelism: int) -> LayeredBackend:
        assert out.written is not None
        keyed = (out.written.keyed,) if out.written.keyed else ()
        operators: tuple[OperatorState, ...] = out.written.operators if subtask == 0 else ()
        restore = SubtaskRestore("chain", subtask, keyed, operators)
        return self._open(config, subtask, parallelism, restore)

    def _check(self, model: Model, parts: list[LayeredBackend]) -> None:
        for uid, schema in KEYS.items():
            groups = KeyGroups(uid, schema, GROUPS)
            for number, part in enumerate(parts):
                own = groups_of(number, len(parts), GROUPS)
                for kind in KINDS:
                    table = model.table(uid, kind)
                    mine = {key: value for key, value in table.items() if int(groups.of([key])[0]) in own}
                    assert contents(part, uid, kind) == shown(mine)
                for kind in ("event", "processing"):
                    timers = [
                        t for t in model.timers.get((uid, kind), []) if int(groups.of([t[1]])[0]) in own
                    ]
                    found = []
                    while (due := getattr(part.timers(uid), kind).take(9)) is not None:
                        found += [(due[0], repr(key)) for key in due[1]]
                    timers.sort(key=lambda timer: timer[0])
                    assert found == [(time, repr(key)) for time, key in timers]
        states = parts[0].operators("one")
        assert list(map(repr, states.list("items"))) == list(map(repr, model.items))
        assert shown(states.broadcast("rules")) == shown(model.rules)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(name=backends, mode=modes, steps=STEPS)
def test_what_is_restored_is_what_was_there_at_the_barrier(
    make_storage: Any, name: str, mode: str, steps: list[tuple[str, dict[str, Any]]]
) -> None:
    run = Run(make_storage(), name, mode)
    try:
        for step, arguments in steps:
            getattr(run, step)(**arguments)
    finally:
        run.backend.close()
