"""Locations of rows, grouped by their segments."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.vertex.rules.source_ranges import by_segment, locate


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 300)), max_size=12),
    st.integers(0, 1 << 40),
    st.integers(1, 1 << 20),
)
def test_locations_are_grouped_by_segment_be_they_in_long_runs_or_in_short_ones(
    runs: list[tuple[int, int]], first: int, step: int
) -> None:
    parts = [locate(first + number * step, np.arange(count) * 7) for number, count in runs]
    locations = np.concatenate([np.zeros(0, np.uint64), *parts])
    expected: dict[int, list[tuple[int, int]]] = {}
    for position, location in enumerate(locations.tolist()):
        segment, row = divmod(location, 1 << 20)
        expected.setdefault(segment, []).append((row, position))
    found = [
        (segment, list(zip(rows.tolist(), positions.tolist(), strict=True)))
        for segment, rows, positions in by_segment(locations)
    ]
    assert found == sorted(expected.items())
