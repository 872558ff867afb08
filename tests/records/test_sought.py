"""A text is found in text and binary values of any depth, and in nothing that is stored beside them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.records.ipc import says

COLUMNS = {
    "string": pa.array(["left", "needle", "right"]),
    "large string": pa.array(["left", "needle", "right"], pa.large_string()),
    "string view": pa.array(["left", "a needle in a long text", "right"], pa.string_view()),
    "binary": pa.array([b"left", b"\xffneedle", b"right"]),
    "large binary": pa.array([b"left", b"needle", b"right"], pa.large_binary()),
    "binary view": pa.array([b"left", b"needle", b"right"], pa.binary_view()),
    "fixed binary": pa.array([b"leftle", b"needle", b"rights"], pa.binary(6)),
    "dictionary": pa.array(["left", "needle", "left"]).dictionary_encode(),
    "struct": pa.array([{"a": "left"}, {"a": "needle"}, {"a": None}]),
    "list": pa.array([["left"], ["x", "needle"], None]),
    "fixed list": pa.array([["left"], ["needle"], ["right"]], pa.list_(pa.string(), 1)),
    "map key": pa.array([[("left", 1)], [("needle", 2)], []], pa.map_(pa.string(), pa.int64())),
    "map value": pa.array([[(1, "left")], [(2, "needle")], []], pa.map_(pa.int64(), pa.string())),
    "list of structs": pa.array([[{"a": "left"}], [{"a": "x"}, {"a": "needle"}], []]),
}


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_a_text_is_found_in_its_own_row_alone(column: Any) -> None:
    batch = pa.record_batch({"n": pa.array([1, 2, 3]), "v": column})
    assert [says(batch.slice(row, 1), b"needle") for row in range(3)] == [False, True, False]


def test_numbers_say_nothing() -> None:
    batch = pa.record_batch({"n": pa.array([int.from_bytes(b"needles!", "little")]), "none": pa.nulls(1)})
    assert not says(batch, b"needle")
