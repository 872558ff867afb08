"""How the parts of a topology are called: what a user may choose, and what an operator's picture says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ftlayer.checks import shown
from ftlayer.errors import ConfigError
from ftlayer.functions.aggregates.keyed import KeyedAggregate
from ftlayer.functions.interval_join import IntervalJoin
from ftlayer.functions.pickling import needing
from ftlayer.functions.steps import (
    Filter,
    FlatMap,
    Map,
    MapAsync,
    MapBatches,
    Process,
    Reduce,
)
from ftlayer.functions.windows.function import WindowFunction
from ftlayer.topology.job_graph import JobGraph
from ftlayer.topology.operators import (
    AssignWatermarks,
    CoProcess,
    FunctionSink,
    IterableSource,
    IterationHead,
    IterationTail,
    Join,
    Operator,
    PushSource,
    QueueSource,
    ReaderSource,
    Replay,
    Source,
)

MAX_NAME_CHARS = 100
"""A stream's name in the vertex is made of three of them."""

INGEST = "ingest"
"""The vertex files ingested records under this name: no job may have it."""


def check_name(name: object, what: str) -> None:
    """Raise `ConfigError` unless ``name`` can be a uid, a tag or part of a stream's name in the vertex."""
    if (
        not isinstance(name, str)
        or not 1 <= len(name) <= MAX_NAME_CHARS
        or not all(char.isalnum() or char in "_-." for char in name)
    ):
        raise ConfigError(
            f"{what}: expected 1 to {MAX_NAME_CHARS} letters, digits, '_', '-', '.', got {shown(name)}"
        )


def check_job_name(name: object) -> None:
    """Raise `ConfigError` unless a job can be called ``name``."""
    check_name(name, "name of the topology")
    if name == INGEST:
        raise ConfigError(
            f"name of the topology: {INGEST!r} is what ingested records are filed under; choose another"
        )


def kind_of(operator: Operator) -> str:
    """Return the word that automatic uids are made of."""
    match operator:
        case FlatMap():
            return "flat_map"
        case MapBatches():
            return "map_batches"
        case MapAsync():
            return "map_async"
        case AssignWatermarks():
            return "watermarks"
        case IterationHead():
            return "iteration"
        case Process(function=WindowFunction()):
            return "window"
        case CoProcess():
            return "co_process"
        case KeyedAggregate():
            return "aggregate"
        case Reduce() if operator.create is not None:
            return "aggregate"
    return type(operator).__name__.lower()


def display_name(operator: Operator) -> str:
    """Say in a few words what an operator does: ``map(parse)``, ``reduce(add by user)``."""
    match operator:
        case Source():
            return f"source({_source(operator)})"
        case Replay():
            return f"replay({operator.stream})"
        case Map() | FlatMap() | Filter() | MapBatches() | MapAsync():
            return f"{kind_of(operator)}({function_name(operator.function)})"
        case Reduce():
            return f"{kind_of(operator)}({function_name(operator.function)} by {', '.join(operator.keys)})"
        case KeyedAggregate(plan=plan):
            return f"aggregate({', '.join(each.call.name for each in plan.aggregates)} by {', '.join(operator.keys)})"
        case Process(function=WindowFunction(kind=windows)):
            return f"window({windows} by {', '.join(operator.keys)})"
        case Process():
            by = f" by {', '.join(operator.keys)}" if operator.keys else ""
            return f"process({function_name(operator.function)}{by})"
        case AssignWatermarks():
            return f"watermarks({operator.column} - {operator.out_of_orderness_ms} ms)"
        case CoProcess(function=IntervalJoin() as join):
            return _joined(join, operator.keys)
        case CoProcess():
            by = f" by {_both(operator.keys)}" if operator.keys[0] else ""
            return f"co_process({function_name(operator.function)}{by})"
        case Join():
            return _joined(operator, operator.keys)
        case IterationHead():
            return f"iteration(ends after {operator.max_wait_ms} ms)"
        case IterationTail():
            return "feedback"
    connector = operator.connector
    if isinstance(connector, FunctionSink):
        return f"sink({function_name(connector.function)})"
    return f"sink({type(connector.writer).__name__})"


def placed(reason: str, uid: str, graph: JobGraph) -> str:
    """Return a reason with the operator that it is about, by uid and by what it does, unless it says so itself."""
    if not uid or repr(uid) in reason:
        return reason
    operators = (operator for vertex in graph.vertices for operator in vertex.operators)
    found = next((display_name(operator) for operator in operators if operator.uid == uid), "")
    return f"{uid!r}{f' ({found})' if found else ''}: {reason}"


def operators_needing(missing: str, graph: JobGraph) -> str:
    """Return which operators of a graph refer to a module or name, by uid and by what they do; "" for none."""
    operators = (operator for vertex in graph.vertices for operator in vertex.operators)
    return needing(missing, [(f"{op.uid!r} ({display_name(op)})", op) for op in operators])


def function_name(function: Callable[..., Any]) -> str:
    """Return what a reader knows a function by: its name, or its class for an object."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__qualname__", type(function).__name__)
    return str(name).rpartition("<locals>.")[2]


def _joined(join: Join | IntervalJoin, keys: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    bounds = f"{join.lower_ms} to {join.upper_ms} ms"
    return f"join({function_name(join.function)} by {_both(keys)}, {bounds})"


def _both(keys: tuple[tuple[str, ...], tuple[str, ...]]) -> str:
    return " = ".join(", ".join(columns) for columns in keys)


def _source(source: Source) -> str:
    match source.connector:
        case ReaderSource(reader):
            return type(reader).__name__
        case IterableSource(partitions):
            return "1 iterable" if len(partitions) == 1 else f"{len(partitions)} iterables"
        case PushSource(start):
            return f"push, {function_name(start)}"
        case QueueSource(queue):
            return type(queue).__name__
