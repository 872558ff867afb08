"""Checks before anything runs: a graph that could not be run or tracked is refused by the names of its operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import check_bool, check_choice, check_int, check_methods, check_unlike, named_type
from ftlayer.errors import ConfigError, InvalidTopologyError, UnhashableKeyError, UnsupportedError
from ftlayer.functions.aggregates import KeyedAggregate
from ftlayer.functions.steps import MAIN, Process, Reduce
from ftlayer.records.keyhash import key_column
from ftlayer.records.partitioning import Custom, Forward, HashByKey, replay_twin
from ftlayer.records.traced import KeySelector
from ftlayer.topology import job_graph, operators
from ftlayer.topology.explain import check_iterations
from ftlayer.topology.job_graph import StreamEdge, StreamGraph, StreamNode
from ftlayer.vertex.calls import REPLAYS

WAITING = "waiting"
"""Where the latest offset of a queue's reader has how many messages wait in the queue."""


def lag_behind(offset: object, latest: object) -> int | None:
    """Return how many records lie between an offset and what ``reportLatestOffset`` gave.

    That is known of offsets that are numbers by split, and of queues, whose messages are counted by `WAITING`; of
    others this is None.
    """
    if not (isinstance(offset, dict) and isinstance(latest, dict)):
        return None
    begins: dict[str, int] = {split: at for split, at in offset.items() if type(at) is int}
    ends: dict[str, int] = {split: at for split, at in latest.items() if type(at) is int}
    if len(begins) < len(offset) or len(ends) < len(latest):
        return None
    if WAITING in ends:
        return ends[WAITING]
    return sum(max(0, end - begins.get(split, 0)) for split, end in ends.items())


def lies_before(offset: object, place: object) -> bool:
    """Whether an offset is before a place, as far as the numbers in both tell.

    Numbers whose names all end with a digit are those of splits, and each counts by itself. Of others, as a file's
    number with a line's, one that has grown says that the offset is behind; so may a text that is another one.
    """
    now = dict(_parts(offset, ""))
    pairs = [(name, part, now[name]) for name, part in _parts(place, "") if name in now]
    numbers = [(at, to) for _, at, to in pairs if _is_number(at) and _is_number(to)]
    if not any(to < at for at, to in numbers):
        return False
    if all(name[-1:].isdigit() for name, _, _ in pairs):
        return True
    return not any(to > at for at, to in numbers) and len(numbers) == sum(
        at != to or _is_number(at) for _, at, to in pairs
    )


def _parts(offset: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(offset, dict | list):
        for key, value in offset.items() if isinstance(offset, dict) else enumerate(offset):
            yield from _parts(value, f"{name}/{key}" if isinstance(offset, dict) else f"{name}/{key}]")
    else:
        yield name, offset


def _is_number(part: object) -> bool:
    return isinstance(part, int | float) and not isinstance(part, bool)


RESERVED_NAMES = ("source_record_id", "record_id", "key_hash", "attempt", "origin")
"""Names of ftlayer's own columns; a user's column is called something else."""

RESERVED_PREFIX = "_ft"
"""Of `ftlayer.functions.chains.segments.ROW_TAG`, and of the column that a wrapped query tracks by."""

MAX_PARALLELISM = 32_768
"""As many as there can be key groups."""


def check_replay(replay: str, connector: operators.SourceConnector) -> None:
    """Raise `ConfigError` unless rows of this source can be replayed from there (``"store"``, ``"source"``)."""
    check_choice(replay, "source: replay", REPLAYS)
    if replay == "source" and not isinstance(connector, operators.IterableSource | operators.ReaderSource):
        raise ConfigError(
            "source: replay: 'source' is for iterables and stream readers, which can be read again from any row on; "
            f"this is {named_type(connector)}: use replay='store' (the default), which stores its records before "
            "they are processed"
        )


def check_graph(graph: StreamGraph, *, tracked: bool) -> None:
    """Raise unless the graph can be run, and (``tracked``) every record of it followed.

    Raises:
        InvalidTopologyError: operators that don't fit together; names them.
        ConfigError, UnhashableKeyError: a name, a column or a key of one operator; names both.
    """
    job_graph.check_job_name(graph.name)
    _check_uids(graph)
    for node in graph.nodes:
        check_parallelism(node.parallelism, repr(node.uid))
        check_operator(node.operator)
    _check_ends(graph)
    check_iterations(graph, tracked=tracked)
    _check_dead_ends(graph)
    for edge in graph.edges:
        _check_edge(graph, edge)
    for node in graph.nodes:
        _check_inputs(graph, node)
    _check_watermarks(graph)
    if tracked:
        _check_volatile(graph)
        _check_twins(graph)


def check_parallelism(parallelism: object, what: str) -> None:
    check_int(parallelism, f"parallelism of {what}", least=1, most=MAX_PARALLELISM)


# ---------------------------------------------------------------- one operator


def check_operator(operator: operators.Operator) -> None:
    uid = operator.uid
    job_graph.check_name(uid, "uid")
    for tag, schema in job_graph.outputs_of(operator).items():
        output = repr(uid) if tag == MAIN else f"side output {tag!r} of {uid!r}"
        if tag != MAIN:
            job_graph.check_name(tag, f"side output of {uid!r}")
        check_columns(schema, output)
    if len(job_graph.outputs_of(operator)) != 1 + len(job_graph.side_outputs_of(operator)):
        raise InvalidTopologyError(f"{uid!r}: two side outputs have the same tag, or one has the empty tag")
    for switch in ("volatile_state", "tagged"):
        check_bool(getattr(operator, switch, False), f"{switch} of {uid!r}")
    if isinstance(operator, operators.AssignWatermarks):
        _check_time_column(operator)
    if isinstance(operator, operators.CoProcess | operators.Join):
        _check_equal_keys(operator)
    if job_graph.has_timers(operator) and not job_graph.keeps_state(operator):
        raise InvalidTopologyError(
            f"{uid!r}: its function has timers, which belong to a key, and the stream has none; use key_by before it"
        )


def check_columns(schema: object, what: str) -> None:
    """Raise unless ``schema`` has columns, each with a name of its own (to Spark, too) that is not ours."""
    if not isinstance(schema, pa.Schema):
        raise ConfigError(f"schema of {what}: expected a pyarrow.Schema, got {type(schema).__name__}")
    if not schema.names:
        raise InvalidTopologyError(f"schema of {what}: a record needs at least one column")
    for name in schema.names:
        if name in RESERVED_NAMES or name.lower().startswith(RESERVED_PREFIX):
            raise InvalidTopologyError(
                f"schema of {what}: column {name!r} has a reserved name (those are {', '.join(RESERVED_NAMES)} and "
                f"all that start with {RESERVED_PREFIX!r}): rename it"
            )
    check_unlike(schema.names, f"schema of {what}")


def check_key(columns: tuple[str, ...], schema: pa.Schema, what: str) -> KeySelector:
    """Return the selector of a key; `UnhashableKeyError` or `ConfigError` that names ``what`` and the column."""
    try:
        selector = KeySelector(columns)
        selector.check(schema)
    except (ConfigError, UnhashableKeyError) as error:
        raise type(error)(f"{what}: {error}") from error
    return selector


def key_types(schema: pa.Schema, columns: tuple[str, ...]) -> list[pa.DataType]:
    """Return the types of a key's columns, which exist; ``a.b`` is field ``b`` of struct ``a``."""
    nothing = pa.RecordBatch.from_pylist([], schema=schema)
    return [key_column(nothing, name).type for name in columns]


def _check_time_column(operator: operators.AssignWatermarks) -> None:
    index = operator.schema.get_field_index(operator.column)
    if index < 0:
        raise ConfigError(
            f"{operator.uid!r}: there is no column {operator.column!r}; "
            f"there are {', '.join(operator.schema.names)}"
        )
    type_ = operator.schema.field(index).type
    if not (pa.types.is_timestamp(type_) or pa.types.is_int64(type_)):
        raise InvalidTopologyError(
            f"{operator.uid!r}: column {operator.column!r} is {type_}; a record's time is a timestamp, or int64 "
            "milliseconds since 1970: convert it in a map before"
        )


def _check_equal_keys(operator: operators.CoProcess | operators.Join) -> None:
    first, second = operator.keys
    if isinstance(operator, operators.Join) and not first:
        raise InvalidTopologyError(
            f"{operator.uid!r}: a join needs keys on both inputs; use key_by before it"
        )
    if len(first) != len(second):
        raise InvalidTopologyError(
            f"{operator.uid!r}: the keys of its inputs have {len(first)} and {len(second)} columns "
            f"({', '.join(first) or 'none'}; {', '.join(second) or 'none'}); key both inputs alike"
        )
    for number in (0, 1):
        if operator.keys[number]:
            check_key(operator.keys[number], operator.inputs[number], f"input {number} of {operator.uid!r}")
    types = [key_types(schema, keys) for schema, keys in zip(operator.inputs, operator.keys, strict=True)]
    for names, left, right in zip(zip(first, second, strict=True), *types, strict=True):
        if left != right:
            raise InvalidTopologyError(
                f"{operator.uid!r}: key column {names[0]!r} of input 0 is {left} and {names[1]!r} of input 1 is "
                f"{right}; equal keys of different types have different hashes: convert one of them in a map before"
            )


# ---------------------------------------------------------------- the graph's form


def _check_uids(graph: StreamGraph) -> None:
    twice = [uid for uid, count in Counter(node.uid for node in graph.nodes).items() if count > 1]
    if twice:
        names = ", ".join(node.name for node in graph.nodes if node.uid == twice[0])
        raise InvalidTopologyError(
            f"uid {twice[0]!r} is given to several operators ({names}); ids and state are filed under it: choose others"
        )
    if not any(isinstance(node.operator, operators.Source) for node in graph.nodes):
        raise InvalidTopologyError(f"topology {graph.name!r} has no source; begin with source(…)")


def _check_ends(graph: StreamGraph) -> None:
    uids = {node.uid for node in graph.nodes}
    for edge in graph.edges:
        missing = {edge.source, edge.target} - uids
        if missing:
            raise InvalidTopologyError(
                f"an edge from {edge.source!r} to {edge.target!r}: there is no {missing.pop()!r}"
            )
        source, target = graph.node(edge.source).operator, graph.node(edge.target).operator
        if isinstance(source, operators.Sink):
            raise InvalidTopologyError(f"{edge.source!r} is a sink and {edge.target!r} comes behind it")
        if edge.tag != job_graph.LETTERS and edge.tag not in job_graph.outputs_of(source):
            raise InvalidTopologyError(f"{edge.source!r} has no side output {edge.tag!r} for {edge.target!r}")
        if not 0 <= edge.input < job_graph.inputs_of(target):
            raise InvalidTopologyError(
                f"{edge.target!r} has {job_graph.inputs_of(target)} inputs; {edge.source!r} goes to number {edge.input}"
            )
    for node in graph.nodes:
        connected = {edge.input for edge in graph.edges_into(node.uid) if not edge.feedback}
        numbers = set(range(job_graph.inputs_of(node.operator))) - connected
        if numbers:
            open_inputs = ", ".join(map(str, sorted(numbers)))
            raise InvalidTopologyError(f"{node.uid!r} gets no records: input {open_inputs} is open")


def check_writers(graph: StreamGraph) -> None:
    """Raise `UnsupportedError` where a graph without checkpoints has a writer that commits behind them only.

    Such a writer says so by its attribute ``needs_checkpoints``.
    """
    for node in graph.nodes:
        connector = node.operator.connector if isinstance(node.operator, operators.Sink) else None
        if isinstance(connector, operators.WriterSink) and getattr(
            connector.writer, "needs_checkpoints", False
        ):
            kind = type(connector.writer).__name__
            raise UnsupportedError(
                f"sink {node.uid!r}: an exactly-once {kind} commits behind checkpoints, and this topology has none: "
                f"give checkpointing=CheckpointConfig(…), or the sink exactly_once=False"
            )


def _check_dead_ends(graph: StreamGraph) -> None:
    sinks = {node.uid for node in graph.nodes if isinstance(node.operator, operators.Sink)}
    dead = [node for node in graph.nodes if node.uid not in sinks and not graph.behind(node.uid) & sinks]
    if dead:
        names = ", ".join(f"{node.uid!r} ({node.name})" for node in dead)
        raise InvalidTopologyError(
            f"no sink gets what comes from {names}: end each stream with sink(…), or leave the operator out"
        )


def _check_state_key(schema: pa.Schema, keys: tuple[str, ...], what: str) -> None:
    for name, kind in zip(keys, key_types(schema, keys), strict=True):
        if pa.types.is_nested(kind):
            raise UnhashableKeyError(
                f"{what}: key column {name!r} is {kind}, and state is kept by values that Python can hash; key by "
                "fields of it ('a.b'), or by a text that a map makes of it"
            )


def _check_edge(graph: StreamGraph, edge: StreamEdge) -> None:
    source, target = graph.node(edge.source), graph.node(edge.target)
    partitioner, schema = graph.partitioner_of(edge), graph.schema_of(edge)
    what = f"from {edge.source!r} to {edge.target!r}"
    if isinstance(partitioner, Forward) and source.parallelism != target.parallelism:
        raise InvalidTopologyError(
            f"{what}: forward() needs the same parallelism on both sides, and there are {source.parallelism} and "
            f"{target.parallelism} subtasks; use rebalance(), or set_parallelism(…) of one of them"
        )
    try:
        if isinstance(partitioner, HashByKey):
            partitioner.selector.check(schema)
        if isinstance(partitioner, Custom):
            key_types(schema, partitioner.selector.columns)
    except (ConfigError, UnhashableKeyError) as error:
        raise type(error)(f"{what}: {error}") from error


def _check_inputs(graph: StreamGraph, node: StreamNode) -> None:
    """Check that the edges of each input carry the same columns, and come by the input's key if it has one."""
    declared = job_graph.declared_inputs(node.operator)
    for number, keys in enumerate(job_graph.keys_of(node.operator)):
        edges = [edge for edge in graph.edges_into(node.uid) if edge.input == number]
        expected = declared[number] if declared else graph.schema_of(edges[0])
        if isinstance(node.operator, Reduce | KeyedAggregate | Process | operators.CoProcess):
            _check_state_key(expected, keys, f"input {number} of {node.uid!r}")
        for edge in edges:
            difference = schema_difference(expected, graph.schema_of(edge))
            if difference:
                raise InvalidTopologyError(
                    f"input {number} of {node.uid!r} gets records of another schema from {edge.source!r}: {difference}"
                )
            if keys and graph.partitioner_of(edge) != HashByKey(KeySelector(keys)):
                raise InvalidTopologyError(
                    f"input {number} of {node.uid!r} has the key {', '.join(keys)}, and its records come from "
                    f"{edge.source!r} by {graph.partitioner_of(edge)!r}; use key_by right before it"
                )


def schema_difference(expected: pa.Schema, got: pa.Schema) -> str:
    """Say what tells two schemas apart, "" if nothing does; metadata does not count."""
    if expected.equals(got):
        return ""
    if expected.names != got.names:
        return f"columns {', '.join(got.names)} instead of {', '.join(expected.names)}"
    one, other = next(pair for pair in zip(expected, got, strict=True) if not pair[0].equals(pair[1]))
    was, now = (f"{field.type}{'' if field.nullable else ' not null'}" for field in (one, other))
    return f"column {one.name!r} is {now} instead of {was}"


# ---------------------------------------------------------------- event time, tracking


def _check_watermarks(graph: StreamGraph) -> None:
    timed: set[str] = set()
    for node in graph.in_order:
        edges = [edge for edge in graph.edges_into(node.uid) if not edge.feedback]
        if job_graph.gives_times(node.operator) or (edges and all(edge.source in timed for edge in edges)):
            timed.add(node.uid)
        if job_graph.needs_watermarks(node.operator):
            for edge in edges:
                if edge.source not in timed:
                    raise InvalidTopologyError(
                        f"{node.uid!r} works on event time, and what input {edge.input} gets from {edge.source!r} has "
                        "none: use assign_watermarks(column, …) on that stream before key_by"
                    )


def _check_volatile(graph: StreamGraph) -> None:
    names = [
        f"{node.uid!r} ({node.name})"
        for node in graph.nodes
        if job_graph.keeps_state(node.operator) and not job_graph.is_volatile(node.operator)
    ]
    if names:
        raise InvalidTopologyError(
            f"{', '.join(names)}: acker mode replays records and does not restore state, so what an operator remembers "
            "is gone with its slot, and a replayed record may be counted twice. Where state has to be exact, use "
            "barrier mode (CheckpointConfig); where it may be lost, say volatile_state=True"
        )


def _check_twins(graph: StreamGraph) -> None:
    for edge in graph.edges:
        if job_graph.emits_roots(graph.node(edge.source).operator):
            try:
                replay_twin(graph.partitioner_of(edge))
            except UnsupportedError as error:
                raise InvalidTopologyError(
                    f"from {edge.source!r} to {edge.target!r}: records of {edge.source!r} are replayed, and {error}"
                ) from error


# ---------------------------------------------------------------- process functions


def check_process(function: object, wanted: type, method: str) -> None:
    """Raise `ConfigError` unless ``function`` is a process function of this class whose methods run when called."""
    if isinstance(function, type) and issubclass(function, wanted):
        raise ConfigError(f"{method}: expected an instance, got the class; write {function.__name__}(…)")
    if not isinstance(function, wanted):
        raise ConfigError(
            f"{method}: expected a {wanted.__name__} (ftlayer.functions.process), got {named_type(function)}"
        )
    emitting = ("process", "process_left", "process_right", "on_timer")
    check_methods(function, ("open", *emitting, "close"), method, may_yield=emitting)
