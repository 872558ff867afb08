"""From the graph that a user built to the one that runs: operators are chained, and the vertex is wired in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ftlayer.checkpoint.failure_policy import FailurePolicy
from ftlayer.circuit import Limit
from ftlayer.config import FTStatus
from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import MAIN
from ftlayer.partitioning.partitioners import Forward
from ftlayer.topology.barrier_builder import BarrierBuilder
from ftlayer.topology.checks import check_graph, check_writers
from ftlayer.topology.facts import (
    has_timers,
    inputs_of,
    rate_limit_of,
    side_outputs_of,
)
from ftlayer.topology.failing import (
    NO_POLICIES,
    Policies,
    check_letters,
    check_no_policies,
    check_rules,
    policies_of,
)
from ftlayer.topology.ft_builder import FTLayerBuilder, NopFTLayerBuilder, OpFTLayerBuilder
from ftlayer.topology.graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import IterationHead, IterationTail, Operator, Sink, Source
from ftlayer.vertex.calls import StreamOptions


def job_graph(
    graph: StreamGraph,
    status: FTStatus = FTStatus.ON,
    retry: StreamOptions | None = None,
    *,
    rules: RetryRules = NO_RULES,
    limit: Limit | None = None,
    max_parallelism: int = 0,
    failures: FailurePolicy | None = None,
) -> JobGraph:
    """Translate a graph. ``retry`` are the options of sources that have none of their own.

    ``rules`` are the topology's, on which failures are worth a retry, and ``limit`` how many open its circuit breaker.
    ``max_parallelism`` above 0 is the number of key groups in barrier mode, and ``failures`` what becomes there of
    records that fail. Raises what `check_graph`, `with_rules`, `policies_of`, `check_rules`, `check_letters`,
    `check_no_policies`, `check_writers` and the ``wire`` of the builders raise.
    """
    if max_parallelism:
        policies = policies_of(graph, failures)
        check_rules(graph, policies)
        check_letters(graph, policies)
        rules_by_uid = {uid: policy.rules for uid, policy in policies.items() if policy is not None}
        return generate(with_rules(graph, rules_by_uid), BarrierBuilder(max_parallelism), policies)
    check_no_policies(graph)
    check_writers(graph)
    if status is FTStatus.OFF:
        return generate(graph, NopFTLayerBuilder())
    return generate(
        with_rules(graph, {node.uid: rules for node in graph.nodes}),
        OpFTLayerBuilder(retry or StreamOptions(), limit),
    )


def generate(graph: StreamGraph, ft_builder: FTLayerBuilder, policies: Policies = NO_POLICIES) -> JobGraph:
    """Check the graph, chain what can be chained, and have ``ft_builder`` wire the vertex in."""
    check_graph(graph, tracked=ft_builder.tracked)
    chain_of = _chains(graph, policies, tracked=ft_builder.tracked)
    members: dict[str, list[Operator]] = {}
    for node in graph.in_order:
        members.setdefault(chain_of[node.uid], []).append(node.operator)
    vertices = tuple(
        JobVertex(uid, tuple(operators), graph.node(uid).parallelism, policies.get(uid))
        for uid, operators in members.items()
    )
    between = [edge for edge in graph.edges if chain_of[edge.source] != chain_of[edge.target]]
    edges = tuple(_job_edge(graph, edge, number, chain_of) for number, edge in enumerate(between))
    own = {node.uid: node.retry for node in graph.nodes if node.retry is not None}
    return ft_builder.wire(JobGraph(graph.name, vertices, edges, tracked=False), own)


def _job_edge(graph: StreamGraph, edge: StreamEdge, number: int, chain_of: Mapping[str, str]) -> JobEdge:
    return JobEdge(
        number,
        chain_of[edge.source],
        chain_of[edge.target],
        edge.input,
        graph.partitioner_of(edge),
        graph.schema_of(edge),
        edge.tag,
        feedback=edge.feedback,
    )


def _chains(graph: StreamGraph, policies: Policies, *, tracked: bool) -> dict[str, str]:
    """Return for each operator the uid of its chain, which is that of the chain's first."""
    chain_of: dict[str, str] = {}
    for node in graph.in_order:
        before = _chained_to(graph, node.uid, policies, tracked=tracked)
        chain_of[node.uid] = node.uid if before is None else chain_of[before]
    return chain_of


def _chained_to(graph: StreamGraph, uid: str, policies: Policies, *, tracked: bool) -> str | None:
    """Return the uid of the operator that this one gets its records from within its subtask, None if from channels."""
    edges = graph.edges_into(uid)
    if len(edges) != 1 or inputs_of(graph.node(uid).operator) != 1:
        return None
    # The slot limits what a task takes from its channels.
    if rate_limit_of(graph.node(uid).operator) is not None:
        return None
    (edge,) = edges
    before = graph.node(edge.source).operator
    if (
        edge.tag != MAIN
        or not isinstance(graph.partitioner_of(edge), Forward)
        or len(graph.edges_from(edge.source)) != 1
        # Side outputs leave from the end of a chain.
        or side_outputs_of(before)
        # A source is a task of its own kind: it has a reader beside it, and no functions.
        or isinstance(before, Source)
        # Roots are persisted on their way from one chain to the next.
        or (tracked and has_timers(before))
        # A chain takes a record whole or not at all, and has one policy for those that it does not take.
        or policies.get(uid) != policies.get(edge.source)
        # A sink takes rows in batches of its own, of which some may fail when those before it are done.
        or (policies.get(uid) is not None and isinstance(graph.node(uid).operator, Sink))
    ):
        return None
    return edge.source


def with_rules(graph: StreamGraph, wider: Mapping[str, RetryRules]) -> StreamGraph:
    """Return the graph whose operators have all the rules that apply to them, the narrowest first.

    ``wider`` has by uid what applies behind an operator's own and its sources' rules. Those that it does not name stay.

    Raises `InvalidTopologyError` for an operator whose sources say different things, and that says nothing itself.
    """
    nodes = tuple(
        _with_rules(graph, node, wider[node.uid]) if node.uid in wider else node for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _with_rules(graph: StreamGraph, node: StreamNode, wider: RetryRules) -> StreamNode:
    operator = node.operator
    if isinstance(operator, IterationHead | IterationTail):
        return node
    own = operator.rules
    if isinstance(operator, Source):
        return replace(node, operator=replace(operator, rules=own.within(wider)))
    sources = [
        (other.uid, other.operator.rules)
        for other in graph.nodes
        if isinstance(other.operator, Source) and node.uid in graph.behind(other.uid)
    ]
    found = sources[0][1] if sources else RetryRules()
    for uid, rules in sources:
        if rules.levels != found.levels and not any(level.retry_on is not None for level in own.levels):
            raise InvalidTopologyError(
                f"{node.uid!r} has records of {sources[0][0]!r} and of {uid!r}, whose retry_on or dead_on differ: give "
                "both sources the same, or the operator a retry_on of its own"
            )
    return replace(node, operator=replace(operator, rules=own.within(found).within(wider)))
