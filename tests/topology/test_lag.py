"""How many records lie between two offsets of a stream reader."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.topology.lag import WAITING, lag_behind


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
