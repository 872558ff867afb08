"""What a snapshot reads of a table: of each key the newest entry, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.records.kernels import native
from ftlayer.state.snapshots import entries as view
from ftlayer.state.snapshots.entries import newest_of
from ftlayer.state.tables.layers import DELETED

keys = st.integers(0, 9) | st.sampled_from(["a", (1, "b"), None])
values = st.integers() | st.just(DELETED)
tables = st.dictionaries(keys, values, max_size=12)


@settings(max_examples=100, deadline=None)
@given(layers=st.lists(tables, max_size=4), base=st.none() | tables, size=st.integers(1, 5))
def test_of_each_key_the_newest_entry_is_read(
    layers: list[dict[Any, Any]], base: dict[Any, Any] | None, size: int
) -> None:
    expected: dict[Any, Any] = {}
    for layer in reversed([*layers, base or {}]):
        expected |= layer
    found: dict[Any, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(view, "SLICE", size)
        for part in newest_of([layer.items() for layer in layers], base):
            read = [*zip(part.keys, part.values, strict=True), *((key, DELETED) for key in part.deleted)]
            assert 0 < len(read) <= size
            for key, value in read:
                assert key not in found
                found[key] = value
    assert found == expected


def test_a_dict_that_changes_while_it_is_read_is_refused() -> None:
    class Meddling:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            table[object()] = 0
            return False

    table: dict[Any, Any] = {1: 0, 2: 0, 3: 0}
    with pytest.raises(RuntimeError, match="changed"):
        native.dict_part(table, 0, 10, {Meddling(): None}, DELETED)


@pytest.mark.parametrize(("at", "most"), [(-1, 1), (0, 0)])
def test_a_part_begins_at_a_place_and_has_entries(at: int, most: int) -> None:
    with pytest.raises(ValueError, match="dict_part"):
        native.dict_part({}, at, most, {}, DELETED)
