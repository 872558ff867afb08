"""What is drawn of curves that were measured."""

from __future__ import annotations

from bench.scale.plot import drawn


def test_points_with_a_cost_are_drawn_with_the_exponent_of_their_fit() -> None:
    curve = {
        "costs": {"us": "µs", "mib": "MiB"},
        "series": {
            "a": {
                "points": [{"x": 0, "us": 1}, {"x": 1, "us": 2}, {"x": 2, "us": 0}, {"x": 4, "mib": 1}],
                "fits": {},
            },
            "b": {"points": [{"x": 1, "us": 1}, {"x": 2, "us": 2}], "fits": {"us": {"exponent": 1.0}}},
            "c": {"points": [{"x": 1, "mib": 1}], "fits": {}},
        },
    }
    assert drawn(curve) == {"a": ([1], [2], "a"), "b": ([1, 2], [1, 2], "b: x^1.00")}
