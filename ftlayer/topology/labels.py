"""Labels of a graph's parts, in its text and its pictures."""

from __future__ import annotations

from ftlayer.partitioning.partitioners import (
    Broadcast,
    Custom,
    Forward,
    Global,
    HashByKey,
    Partitioner,
    Rebalance,
    Shuffle,
)
from ftlayer.partitioning.replay import (
    ReplayAnywhere,
    ReplayByRouting,
    ReplayEverywhere,
    ReplayGlobal,
    ReplayPartitioner,
)
from ftlayer.records.selector import KeySelector
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex
from ftlayer.topology.names import function_name
from ftlayer.topology.operators import Replay, Source


def replay_of(vertex: JobVertex) -> Replay | None:
    """Return the `Replay` that a chain consists of, None for any other chain."""
    operator = vertex.operators[0]
    return operator if isinstance(operator, Replay) else None


def partitioner_name(partitioner: Partitioner | ReplayPartitioner, routing: int | None = None) -> str:
    """Say in a few words where an edge's records go: ``hash(user)``, ``rebalance``, ``by key_hash[0]``."""
    match partitioner:
        case HashByKey(KeySelector(columns)):
            return f"hash({', '.join(columns)})"
        case Custom(selector, function):
            return f"custom({function_name(function)}({', '.join(selector.columns)}))"
        case ReplayByRouting():
            return f"by key_hash[{routing}]"
        case ReplayAnywhere():
            return "any channel"
        case ReplayEverywhere():
            return "every channel"
        case ReplayGlobal():
            return "channel 0"
        case Forward() | Rebalance() | Shuffle() | Broadcast() | Global() | HashByKey():
            return type(partitioner).__name__.removesuffix("ByKey").lower()
    return type(partitioner).__name__


def stored_name(partitioner: Partitioner | ReplayPartitioner) -> str:
    """Say what is stored with a record for an edge to be replayed by."""
    return "subtask" if isinstance(partitioner, Forward) else partitioner_name(partitioner)


def emitter_of(graph: JobGraph, replay: Replay) -> JobVertex:
    """Return the chain whose records ``replay`` sends again."""
    (chain,) = (vertex for vertex in graph.vertices if vertex.operators[-1].uid == replay.of)
    return chain


def persisted_name(graph: JobGraph, replay: Replay) -> str:
    """Say what is persisted on its way out of an operator: all that a source emits, of others what timers do."""
    of_source = isinstance(emitter_of(graph, replay).operators[-1], Source)
    return "records" if of_source else "timers' records"


def original_edges(graph: JobGraph, replay: Replay) -> list[JobEdge]:
    """Return the edges whose records ``replay`` sends again, in the order of its own."""
    return [edge for edge in graph.edges_from(emitter_of(graph, replay).uid) if edge.tag == replay.tag]
