"""Whether a checkpoint can be restored into a graph, and what of it no operator claims."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ftlayer.checkpoint.snapshots import Checkpoint, EdgeInfo, OperatorInfo, SubtaskSnapshot
from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.functions.ttl import plain_name
from ftlayer.partitioning.key_groups import HashByKeyGroup
from ftlayer.partitioning.partitioners import Custom, Partitioner
from ftlayer.partitioning.replay import ReplayPartitioner
from ftlayer.printable import shown_url
from ftlayer.records.selector import KeySelector
from ftlayer.runtime.barrier_mode.task.failing.waiting import WAITING_TABLE
from ftlayer.runtime.connectors.positions import partition_index
from ftlayer.runtime.task.key_schemas import key_schemas
from ftlayer.topology.facts import inputs_of
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Source


def operator_infos(graph: JobGraph) -> tuple[OperatorInfo, ...]:
    """Describe all operators, chain by chain, each in the order in which records pass through it."""
    return tuple(
        OperatorInfo(
            uid=operator.uid,
            chain=vertex.uid,
            kind=type(operator).__name__,
            parallelism=vertex.parallelism,
            keys=tuple(str(field.type) for field in keys.get(operator.uid, ())),
        )
        for vertex in graph.vertices
        for keys in [key_schemas(vertex.operators, _inputs(graph, vertex))]
        for operator in vertex.operators
    )


def edge_infos(graph: JobGraph) -> tuple[EdgeInfo, ...]:
    """Describe all edges, in their order."""
    between = [(edge.source, edge.tag, edge.target, edge.input) for edge in graph.edges]
    return tuple(
        EdgeInfo(between[:number].count(ends), partitioner_text(graph.edges[number].partitioner))
        for number, ends in enumerate(between)
    )


def partitioner_text(partitioner: Partitioner | ReplayPartitioner) -> str:
    """Say what decides about channels: equal texts, equal channels.

    A function of the user's is known by its name: another one of the same name goes unnoticed.
    """
    kind = type(partitioner).__name__.lower()
    match partitioner:
        case HashByKeyGroup(selector=KeySelector(columns)):
            return f"{kind}({', '.join(columns)})"
        case Custom(KeySelector(columns), function):
            name = getattr(function, "__qualname__", type(function).__qualname__)
            return f"{kind}({name}, {', '.join(columns)})"
        case _:
            return kind


def check_fits(checkpoint: Checkpoint, graph: JobGraph) -> None:
    """Raise `IncompatibleCheckpointError` for other key groups, too many subtasks, or keys of other types."""
    name = named(checkpoint)
    if checkpoint.max_parallelism != graph.max_parallelism:
        raise IncompatibleCheckpointError(
            f"{name} has {checkpoint.max_parallelism} key groups, and the job has {graph.max_parallelism}; "
            f"set max_parallelism={checkpoint.max_parallelism}: it cannot change during a job's life"
        )
    for vertex in graph.vertices:
        if vertex.parallelism > checkpoint.max_parallelism:
            raise IncompatibleCheckpointError(
                f"{vertex.uid!r} has parallelism {vertex.parallelism}, and {name} has "
                f"{checkpoint.max_parallelism} key groups; lower the parallelism"
            )
    _check_keys(checkpoint, graph)


def unclaimed(checkpoint: Checkpoint, graph: JobGraph) -> dict[str, tuple[str, str]]:
    """Say what belongs to operators, partitions of sources, or heads of chains, that the graph has no more.

    Returns one text for each kind of thing and operator, with the operator and the thing's name in it, if it has one.
    """
    known = {operator.uid for vertex in graph.vertices for operator in vertex.operators}
    found = {text: (uid, name) for uid, name, text in _belongings(checkpoint) if uid not in known}
    retrying = {
        operator.uid
        for vertex in graph.vertices
        if vertex.failures is not None
        for operator in vertex.operators
    }
    for part in checkpoint.subtasks:
        for uid in sorted(_waited_at(part) & known - retrying):
            text = (
                f"records that wait for another attempt, and enter at {uid!r}, which has no failure policy any more "
                "(restore with the policy until none waits)"
            )
            found[text] = uid, WAITING_TABLE
        for partition in part.positions:
            if part.uid in known and not has_partition(graph.vertex(part.uid), partition):
                text = f"the position of partition {partition_index(partition)} of source {part.uid!r}"
                found[text] = part.uid, f"partition-{partition_index(partition)}"
    return found


def _waited_at(part: SubtaskSnapshot) -> set[str]:
    """Return the operators at which records that wait in this part may enter."""
    if not part.waiting:
        return set()
    tables = () if part.keyed is None else part.keyed.tables
    return {part.uid, *(table.operator for table in tables if table.name == WAITING_TABLE)}


def has_partition(vertex: JobVertex, partition: str) -> bool:
    """Whether a source still has a partition; those of a reader are the reader's to know."""
    source = vertex.operators[0]
    if not isinstance(source, Source) or not isinstance(source.connector, IterableSource):
        return True
    return partition_index(partition) < len(source.connector.partitions)


def named(checkpoint: Checkpoint) -> str:
    where = f" at {shown_url(checkpoint.location)}" if checkpoint.location else ""
    return f"{checkpoint.kind} {checkpoint.checkpoint}{where}"


def _check_keys(checkpoint: Checkpoint, graph: JobGraph) -> None:
    stateful = {
        table.operator
        for part in checkpoint.subtasks
        if part.keyed is not None
        for table in part.keyed.tables
    }
    before = {info.uid: info.keys for info in checkpoint.operators}
    for info in operator_infos(graph):
        keys = before.get(info.uid, info.keys)
        if info.uid in stateful and keys != info.keys:
            raise IncompatibleCheckpointError(
                f"operator {info.uid!r} has state by a key of ({', '.join(keys)}) in {named(checkpoint)}, and its key "
                f"is ({', '.join(info.keys) or 'none'}) now; state cannot move between keys: go back to the key it "
                "had, or give the operator another uid and allow_unclaimed_state=True"
            )


def _belongings(checkpoint: Checkpoint) -> Iterator[tuple[str, str, str]]:
    """Yield (operator, name of a thing that has one, what it is) for everything in the checkpoint."""
    for part in checkpoint.subtasks:
        for table in () if part.keyed is None else part.keyed.tables:
            if table.name == WAITING_TABLE and not part.waiting:
                continue  # Nothing is in it.
            yield (
                table.operator,
                plain_name(table.name),
                f"keyed state {table.name!r} of operator {table.operator!r}",
            )
        for state in part.operators:
            yield state.operator, state.name, f"operator state {state.name!r} of operator {state.operator!r}"
        if part.positions:
            yield part.uid, "", f"positions of source {part.uid!r}"
        for committable in part.committables:
            yield committable.sink, "", f"uncommitted rows of sink {committable.sink!r}"
        for channel in part.channels:
            # What is on its way belongs to who receives it.
            yield channel.target, "", f"records on their way to operator {channel.target!r}"


def _inputs(graph: JobGraph, vertex: JobVertex) -> list[pa.Schema]:
    schemas = {edge.input: edge.schema for edge in graph.edges_into(vertex.uid)}
    return [schemas[number] for number in range(inputs_of(vertex.operators[0]))]
