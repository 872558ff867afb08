"""State on the heap against plain dicts of lists and dicts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.errors import ConfigError
from ftlayer.state.heap import HeapBackend, HeapState

keys = st.sampled_from(["a", None, 1, (1, "a")])
fields = st.sampled_from(["x", "y", 0])


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("extend"), keys, st.lists(st.integers(), max_size=3)),
            st.tuples(st.just("clear"), keys),
        ),
        max_size=30,
    )
)
def test_lists_do_what_a_dict_of_lists_does(calls: list[Any]) -> None:
    table = HeapState().lists("l")
    model: dict[Any, list[int]] = {}
    for name, key, *rest in calls:
        getattr(table, name)(key, *rest)
        model[key] = [*model.get(key, []), *rest[0]] if name == "extend" else []
        assert table.get(key) == model[key]
        table.get(key).append(99)  # a copy
        assert all(table.get(key) == values for key, values in model.items())
        assert len(table) == sum(map(bool, model.values()))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), keys, fields, st.integers()),
            st.tuples(st.just("remove"), keys, fields),
            st.tuples(st.just("clear"), keys),
        ),
        max_size=30,
    )
)
def test_maps_do_what_a_dict_of_dicts_does(calls: list[Any]) -> None:
    table = HeapState().maps("m")
    model: dict[Any, dict[Any, int]] = {}
    for name, key, *rest in calls:
        items = model.setdefault(key, {})
        if name == "remove" and rest[0] not in items:
            with pytest.raises(KeyError):
                table.remove(key, *rest)
            continue
        getattr(table, name)(key, *rest)
        if name == "put":
            items[rest[0]] = rest[1]
        elif name == "remove":
            del items[rest[0]]
        else:
            items.clear()
        assert all(dict(table.items(key)) == items for key, items in model.items())
        assert len(table) == sum(map(bool, model.values()))


def test_values_raised_while_they_are_added_leave_a_list_as_it_was() -> None:
    table = HeapState().lists("l")
    with pytest.raises(ZeroDivisionError):
        table.extend("a", (1 // n for n in (1, 0)))
    assert table.get("a") == []


def test_a_name_is_of_one_kind_and_its_table_is_the_same_at_every_call() -> None:
    state = HeapState()
    state.values("x")["a"] = 1
    assert state.values("x") == {"a": 1}
    with pytest.raises(ConfigError, match="'x' is used as a list and as a value"):
        state.lists("x")
    with pytest.raises(ConfigError, match="'x' is used as a map and as a value"):
        state.maps("x")


def test_operators_do_not_see_each_others_state() -> None:
    backend = HeapBackend()
    backend.state("a").values("x")["k"] = 1
    backend.timers("a").event.add("k", 5)
    assert backend.state("b").values("x") == {}
    assert backend.timers("b").event.next_ms() is None
    assert backend.state("a").values("x") == {"k": 1}
    assert backend.timers("a").event.next_ms() == 5
