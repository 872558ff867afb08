"""What lies between two offsets of a stream reader."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.topology.checks import WAITING, lag_behind, lies_before


@pytest.mark.parametrize(
    ("offset", "latest", "lag"),
    [
        ({"a-0": 3, "a-1": 10}, {"a-0": 5, "a-1": 10}, 2),
        ({"a-0": 3}, {"a-0": 5, "a-1": 7}, 9),
        ({"a-0": 3, "a-1": 10}, {"a-0": 2, "a-1": 11}, 1),
        ({"a-0": 3, "gone": 10}, {"a-0": 3}, 0),
        ({"next": 3}, {"next": 5, WAITING: 40}, 40),
        ({"a": "x"}, {"a": 5}, None),
        ({"a": 1}, {"a": True}, None),
        ({"a": 1}, None, None),
        (7, {"a": 5}, None),
    ],
)
def test_lag_is_told_of_offsets_that_are_numbers(offset: Any, latest: Any, lag: int | None) -> None:
    assert lag_behind(offset, latest) == lag


@pytest.mark.parametrize(
    ("place", "offset", "is_before"),
    [
        (300, 100, True),
        (300, 300, False),
        (100.5, 100.25, True),
        ({"index": 300}, {"index": 100}, True),
        ({"index": 300}, {"index": 300}, False),
        ({"0": 300, "1": 50}, {"0": 100, "1": 60}, True),
        ({"topic": {"0": 300, "1": 50}}, {"topic": {"0": 301, "1": 49}}, True),
        ({"a-0": 3, "a-1": 5}, {"a-0": 4}, False),
        ({"file": 3, "line": 500}, {"file": 4, "line": 0}, False),
        ({"file": 3, "line": 500}, {"file": 3, "line": 100}, True),
        ({"file": "a", "line": 500}, {"file": "b", "line": 0}, False),
        ({"file": "a", "line": 500}, {"file": "a", "line": 0}, True),
        ([3, 500], [4, 0], False),
        ([3, 500], [3, 400], True),
        ({"index": 300, "is_last": True}, {"index": 300, "is_last": False}, False),
        ("b", "a", False),
        (None, 5, False),
        ({"index": 300}, {}, False),
    ],
)
def test_an_offset_before_a_place(place: Any, offset: Any, is_before: bool) -> None:
    assert lies_before(offset, place) is is_before
