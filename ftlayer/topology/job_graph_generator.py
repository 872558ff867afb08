"""From the graph that a user built to the one that runs: operators are chained, and the vertex is wired in."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar, Protocol, TypeAlias, cast

from ftlayer.checkpoint.options import FailurePolicy
from ftlayer.common.rules.circuit import Limit
from ftlayer.config import FTStatus
from ftlayer.errors import InvalidTopologyError, UnsupportedError
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import MAIN
from ftlayer.records import partitioning
from ftlayer.topology.checks import check_graph, check_writers
from ftlayer.topology.job_graph import (
    LETTERS,
    JobEdge,
    JobGraph,
    JobVertex,
    StreamGraph,
    StreamNode,
    emits_roots,
    has_timers,
    inputs_of,
    outputs_of,
    rate_limit_of,
    rules_of_operator,
    side_outputs_of,
)
from ftlayer.topology.operators import (
    CoProcess,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    PushSource,
    Replay,
    Sink,
    Source,
)
from ftlayer.vertex.calls import StreamCircuit, StreamOptions

_OWN = ("function", "lower_ms", "upper_ms")
JOIN_KEEPS = tuple(field.name for field in fields(Join) if field.name not in _OWN)
"""What a join is told that is not its function's; `CoProcess` has all of it."""


@dataclass(frozen=True)
class BarrierBuilder:
    """`FTLayerBuilder` of graphs with checkpoints; ``max_parallelism`` is the number of key groups."""

    max_parallelism: int
    tracked: ClassVar[bool] = False

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        for vertex in graph.vertices:
            source = vertex.operators[0]
            if isinstance(source, Source) and isinstance(source.connector, PushSource):
                raise InvalidTopologyError(
                    f"source {source.uid!r}: what was pushed cannot be had again, so there is nothing to restore it "
                    "from; put the records into an ingest of an FTLayer, and let the topology read "
                    "layer.ingest(…).reader(name)"
                )
            if vertex.parallelism > self.max_parallelism:
                raise InvalidTopologyError(
                    f"{vertex.uid!r} has parallelism {vertex.parallelism}, and there are {self.max_parallelism} key "
                    "groups; raise max_parallelism of CheckpointConfig (before the first checkpoint: it stays)"
                )
        return replace(
            graph,
            vertices=tuple(map(_without_joins, graph.vertices)),
            edges=tuple(self._by_group(edge) for edge in graph.edges),
            max_parallelism=self.max_parallelism,
        )

    def _by_group(self, edge: JobEdge) -> JobEdge:
        if not isinstance(edge.partitioner, partitioning.HashByKey):
            return edge
        return replace(
            edge, partitioner=partitioning.HashByKeyGroup(edge.partitioner.selector, self.max_parallelism)
        )


def _without_joins(vertex: JobVertex) -> JobVertex:
    operators = tuple(as_co_process(each) if isinstance(each, Join) else each for each in vertex.operators)
    return replace(vertex, operators=operators)


def as_co_process(join: Join) -> CoProcess:
    """Return an operator that does what `Join` does, under the same uid, with its records in keyed state."""
    from ftlayer.functions.windows import IntervalJoin

    function = IntervalJoin(join.function, join.lower_ms, join.upper_ms, join.schema, join.inputs)
    kept = {name: getattr(join, name) for name in JOIN_KEEPS}
    return CoProcess(function=function, **kept)


Policies: TypeAlias = Mapping[str, FailurePolicy | None]
"""By operator's uid; None: a record that fails there fails the job."""

NO_POLICIES: Policies = {}


def policies_of(graph: StreamGraph, of_job: FailurePolicy | None, *, keeps_letters: bool = True) -> Policies:
    """Return each operator's policy: its own, else the job's.

    An operator whose input is broadcast has none of the job: where one of its subtasks took a record that another one
    could not take, they would no longer have the same state. Raises `InvalidTopologyError` if it has one of its own.
    A source, whose rows are letters if they do not fit its schema, has none of the job either where nothing
    ``keeps_letters``, and they are no records.
    """
    found = {node.uid: _policy_of(graph, node, of_job) for node in graph.nodes}
    sent = {edge.source for edge in graph.edges if edge.tag == LETTERS}
    for node in graph.nodes:
        if isinstance(node.operator, Source) and node.on_failure is None and node.uid not in sent:
            found[node.uid] = of_job if keeps_letters else None
    for node in graph.nodes:
        if isinstance(node.operator, IterationTail):
            # It only passes on, and stays in the chain that it ends.
            found[node.uid] = found[graph.edges_into(node.uid)[0].source]
    return found


def _policy_of(graph: StreamGraph, node: StreamNode, of_job: FailurePolicy | None) -> FailurePolicy | None:
    own = node.on_failure if isinstance(node.on_failure, FailurePolicy) else None
    copies = [
        edge.source
        for edge in graph.edges_into(node.uid)
        if isinstance(graph.partitioner_of(edge), partitioning.Broadcast)
    ]
    if copies:
        if own is not None:
            raise InvalidTopologyError(
                f"{node.uid!r}: on_failure: every subtask gets what {copies[0]!r} broadcasts, and one that set a "
                "record aside would not have the others' state: say on_failure('fail'), or catch the error in its "
                "function"
            )
        return None
    return of_job if node.on_failure is None else own


def check_letters(graph: StreamGraph, policies: Policies) -> None:
    for edge in graph.edges:
        if edge.tag == LETTERS and policies[edge.source] is None:
            raise InvalidTopologyError(
                f"{edge.source!r}: dead_letters: a record that fails there fails the job: give "
                "CheckpointConfig(failures=FailurePolicy(…)), or on_failure(FailurePolicy(…)); what is broadcast to "
                "has none"
            )


def check_no_policies(graph: StreamGraph) -> None:
    """Raise `UnsupportedError` where an operator of a graph without checkpoints has a policy, or puts letters out."""
    for edge in graph.edges:
        if edge.tag == LETTERS:
            raise UnsupportedError(
                f"{edge.source!r}: dead_letters: there are some where records are tracked (layer=FTLayer…), and in "
                "barrier mode with a FailurePolicy (checkpointing=CheckpointConfig(…))"
            )
    for node in graph.nodes:
        if node.on_failure is not None:
            raise UnsupportedError(
                f"{node.uid!r}: on_failure is an option of barrier mode (checkpointing=CheckpointConfig(…)): leave it "
                "out; with layer=… records are tried again as FTLayer, retry=… of a source, retry_on and dead_on say"
            )


def check_rules(graph: StreamGraph, policies: Policies) -> None:
    """Raise `UnsupportedError` for rules on single records that fail where such a record fails the job."""
    for node in graph.nodes:
        rules = rules_of_operator(node.operator)
        if isinstance(node.operator, Source):
            if node.retry is not None or node.operator.replay != "store":
                option = "retry" if node.retry is not None else "replay"
                raise UnsupportedError(
                    f"{node.uid!r}: {option} of a source is for acker mode; with checkpointing=… rows are read again "
                    "from the last checkpoint, and FailurePolicy says how records are tried again: leave it out"
                )
            if rules.limit is not None:
                raise UnsupportedError(
                    f"{node.uid!r}: max_failing of a source is for acker mode; with checkpointing=… it is an option of "
                    "FailurePolicy, and of operators that have one"
                )
            if any(policies[uid] is not None for uid in graph.behind(node.uid)):
                continue
        elif policies[node.uid] is not None:
            continue
        if rules.limit is not None or rules.levels:
            option = "max_failing is" if rules.limit is not None else "retry_on and dead_on are"
            raise UnsupportedError(
                f"{node.uid!r}: {option} about single records that fail, and here one that fails fails the job: say "
                "what becomes of it by CheckpointConfig(failures=FailurePolicy(…)) or on_failure(FailurePolicy(…)), or "
                "leave the option out"
            )


MAX_ROUTING_COLUMNS = 32
"""At most this many numbers are stored with a record for the edges that it is replayed by."""


class FTLayerBuilder(Protocol):
    """Wires the vertex into a graph of chains."""

    @property
    def tracked(self) -> bool:
        """Whether records will be tracked, which decides what may be chained."""

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        """Return the graph with the vertex in it. ``retry`` has by uid the options of sources with their own."""


class NopFTLayerBuilder:
    tracked = False

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        return graph


@dataclass(frozen=True)
class OpFTLayerBuilder:
    """Makes the vertex the first output of every source and the first input of every task behind one.

    Each output of an operator that emits roots (a source, or one with timers) is a stream of the vertex. A `Replay`
    stands for the stream as an input: for every edge of the output it has one with the same target and input, whose
    partitioner is the replay twin. What the twins need of a record is stored with it, one column of its ``key_hash``
    for each distinct rule: edges that go by the same key, or forward, share one.

    Attributes:
        retry: options of streams that have none of their own.
        limit: how many records may fail, of sources and in operators that have no limit of their own.
    """

    retry: StreamOptions = field(default_factory=StreamOptions)
    limit: Limit | None = None
    tracked: ClassVar[bool] = True

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        """Raises `InvalidTopologyError` where more has to be stored with a record than there is room for, and
        `UnsupportedError` for a partitioner without a twin.
        """
        edges = list(graph.edges)
        vertices = list(graph.vertices)
        options: list[tuple[str, StreamOptions]] = []
        for vertex in graph.vertices:
            operator = vertex.operators[-1]
            if not emits_roots(operator):
                continue
            for tag, schema in outputs_of(operator).items():
                stream = graph.stream_of(operator.uid, tag)
                circuits = circuits_of(graph, vertex, tag, self.limit)
                replay = operator.replay if isinstance(operator, Source) else "store"
                chosen = retry.get(operator.uid, self.retry)
                options.append((stream, replace(chosen, circuits=circuits, replay=replay)))
                routed = _with_routing(graph, vertex, operator, tag)
                if not routed:
                    continue
                rules = rules_of_operator(operator)
                again = Replay(replay_uid(operator.uid, tag), stream, operator.uid, schema, tag, rules)
                vertices.append(JobVertex(again.uid, (again,), 1))
                for edge in routed:
                    edges[edge.number] = edge
                    # The edge by which the replay sends again what went by this one.
                    twin = partitioning.replay_twin(cast(partitioning.Partitioner, edge.partitioner))
                    edges.append(replace(edge, number=len(edges), source=again.uid, partitioner=twin, tag=""))
        return replace(
            graph, vertices=tuple(vertices), edges=tuple(edges), tracked=True, options=tuple(options)
        )


def replay_uid(of: str, tag: str = "") -> str:
    """Return the uid of the `Replay` of an operator's output; a user's uid has no colon."""
    return f"replay:{of}:{tag}" if tag else f"replay:{of}"


def routing_rule(partitioner: partitioning.Partitioner, channels: int) -> Hashable:
    """Return what decides the number that is stored for an edge: equal rules, equal numbers. None: none is stored."""
    match partitioner:
        case partitioning.HashByKey(selector):
            return ("hash", selector)
        case partitioning.Forward():
            return "subtask"
        case partitioning.Custom(selector, function):
            # The function's answer depends on the number of channels; equal functions need not be hashable.
            return ("custom", selector, id(function), channels)
    return None


def _with_routing(graph: JobGraph, vertex: JobVertex, operator: Operator, tag: str) -> list[JobEdge]:
    """Number what has to be stored for an output: return its edges with their columns."""
    columns: dict[Hashable, int] = {}
    routed: list[JobEdge] = []
    for edge in graph.edges_from(vertex.uid):
        if edge.tag != tag:
            continue
        rule = routing_rule(
            cast(partitioning.Partitioner, edge.partitioner), graph.vertex(edge.target).parallelism
        )
        routing = None if rule is None else columns.setdefault(rule, len(columns))
        routed.append(replace(edge, routing=routing))
    if len(columns) > MAX_ROUTING_COLUMNS:
        raise InvalidTopologyError(
            f"{operator.uid!r}: its records go by {len(columns)} different keys or functions, and "
            f"{MAX_ROUTING_COLUMNS} can be stored with a record; put a map between and let some edges start there"
        )
    return routed


# ---------------------------------------------------------------- circuit breakers


def circuits_of(
    graph: JobGraph, vertex: JobVertex, tag: str, of_topology: Limit | None
) -> tuple[StreamCircuit, ...]:
    """Return those of the output ``tag`` of a chain whose last operator emits roots.

    Operators behind one with timers are paused for by the sources before it as well, which do not count there.
    """
    operator = vertex.operators[-1]
    own = rules_of_operator(operator).limit if isinstance(operator, Source) else None
    limit = own or of_topology
    found = [] if limit is None else [StreamCircuit(operator.uid if own else "", limit)]
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


def job_graph(
    graph: StreamGraph,
    status: FTStatus = FTStatus.ON,
    retry: StreamOptions | None = None,
    *,
    rules: RetryRules = NO_RULES,
    limit: Limit | None = None,
    max_parallelism: int = 0,
    failures: FailurePolicy | None = None,
    keeps_letters: bool = True,
) -> JobGraph:
    """Translate a graph. ``retry`` are the options of sources that have none of their own.

    ``rules`` are the topology's, on which failures are worth a retry, and ``limit`` how many open its circuit breaker.
    ``max_parallelism`` above 0 is the number of key groups in barrier mode, and ``failures`` what becomes there of
    records that fail; ``keeps_letters``: the job has a place for them. Raises what `check_graph`, `with_rules`,
    `policies_of`, `check_rules`, `check_letters`, `check_no_policies`, `check_writers` and the ``wire`` of the builders
    raise.
    """
    if max_parallelism:
        policies = policies_of(graph, failures, keeps_letters=keeps_letters)
        check_rules(graph, policies)
        check_letters(graph, policies)
        sources = {node.uid for node in graph.nodes if isinstance(node.operator, Source)}
        wider = {uid: each.rules for uid, each in policies.items() if each and uid not in sources}
        return generate(with_rules(graph, wider), BarrierBuilder(max_parallelism), policies)
    check_no_policies(graph)
    check_writers(graph)
    if status is FTStatus.OFF:
        return generate(graph, NopFTLayerBuilder())
    wider = {node.uid: rules for node in graph.nodes}
    return generate(with_rules(graph, wider), OpFTLayerBuilder(retry or StreamOptions(), limit))


def generate(graph: StreamGraph, ft_builder: FTLayerBuilder, policies: Policies = NO_POLICIES) -> JobGraph:
    """Check the graph, chain what can be chained, and have ``ft_builder`` wire the vertex in."""
    check_graph(graph, tracked=ft_builder.tracked)
    chain_of: dict[str, str] = {}  # which is called as its first operator
    members: dict[str, list[Operator]] = {}
    for node in graph.in_order:
        before = _chained_to(graph, node.uid, policies, tracked=ft_builder.tracked)
        chain_of[node.uid] = node.uid if before is None else chain_of[before]
        members.setdefault(chain_of[node.uid], []).append(node.operator)
    vertices = tuple(
        JobVertex(uid, tuple(operators), graph.node(uid).parallelism, policies.get(uid))
        for uid, operators in members.items()
    )
    between = [edge for edge in graph.edges if chain_of[edge.source] != chain_of[edge.target]]
    edges = tuple(
        JobEdge(
            number,
            chain_of[edge.source],
            chain_of[edge.target],
            edge.input,
            graph.partitioner_of(edge),
            graph.schema_of(edge),
            edge.tag,
            feedback=edge.feedback,
        )
        for number, edge in enumerate(between)
    )
    own = {node.uid: node.retry for node in graph.nodes if node.retry is not None}
    return ft_builder.wire(JobGraph(graph.name, vertices, edges, tracked=False), own)


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
        or not isinstance(graph.partitioner_of(edge), partitioning.Forward)
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
    nodes = tuple(_with_rules(graph, node, wider.get(node.uid)) for node in graph.nodes)
    return replace(graph, nodes=nodes)


def _with_rules(graph: StreamGraph, node: StreamNode, wider: RetryRules | None) -> StreamNode:
    operator = node.operator
    if wider is None or isinstance(operator, IterationHead | IterationTail):
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
