"""Which circuit breakers a topology's streams have: their own, and those of the operators that they feed."""

from __future__ import annotations

from ftlayer.circuit import Limit
from ftlayer.topology.facts import emits_roots, rules_of_operator
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import Source
from ftlayer.vertex.calls import StreamCircuit


def circuits_of(
    graph: JobGraph, vertex: JobVertex, tag: str, of_topology: Limit | None
) -> tuple[StreamCircuit, ...]:
    """Return those of the output ``tag`` of a chain whose last operator emits roots.

    Operators behind one with timers are paused for by the sources before it as well, which do not count there.
    """
    operator = vertex.operators[-1]
    found: list[StreamCircuit] = []
    own = rules_of_operator(operator).limit if isinstance(operator, Source) else None
    if own is not None:
        found.append(StreamCircuit(operator.uid, own))
    elif of_topology is not None:
        found.append(StreamCircuit("", of_topology))
    first = [edge.target for edge in graph.edges_from(vertex.uid) if edge.tag == tag]
    counted = _reached(graph, first, through_roots=False)
    for uid in _reached(graph, first, through_roots=True):
        for each in graph.vertex(uid).operators:
            limit = rules_of_operator(each).limit
            if limit is not None:
                found.append(StreamCircuit(each.uid, limit, uid in counted))
    return tuple(found)


def _reached(graph: JobGraph, first: list[str], *, through_roots: bool) -> dict[str, None]:
    """Return the chains that are reached from ``first``, these included; of those that emit roots on demand."""
    found: dict[str, None] = {}
    left = list(first)
    while left:
        uid = left.pop()
        if uid in found:
            continue
        found[uid] = None
        if through_roots or not emits_roots(graph.vertex(uid).operators[-1]):
            left += [edge.target for edge in graph.edges_from(uid)]
    return found
