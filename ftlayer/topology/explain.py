"""A graph of chains in words: what runs where, how records get from one to the other, where the vertex comes in."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.topology.drawing import to_dot, to_mermaid
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.labels import original_edges, partitioner_name, persisted_name, replay_of, stored_name
from ftlayer.topology.names import display_name
from ftlayer.vertex.calls import StreamOptions

__all__ = ["explain", "to_dot", "to_mermaid"]


def explain(graph: JobGraph) -> str:
    """Return the graph as text of several lines: its chains, its edges and the vertex's part, without a newline
    at the end.
    """
    chains = [vertex for vertex in graph.vertices if replay_of(vertex) is None]
    status = "on" if graph.tracked else "off"
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


def _attempts(options: StreamOptions) -> str:
    return "any number of attempts" if options.max_attempts is None else f"{options.max_attempts} attempts"


def _vertex(graph: JobGraph) -> list[str]:
    """Say of each stream what is stored and where it is replayed."""
    lines: list[str] = []
    replays = {replay.stream: replay for vertex in graph.vertices if (replay := replay_of(vertex))}
    for stream, options in graph.options:
        lines.append(
            f"  stream {stream!r}: {_attempts(options)} of {options.timeout_ms} ms, "
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
    """Set rows of equal length in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
