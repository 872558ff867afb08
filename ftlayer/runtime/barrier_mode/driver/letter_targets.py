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

    A letter of an operator that was a chain's head, and has others before it now, goes to the chain that it is in. A
    text says why it cannot go back: no such operator, another schema, no failure policy.
    """
    vertex = next((each for each in graph.vertices if letter.chain in _uids(each)), None)
    if vertex is None:
        there = ", ".join(repr(each.uid) for each in graph.vertices if each.failures is not None) or "none"
        return (
            f"the job has no operator {letter.chain!r} (any more); those with a failure policy are: {there}"
        )
    if vertex.failures is None:
        return f"{letter.chain!r} has no failure policy (any more), so a record that fails again would fail the job"
    if vertex.uid != letter.chain:
        return _inside(letter, graph, vertex)
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


def _inside(letter: ChainLetter, graph: JobGraph, vertex: JobVertex) -> Target | str:
    """Return where it goes if others stand before its operator. Those have no keys, and one input."""
    if letter.kind is LetterKind.TIMER:
        return f"{letter.chain!r} has no key (any more), and its timers none of one"
    if letter.input:
        return f"{letter.chain!r} has no input {letter.input} (any more)"
    before = vertex.operators[_uids(vertex).index(letter.chain) - 1]
    try:
        problem = _other_columns(letter, read_one_batch(letter.payload).schema, before.schema)
    except (FTLayerError, *UNREADABLE) as error:
        problem = f"the record for {letter.chain!r} cannot be read: {error}"
    subtask = letter.subtask % vertex.parallelism
    return problem or Target(graph.slot_of(vertex.uid, subtask), vertex.uid, subtask)


def _of_record(letter: ChainLetter, vertex: JobVertex, edge: JobEdge) -> int | str:
    payload = read_one_batch(letter.payload)
    problem = _other_columns(letter, payload.schema, edge.schema)
    if problem:
        return problem
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


def _other_columns(letter: ChainLetter, has: pa.Schema, takes: pa.Schema) -> str:
    """Say why a record is not one that its operator takes; "" if it is."""
    if has.equals(takes):
        return ""
    return f"{letter.chain!r} takes other records now: {_columns(takes)}; this one has {_columns(has)}"


def _uids(vertex: JobVertex) -> list[str]:
    return [operator.uid for operator in vertex.operators]


def _columns(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
