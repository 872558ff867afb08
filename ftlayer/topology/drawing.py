"""A graph of chains as a picture: Mermaid for pages that render it, DOT for Graphviz."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.labels import emitter_of, partitioner_name, persisted_name, replay_of
from ftlayer.topology.names import display_name

VERTEX = "FTLayer vertex"


@dataclass(frozen=True)
class _Arrow:
    """``dotted``: to or from the vertex, or back to the head of an iteration (``back``)."""

    source: str
    target: str
    label: str
    dotted: bool
    back: bool = False


def to_mermaid(graph: JobGraph) -> str:
    """Return a Mermaid flowchart: a box a chain, an arrow an edge.

    Dotted ones lead to and from the vertex, and from the end of an iteration back to its head.
    """
    names = _node_names(graph)
    lines = ["flowchart LR"]
    for vertex in _chains(graph):
        text = "<br/>".join(_mermaid_text(line) for line in _box(vertex))
        lines.append(f'    {names[vertex.uid]}["{text}"]')
    if graph.tracked:
        lines.append(f'    ft[("{VERTEX}")]')
    for arrow in _arrows(graph, names):
        line = "-.->" if arrow.dotted else "-->"
        lines.append(f'    {arrow.source} {line}|"{_mermaid_text(arrow.label)}"| {arrow.target}')
    return "\n".join(lines)


def to_dot(graph: JobGraph) -> str:
    """Return the same picture in Graphviz's DOT."""
    names = _node_names(graph)
    lines = [f'digraph "{_dot_text(graph.name)}" {{', "    rankdir=LR;", "    node [shape=box];"]
    for vertex in _chains(graph):
        text = "\\n".join(_dot_text(line) for line in _box(vertex))
        lines.append(f'    {names[vertex.uid]} [label="{text}"];')
    if graph.tracked:
        lines.append(f'    ft [label="{VERTEX}", shape=cylinder];')
    for arrow in _arrows(graph, names):
        # An edge that leads back puts nothing to the right of where it comes from.
        style = (", style=dashed" if arrow.dotted else "") + (", constraint=false" if arrow.back else "")
        lines.append(f'    {arrow.source} -> {arrow.target} [label="{_dot_text(arrow.label)}"{style}];')
    return "\n".join([*lines, "}"])


def _chains(graph: JobGraph) -> list[JobVertex]:
    return [vertex for vertex in graph.vertices if replay_of(vertex) is None]


def _node_names(graph: JobGraph) -> dict[str, str]:
    """Name the boxes by number: a uid may be a word of the language, or have letters that it does not know."""
    return {vertex.uid: f"c{number}" for number, vertex in enumerate(_chains(graph))}


def _box(vertex: JobVertex) -> list[str]:
    return [
        f"{vertex.uid} ×{vertex.parallelism}",
        *(display_name(operator) for operator in vertex.operators),
    ]


def _arrows(graph: JobGraph, names: dict[str, str]) -> Iterator[_Arrow]:
    for edge in graph.edges:
        if edge.source in names:
            yield _Arrow(names[edge.source], names[edge.target], _label(edge), edge.feedback, edge.feedback)
    for vertex in graph.vertices:
        replay = replay_of(vertex)
        if replay is None:
            continue
        tag = f"[{replay.tag}] " if replay.tag else ""
        label = f"{tag}persist {persisted_name(graph, replay)}"
        yield _Arrow(names[emitter_of(graph, replay).uid], "ft", label, dotted=True)
        for edge in graph.edges_from(vertex.uid):
            label = f"replay {replay.of}: {_label(edge)}"
            yield _Arrow("ft", names[edge.target], label, dotted=True)


def _label(edge: JobEdge) -> str:
    if edge.feedback:
        return "feedback"
    tag = f"[{edge.tag}] " if edge.tag else ""
    which = f", input {edge.input}" if edge.input else ""
    return f"{tag}{partitioner_name(edge.partitioner, edge.routing)}{which}"


def _mermaid_text(text: str) -> str:
    """Write what Mermaid would read as markup as the entities it knows."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
