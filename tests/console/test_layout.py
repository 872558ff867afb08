"""The layout of graphs: whatever the graph, boxes stand apart and edges run between them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.monitor.console.charts import EdgeRoute, Layout, LayoutEdge, lay_out

SAMPLES = [step / 40 for step in range(41)]


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[str], list[LayoutEdge]]:
    """Any graph: circles, edges to the node itself, several edges between two nodes, nodes without any."""
    uids = [f"n{number}" for number in range(draw(st.integers(1, 9)))]
    ends = st.sampled_from(uids)
    edges = draw(st.lists(st.builds(LayoutEdge, ends, ends, st.booleans() | st.just(False)), max_size=16))
    return uids, edges


@given(graphs())
def test_boxes_do_not_overlap(graph: tuple[list[str], list[LayoutEdge]]) -> None:
    """Two boxes have a gap between them, and all are inside the drawing."""
    layout = lay_out(*graph)
    assert [box.uid for box in layout.boxes] == graph[0]
    for one, other in combinations(layout.boxes, 2):
        beside = one.x + one.width < other.x or other.x + other.width < one.x
        above = one.y + one.height < other.y or other.y + other.height < one.y
        assert beside or above, (one, other)
    for box in layout.boxes:
        assert box.x >= 0
        assert box.x + box.width <= layout.width
        assert box.y >= 0
        assert box.y + box.height <= layout.height


@given(graphs())
def test_no_edge_crosses_a_box(graph: tuple[list[str], list[LayoutEdge]]) -> None:
    """An edge touches the side of the two boxes that it joins, and is outside all boxes in between."""
    layout = lay_out(*graph)
    assert [route.edge for route in layout.routes] == graph[1]
    for route in layout.routes:
        _check_ends(layout, route)
        for curve in route.curves:
            for x, y in map(curve.at, SAMPLES):
                assert 0 <= x <= layout.width
                assert 0 <= y <= layout.height
                for box in layout.boxes:
                    inside = box.x + 0.01 < x < box.x + box.width - 0.01 and box.y < y < box.y + box.height
                    assert not inside, (route, box)


def _check_ends(layout: Layout, route: EdgeRoute) -> None:
    boxes = {box.uid: box for box in layout.boxes}
    source, target = boxes[route.edge.source], boxes[route.edge.target]
    (start_x, start_y), (end_x, end_y) = route.curves[0].start, route.curves[-1].end
    assert start_x == source.x + source.width
    assert source.y < start_y < source.y + source.height
    assert end_x == target.x
    assert target.y < end_y < target.y + target.height
    for one, other in zip(route.curves, route.curves[1:], strict=False):
        assert one.end == other.start


def test_a_chain_is_a_straight_line() -> None:
    """Where nothing is in the way, what follows is beside what it follows."""
    layout = lay_out(list("abc"), [LayoutEdge("a", "b"), LayoutEdge("b", "c")])
    assert len({box.y for box in layout.boxes}) == 1
    assert [box.x for box in layout.boxes] == sorted({box.x for box in layout.boxes})


def test_no_graph_is_an_empty_drawing() -> None:
    """A job that has not told its plan draws nothing, and does not fail."""
    assert lay_out([], []).boxes == ()
