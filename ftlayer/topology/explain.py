"""A graph of chains in words: what runs where, how records get from one to the other, where the vertex comes in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ftlayer.partitioning.partitioners import Broadcast
from ftlayer.topology.job_graph import (
    JobEdge,
    JobGraph,
    JobVertex,
    display_name,
    emitter_of,
    original_edges,
    partitioner_name,
    persisted_name,
    replay_of,
    rules_of_operator,
    stored_name,
)
from ftlayer.topology.operators import Source

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


def explain(graph: JobGraph) -> str:
    """Return the graph as text of several lines, without a newline at the end.

    It has the chains, the edges, the vertex's part, and in barrier mode what becomes of records that fail by chain.
    """
    chains = [vertex for vertex in graph.vertices if replay_of(vertex) is None]
    status = "on" if graph.tracked else "by checkpoints" if graph.checkpointed else "off"
    slots = f"{graph.slots} slot{'s' * (graph.slots != 1)}"
    replays = {vertex.uid for vertex in graph.vertices if replay_of(vertex) is not None}
    edges = [edge for edge in graph.edges if edge.source not in replays]
    lines = [
        f"topology {graph.name!r}: {len(chains)} chains on {slots}, fault tolerance {status}",
        "",
        "chains",
        *_table([[vertex.uid, f"×{vertex.parallelism}", _operators(vertex)] for vertex in chains]),
        "",
        "edges",
        *_table([[f"#{edge.number}", *_edge(edge)] for edge in edges]),
    ]
    if graph.tracked:
        lines += ["", "vertex", *_vertex(graph)]
    if any(vertex.failures is not None for vertex in chains):
        failing = [[vertex.uid, _failing(graph, vertex)] for vertex in chains if not _is_source(vertex)]
        lines += ["", "records that fail", *_table(failing)]
    return "\n".join(lines)


def _operators(vertex: JobVertex) -> str:
    return " → ".join(
        name if operator.uid == vertex.uid else f"{operator.uid} {name}"
        for operator in vertex.operators
        for name in [display_name(operator)]
    )


def _edge(edge: JobEdge) -> list[str]:
    source = f"{edge.source}[{edge.tag}]" if edge.tag else edge.source
    stored = "" if edge.routing is None else f"key_hash[{edge.routing}]"
    if edge.feedback:
        return [f"{source} ↩ {edge.target}", "feedback", partitioner_name(edge.partitioner), stored]
    return [f"{source} → {edge.target}", f"input {edge.input}", partitioner_name(edge.partitioner), stored]


def _attempts(most: int | None) -> str:
    return "any number of attempts" if most is None else f"{most} attempt{'s' * (most != 1)}"


def _is_source(vertex: JobVertex) -> bool:
    return isinstance(vertex.operators[0], Source)


def _failing(graph: JobGraph, vertex: JobVertex) -> str:
    """Say what becomes of a record that fails in a chain of barrier mode."""
    policy = vertex.failures
    if policy is None:
        broadcast = any(isinstance(edge.partitioner, Broadcast) for edge in graph.edges_into(vertex.uid))
        return "fails the job" + (", since its input is broadcast" if broadcast else "")
    said = _attempts(policy.max_attempts)
    if policy.max_attempts != 1:
        pauses = ", ".join(pause if isinstance(pause, str) else f"{pause} ms" for pause in policy.pauses)
        said += f", {pauses} between them"
    if policy.max_attempts is not None:
        where = ", a record of dead_letters()" if graph.sends_letters(vertex.uid) else ""
        said += f", then a dead letter{where}"
    own = [(f" of {operator.uid}", rules_of_operator(operator).limit) for operator in vertex.operators]
    for of, limit in [("", policy.rules.limit), *own]:
        if limit is not None:
            said += f"; pauses while more than {limit}{of} fail"
    return said + ("; holds the watermark" if policy.hold_watermark else "")


def _vertex(graph: JobGraph) -> list[str]:
    lines: list[str] = []
    replays = {replay.stream: replay for vertex in graph.vertices if (replay := replay_of(vertex))}
    for stream, options in graph.options:
        lines.append(
            f"  stream {stream!r}: {_attempts(options.max_attempts)} of {options.timeout_ms} ms, "
            f"{options.max_pending} records in flight"
        )
        replay = replays.get(stream)
        if replay is None:
            lines.append("    no chain reads it: nothing to replay")
            continue
        twins = graph.edges_from(replay.uid)
        originals = original_edges(graph, replay)
        numbers = ", ".join(f"#{edge.number}" for edge in originals)
        lines.append(
            f"    persists {persisted_name(graph, replay)} of {replay.of!r} before they go by {numbers}"
        )
        columns = {
            edge.routing: stored_name(edge.partitioner) for edge in originals if edge.routing is not None
        }
        for column in sorted(columns):
            lines.append(f"    stores key_hash[{column}] = {columns[column]}")
        lines.append(f"    replays by {replay.uid!r} in slot {graph.slot_of(replay.uid, 0)}:")
        pairs = zip(twins, originals, strict=True)
        rows = [
            [f"#{twin.number}", f"as #{edge.number} to {twin.target}", f"input {twin.input}",
             partitioner_name(twin.partitioner, twin.routing)]
            for twin, edge in pairs
        ]  # fmt: skip
        lines += [f"    {line}" for line in _table(rows)]
    return lines


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
