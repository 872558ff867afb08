"""A graph of chains in words: what runs where, how records get from one to the other, where the vertex comes in."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.common.checks import duration_ms
from ftlayer.errors import InvalidTopologyError
from ftlayer.records.partitioning import Broadcast, Forward
from ftlayer.topology import job_graph
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.operators import IterationHead, IterationTail, Source

logger = logging.getLogger(__name__)


# Iterations: what makes a circle of operators one that can be run, and what barrier mode asks before it does.
#
# An iteration is a head, where its loop begins, and a tail, from which records go back to it:
#
#     … → head → body … → tail
#          ↑_______________|     the feedback edge
#
# The feedback edge is a `Forward` between as many subtasks, so it never leaves a slot. No watermark, no barrier and no
# end of a stream travels over it, and no task waits to send on it: all other edges of a circle may hold their
# senders up, as they do elsewhere, and still no circle of senders can wait for each other.


TAIL = ".tail"
"""Behind the head's uid this is the tail's."""

WHAT_IS_LOST = (
    "records on their way back to the head are in no checkpoint: a restore, and a stop with a savepoint, loses those "
    "that were on the feedback edge when the barrier passed, with all that would have come of them"
)


def circle_error(uids: Iterable[str], *, tracked: bool) -> InvalidTopologyError:
    names = _circle(uids)
    if tracked:
        return InvalidTopologyError(
            f"iteration {names}: with fault tolerance on there are no circles, since a record could go round without "
            "end and its root never be complete; repeat inside one function, or write to an external queue and read it"
        )
    return InvalidTopologyError(
        f"{names}: these operators feed each other without an iteration; begin one with iterate() and end it with "
        "close_with(…)"
    )


def check_iterations(graph: StreamGraph, *, tracked: bool) -> None:
    """Raise `InvalidTopologyError` for circles that cannot be run, naming their operators.

    Those are all of them with ``tracked``, those without a head, heads that are not closed exactly once, and feedback
    edges that do not lead from the tail of an iteration's own body to its head.
    """
    heads = [node for node in graph.nodes if isinstance(node.operator, IterationHead)]
    if tracked and heads:
        raise circle_error(body_of(graph, heads[0].uid) or (heads[0].uid,), tracked=True)
    circle = graph.circle()
    if circle:
        raise circle_error(circle, tracked=tracked)
    for head in heads:
        closed = [edge for edge in graph.edges_into(head.uid) if edge.feedback]
        if not closed:
            raise InvalidTopologyError(
                f"iteration {head.uid!r} is never closed: call close_with(…) with what is to come back to it, or leave "
                "iterate() out"
            )
        if len(closed) > 1:
            raise closed_twice(head.uid, [edge.source for edge in closed])
    for edge in graph.edges:
        if edge.feedback:
            _check_feedback(graph, edge)


def closed_twice(head: str, by: Iterable[str]) -> InvalidTopologyError:
    return InvalidTopologyError(
        f"iteration {head!r} is closed twice, by {' and by '.join(map(repr, by))}: close it once, with the union of "
        "what is to come back"
    )


def body_of(graph: StreamGraph, head: str) -> tuple[str, ...]:
    """Return the uids of the operators between an iteration's head and its tail, in their order; () for an open one."""
    return tuple(
        node.uid
        for node in graph.in_order
        if not isinstance(node.operator, IterationTail)
        and node.uid != head
        and node.uid in graph.behind(head)
        and head in graph.behind(node.uid)
    )


def check_forced(graph: StreamGraph, config: CheckpointConfig) -> None:
    """Raise `InvalidTopologyError` for iterations that ``config`` does not say it will have all the same."""
    heads = [node for node in graph.nodes if isinstance(node.operator, IterationHead)]
    if not heads:
        return
    names = _described(graph, heads)
    if not config.force_iterations:
        raise InvalidTopologyError(
            f"{names}: checkpoints of a topology with iterations are not exact, since {WHAT_IS_LOST}. Leave the "
            "iteration out (repeat inside one function, or write to an external queue and read it), or accept the "
            "loss with force_iterations=True of CheckpointConfig"
        )
    if config.unaligned and not config.force_unaligned:
        raise InvalidTopologyError(
            f"{names}: an unaligned checkpoint holds the records that its barriers overtake on all edges but the one "
            f"that leads back: {WHAT_IS_LOST}. Set unaligned=False, or accept the loss with force_unaligned=True of "
            "CheckpointConfig, beside force_iterations=True"
        )


def warn_of_losses(graph: StreamGraph) -> None:
    """Log a warning of what checkpoints of a graph with iterations do not hold; nothing for one without."""
    heads = [node for node in graph.nodes if isinstance(node.operator, IterationHead)]
    if heads:
        logger.warning(
            "topology %r: %s with checkpoints, as force_iterations says: %s",
            graph.name,
            _described(graph, heads),
            WHAT_IS_LOST,
        )


def _described(graph: StreamGraph, heads: Iterable[StreamNode]) -> str:
    return ", ".join(f"iteration {head.uid!r} ({_circle(body_of(graph, head.uid))})" for head in heads)


def _check_feedback(graph: StreamGraph, edge: StreamEdge) -> None:
    tail, head = graph.node(edge.source), graph.node(edge.target)
    what = f"the feedback edge from {edge.source!r} to {edge.target!r}"
    if not isinstance(head.operator, IterationHead) or not isinstance(tail.operator, IterationTail):
        raise InvalidTopologyError(f"{what} does not lead from the tail of an iteration to a head")
    if not isinstance(graph.partitioner_of(edge), Forward) or head.parallelism != tail.parallelism:
        raise InvalidTopologyError(
            f"{what} leaves the slot: it has to be forward(), and there are {tail.parallelism} and "
            f"{head.parallelism} subtasks"
        )
    if len(graph.edges_from(tail.uid)) != 1:
        raise InvalidTopologyError(f"{what} has others beside it, which could hold {edge.source!r} up")
    if not body_of(graph, head.uid):
        raise InvalidTopologyError(f"{what} does not come from the iteration behind {edge.target!r}")


def _circle(uids: Iterable[str]) -> str:
    names = list(uids)
    return " → ".join([*names, names[0]]) if names else "no operators"


VERTEX = "FTLayer vertex"


@dataclass(frozen=True)
class _Arrow:
    """``dotted``: to or from the vertex, or back to the head of an iteration (``back``)."""

    source: str
    target: str
    label: str
    dotted: bool
    back: bool = False


def to_mermaid(graph: job_graph.JobGraph) -> str:
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


def to_dot(graph: job_graph.JobGraph) -> str:
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


def _chains(graph: job_graph.JobGraph) -> list[job_graph.JobVertex]:
    return [vertex for vertex in graph.vertices if job_graph.replay_of(vertex) is None]


def _node_names(graph: job_graph.JobGraph) -> dict[str, str]:
    """Name the boxes by number: a uid may be a word of the language, or have letters that it does not know."""
    return {vertex.uid: f"c{number}" for number, vertex in enumerate(_chains(graph))}


def _box(vertex: job_graph.JobVertex) -> list[str]:
    return [f"{vertex.uid} ×{vertex.parallelism}", *map(job_graph.display_name, vertex.operators)]


def _arrows(graph: job_graph.JobGraph, names: dict[str, str]) -> Iterator[_Arrow]:
    for edge in graph.edges:
        if edge.source in names:
            yield _Arrow(names[edge.source], names[edge.target], _label(edge), edge.feedback, edge.feedback)
    for vertex in graph.vertices:
        replay = job_graph.replay_of(vertex)
        if replay is None:
            continue
        tag = f"[{replay.tag}] " if replay.tag else ""
        label = f"{tag}persist {job_graph.persisted_name(graph, replay)}"
        yield _Arrow(names[job_graph.emitter_of(graph, replay).uid], "ft", label, dotted=True)
        for edge in graph.edges_from(vertex.uid):
            label = f"replay {replay.of}: {_label(edge)}"
            yield _Arrow("ft", names[edge.target], label, dotted=True)


def _label(edge: job_graph.JobEdge) -> str:
    if edge.feedback:
        return "feedback"
    tag = f"[{edge.tag}] " if edge.tag else ""
    which = f", input {edge.input}" if edge.input else ""
    return f"{tag}{job_graph.partitioner_name(edge.partitioner, edge.routing)}{which}"


def _mermaid_text(text: str) -> str:
    """Write what Mermaid would read as markup as the entities it knows."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def _dot_text(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def explain(graph: job_graph.JobGraph) -> str:
    """Return the graph as text of several lines, without a newline at the end.

    It has the chains, the edges, the vertex's part, and in barrier mode what becomes of records that fail by chain.
    """
    chains = _chains(graph)
    status = "on" if graph.tracked else "by checkpoints" if graph.checkpointed else "off"
    slots = f"{graph.slots} slot{'s' * (graph.slots != 1)}"
    edges = [edge for edge in graph.edges if edge.source not in graph.replays]
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
        others = [vertex for vertex in chains if not isinstance(vertex.operators[0], Source)]
        failing = [[vertex.uid, _failing(graph, vertex)] for vertex in others]
        lines += ["", "records that fail", *_table(failing)]
    return "\n".join(lines)


def _operators(vertex: job_graph.JobVertex) -> str:
    return " → ".join(
        name if operator.uid == vertex.uid else f"{operator.uid} {name}"
        for operator in vertex.operators
        for name in [job_graph.display_name(operator)]
    )


def _edge(edge: job_graph.JobEdge) -> list[str]:
    source = f"{edge.source}[{edge.tag}]" if edge.tag else edge.source
    stored = "" if edge.routing is None else f"key_hash[{edge.routing}]"
    if edge.feedback:
        return [f"{source} ↩ {edge.target}", "feedback", job_graph.partitioner_name(edge.partitioner), stored]
    way = job_graph.partitioner_name(edge.partitioner)
    return [f"{source} → {edge.target}", f"input {edge.input}", way, stored]


def _attempts(most: int | None) -> str:
    return "any number of attempts" if most is None else f"{most} attempt{'s' * (most != 1)}"


def _failing(graph: job_graph.JobGraph, vertex: job_graph.JobVertex) -> str:
    policy = vertex.failures
    if policy is None:
        broadcast = any(isinstance(edge.partitioner, Broadcast) for edge in graph.edges_into(vertex.uid))
        return "fails the job" + (", since its input is broadcast" if broadcast else "")
    said = _attempts(policy.max_attempts)
    if policy.max_attempts != 1:
        pauses = [
            pause if isinstance(pause, str) else f"{duration_ms(pause, 'backoff') / 1_000:g}s"
            for pause in policy.pauses
        ]
        said += f", {', '.join(pauses)} between them"
    if policy.max_attempts is not None:
        where = ", a record of dead_letters()" if graph.sends_letters(vertex.uid) else ""
        said += f", then a dead letter{where}"
    own = [(f" of {each.uid}", job_graph.rules_of_operator(each).limit) for each in vertex.operators]
    for of, limit in [("", policy.rules.limit), *own]:
        if limit is not None:
            said += f"; pauses while more than {limit}{of} fail"
    return said + ("; holds the watermark" if policy.hold_watermark else "")


def _vertex(graph: job_graph.JobGraph) -> list[str]:
    lines: list[str] = []
    replays = {replay.stream: replay for vertex in graph.vertices if (replay := job_graph.replay_of(vertex))}
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
        originals = job_graph.original_edges(graph, replay)
        numbers = ", ".join(f"#{edge.number}" for edge in originals)
        lines.append(
            f"    persists {job_graph.persisted_name(graph, replay)} of {replay.of!r} before they go by {numbers}"
        )
        routed = [(edge.routing, edge.partitioner) for edge in originals if edge.routing is not None]
        columns = {column: job_graph.stored_name(partitioner) for column, partitioner in routed}
        lines += [f"    stores key_hash[{column}] = {columns[column]}" for column in sorted(columns)]
        lines.append(f"    replays by {replay.uid!r} in slot {graph.slot_of(replay.uid, 0)}:")
        pairs = zip(twins, originals, strict=True)
        rows = [
            [f"#{twin.number}", f"as #{edge.number} to {twin.target}", f"input {twin.input}",
             job_graph.partitioner_name(twin.partitioner, twin.routing)]
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
