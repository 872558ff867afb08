"""What is drawn as SVG: the graph of a topology, series over the last hour, batches by phase, bars for shares.

A graph is a box a chain, with how it fares, and what waits on the edges. Charts have no text in them, so that they can
be stretched to any width; what they say stands in words beside them.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import mul

from markupsafe import Markup, escape

from ftlayer.monitor.console import formats

# Boxes of a graph lie in layers from left to right (Sugiyama, Tagawa, Toda). An edge runs between the columns of boxes,
# and where it has to pass a column, on a lane of its own between the boxes: none crosses a box. An edge that leads back
# runs below everything.

BOX_WIDTH, BOX_HEIGHT, COLUMN_GAP, ROW_GAP, MARGIN = 232.0, 96.0, 88.0, 24.0, 12.0
_LANE_HEIGHT, _BACK_LANE, _BACK_OFFSET, _BACK_STEP = 4.0, 14.0, 10.0, 5.0
_SWEEPS = 6


@dataclass(frozen=True, slots=True)
class LayoutEdge:
    """An edge to be drawn; ``back`` leads against the direction of the others."""

    source: str
    target: str
    back: bool = False


@dataclass(frozen=True, slots=True)
class Box:
    """Where a node is: its upper left corner. All have one size."""

    uid: str
    x: float
    y: float
    width: float = BOX_WIDTH
    height: float = BOX_HEIGHT

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Curve:
    """A cubic Bézier curve; a straight line has its control points on it."""

    start: Point
    first: Point
    second: Point
    end: Point

    def at(self, share: float) -> Point:
        rest = 1 - share
        weights = rest**3, 3 * rest**2 * share, 3 * rest * share**2, share**3
        xs, ys = zip(self.start, self.first, self.second, self.end, strict=True)
        return sum(map(mul, weights, xs)), sum(map(mul, weights, ys))


@dataclass(frozen=True, slots=True)
class EdgeRoute:
    """How one edge runs. ``label_at`` is a point of it that is free of boxes."""

    edge: LayoutEdge
    curves: tuple[Curve, ...]

    @property
    def label_at(self) -> Point:
        return self.curves[len(self.curves) // 2 if self.edge.back else 0].at(0.5)


@dataclass(frozen=True, slots=True)
class Layout:
    """A graph as it is drawn; ``routes`` are in the order of the edges that were given."""

    boxes: tuple[Box, ...]
    routes: tuple[EdgeRoute, ...]
    width: float
    height: float


@dataclass(slots=True)
class _Cell:
    """A place in a column: a node, or the lane of an edge that passes it."""

    column: int
    height: float
    uid: str = ""
    y: float = 0.0
    before: list[_Cell] = field(default_factory=list)
    behind: list[_Cell] = field(default_factory=list)

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


def lay_out(uids: Sequence[str], edges: Sequence[LayoutEdge]) -> Layout:
    """Place nodes and edges. Every edge joins two of ``uids``, which are all different."""
    forward, back = _split(uids, edges)
    columns = _columns_of(uids, [edges[index] for index in forward])
    cells, chains = _cells(uids, edges, forward, columns)
    table = _in_columns(cells)
    _order(table)
    _place(table)
    return _drawn(uids, edges, cells, chains, back)


# ---------------------------------------------------------------- which edges lead back, and columns


def _split(uids: Sequence[str], edges: Sequence[LayoutEdge]) -> tuple[list[int], list[int]]:
    """Return the numbers of edges that lead forward, and of those that lead back: marked, or closing a circle."""
    leaving: dict[str, list[int]] = defaultdict(list)
    for index, edge in enumerate(edges):
        if not edge.back:
            leaving[edge.source].append(index)
    back = {index for index, edge in enumerate(edges) if edge.back}
    done: set[str] = set()
    for root in uids:
        if root not in done:
            back |= _closing(root, edges, leaving, done)
    return [index for index in range(len(edges)) if index not in back], sorted(back)


def _closing(
    root: str, edges: Sequence[LayoutEdge], leaving: Mapping[str, list[int]], done: set[str]
) -> set[int]:
    """Return the edges behind ``root`` that lead to a node that is on the way to them."""
    closing = set()
    way = {root}
    stack = [(root, iter(leaving.get(root, ())))]
    while stack:
        uid, rest = stack[-1]
        index = next(rest, None)
        if index is None:
            stack.pop()
            way.discard(uid)
            done.add(uid)
            continue
        target = edges[index].target
        if target in way:
            closing.add(index)
        elif target not in done:
            way.add(target)
            stack.append((target, iter(leaving.get(target, ()))))
    return closing


def _columns_of(uids: Sequence[str], edges: Sequence[LayoutEdge]) -> dict[str, int]:
    arriving = dict.fromkeys(uids, 0)
    leaving: dict[str, list[str]] = defaultdict(list)
    for edge in edges:
        arriving[edge.target] += 1
        leaving[edge.source].append(edge.target)
    columns = dict.fromkeys(uids, 0)
    ready = [uid for uid in uids if not arriving[uid]]
    for uid in ready:
        for target in leaving[uid]:
            columns[target] = max(columns[target], columns[uid] + 1)
            arriving[target] -= 1
            if not arriving[target]:
                ready.append(target)
    return columns


def _cells(
    uids: Sequence[str], edges: Sequence[LayoutEdge], forward: Sequence[int], columns: Mapping[str, int]
) -> tuple[dict[str, _Cell], dict[int, list[_Cell]]]:
    """Return the nodes' cells, and for each edge all cells that it goes through, its ends included."""
    cells = {uid: _Cell(columns[uid], BOX_HEIGHT, uid) for uid in uids}
    chains = {}
    for index in forward:
        source, target = cells[edges[index].source], cells[edges[index].target]
        lanes = [_Cell(column, _LANE_HEIGHT) for column in range(source.column + 1, target.column)]
        chains[index] = chain = [source, *lanes, target]
        for one, next_one in itertools.pairwise(chain):
            one.behind.append(next_one)
            next_one.before.append(one)
    return cells, chains


# ---------------------------------------------------------------- order and heights


def _in_columns(cells: Mapping[str, _Cell]) -> list[list[_Cell]]:
    table: dict[int, list[_Cell]] = defaultdict(list)
    for cell in cells.values():
        table[cell.column].append(cell)
        for lane in cell.behind:
            while not lane.uid:
                table[lane.column].append(lane)
                (lane,) = lane.behind
    return [table[column] for column in sorted(table)]


def _order(table: list[list[_Cell]]) -> None:
    """Sort each column by the mean place of its neighbours, to and fro, so that few edges cross."""
    place = {id(cell): float(index) for column in table for index, cell in enumerate(column)}
    for sweep in range(_SWEEPS):
        rightward = sweep % 2 == 0
        for column in table if rightward else reversed(table):
            wanted = {
                id(cell): _mean([place[id(other)] for other in (cell.before if rightward else cell.behind)])
                for cell in column
            }
            column.sort(key=lambda cell: place[id(cell)] if (mean := wanted[id(cell)]) is None else mean)
            for index, cell in enumerate(column):
                place[id(cell)] = float(index)


def _place(table: list[list[_Cell]]) -> None:
    """Give each cell its height: close to its neighbours', in the order of its column, and none over another."""
    for column in table:
        _pack(column, [0.0] * len(column))
    for sweep in range(_SWEEPS):
        rightward = sweep % 2 == 0
        for column in table if rightward else reversed(table):
            wanted = []
            for cell in column:
                others = [other.middle for other in (cell.before if rightward else cell.behind)]
                mean = _mean(others)
                wanted.append(cell.y if mean is None else mean - cell.height / 2)
            _pack(column, wanted)
    top = min((cell.y for column in table for cell in column), default=0.0)
    for column in table:
        for cell in column:
            cell.y = round(cell.y - top + MARGIN, 1)


def _pack(column: Sequence[_Cell], wanted: Sequence[float]) -> None:
    """Bring a column as close to what is wanted as its order allows.

    Pushing cells down from the first, and up from the last, gives two arrangements without overlap; so is their mean.
    """
    down = list(wanted)
    for index in range(1, len(column)):
        down[index] = max(down[index], down[index - 1] + column[index - 1].height + ROW_GAP)
    up = list(wanted)
    for index in range(len(column) - 2, -1, -1):
        up[index] = min(up[index], up[index + 1] - column[index].height - ROW_GAP)
    for cell, low, high in zip(column, down, up, strict=True):
        cell.y = (low + high) / 2


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


# ---------------------------------------------------------------- lines


def _drawn(
    uids: Sequence[str],
    edges: Sequence[LayoutEdge],
    cells: Mapping[str, _Cell],
    chains: Mapping[int, list[_Cell]],
    back: Sequence[int],
) -> Layout:
    # Edges that lead back run through the gaps; the first and the last column get a gap of their own for them.
    gutter = _BACK_OFFSET + _BACK_STEP * (len(back) + 1) if back else 0.0
    gap = COLUMN_GAP + gutter
    left = MARGIN + gutter

    def x_of(cell: _Cell) -> float:
        return left + cell.column * (BOX_WIDTH + gap)

    ports = _ports(edges, cells, chains, back)
    bottom = max((cell.y + cell.height for cell in cells.values()), default=0.0)
    bottom = max(bottom, *(lane.y for chain in chains.values() for lane in chain), 0.0)
    routes = {
        index: EdgeRoute(edges[index], tuple(_forward(chain, x_of, *ports[index])))
        for index, chain in chains.items()
    }
    for lane, index in enumerate(back):
        source, target = cells[edges[index].source], cells[edges[index].target]
        offset = _BACK_OFFSET + _BACK_STEP * lane
        start = x_of(source) + BOX_WIDTH, ports[index][0]
        end = x_of(target), ports[index][1]
        low = bottom + _BACK_LANE * (lane + 1)
        corners = [start, (start[0] + offset, start[1]), (start[0] + offset, low)]
        corners += [(end[0] - offset, low), (end[0] - offset, end[1]), end]
        routes[index] = EdgeRoute(edges[index], tuple(map(_line, corners, corners[1:])))
    last = max((cell.column for cell in cells.values()), default=0)
    return Layout(
        tuple(Box(uid, x_of(cells[uid]), cells[uid].y) for uid in uids),
        tuple(routes[index] for index in range(len(edges))),
        left + last * (BOX_WIDTH + gap) + BOX_WIDTH + gutter + MARGIN,
        bottom + _BACK_LANE * len(back) + MARGIN,
    )


def _ports(
    edges: Sequence[LayoutEdge],
    cells: Mapping[str, _Cell],
    chains: Mapping[int, list[_Cell]],
    back: Sequence[int],
) -> dict[int, tuple[float, float]]:
    """Return the heights at which each edge leaves its source and enters its target, spread over their sides."""
    leaving: dict[str, list[tuple[float, int]]] = defaultdict(list)
    entering: dict[str, list[tuple[float, int]]] = defaultdict(list)
    ends_at = {index: (chain[1].middle, chain[-2].middle) for index, chain in chains.items()}
    for index, (first, last) in (ends_at | dict.fromkeys(back, (math.inf, math.inf))).items():
        leaving[edges[index].source].append((first, index))
        entering[edges[index].target].append((last, index))
    starts, ends = _spread(leaving, cells), _spread(entering, cells)
    return {index: (starts[index], ends[index]) for index in range(len(edges))}


def _spread(sides: Mapping[str, list[tuple[float, int]]], cells: Mapping[str, _Cell]) -> dict[int, float]:
    heights = {}
    for uid, ends in sides.items():
        cell = cells[uid]
        for place, (_, index) in enumerate(sorted(ends), 1):
            heights[index] = round(cell.y + cell.height * place / (len(ends) + 1), 1)
    return heights


def _forward(chain: Sequence[_Cell], x_of: Callable[[_Cell], float], start: float, end: float) -> list[Curve]:
    curves = []
    heights = [start, *(lane.middle for lane in chain[1:-1]), end]
    for place, (one, other) in enumerate(itertools.pairwise(chain)):
        here = x_of(one) + BOX_WIDTH, heights[place]
        there = x_of(other), heights[place + 1]
        half = (here[0] + there[0]) / 2
        curves.append(Curve(here, (half, here[1]), (half, there[1]), there))
        if not other.uid:
            curves.append(_line(there, (there[0] + BOX_WIDTH, there[1])))
    return curves


def _line(start: Point, end: Point) -> Curve:
    return Curve(start, start, end, end)


_PADDING, _NAME_LENGTH, _LINE_LENGTH = 12.0, 25, 34
_SHRINKS_UP_TO = 1_800.0
"""A graph of up to this width is drawn smaller where the window is; a wider one is scrolled."""

_BUSY_WIDTH, _HELD_WIDTH = 62.0, 128.0


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A chain as it is drawn: shares from 0 to 1, rates per second; None is what is not known, or goes without saying.

    ``about`` says below its name what it is made of.
    """

    uid: str
    names: tuple[str, ...]
    parallelism: int
    in_per_s: float | None = None
    out_per_s: float | None = None
    busy: float | None = None
    back_pressured: float | None = None
    is_bottleneck: bool = False
    about: str = ""


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """An edge as it is drawn; ``note`` is said when somebody points at it. ``per_s`` is what goes over it, if known."""

    source: str
    target: str
    queued_bytes: int = 0
    back: bool = False
    note: str = ""
    per_s: float | None = None


def draw(nodes: Sequence[GraphNode], edges: Sequence[GraphEdge], label: str) -> Markup:
    """Draw a graph; ``label`` says in words what it is. A table beside it has to say the same."""
    layout = lay_out(
        [node.uid for node in nodes], [LayoutEdge(edge.source, edge.target, edge.back) for edge in edges]
    )
    parts = [_edge(edge, route) for edge, route in zip(edges, layout.routes, strict=True)]
    parts += [_node(node, box) for node, box in zip(nodes, layout.boxes, strict=True)]
    kind = "graph shrinks" if layout.width <= _SHRINKS_UP_TO else "graph"
    return Markup(
        '<svg class="{3}" viewBox="0 0 {0} {1}" width="{0}" height="{1}" role="img" aria-label="{2}">'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" markerHeight="9" '
        'markerUnits="userSpaceOnUse" orient="auto">'
        '<path class="head" d="M0 0.8 8 4 0 7.2z"/></marker></defs>{4}</svg>'
    ).format(f"{layout.width:g}", f"{layout.height:g}", label, kind, Markup("").join(parts))


def _node(node: GraphNode, box: Box) -> Markup:
    kind = "node bottleneck" if node.is_bottleneck else "node"
    left, right = box.x + _PADDING, box.x + box.width - _PADDING
    parts = [
        Markup('<g class="{}"><title>{}</title>').format(kind, " → ".join(node.names) or node.uid),
        Markup('<rect class="box" x="{}" y="{}" width="{}" height="{}" rx="6"/>').format(
            f"{box.x:g}", f"{box.y:g}", f"{box.width:g}", f"{box.height:g}"
        ),
        _text(left, box.y + 22, _cut(node.uid, _NAME_LENGTH), "name"),
        _text(right, box.y + 22, f"×{node.parallelism}", "dim end"),
        _text(left, box.y + 39, _cut(node.about, _LINE_LENGTH), "dim"),
        _text(left, box.y + 59, _rates(node), "rates"),
        _share(left, box.y + 72, _BUSY_WIDTH, "busy", node.busy),
        _share(right - _HELD_WIDTH, box.y + 72, _HELD_WIDTH, "held", node.back_pressured),
        Markup("</g>"),
    ]
    return Markup("").join(parts)


def _rates(node: GraphNode) -> str:
    sides = (("in", node.in_per_s), ("out", node.out_per_s))
    return " · ".join(f"{word} {formats.rate(value)}" for word, value in sides if value is not None)


def _share(x: float, y: float, most: float, kind: str, value: float | None) -> Markup:
    if value is None:
        return Markup("")
    words = "busy" if kind == "busy" else "back-pressured"
    level = " high" if value >= 0.8 else ""
    width = most * min(max(value, 0.0), 1.0)
    said = _text(x, y + 15, f"{words} {formats.share(value)}", "dim small")
    return Markup(
        '<g class="{0}{1}"><rect class="track" x="{2}" y="{3}" width="{4}" height="3" rx="1.5"/>'
        '<rect class="fill" x="{2}" y="{3}" width="{5:.1f}" height="3" rx="1.5"/>{6}</g>'
    ).format(kind, level, f"{x:g}", f"{y:g}", f"{most:g}", width, said)


def _edge(edge: GraphEdge, route: EdgeRoute) -> Markup:
    kind = "edge waits" if edge.queued_bytes else "edge"
    title = edge.note or f"{edge.source} → {edge.target}"
    x, y = route.label_at
    label = Markup("")
    if edge.per_s is not None:
        label += _text(x, y - 6, formats.rate(edge.per_s), "small middle")
    if edge.queued_bytes:
        label += _text(x, y + 15, f"{formats.size(edge.queued_bytes)} wait", "small middle waiting")
    return Markup('<g class="{}"><title>{}</title><path d="{}" marker-end="url(#arrow)"/>{}</g>').format(
        kind, title, _path(route.curves), label
    )


def _path(curves: Sequence[Curve]) -> str:
    steps = ["M{:g} {:g}".format(*curves[0].start)]
    for curve in curves:
        if curve.first == curve.start:
            steps.append("L{:g} {:g}".format(*curve.end))
        else:
            steps.append("C{:g} {:g} {:g} {:g} {:g} {:g}".format(*curve.first, *curve.second, *curve.end))
    return "".join(steps)


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, f"{x:g}", f"{y:g}", escape(text))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


WIDTH = 240
HEIGHT = 56


def area(values: Sequence[float], label: str) -> Markup:
    """Draw a series from left to right, zero at the bottom and its largest value at the top; NaN is a gap.

    ``label`` says in words what is to be seen.
    """
    largest = largest_of(values)
    step = WIDTH / max(len(values) - 1, 1)
    drawn = []
    for start, run in _runs(values):
        heights = [round(HEIGHT - value / largest * (HEIGHT - 2), 1) for value in run]
        points = [(round(place * step, 1), height) for place, height in enumerate(heights, start)]
        if len(points) == 1:  # a line needs two ends
            points.append((round(min(points[0][0] + step, WIDTH), 1), points[0][1]))
        line = " ".join(f"{x:g},{y:g}" for x, y in points)
        drawn.append(f'<polygon points="{points[0][0]:g},{HEIGHT} {line} {points[-1][0]:g},{HEIGHT}"/>')
        drawn.append(f'<polyline points="{line}"/>')
    return _svg("chart", label, "".join(drawn))


def largest_of(values: Sequence[float]) -> float:
    return max((value for value in values if math.isfinite(value)), default=0.0) or 1.0


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of `stack`: its parts from the bottom up, and what it says when somebody points at it."""

    parts: tuple[float, ...]
    title: str


def stack(bars: Sequence[Bar], label: str) -> Markup:
    """Draw bars side by side, the last one at the right: parts on top of each other, of classes ``p0``, ``p1`` …"""
    largest = max((sum(bar.parts) for bar in bars), default=0.0) or 1.0
    step = WIDTH / max(len(bars), 24)  # a few batches do not become walls
    drawn = []
    for index, bar in enumerate(bars):
        x, top = WIDTH - (len(bars) - index) * step, float(HEIGHT)
        drawn.append(f"<g><title>{escape(bar.title)}</title>")
        for number, part in enumerate(bar.parts):
            height = part / largest * (HEIGHT - 2)
            top -= height
            drawn.append(
                f'<rect class="p{number}" x="{x:.1f}" y="{top:.1f}" width="{step * 0.84:.1f}" height="{height:.1f}"/>'
            )
        drawn.append("</g>")
    return _svg("chart stack", label, "".join(drawn))


def meter(share: float, label: str, kind: str = "") -> Markup:
    """Draw a share from 0 to 1 as a bar; ``kind`` is a class for its colour."""
    width = round(min(max(share, 0.0), 1.0) * 100, 1) if math.isfinite(share) else 0.0
    return Markup(
        '<svg class="meter {}" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="{}">'
        '<rect class="track" width="100" height="6"/><rect class="fill" width="{}" height="6"/></svg>'
    ).format(kind, label, f"{width:g}")


def _runs(values: Sequence[float]) -> Iterator[tuple[int, list[float]]]:
    """Yield the stretches without a gap: where each begins, and its values."""
    run: list[float] = []
    for index, value in enumerate([*values, math.nan]):
        if math.isfinite(value):
            run.append(max(value, 0.0))
        elif run:
            yield index - len(run), run
            run = []


def _svg(kind: str, label: str, drawn: str) -> Markup:
    """Wrap shapes that are made of numbers and escaped text alone."""
    return Markup(
        '<svg class="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>'
    ).format(kind, WIDTH, HEIGHT, label, Markup(drawn))
