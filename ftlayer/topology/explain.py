"""A graph of chains in words: what runs where, how records get from one to the other, where the vertex comes in."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.partitioning.partitioners import Broadcast
from ftlayer.topology.drawing import to_dot, to_mermaid
from ftlayer.topology.facts import rules_of_operator
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.labels import original_edges, partitioner_name, persisted_name, replay_of, stored_name
from ftlayer.topology.names import display_name
from ftlayer.topology.operators import Source

__all__ = ["explain", "to_dot", "to_mermaid"]


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
    """Say of each stream what is stored and where it is replayed."""
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
    """Set rows of equal length in columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
