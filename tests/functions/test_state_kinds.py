"""Kinds of state: reducing and aggregating values, times to live, state that belongs to no key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.functions.keyed import StateTtl, holds_stamped, is_expired, table_name
from ftlayer.functions.process import Context
from ftlayer.state.heap import HeapBackend

TTL = StateTtl("10ms")
READ = StateTtl("10ms", refresh_on_read=True)


def context(backend: HeapBackend | None = None) -> Context:
    backend = backend or HeapBackend()
    made = Context("p", [], backend.state("p"), backend.timers("p"), operators=backend.operators("p"))
    made.key = "a"
    return made


def test_reducing() -> None:
    ctx = context()
    total = ctx.reducing("total", lambda one, other: one + other)
    assert total.get() is None
    total.add(3)
    total.add(4)
    ctx.key = "b"
    assert total.get() is None
    total.add(10)
    ctx.key = "a"
    assert total.get() == 7
    assert ctx.value("total").get() == 7
    total.clear()
    assert total.get() is None
    total.add(1)
    assert total.get() == 1


def test_none_can_be_reduced() -> None:
    seen: list[tuple[Any, Any]] = []
    handle = context().reducing("x", lambda one, other: seen.append((one, other)))
    handle.add(None)
    handle.add(5)
    handle.add(6)
    assert seen == [(None, 5), (None, 6)]


def test_aggregating() -> None:
    ctx = context()
    mean = ctx.aggregating(
        "mean", lambda: (0, 0), lambda old, value: (old[0] + value, old[1] + 1), lambda old: old[0] / old[1]
    )
    assert mean.get() is None
    mean.add(1)
    mean.add(4)
    assert mean.get() == 2.5
    plain = ctx.aggregating("mean", lambda: (0, 0), lambda old, value: old)
    assert plain.get() == (5, 2)
    mean.clear()
    assert plain.get() is None


def test_handles_may_be_asked_for_each_time() -> None:
    ctx = context()
    for _ in range(3):
        ctx.reducing("n", int.__add__).add(1)
        ctx.list("l", ttl=TTL).append(1)
    assert ctx.reducing("n", int.__add__).get() == 3
    assert ctx.list("l", ttl=TTL).get() == [1, 1, 1]
    assert ctx.list("l", ttl=TTL) is ctx.list("l", ttl=TTL)


@pytest.mark.parametrize("ttl", [TTL, READ])
def test_reducing_and_aggregating_with_a_time_to_live(ttl: StateTtl) -> None:
    ctx = context()
    total = ctx.reducing("total", int.__add__, ttl=ttl)
    count = ctx.aggregating("count", int, lambda old, _: old + 1, ttl=ttl)
    total.add(5)
    count.add(5)
    ctx.now_ms = 9
    total.add(2)
    count.add(2)
    ctx.now_ms = 18
    assert (total.get(), count.get()) == (7, 2)
    ctx.now_ms = 29
    assert (total.get(), count.get()) == (None, None)
    total.add(1)
    assert total.get() == 1


def test_what_is_over_is_removed_when_its_key_is_used() -> None:
    backend = HeapBackend()
    ctx = context(backend)
    tables = backend.state("p")
    ctx.value("v", ttl=TTL).set(1)
    ctx.list("l", ttl=TTL).extend([1, 2])
    ctx.map("m", ttl=TTL).update({1: 1, 2: 2})
    ctx.now_ms = 10
    assert ctx.value("v", 7, ttl=TTL).get() == 7
    assert ctx.list("l", ttl=TTL).get() == []
    assert list(ctx.map("m", ttl=TTL)) == []
    sizes = [
        len(table(table_name(name, TTL)))
        for table, name in ((tables.values, "v"), (tables.lists, "l"), (tables.maps, "m"))
    ]
    assert sizes == [0, 0, 0]


def test_what_a_backend_is_told() -> None:
    backend = HeapBackend()
    ctx = context(backend)
    ctx.now_ms = 100
    ctx.value("v", ttl=TTL).set("x")
    name = table_name("v", TTL)
    stamped = backend.state("p").values(name)["a"]
    assert holds_stamped(name)
    assert not holds_stamped(table_name("v", None))
    assert stamped[1] == "x"
    assert not is_expired(stamped, 109)
    assert is_expired(stamped, 110)


def test_a_name_has_a_time_to_live_or_has_none() -> None:
    ctx = context()
    ctx.value("v").set(1)
    with pytest.raises(ConfigError, match="'p' uses the state 'v' with a time to live and without"):
        ctx.value("v", ttl=TTL)
    ctx.map("m", ttl=TTL)
    with pytest.raises(ConfigError, match="'m'"):
        ctx.map("m")


@pytest.mark.parametrize("make", [lambda: StateTtl("soon"), lambda: StateTtl(0), lambda: StateTtl(-5)])
def test_times_that_are_none(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="StateTtl: time"):
        make()


def test_refresh_is_yes_or_no() -> None:
    with pytest.raises(ConfigError, match="refresh_on_read"):
        StateTtl("1s", refresh_on_read="yes")  # type: ignore[arg-type]


# ---------------------------------------------------------------- against a model


class Living(RuleBasedStateMachine):
    """A value, a list and a mapping with a time to live, against what was written when."""

    @initialize(refresh=st.booleans())
    def begin(self, refresh: bool) -> None:
        self.refresh = refresh
        self.ctx = context()
        ttl = StateTtl("10ms", refresh_on_read=refresh)
        self.value = self.ctx.value("v", "none", ttl=ttl)
        self.list = self.ctx.list("l", ttl=ttl)
        self.map = self.ctx.map("m", ttl=ttl)
        # By key: [when it is over, value] of each.
        self.values: dict[str, list[Any]] = {}
        self.lists: dict[str, list[list[Any]]] = {}
        self.maps: dict[str, dict[int, list[Any]]] = {}

    def over(self, entry: list[Any]) -> bool:
        return bool(entry[0] <= self.ctx.now_ms)

    def read(self, entry: list[Any]) -> Any:
        if self.refresh:
            entry[0] = self.ctx.now_ms + 10
        return entry[1]

    @rule(key=st.sampled_from("ab"), passed=st.integers(0, 7))
    def go_on(self, key: str, passed: int) -> None:
        self.ctx.key = key
        self.ctx.now_ms += passed

    @rule(n=st.integers())
    def write(self, n: int) -> None:
        self.value.set(n)
        self.values[self.ctx.key] = [self.ctx.now_ms + 10, n]

    @rule()
    def look(self) -> None:
        entry = self.values.get(self.ctx.key)
        there = entry is not None and not self.over(entry)
        assert self.value.get() == (self.read(entry) if there else "none")

    @rule(numbers=st.lists(st.integers(0, 9), max_size=3))
    def extend(self, numbers: list[int]) -> None:
        self.list.extend(iter(numbers))
        self.lists.setdefault(self.ctx.key, []).extend([self.ctx.now_ms + 10, n] for n in numbers)

    @rule()
    def look_at_list(self) -> None:
        live = [entry for entry in self.lists.get(self.ctx.key, []) if not self.over(entry)]
        self.lists[self.ctx.key] = live
        assert self.list.get() == [self.read(entry) for entry in live]

    @rule(field=st.integers(0, 3), n=st.integers())
    def put(self, field: int, n: int) -> None:
        self.map[field] = n
        self.maps.setdefault(self.ctx.key, {})[field] = [self.ctx.now_ms + 10, n]

    @rule(field=st.integers(0, 3))
    def look_at_item(self, field: int) -> None:
        entry = self.maps.get(self.ctx.key, {}).get(field)
        there = entry is not None and not self.over(entry)
        assert self.map.get(field, "none") == (self.read(entry) if there else "none")
        assert (field in self.map) is there

    @rule(field=st.integers(0, 3))
    def remove(self, field: int) -> None:
        entry = self.maps.get(self.ctx.key, {}).pop(field, None)
        if entry is None or self.over(entry):
            with pytest.raises(KeyError):
                del self.map[field]
        else:
            del self.map[field]

    @rule()
    def look_at_map(self) -> None:
        live = {f for f, entry in self.maps.get(self.ctx.key, {}).items() if not self.over(entry)}
        assert set(self.map) == live
        assert len(self.map) == len(live)
        model = self.maps.get(self.ctx.key, {})
        assert dict(self.map.items()) == {f: self.read(model[f]) for f in live}
        assert sorted(self.map.values()) == sorted(model[f][1] for f in live)

    @rule()
    def clear(self) -> None:
        for handle, model in ((self.value, self.values), (self.list, self.lists), (self.map, self.maps)):
            handle.clear()
            model.pop(self.ctx.key, None)


Living.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLiving = Living.TestCase


# ---------------------------------------------------------------- state that belongs to no key


def test_operator_state_is_the_same_object_each_time() -> None:
    backend = HeapBackend()
    ctx = context(backend)
    ctx.operator_list("files").append("a")
    ctx.union_list("offsets").append(1)
    ctx.broadcast("rules")["x"] = 5
    assert backend.operators("p").list("files") == ["a"]
    assert backend.operators("p").list("offsets", union=True) == [1]
    assert backend.operators("p").broadcast("rules") == {"x": 5}
    assert ctx.operator_list("files") is ctx.operator_list("files")


def test_operator_state_needs_no_key() -> None:
    backend = HeapBackend()
    ctx = Context("p", [], operators=backend.operators("p"))
    ctx.operator_list("l").append(1)
    with pytest.raises(UnsupportedError, match="has not state"):
        ctx.value("v")


def test_a_name_is_one_kind_of_operator_state() -> None:
    ctx = context()
    ctx.operator_list("l")
    with pytest.raises(ConfigError, match="'l'"):
        ctx.broadcast("l")
