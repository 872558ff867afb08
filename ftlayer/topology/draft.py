"""The graph that streams write, operator by operator, until it is built."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa

from ftlayer.checkpoint.dead_letters.letter import LETTER_SCHEMA
from ftlayer.checkpoint.options import OnFailure, check_on_failure
from ftlayer.common.checks import member, shown
from ftlayer.common.rules.restart import RestartStrategy, check_strategy, default_restart
from ftlayer.config import FTStatus
from ftlayer.errors import ConfigError, InvalidTopologyError
from ftlayer.functions.steps import MAIN
from ftlayer.records.partitioning import Forward, Partitioner
from ftlayer.topology import job_graph
from ftlayer.topology.checks import check_columns, check_operator, check_parallelism
from ftlayer.topology.connectors import ParseSchema, Schema
from ftlayer.topology.explain import TAIL, circle_error, closed_twice
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.operators import IterableSource, IterationTail, Operator, ReaderSource, Source
from ftlayer.vertex.calls import StreamOptions

Sides: TypeAlias = Mapping[str, Schema]
"""The schemas of side outputs, by tag."""


@dataclass(frozen=True)
class Leg:
    """One output of an operator on its way somewhere; ``node`` is its place in the draft.

    ``partitioner`` None: the automatic one.
    """

    node: int
    tag: str = MAIN
    partitioner: Partitioner | None = None


class GraphDraft:
    """Operators and how records get from one to the next; names and numbers of subtasks may still change.

    Attributes:
        name: of the topology.
        parallelism: of operators that have none of their own.
        status: whether records are tracked.
        restart: of sources that have no strategy of their own.
        parse_schema: reads schemas that are given as text.
        open_letters: opens the dead letters of streams; None: no vertex has them, and chains may put them out.
    """

    def __init__(
        self,
        name: str,
        *,
        parallelism: int,
        status: FTStatus | str,
        restart: RestartStrategy | None,
        parse_schema: ParseSchema,
    ) -> None:
        job_graph.check_job_name(name)
        check_parallelism(parallelism, f"topology {name!r}")
        self.name = name
        self.parallelism = parallelism
        self.status = member(status, "status", FTStatus)
        check_strategy(restart, "restart")
        self.restart = default_restart() if restart is None else restart
        self.parse_schema = parse_schema
        self.open_letters: Callable[[Sequence[str]], Any] | None = None
        self._nodes: list[StreamNode] = []
        self._edges: list[tuple[Leg, int, int]] = []
        self._closed: dict[int, tuple[Leg, ...]] = {}  # what is fed back, by the head's place
        self._kinds: Counter[str] = Counter()
        self._letters: dict[int, tuple[Leg, ...]] = {}  # whose dead letters a source has, by its place

    def schema(self, given: Schema, what: str) -> pa.Schema:
        """Return a schema that was given as such or as text; raises unless its columns can be used."""
        schema = self.parse_schema(given) if isinstance(given, str) else given
        check_columns(schema, what)
        return schema

    def side_schemas(self, side: Sides | None) -> tuple[tuple[str, pa.Schema], ...]:
        """Return the schemas of side outputs, by tag; raises as `schema`, and `ConfigError` for what is no mapping."""
        if side is not None and not isinstance(side, Mapping):
            raise ConfigError(f"side: expected {{tag: schema}}, got {shown(side)}")
        given = (side or {}).items()
        return tuple((tag, self.schema(schema, f"side output {tag!r}")) for tag, schema in given)

    def add(
        self,
        make: Callable[[str], Operator],
        inputs: Sequence[tuple[Leg, ...]],
        *,
        uid: str | None,
        parallelism: int | None,
        retry: StreamOptions | None = None,
        on_failure: OnFailure | None = None,
    ) -> Leg:
        """Add the operator that ``make`` returns for a uid, behind ``inputs``; return its output."""
        operator = make("operator")
        kind = job_graph.kind_of(operator)
        number = self._kinds[kind] + 1
        operator = replace(operator, uid=self._free_uid(f"{kind}-{number}" if uid is None else uid))
        check_operator(operator)
        if parallelism is not None:
            check_parallelism(parallelism, repr(operator.uid))
        if on_failure is not None:
            check_on_failure(on_failure, f"{operator.uid!r}: on_failure")
        self._kinds[kind] = number
        place = len(self._nodes)
        self._nodes.append(StreamNode(operator, parallelism or self.parallelism, retry, on_failure))
        self._edges.extend((leg, place, which) for which, legs in enumerate(inputs) for leg in legs)
        return Leg(place)

    def add_letters(self, legs: tuple[Leg, ...], uid: str | None) -> Leg:
        # Which streams these are is known when the graph is built: uids may change until then.
        nothing = IterableSource(((list),))
        leg = self.add(
            lambda uid: Source(uid, nothing, LETTER_SCHEMA, restart=self.restart), [], uid=uid, parallelism=1
        )
        if self.status is FTStatus.ON:
            self._letters[leg.node] = legs
        return leg

    def operator(self, place: int) -> Operator:
        return self._nodes[place].operator

    def rename(self, place: int, uid: str) -> None:
        node = self._nodes[place]
        if uid != node.uid:
            self._nodes[place] = replace(node, operator=replace(node.operator, uid=self._free_uid(uid)))

    def set_parallelism(self, place: int, parallelism: int) -> None:
        node = self._nodes[place]
        check_parallelism(parallelism, repr(node.uid))
        self._nodes[place] = replace(node, parallelism=parallelism)

    def set_on_failure(self, place: int, on_failure: OnFailure) -> None:
        node = self._nodes[place]
        check_on_failure(on_failure, f"{node.uid!r}: on_failure")
        self._nodes[place] = replace(node, on_failure=on_failure)

    def close_iteration(self, head: int, feedback: tuple[Leg, ...]) -> None:
        """Feed outputs back to the head of an iteration. Raises as `IterativeStream.close_with`."""
        graph = self.graph()
        uid = self.operator(head).uid
        ends = {self.operator(leg.node).uid for leg in feedback}
        outside = ends - graph.behind(uid)
        if outside:
            raise InvalidTopologyError(
                f"close_with: {', '.join(sorted(outside))} does not come from the iteration behind {uid}: feed back "
                "what an operator behind it puts out"
            )
        if self.status is FTStatus.ON:
            inside = [node.uid for node in graph.in_order if node.uid in graph.behind(uid)]
            circle = [one for one in inside if one in ends or graph.behind(one) & ends]
            raise circle_error(circle, tracked=True)
        if head in self._closed:
            before = {self.operator(leg.node).uid for leg in self._closed[head]}
            raise closed_twice(uid, [", ".join(sorted(before)), ", ".join(sorted(ends))])
        self._closed[head] = feedback

    def graph(self) -> StreamGraph:
        nodes = list(self._nodes)
        edges = [
            StreamEdge(nodes[leg.node].uid, nodes[target].uid, which, leg.partitioner, leg.tag)
            for leg, target, which in self._edges
        ]
        for place, feedback in self._closed.items():
            # Here and not where it was closed, since its head may be given another uid and parallelism.
            head = nodes[place]
            tail = IterationTail(head.uid + TAIL, head.operator.schema)
            nodes.append(StreamNode(tail, head.parallelism))
            for leg in feedback:
                edges.append(StreamEdge(nodes[leg.node].uid, tail.uid, 0, leg.partitioner, leg.tag))
            edges.append(StreamEdge(tail.uid, head.uid, 0, Forward(), feedback=True))
        graph = StreamGraph(self.name, tuple(nodes), tuple(edges))
        return replace(graph, nodes=self._with_letters(graph)) if self._letters else graph

    def _with_letters(self, graph: StreamGraph) -> tuple[StreamNode, ...]:
        """Let each source of dead letters read the streams that it is meant for."""
        nodes = list(graph.nodes)
        for place, legs in self._letters.items():
            ends = {nodes[leg.node].uid for leg in legs}
            streams = [
                job_graph.stream_name(graph.name, node.uid, tag)
                for node in graph.nodes
                if job_graph.emits_roots(node.operator)
                and (node.uid in ends or graph.behind(node.uid) & ends)
                for tag in job_graph.outputs_of(node.operator)
            ]
            operator = nodes[place].operator
            assert self.open_letters is not None
            assert isinstance(operator, Source)
            connector = ReaderSource(self.open_letters(streams))
            nodes[place] = replace(nodes[place], operator=replace(operator, connector=connector))
        return tuple(nodes)

    def _free_uid(self, uid: str) -> str:
        job_graph.check_name(uid, "uid")
        if any(node.uid == uid for node in self._nodes):
            raise InvalidTopologyError(
                f"uid {uid!r} is given to several operators; ids and state are filed under it: choose another"
            )
        return uid
