"""Charts and the graph as SVG: well-formed, escaped, inside their frame; and numbers as people read them."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.monitor.console import charts, formats
from ftlayer.monitor.console.charts import GraphEdge, GraphNode, draw

SCRIPT = '"><script>alert(1)</script>'
NAMESPACE = "{http://www.w3.org/2000/svg}"
values = st.floats(0, 1e12, allow_subnormal=False) | st.just(math.nan)


@given(st.lists(values, max_size=60))
def test_an_area_stays_in_its_frame(series: list[float]) -> None:
    """Every point is in the frame; gaps are left out, nothing is drawn for them."""
    root = ElementTree.fromstring(charts.area(series, "in per second"))
    lines = [element.get("points", "") for element in root if element.tag == "polyline"]
    points = [tuple(map(float, point.split(","))) for line in lines for point in line.split()]
    assert all(0 <= x <= charts.WIDTH and 0 <= y <= charts.HEIGHT for x, y in points)
    assert bool(points) == any(map(math.isfinite, series))


@given(st.lists(st.lists(st.floats(0, 1e6), max_size=5), max_size=40))
def test_stacks_stay_in_their_frame(parts: list[list[float]]) -> None:
    """The highest bar reaches the top at most, and all have their title."""
    root = ElementTree.fromstring(charts.stack([charts.Bar(tuple(one), SCRIPT) for one in parts], SCRIPT))
    assert root.get("aria-label") == SCRIPT
    for group in root:
        title, *rects = group
        assert title.text == SCRIPT
        assert all(float(rect.get("y", "")) > -0.1 for rect in rects)
        assert all(float(rect.get("height", "")) >= 0 for rect in rects)


@given(st.floats())
def test_a_meter_is_never_fuller_than_full(share: float) -> None:
    """Whatever it is given: NaN is empty."""
    root = ElementTree.fromstring(charts.meter(share, SCRIPT))
    assert 0 <= float(root[1].get("width", "")) <= 100


def test_names_are_text_in_the_graph() -> None:
    """What people and records call things is not taken for markup, anywhere in the drawing."""
    nodes = [GraphNode(SCRIPT, (SCRIPT,), 2, 1.0, 2.0, 0.5, 0.9, True), GraphNode("b", (), 1)]
    drawn = draw(nodes, [GraphEdge(SCRIPT, "b", 5_000, note=SCRIPT)], SCRIPT)
    assert "<script" not in drawn
    root = ElementTree.fromstring(drawn)
    assert any(SCRIPT in (title.text or "") for title in root.iter("title"))
    assert "4.88 KiB" in drawn


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (formats.short(0), "0"),
        (formats.short(0.25), "0.2"),
        (formats.short(999), "999"),
        (formats.short(1_234), "1.23k"),
        (formats.short(45_600_000), "45.6M"),
        (formats.rate(120_000), "120k/s"),
        (formats.rate(math.nan), "–"),
        (formats.size(0), "0 B"),
        (formats.size(1536), "1.50 KiB"),
        (formats.size(1 << 40), "1.00 TiB"),
        (formats.share(0.066), "7 %"),
        (formats.seconds(0.0123), "12 ms"),
        (formats.seconds(59.96), "60.0 s"),
        (formats.seconds(61), "1 min 1 s"),
        (formats.seconds(7_200), "2 h"),
        (formats.seconds(90_061), "1 d 1 h"),
        (formats.seconds(None), "–"),
        (formats.moment(None), "–"),
        (formats.moment("2026-09-21T14:13:20.123Z"), "2026-09-21 14:13:20"),
        (formats.moment("-5 ms"), "-5 ms"),
        (formats.of(1, "job", "jobs"), "1 job"),
        (formats.of(2_000, "job", "jobs"), "2,000 jobs"),
        (formats.count(1_234_567), "1,234,567"),
    ],
)
def test_numbers_as_people_read_them(said: str, meant: str) -> None:
    """Three digits are enough at a glance."""
    assert said == meant


@given(st.floats(0, 1e15))
def test_numbers_are_short(value: float) -> None:
    """They fit into a column, and into a box of the graph."""
    assert len(formats.short(value)) <= 5
    assert len(formats.size(value)) <= 8
