"""The builder that streams write a graph into, operator by operator."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ftlayer.checks import check_instance, member
from ftlayer.config import FTStatus
from ftlayer.dead_letters.schema import LETTER_SCHEMA
from ftlayer.errors import ConfigError, InvalidTopologyError, UnsupportedError
from ftlayer.functions.retry_rules import Errors, rules_of
from ftlayer.partitioning.partitioners import Forward
from ftlayer.restart import RestartStrategy, check_strategy, default_restart
from ftlayer.topology.checks import check_columns, check_graph, check_operator, check_parallelism
from ftlayer.topology.connectors import Options, ParseSchema, Schema, open_source
from ftlayer.topology.ddl import parse_ddl, to_ddl
from ftlayer.topology.facts import emits_roots, outputs_of
from ftlayer.topology.graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.topology.iterations import TAIL, circle_error, closed_twice
from ftlayer.topology.job_graph import stream_name
from ftlayer.topology.names import check_job_name, check_name, kind_of
from ftlayer.topology.operators import IterableSource, IterationTail, Operator, ReaderSource, Source
from ftlayer.topology.streams import DataStream, Leg
from ftlayer.vertex.calls import StreamOptions


class GraphBuilder:
    """Makes streams and keeps the graph that they write.

    The same calls give the same graph: an operator without a ``uid`` is called by its kind and its place among those
    of its kind, ``map-1``, ``map-2``. Give uids to keep ids and positions over a change of the program.

    Args:
        name: of the topology; the vertex files its records under it.
        parallelism: of operators that have none of their own.
        restart: of sources that have no strategy of their own; None: `default_restart`.
        status: whether records are tracked; `FTStatus.OFF` allows operators that could not be.
        parse_schema: reads schemas that are given as text; `parse_ddl` by default.
    """

    def __init__(
        self,
        name: str,
        *,
        parallelism: int = 1,
        status: FTStatus | str = FTStatus.ON,
        restart: RestartStrategy | None = None,
        parse_schema: ParseSchema = parse_ddl,
    ) -> None:
        """Begin an empty graph. Raises `ConfigError`."""
        check_job_name(name)
        check_parallelism(parallelism, f"topology {name!r}")
        self.name = name
        self.parallelism = parallelism
        self.status = member(status, "status", FTStatus)
        check_strategy(restart, "restart")
        self._restart = default_restart() if restart is None else restart
        self._parse = parse_schema
        self._nodes: list[_Node] = []
        self._edges: list[tuple[Leg, int, int]] = []
        self._closed: dict[int, tuple[Leg, ...]] = {}  # what is fed back, by the head's place
        self._kinds: Counter[str] = Counter()
        self._letters: dict[int, tuple[Leg, ...]] = {}  # whose dead letters a source has, by its place
        self.open_letters: Callable[[Sequence[str]], Any] | None = None

    def source(
        self,
        source: Any,
        schema: Schema | None = None,
        *,
        options: Options | None = None,
        uid: str | None = None,
        parallelism: int | None = None,
        retry: StreamOptions | None = None,
        retry_on: Errors | None = None,
        dead_on: Errors | None = None,
        max_failing: str | int | None = None,
        restart: RestartStrategy | None = None,
    ) -> DataStream:
        """Begin a stream.

        Args:
            source: a stream reader or `DataSource` class of pyspark; an iterable of records that can be gone through
                again and again, a function without arguments that returns one, or `partitions` of either; a DataFrame
                of pandas, polars, Arrow (or anything with ``__arrow_c_stream__``), which is read now, or a list of
                dicts; or a `PushSource`. A record is a value (one column), a tuple in the order of the columns
                (several), or whole `pa.RecordBatch`es come.
            schema: of the records, as a `pa.Schema` or as Spark's DDL; may be left out for a `DataSource` that knows,
                for a DataFrame, and for lists and the like whose first records say it: a line on stderr does then.
            options: for a `DataSource` class.
            uid: stable name; positions of the source are kept under it.
            parallelism: subtasks that read. By default as many as there are partitions of iterables, up to the
                topology's; one for a `PushSource` (its callback is registered in each subtask) and a simple reader.
            retry: retry options of these records; by default the topology's.
            retry_on, dead_on: which errors are worth another attempt of these records, where an operator does not say
                so itself; by default the topology's. Acker mode only.
            max_failing: a share of this source's records of the last minute (``"5%"``), or a number a minute (``100``,
                ``"100/min"``), of those that fail in operators without a limit of their own. While more fail, the
                source pauses; by default the topology's limit, which is about all sources' records. Acker mode only.
            restart: whether, and after what pause, this source is read again when it raises; by default as the
                topology's ``restart``. Each subtask counts its own failures. A source that its strategy gives up ends
                the job with a `SourceGivenUpError`.

        Raises:
            ConfigError: what cannot be a source, a one-shot iterator among others; no or a wrong schema.
        """
        rules = rules_of(retry_on, dead_on, "source", max_failing)
        if retry is not None:
            check_instance(retry, "source: retry", StreamOptions)
            retry.check_pauses("source: retry")
            if retry.circuits:
                raise ConfigError("source: retry: circuits are not to be given: use max_failing=…")
        check_strategy(restart, "source: restart")
        wanted = None if schema is None else self.schema(schema, "source")
        opened = open_source(source, wanted, options, self._parse)
        known = wanted if wanted is not None else opened.schema
        if known is None:
            raise ConfigError("source: give schema=…, a pyarrow.Schema or text like 'id bigint, name string'")
        if parallelism is None and opened.most_subtasks is not None:
            parallelism = min(opened.most_subtasks, self.parallelism)
        node = self.add(
            lambda uid: Source(uid, opened.connector, known, rules, restart or self._restart),
            [],
            uid=uid,
            parallelism=parallelism,
            retry=retry,
        )
        if wanted is None and opened.inferred:
            # Said once: types that are guessed are to be seen.
            said = f"{self.operator(node).uid}: schema '{to_ddl(known)}', {opened.inferred}"
            print(said, file=sys.stderr, flush=True)
        return DataStream(self, (Leg(node),), known)

    def dead_letters(self, legs: tuple[Leg, ...], uid: str | None) -> DataStream:
        """Begin a stream of the dead letters of what ``legs`` derive from; see `DataStream.dead_letters`."""
        if self.open_letters is None:
            raise UnsupportedError(
                "dead_letters: a topology has dead letters where its records are tracked: in a StreamEnvironment with "
                "layer=FTLayer…"
            )
        # Which streams these are is known when the graph is built: uids may change until then.
        nothing = IterableSource(((list),))
        node = self.add(
            lambda uid: Source(uid, nothing, LETTER_SCHEMA, restart=self._restart), [], uid=uid, parallelism=1
        )
        if self.status is FTStatus.ON:
            self._letters[node] = legs
        return DataStream(self, (Leg(node),), LETTER_SCHEMA)

    def build(self) -> StreamGraph:
        """Return the graph, checked: see `check_graph` for what is raised."""
        graph = self._graph()
        check_graph(graph, tracked=self.status is FTStatus.ON)
        return graph

    # ------------------------------------------------------------ for the streams

    def schema(self, given: Schema, what: str) -> pa.Schema:
        """Return a schema that was given as such or as text; raises unless its columns can be used."""
        schema = self._parse(given) if isinstance(given, str) else given
        check_columns(schema, what)
        return schema

    def add(
        self,
        make: Callable[[str], Operator],
        inputs: Sequence[tuple[Leg, ...]],
        *,
        uid: str | None,
        parallelism: int | None,
        retry: StreamOptions | None = None,
    ) -> int:
        """Add the operator that ``make`` returns for a uid, behind ``inputs``; return its place."""
        operator = make("operator")
        kind = kind_of(operator)
        number = self._kinds[kind] + 1
        operator = replace(operator, uid=self._free_uid(f"{kind}-{number}" if uid is None else uid))
        check_operator(operator)
        if parallelism is not None:
            check_parallelism(parallelism, repr(operator.uid))
        self._kinds[kind] = number
        place = len(self._nodes)
        self._nodes.append(_Node(operator, parallelism, retry))
        self._edges.extend((leg, place, which) for which, legs in enumerate(inputs) for leg in legs)
        return place

    def operator(self, place: int) -> Operator:
        """Return the operator at a place."""
        return self._nodes[place].operator

    def rename(self, place: int, uid: str) -> None:
        """Give an operator a uid; `ConfigError` if it is no name, `InvalidTopologyError` if another one has it."""
        node = self._nodes[place]
        if uid != node.operator.uid:
            node.operator = replace(node.operator, uid=self._free_uid(uid))

    def set_parallelism(self, place: int, parallelism: int) -> None:
        """Set an operator's number of subtasks."""
        node = self._nodes[place]
        check_parallelism(parallelism, repr(node.operator.uid))
        node.parallelism = parallelism

    def close_iteration(self, head: int, feedback: tuple[Leg, ...]) -> None:
        """Feed outputs back to the head of an iteration. Raises as `IterativeStream.close_with`."""
        graph = self._graph()
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
            raise circle_error(
                [one for one in inside if one in ends or graph.behind(one) & ends], tracked=True
            )
        if head in self._closed:
            before = {self.operator(leg.node).uid for leg in self._closed[head]}
            raise closed_twice(uid, [", ".join(sorted(before)), ", ".join(sorted(ends))])
        self._closed[head] = feedback

    def _graph(self) -> StreamGraph:
        nodes = [
            StreamNode(node.operator, node.parallelism or self.parallelism, node.retry)
            for node in self._nodes
        ]
        edges = [
            StreamEdge(nodes[leg.node].uid, nodes[target].uid, which, leg.partitioner, leg.tag)
            for leg, target, which in self._edges
        ]
        for place, feedback in self._closed.items():
            # Here and not where it was closed, since its head may be given another uid and parallelism.
            head = nodes[place]
            tail = IterationTail(head.uid + TAIL, head.operator.schema)
            nodes.append(StreamNode(tail, head.parallelism))
            edges.extend(
                StreamEdge(nodes[leg.node].uid, tail.uid, 0, leg.partitioner, leg.tag) for leg in feedback
            )
            edges.append(StreamEdge(tail.uid, head.uid, 0, Forward(), feedback=True))
        graph = StreamGraph(self.name, tuple(nodes), tuple(edges))
        return replace(graph, nodes=self._with_letters(graph)) if self._letters else graph

    def _with_letters(self, graph: StreamGraph) -> tuple[StreamNode, ...]:
        """Let each source of dead letters read the streams that it is meant for."""
        nodes = list(graph.nodes)
        for place, legs in self._letters.items():
            ends = {nodes[leg.node].uid for leg in legs}
            streams = [
                stream_name(graph.name, node.uid, tag)
                for node in graph.nodes
                if emits_roots(node.operator) and (node.uid in ends or graph.behind(node.uid) & ends)
                for tag in outputs_of(node.operator)
            ]
            operator = nodes[place].operator
            assert self.open_letters is not None
            assert isinstance(operator, Source)
            connector = ReaderSource(self.open_letters(streams))
            nodes[place] = replace(nodes[place], operator=replace(operator, connector=connector))
        return tuple(nodes)

    def _free_uid(self, uid: str) -> str:
        check_name(uid, "uid")
        for node in self._nodes:
            if node.operator.uid == uid:
                raise InvalidTopologyError(
                    f"uid {uid!r} is given to several operators; ids and state are filed under it: choose another"
                )
        return uid


@dataclass
class _Node:
    operator: Operator
    parallelism: int | None
    retry: StreamOptions | None
