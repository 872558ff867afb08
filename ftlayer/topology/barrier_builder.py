"""How barrier mode gets into a graph: edges by key go by key group, and joins keep their state by key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from ftlayer.errors import InvalidTopologyError
from ftlayer.partitioning.key_groups import HashByKeyGroup
from ftlayer.partitioning.partitioners import HashByKey
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.operators import CoProcess, Join, PushSource, Source
from ftlayer.vertex.calls import StreamOptions

JOIN_KEEPS = tuple(
    [field.name for field in fields(Join) if field.name not in ("function", "lower_ms", "upper_ms")]
)
"""What a join is told that is not its function's; `CoProcess` has all of it."""


@dataclass(frozen=True)
class BarrierBuilder:
    """`ftlayer.topology.ft_builder.FTLayerBuilder` of graphs with checkpoints.

    Attributes:
        max_parallelism: number of key groups.
    """

    max_parallelism: int

    @property
    def tracked(self) -> bool:
        """False: no record is followed."""
        return False

    def wire(self, graph: JobGraph, retry: Mapping[str, StreamOptions]) -> JobGraph:
        """Return the graph for barriers.

        Raises `InvalidTopologyError` for more subtasks than key groups, and for a source that cannot rewind.
        """
        for vertex in graph.vertices:
            _check_rewinds(vertex)
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
        if not isinstance(edge.partitioner, HashByKey):
            return edge
        return replace(edge, partitioner=HashByKeyGroup(edge.partitioner.selector, self.max_parallelism))


def _check_rewinds(vertex: JobVertex) -> None:
    source = vertex.operators[0]
    if isinstance(source, Source) and isinstance(source.connector, PushSource):
        raise InvalidTopologyError(
            f"source {source.uid!r}: what was pushed cannot be had again, so there is nothing to restore it from; put "
            "the records into an ingest of an FTLayer, and let the topology read layer.ingest(…).reader(name)"
        )


def _without_joins(vertex: JobVertex) -> JobVertex:
    operators = tuple(as_co_process(each) if isinstance(each, Join) else each for each in vertex.operators)
    return replace(vertex, operators=operators)


def as_co_process(join: Join) -> CoProcess:
    """Return an operator that does what `Join` does, under the same uid, with its records in keyed state."""
    from ftlayer.functions.interval_join import IntervalJoin

    function = IntervalJoin(join.function, join.lower_ms, join.upper_ms, join.schema, join.inputs)
    kept = {name: getattr(join, name) for name in JOIN_KEEPS}
    return CoProcess(function=function, **kept)
