"""The graph of a topology as SVG: a box a chain, with how it fares, and what waits on the edges."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from ftlayer.console import formats
from ftlayer.console.layout import Box, Curve, LayoutEdge, Route, lay_out

_PADDING = 12.0
_NAME_LENGTH = 25
_LINE_LENGTH = 34
_SHRINKS_UP_TO = 1_800.0
"""A graph of up to this width is drawn smaller where the window is; a wider one is scrolled."""

_BUSY_WIDTH = 62.0
_HELD_WIDTH = 128.0


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
    right = box.x + box.width - _PADDING
    left = box.x + _PADDING
    subtasks = f"×{node.parallelism}"
    parts = [
        Markup('<g class="{}"><title>{}</title>').format(kind, " → ".join(node.names) or node.uid),
        Markup('<rect class="box" x="{}" y="{}" width="{}" height="{}" rx="6"/>').format(
            f"{box.x:g}", f"{box.y:g}", f"{box.width:g}", f"{box.height:g}"
        ),
        _text(left, box.y + 22, _cut(node.uid, _NAME_LENGTH), "name"),
        _text(right, box.y + 22, subtasks, "dim end"),
        _text(left, box.y + 39, _cut(node.about, _LINE_LENGTH), "dim"),
        _text(left, box.y + 59, _rates(node), "rates"),
        _share(left, box.y + 72, _BUSY_WIDTH, "busy", node.busy),
        _share(right - _HELD_WIDTH, box.y + 72, _HELD_WIDTH, "held", node.back_pressured),
        Markup("</g>"),
    ]
    return Markup("").join(parts)


def _rates(node: GraphNode) -> str:
    sides = [
        f"{word} {formats.rate(value)}"
        for word, value in (("in", node.in_per_s), ("out", node.out_per_s))
        if value is not None
    ]
    return " · ".join(sides)


def _share(x: float, y: float, most: float, kind: str, value: float | None) -> Markup:
    if value is None:
        return Markup("")
    words = "busy" if kind == "busy" else "back-pressured"
    level = " high" if value >= 0.8 else ""
    width = most * min(max(value, 0.0), 1.0)
    return Markup(
        '<g class="{}{}"><rect class="track" x="{}" y="{}" width="{}" height="3" rx="1.5"/>'
        '<rect class="fill" x="{}" y="{}" width="{:.1f}" height="3" rx="1.5"/>{}</g>'
    ).format(
        kind,
        level,
        f"{x:g}",
        f"{y:g}",
        f"{most:g}",
        f"{x:g}",
        f"{y:g}",
        width,
        _text(x, y + 15, f"{words} {formats.share(value)}", "dim small"),
    )


def _edge(edge: GraphEdge, route: Route) -> Markup:
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
    steps = [f"M{_point(curves[0].start)}"]
    for curve in curves:
        if curve.first == curve.start:
            steps.append(f"L{_point(curve.end)}")
        else:
            steps.append(f"C{_point(curve.first)} {_point(curve.second)} {_point(curve.end)}")
    return "".join(steps)


def _point(point: tuple[float, float]) -> str:
    return f"{point[0]:g} {point[1]:g}"


def _text(x: float, y: float, text: str, kind: str) -> Markup:
    return Markup('<text class="{}" x="{}" y="{}">{}</text>').format(kind, f"{x:g}", f"{y:g}", escape(text))


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
