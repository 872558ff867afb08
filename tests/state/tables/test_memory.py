"""State larger than memory keeps no more bytes there than it is to, whatever values are and however they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.records.kernels import native
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend
from ftlayer.state.tables import layers as memory
from ftlayer.state.tables.layers import (
    DELETED,
    ENTRY,
    MOST,
    FrontGauge,
    LayeredTable,
    Sharing,
    StateMemory,
    footprint,
    measured,
)

SCHEMA = pa.schema([("k", pa.int64())])
MAX = 100_000
BATCH = 8
LARGEST = 12_000


# ---------------------------------------------------------------- what things weigh


@dataclass
class Account:
    name: str
    entries: list[Any]
    owner: Account | None = None


class Slotted:
    __slots__ = ("payload",)

    def __init__(self, payload: Any) -> None:
        self.payload = payload


BEYOND_ASCII = {chr(code) for code in range(0x80, 0x100)}


def _made_anew(text: str) -> str:
    return text.encode("utf-32", "surrogatepass").decode("utf-32", "surrogatepass")


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [sign * (1 << bits) + near for sign in (1, -1) for bits in (30, 60, 62, 63) for near in (-1, 0)]
    )
    | st.floats()
    | st.binary(max_size=40)
    # C counts texts without the UTF-8 that they keep once they were encoded: these are new, and none of those that all
    # share as objects from Python 3.12 on.
    | st.text(max_size=20).filter(lambda text: text not in BEYOND_ASCII).map(_made_anew)
)


@settings(max_examples=150, deadline=None)
@given(
    values=st.lists(st.recursive(atoms, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=6))
)
def test_plain_values_are_counted_in_c_as_in_python(values: list[Any]) -> None:
    found = native.plain_footprint(values)
    assert found is None or found == measured(values, 50, set())
    if all(type(value) is not int or abs(value) < 1 << 63 for value in values if type(value) is not tuple):
        assert found is not None or any(type(value) is tuple for value in values)


def test_other_values_are_left_to_python() -> None:
    for value in ([], {}, Account("a", []), (1, []), 1 << 70, bytearray()):
        assert native.plain_footprint([1, value]) is None
    with pytest.raises(TypeError, match="a list"):
        native.plain_footprint((1,))  # type: ignore[arg-type]


def bytes_of(value: Any) -> int:
    return footprint(["k"], [value])


@pytest.mark.parametrize(
    "wrap",
    [
        lambda payload: payload,
        lambda payload: (1, payload),
        lambda payload: [[payload], "x"],
        lambda payload: {"a": {"b": payload}},
        lambda payload: {payload},
        lambda payload: Account("n", [payload]),
        lambda payload: Slotted(payload),
        lambda payload: Account("n", [], Account("m", [Slotted((payload,))])),
    ],
)
def test_a_value_weighs_what_it_consists_of(wrap: Any) -> None:
    assert 50_000 < bytes_of(wrap(bytes(50_000))) - bytes_of(wrap(b"")) + 100 < 50_200


def test_objects_that_refer_to_each_other_are_counted_once() -> None:
    one = Account("a", [bytes(10_000)])
    other = Account("b", [one, one], one)
    one.owner = other
    one.entries += [other, other]
    assert 10_000 < bytes_of(one) < 15_000


def test_values_of_several_types_and_marks_of_deleted_keys() -> None:
    values = [1, "text", None, bytes(1_000), (bytes(2_000),), [bytes(3_000)], DELETED]
    assert 6_000 < footprint(range(7), values) - 7 * ENTRY < 7_000
    assert footprint({"a", "b"}, ()) >= 2 * ENTRY


# ---------------------------------------------------------------- the rule


def test_bases_are_measured_before_anything_is_moved_for_what_was_only_written_again() -> None:
    rule = StateMemory(1_000)
    measured = []

    def measure() -> int:
        measured.append(rule.bases)
        return 600

    rule.grew(600)
    assert rule.excess(measure) == 0
    for _ in range(20):
        rule.grew(100)
        assert rule.excess(measure) == 0
    # Each time a good part of what fits into memory has come since the last one.
    assert measured == [1_300, 1_300]


def test_bases_are_measured_when_they_seem_over_and_when_they_seem_down_not_for_each_slice() -> None:
    """Measuring reads all of them: with slices of some hundred entries it cost more than moving."""
    rule, real, measured = StateMemory(1_000), [5_000], []

    def measure() -> int:
        measured.append(real[0])
        return real[0]

    rule.grew(5_000)
    while rule.excess(measure):
        real[0] -= 10
        rule.moved(10)
    assert measured == [5_000, 1_000]


@given(st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500)), max_size=60))
def test_what_is_moved_brings_bases_below_the_bound(steps: list[tuple[int, int]]) -> None:
    """``real`` is never more than what the rule knows, and moving goes on until it is below the bound."""
    rule, real = StateMemory(1_000), [0]
    for grown, replaced in steps:
        real[0] += grown - min(replaced, real[0])
        rule.grew(grown)
        while rule.excess(lambda: real[0]):
            part = min(100, real[0])
            real[0] -= part
            rule.moved(part)
            if not real[0]:
                rule.emptied()
        assert real[0] <= rule.bases <= 1_250


def test_a_front_is_measured_when_it_grows_by_new_keys_and_when_its_values_grow_in_place() -> None:
    table = LayeredTable("a table", Sharing())
    gauge = FrontGauge(table)
    for key in range(1_000):
        table[key] = b""
    gauge.look(1_000)
    small = gauge.bytes
    assert 0 < small < 300_000
    table[1_000] = bytes(1_000_000)
    gauge.look(1)
    assert gauge.bytes > small + 1_000_000
    for key in range(300):
        table[key] = bytes(10_000)
    gauge.look(300)
    assert gauge.bytes > small + 4_000_000
    table.freeze()
    gauge.frozen()
    assert not gauge.bytes


# ---------------------------------------------------------------- backends


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_BYTES", MAX)


class Held:
    """A backend with one table, and what the table is to hold."""

    def __init__(self, storage: Any, where: Path, **options: Any) -> None:
        config = CheckpointConfig(backend="lmdb", state_directory=str(where), **options)
        spec = BackendSpec(0, 16, 16, {"op": SCHEMA})
        backend = open_backend(config, spec, None, storage, "")
        assert isinstance(backend, LayeredBackend)
        self.backend, self.storage = backend, storage
        self.table = backend.state("op").values("v")
        self.model: dict[int, bytes] = {}
        self.frozen: list[Any] = []
        self.checkpoint = 0
        self.now_ms = 0

    def write(self, pairs: list[tuple[int, int]]) -> None:
        for key, size in pairs:
            self.table[key] = self.model[key] = bytes([key % 256]) * size
        self.tend(len(pairs))

    def tend(self, handled: int = 0) -> None:
        self.now_ms += 10
        self.backend.tend(self.now_ms, handled)

    def freeze(self) -> None:
        self.checkpoint += 1
        self.frozen.append((self.checkpoint, self.backend.freeze(Barrier(self.checkpoint, 0))))

    def release(self, *, write: bool = True) -> None:
        checkpoint, frozen = self.frozen.pop(0)
        if write:
            frozen.write(self.storage.writer(Barrier(checkpoint, 0)), lambda: False)
        frozen.release()
        (self.backend.completed if write else self.backend.aborted)(checkpoint)

    def make_room(self) -> None:
        for _ in range(10_000):
            if not self.backend.is_full:
                return
            self.tend()
        raise AssertionError("it never makes room")

    def in_memory(self) -> int:
        """Return the bytes of all values that the table refers to, and what their entries cost."""
        kept: dict[int, Any] = {}
        entries = dict.__len__(self.table) + len(self.table.base)
        parts = [dict.values(self.table), self.table.base.values()]
        for layer in self.table.layers:
            entries += len(layer)
            parts.append(layer.values.values())
        for part in parts:
            kept.update((id(value), value) for value in part)
        return sum(map(len, filter(None, (v if isinstance(v, bytes) else b"" for v in kept.values()))))

    def check(self) -> None:
        assert dict(self.table.items()) == self.model

    def close(self) -> None:
        while self.frozen:
            self.release(write=False)
        self.backend.close()


@pytest.fixture
def made(storage: Any, tmp_path: Path) -> Iterator[Held]:
    held = Held(storage, tmp_path)
    yield held
    held.close()


def test_large_values_go_to_disk_from_the_first_batch_on(made: Held) -> None:
    """Before any of them was measured, and though the function that writes them takes no time."""
    for first in range(0, 400, BATCH):
        made.write([(key, 32_000) for key in range(first, first + BATCH)])
        made.make_room()
        assert made.in_memory() <= MOST * MAX
    made.check()


def test_while_a_snapshot_reads_the_input_waits_before_memory_is_full_and_goes_on_behind_it(
    made: Held,
) -> None:
    made.write([(key, 1_000) for key in range(500)])
    made.make_room()
    made.freeze()
    key = 500
    while not made.backend.is_full:
        made.write([(key, 10_000)])
        key += 1
    assert made.in_memory() <= MOST * MAX + 10_000
    for _ in range(50):
        made.tend()
        assert made.backend.is_full
    made.release()
    made.make_room()
    made.check()


def test_hot_keys_do_not_make_the_input_wait(made: Held) -> None:
    """What is written again and again takes up memory once, though nothing can be moved to disk meanwhile."""
    made.write([(key, 1_000) for key in range(40)])
    made.freeze()
    for number in range(200):
        made.write([(key, 1_000 + number % 7) for key in range(40)])
        if number % 20 == 0:
            made.freeze()
            made.release(write=False)
        for _ in range(20):
            made.tend()
        assert not made.backend.is_full
    made.check()


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"),
            st.lists(
                st.tuples(st.integers(0, 60), st.sampled_from([0, 10, 500, 5_000, LARGEST])),
                min_size=1,
                max_size=BATCH,
            ),
        ),
        st.tuples(st.just("many"), st.sampled_from([1_000, LARGEST])),
        st.sampled_from([("freeze", None), ("release", True), ("release", True), ("release", False)]),
        st.tuples(st.just("tend"), st.integers(1, 5)),
    ),
    min_size=10,
    max_size=80,
)


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(events=EVENTS, mode=st.sampled_from(["full", "incremental"]))
def test_bytes_in_memory_are_bounded_whatever_happens(
    make_storage: Any, tmp_path: Path, events: list[tuple[str, Any]], mode: str
) -> None:
    """They are at most the bound and one batch: what waits is not given to the task while it is full."""
    held = Held(make_storage(), tmp_path, incremental=mode == "incremental")
    for number, (event, what) in enumerate(events):
        if event == "write" and not held.backend.is_full:
            held.write(what)
        elif event == "many" and not held.backend.is_full:
            held.write([(100 + BATCH * number + i, what) for i in range(BATCH)])
        elif event == "freeze" and len(held.frozen) < 3:
            held.freeze()
        elif event == "release" and held.frozen:
            held.release(write=what)
        elif event == "tend":
            for _ in range(what):
                held.tend()
        assert held.in_memory() <= MOST * MAX + BATCH * LARGEST
    while held.frozen:
        held.release(write=False)
    held.make_room()
    held.check()
    held.close()
