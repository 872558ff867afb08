"""Exponents of cost curves, against points that were made by a known one, and by numpy's least squares."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.scale.curve import Curve, Point, as_json, ends, figure, fit, fits

XS = (1.0, 2.0, 5.0, 10.0, 20.0)
positive = st.floats(1e-3, 1e6)


def no_points(lab: object, quick: bool) -> Iterator[Point]:
    yield from ()


def curve(*costs: str, above_zero: frozenset[str] = frozenset()) -> Curve:
    return Curve("c", "A curve", "things", dict.fromkeys(costs, "µs"), no_points, above_zero=above_zero)


@given(exponent=st.floats(-2, 3), factor=positive)
def test_points_of_a_power_give_its_exponent_and_factor(exponent: float, factor: float) -> None:
    found = fit(XS, [factor * x**exponent for x in XS])
    assert found is not None
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    assert found.factor == pytest.approx(factor, rel=1e-6)
    assert found.residual < 1e-6


@given(
    points=st.lists(st.tuples(positive, positive), min_size=2, max_size=12, unique_by=lambda each: each[0])
)
def test_any_points_give_the_line_of_numpy(points: list[tuple[float, float]]) -> None:
    xs, costs = zip(*points, strict=True)
    logs, heights = np.log(xs), np.log(costs)
    assume(np.ptp(logs) > math.log(2))
    found = fit(xs, costs)
    assert found is not None
    slope, start = np.polyfit(logs, heights, 1)
    assert found.exponent == pytest.approx(slope, rel=1e-4, abs=1e-4)
    off = heights - start - slope * logs
    assert found.residual == pytest.approx(math.sqrt(np.mean(off**2)), rel=1e-4, abs=1e-6)


def test_one_x_has_no_exponent() -> None:
    assert fit([], []) is None
    assert fit([2.0], [3.0]) is None
    assert fit([2.0, 2.0], [3.0, 4.0]) is None


def test_what_there_is_without_work_is_taken_off_where_it_is_said_to_be_constant() -> None:
    points = [Point("s", x, {"start_ms": 1_000 + 3 * x, "us": 2.0}) for x in (0.0, *XS)]
    plain = fits(curve("start_ms", "us"), points)["s"]
    assert plain["start_ms"].exponent < 0.1
    above = fits(curve("start_ms", "us", above_zero=frozenset({"start_ms"})), points)["s"]
    assert above["start_ms"].exponent == pytest.approx(1)
    assert above["start_ms"].factor == pytest.approx(3)
    assert above["us"] == plain["us"]
    assert plain["us"].exponent == pytest.approx(0)


def test_points_that_have_no_cost_or_cost_no_more_than_none_are_left_out() -> None:
    points = [
        Point("s", 0, {"start_ms": 10}),
        Point("s", 1, {"start_ms": 9}),
        Point("s", 2, {"start_ms": 12}),
        Point("s", 4, {"start_ms": 14}),
        Point("s", 8, {}),
    ]
    found = fits(curve("start_ms", above_zero=frozenset({"start_ms"})), points)
    assert found["s"]["start_ms"].exponent == pytest.approx(1)
    assert not fits(curve("start_ms"), points[:2])


def test_series_have_fits_of_their_own_and_points_come_in_any_order() -> None:
    points = [
        Point(name, x, {"us": x**exponent}) for name, exponent in (("a", 1), ("b", 2)) for x in XS[::-1]
    ]
    found = fits(curve("us"), points)
    assert [round(found[name]["us"].exponent, 6) for name in "ab"] == [1, 2]
    assert ends(points, "a") == (Point("a", 1, {"us": 1}), Point("a", 20, {"us": 20}))
    assert figure(points, "b", 5, "us") == 25
    with pytest.raises(KeyError, match="b has no us at 6"):
        figure(points, "b", 6, "us")


def test_what_is_written_has_points_by_x_and_their_fits() -> None:
    points = [Point("a", 2, {"us": 4, "mib": 1}), Point("a", 1, {"us": 2, "mib": 1})]
    written = as_json(curve("us"), points)["series"]["a"]
    assert written["points"] == [{"x": 1, "us": 2, "mib": 1}, {"x": 2, "us": 4, "mib": 1}]
    assert set(written["fits"]) == {"us"}
    assert written["fits"]["us"]["exponent"] == pytest.approx(1)
