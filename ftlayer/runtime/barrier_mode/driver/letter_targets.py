"""Where a requeued letter goes back into the graph that runs now, or why it cannot."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.errors import FTLayerError
from ftlayer.partitioning.key_groups import HashByKeyGroup, key_groups, subtasks_of
from ftlayer.partitioning.partitioners import OutgoingRows
from ftlayer.records.ipc import UNREADABLE, read_one_batch
from ftlayer.records.keyhash import spark_hash
from ftlayer.runtime.barrier_mode.driver.readmission import Target
from ftlayer.runtime.task.key_schemas import key_schemas
from ftlayer.state.snapshots.serializer import unpack
from ftlayer.topology.job_graph import JobEdge, JobGraph, JobVertex


def target_of(letter: ChainLetter, graph: JobGraph) -> Target | str:
    """Return the subtask that is to have a letter: by its key where the chain's input has one, else the one it was in.

    A text says why it cannot go back: no such chain, another schema, no failure policy.
    """
    vertex = next((each for each in graph.vertices if each.uid == letter.chain), None)
    if vertex is None:
        return _no_chain(letter, graph)
    if vertex.failures is None:
        return f"{letter.chain!r} has no failure policy (any more), so a record that fails again would fail the job"
    edge = next((each for each in graph.edges_into(vertex.uid) if each.input == letter.input), None)
    if edge is None:
        return f"{letter.chain!r} has no input {letter.input} (any more)"
    try:
        is_timer = letter.kind is LetterKind.TIMER
        subtask = _of_timer(letter, graph, vertex, edge) if is_timer else _of_record(letter, vertex, edge)
    except (FTLayerError, *UNREADABLE) as error:
        return f"where it belongs in {letter.chain!r} is not known: {error}"
    return (
        subtask
        if isinstance(subtask, str)
        else Target(graph.slot_of(vertex.uid, subtask), vertex.uid, subtask)
    )


def _of_record(letter: ChainLetter, vertex: JobVertex, edge: JobEdge) -> int | str:
    payload = read_one_batch(letter.payload)
    if not payload.schema.equals(edge.schema):
        takes, has = _columns(edge.schema), _columns(payload.schema)
        return f"{letter.chain!r} takes other records now: {takes}; this one has {has}"
    if isinstance(edge.partitioner, HashByKeyGroup):
        rows = OutgoingRows(payload, np.zeros(1, np.uint64))
        return int(edge.partitioner.select(rows, vertex.parallelism)[0])
    return letter.subtask % vertex.parallelism


def _of_timer(letter: ChainLetter, graph: JobGraph, vertex: JobVertex, edge: JobEdge) -> int | str:
    if not isinstance(edge.partitioner, HashByKeyGroup):
        return f"{letter.chain!r} has no key (any more), and its timers none of one"
    inputs = {each.input: each.schema for each in graph.edges_into(vertex.uid)}
    schema = key_schemas(vertex.operators, [inputs[number] for number in sorted(inputs)]).get(vertex.uid)
    if schema is None:
        return f"{letter.chain!r} has no timers (any more)"
    key = unpack(letter.key)
    values = key if isinstance(key, tuple) and len(schema) > 1 else (key,)
    columns = [pa.array([value], field.type) for value, field in zip(values, schema, strict=True)]
    groups = key_groups(spark_hash(columns), graph.max_parallelism)
    return int(subtasks_of(groups, vertex.parallelism, graph.max_parallelism)[0])


def _no_chain(letter: ChainLetter, graph: JobGraph) -> str:
    for vertex in graph.vertices:
        if any(operator.uid == letter.chain for operator in vertex.operators):
            return f"{letter.chain!r} is chained behind {vertex.uid!r} now, and records enter a chain at its head"
    there = ", ".join(repr(each.uid) for each in graph.vertices if each.failures is not None) or "none"
    return f"the job has no operator {letter.chain!r} (any more); those with a failure policy are: {there}"


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
