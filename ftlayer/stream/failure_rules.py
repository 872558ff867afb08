"""Which rules of retries apply where in a graph: an operator's own, then those of its sources, then the topology's."""

from __future__ import annotations

from dataclasses import replace

from ftlayer.errors import InvalidTopologyError, UnsupportedError
from ftlayer.functions.retry_rules import RetryRules
from ftlayer.stream.facts import rules_of_operator
from ftlayer.stream.graph import StreamGraph, StreamNode
from ftlayer.stream.operators import IterationHead, IterationTail, Source


def with_rules(graph: StreamGraph, of_topology: RetryRules) -> StreamGraph:
    """Return the graph whose operators have all the rules that apply to them, the narrowest first.

    Raises `InvalidTopologyError` for an operator whose sources say different things, and that says nothing itself.
    """
    nodes = tuple(_with_rules(graph, node, of_topology) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def check_no_rules(graph: StreamGraph) -> None:
    """Raise `UnsupportedError` where an operator has rules of retries: with checkpoints no record is retried."""
    for node in graph.nodes:
        if rules_of_operator(node.operator).levels:
            raise UnsupportedError(
                f"{node.uid!r}: retry_on and dead_on say what becomes of single records that fail, and with "
                "checkpointing=… a record that fails ends its slot; leave them out, or run the topology with layer=…"
            )


def _with_rules(graph: StreamGraph, node: StreamNode, of_topology: RetryRules) -> StreamNode:
    operator = node.operator
    if isinstance(operator, IterationHead | IterationTail):
        return node
    own = operator.rules
    if isinstance(operator, Source):
        return replace(node, operator=replace(operator, rules=own.within(of_topology)))
    sources = [
        (other.uid, other.operator.rules)
        for other in graph.nodes
        if isinstance(other.operator, Source) and node.uid in graph.behind(other.uid)
    ]
    found = sources[0][1] if sources else RetryRules()
    for uid, rules in sources:
        if rules != found and not any(level.retry_on is not None for level in own.levels):
            raise InvalidTopologyError(
                f"{node.uid!r} has records of {sources[0][0]!r} and of {uid!r}, whose retry_on or dead_on differ: give "
                "both sources the same, or the operator a retry_on of its own"
            )
    return replace(node, operator=replace(operator, rules=own.within(found).within(of_topology)))
