"""The operators of a chain made ready: functions get their contexts, their state and their timers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ftlayer.errors import InvalidTopologyError
from ftlayer.functions.aggregates import AggregateTable, KeyedAggregate
from ftlayer.functions.chains.fused import KeyColumns, PreparedStep, Processing, Reducing
from ftlayer.functions.chains.segments import Aggregating, Windowing
from ftlayer.functions.failures import I64
from ftlayer.functions.keyed import Backend, Timers, owned
from ftlayer.functions.process import Context, uses_timers
from ftlayer.functions.steps import CoProcess, FunctionStep, KeyedStep, MapAsync, MapBatches, Process, Reduce
from ftlayer.functions.undo import UndoBackend, UndoMaps, UndoValues
from ftlayer.functions.windows import TABLE, FixedWindows

# Functions of two inputs that give what they return event times of its own: pairs of a join have the later one's.
#
# Such a function (`gives_times`) returns each record with its time as one more column, `TIME_COLUMN`; it is the first
# of its chain, and what is behind it sees the records without the column.


TIME_COLUMN = "_ft_time"
"""int64, milliseconds since 1970. Users' columns have no such names."""


def gives_times(function: Any) -> bool:
    return bool(getattr(function, "gives_times", False))


def with_time_column(schema: pa.Schema) -> pa.Schema:
    """Return what such a function emits if its operator emits ``schema``."""
    return schema.append(pa.field(TIME_COLUMN, pa.int64(), nullable=False))


def taken_off(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, I64]:
    """Return the records without the column, and their times: int64[n]."""
    times: I64 = batch.column(TIME_COLUMN).to_numpy().astype(np.int64, copy=False)
    return batch.drop_columns([TIME_COLUMN]), times


ChainOperator = FunctionStep | Reduce | KeyedAggregate | Process | CoProcess
PreparedOperator = PreparedStep | MapBatches | MapAsync | Aggregating | Windowing

REDUCE_TABLE = "aggregate"
"""Name of the table in which a `Reduce`, or a `KeyedAggregate`, keeps its aggregates."""


@dataclass(frozen=True, eq=False)
class ProcessOperator:
    position: int
    function: Any
    step: Processing
    timers: Timers | None


@dataclass(frozen=True)
class Prepared:
    paths: tuple[tuple[PreparedOperator, ...], ...]
    processes: tuple[ProcessOperator, ...]


def prepare(operators: Sequence[ChainOperator], inputs: Sequence[pa.Schema], backend: Backend) -> Prepared:
    """Make operators ready, the first of which takes ``inputs``; InvalidTopologyError if they cannot be a chain."""
    _check(operators, inputs)
    paths: list[list[PreparedOperator]] = [[] for _ in inputs]
    processes: list[ProcessOperator] = []
    schema = inputs[0]
    for position, operator in enumerate(operators):
        own = _backend_of(operator, backend)
        if isinstance(operator, Process | CoProcess):
            process, steps = _prepare_process(position, operator, schema, inputs, own)
            processes.append(process)
        else:
            steps = [_prepare_step(operator, schema, own)] * len(paths)
        for path, step in zip(paths, steps, strict=True):
            path.append(step)
        schema = operator.schema
    return Prepared(tuple(map(tuple, paths)), tuple(processes))


def _check(operators: Sequence[ChainOperator], inputs: Sequence[pa.Schema]) -> None:
    tags: dict[str, str] = {}
    for position, operator in enumerate(operators):
        if not isinstance(operator, ChainOperator):
            raise InvalidTopologyError(f"a {type(operator).__name__} is no function of a chain")
        if isinstance(operator, CoProcess) and position:
            raise InvalidTopologyError(f"{operator.uid!r} has two inputs, so it has to begin its chain")
        for tag, _ in operator.side if isinstance(operator, Process | CoProcess) else ():
            if not tag or tag in tags:
                other = f", which {tags[tag]!r} in its chain has too" if tag else ""
                raise InvalidTopologyError(
                    f"{operator.uid!r} has the side output {tag!r}{other}; name it otherwise"
                )
            tags[tag] = operator.uid
    takes = 2 if operators and isinstance(operators[0], CoProcess) else 1
    if len(inputs) != takes:
        raise InvalidTopologyError(f"a chain that takes {takes} inputs got the schemas of {len(inputs)}")


def _backend_of(operator: ChainOperator, backend: Backend) -> Backend:
    changes_values = not isinstance(operator, KeyedStep) or operator.in_place
    return backend if changes_values or not isinstance(backend, UndoBackend) else backend.uncopied()


def _prepare_step(operator: ChainOperator, schema: pa.Schema, backend: Backend) -> PreparedOperator:
    if isinstance(operator, KeyedAggregate):
        return _prepare_aggregates(operator, backend)
    if not isinstance(operator, Reduce):
        assert not isinstance(operator, Process | CoProcess)
        return operator
    if not operator.keys:
        raise InvalidTopologyError(
            f"{operator.uid!r} reduces by key and has no keys; call key_by before reduce"
        )
    key = KeyColumns.of(operator.uid, operator.keys, schema)
    state = backend.state(operator.uid)
    table = state.values(REDUCE_TABLE)
    own = owned if operator.in_place and backend.copies else None
    return Reducing(
        operator.uid,
        operator.function,
        operator.schema,
        key,
        table,
        operator.create,
        rules=operator.rules,
        state=state,
        own=own,
    )


def _prepare_aggregates(operator: KeyedAggregate, backend: Backend) -> Aggregating:
    state = backend.state(operator.uid)
    values = state.values(REDUCE_TABLE)
    state.describe(REDUCE_TABLE, operator.plan.described())
    # Its own log is one entry a batch.
    table = AggregateTable(operator.plan, values.table if isinstance(values, UndoValues) else values)
    state.cache(table)
    return Aggregating(operator.uid, operator.plan, operator.schema, table, operator.rules)


def _prepare_process(
    position: int,
    operator: Process | CoProcess,
    schema: pa.Schema,
    inputs: Sequence[pa.Schema],
    backend: Backend,
) -> tuple[ProcessOperator, list[PreparedOperator]]:
    uid, function = operator.uid, operator.function
    if isinstance(operator, Process):
        entries = [(function.process, operator.keys, schema)] * len(inputs)
    else:
        calls = (function.process_left, function.process_right)
        entries = list(zip(calls, operator.keys, inputs, strict=True))
        if len({bool(keys) for keys in operator.keys}) > 1:
            raise InvalidTopologyError(f"{uid!r} has a key for one of its inputs only; give both or none")
    keyed = any(keys for _, keys, _ in entries)
    timers = backend.timers(uid) if keyed else None
    own = owned if operator.in_place and backend.copies else None
    copies = not getattr(function, "copies_values", False)
    state = backend.state(uid) if keyed else None
    tags = [tag for tag, _ in operator.side]
    context = Context(
        uid,
        tags,
        state,
        timers,
        timed=uses_timers(function),
        operators=backend.operators(uid),
        own=own,
        copies=copies,
    )
    schema_out = with_time_column(operator.schema) if gives_times(function) else operator.schema
    steps = [
        Processing(
            uid,
            call,
            schema_out,
            KeyColumns.of(uid, keys, taken) if keys else None,
            context,
            operator.side,
            rules=operator.rules,
        )
        for call, keys, taken in entries
    ]
    operator_step = ProcessOperator(position, function, steps[0], timers)
    if isinstance(function, FixedWindows) and state is not None and timers is not None:
        maps = state.maps(TABLE)
        # Its own log is one entry a batch.
        table = function.vectorized(maps.table if isinstance(maps, UndoMaps) else maps, timers)
        if table is not None:
            state.cache(table)
            return operator_step, [Windowing(step, table) for step in steps]
    return operator_step, list(steps)
