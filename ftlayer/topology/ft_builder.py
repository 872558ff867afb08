"""How the vertex gets into a graph: nothing without fault tolerance, an output and an input of tasks with it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from ftlayer.circuit import Limit
from ftlayer.errors import InvalidTopologyError
from ftlayer.partitioning.partitioners import Custom, Forward, HashByKey, Partitioner
from ftlayer.partitioning.replay import replay_twin
from ftlayer.topology.facts import emits_roots, outputs_of, rules_of_operator
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import Operator, Replay, Source
from ftlayer.vertex.calls import StreamCircuit, StreamOptions

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
    """Adds nothing: `FTStatus.OFF`."""

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

    @property
    def tracked(self) -> bool:
        return True

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        """Return the graph with routing columns, a `Replay` for each output that has edges, and all streams' options.

        Raises `InvalidTopologyError` where more has to be stored with a record than there is room for, and
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
                for edge in routed:
                    edges[edge.number] = edge
                rules = rules_of_operator(operator)
                again = Replay(replay_uid(operator.uid, tag), stream, operator.uid, schema, tag, rules)
                vertices.append(JobVertex(again.uid, (again,), 1))
                for edge in routed:
                    edges.append(_twin(edge, len(edges), again))
        return replace(
            graph, vertices=tuple(vertices), edges=tuple(edges), tracked=True, options=tuple(options)
        )


def replay_uid(of: str, tag: str = "") -> str:
    """Return the uid of the `Replay` of an operator's output; a user's uid has no colon."""
    return f"replay:{of}:{tag}" if tag else f"replay:{of}"


def routing_rule(partitioner: Partitioner, channels: int) -> Hashable:
    """Return what decides the number that is stored for an edge: equal rules, equal numbers. None: none is stored."""
    match partitioner:
        case HashByKey(selector):
            return ("hash", selector)
        case Forward():
            return "subtask"
        case Custom(selector, function):
            # The function's answer depends on the number of channels; equal functions need not be hashable.
            return ("custom", selector, id(function), channels)
    return None


def _twin(edge: JobEdge, number: int, replay: Replay) -> JobEdge:
    """Return the edge by which ``replay`` sends again what went by ``edge``."""
    partitioner = replay_twin(cast(Partitioner, edge.partitioner))
    return replace(edge, number=number, source=replay.uid, partitioner=partitioner, tag="")


def _with_routing(graph: JobGraph, vertex: JobVertex, operator: Operator, tag: str) -> list[JobEdge]:
    """Number what has to be stored for an output: return its edges with their columns."""
    columns: dict[Hashable, int] = {}
    routed: list[JobEdge] = []
    for edge in graph.edges_from(vertex.uid):
        if edge.tag != tag:
            continue
        rule = routing_rule(cast(Partitioner, edge.partitioner), graph.vertex(edge.target).parallelism)
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
