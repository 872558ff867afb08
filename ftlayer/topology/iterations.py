"""Iterations: what makes a circle of operators one that can be run, and what barrier mode asks before it does.

An iteration is a head, where its loop begins, and a tail, from which records go back to it:

    … → head → body … → tail
         ↑_______________|     the feedback edge

The feedback edge is a `Forward` between as many subtasks, so it never leaves a slot. No watermark, no barrier and no
end of a stream travels over it, and no task waits to send on it: all other edges of a circle may hold their
senders up, as they do elsewhere, and still no circle of senders can wait for each other.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.errors import InvalidTopologyError
from ftlayer.partitioning.partitioners import Forward
from ftlayer.topology.graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.operators import IterationHead, IterationTail

logger = logging.getLogger(__name__)

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
