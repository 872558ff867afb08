"""The operators of a topology beside the user's functions (`ftlayer.functions.steps`): what each has to know.

All are frozen values that travel to the slots inside Spark's closures. ``uid`` is unique in a graph and stays
the same over restarts: record ids, state and a source's positions are filed under it. ``schema`` is what an
operator emits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import CoProcess as CoProcess
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches, Process, Reduce

# ---------------------------------------------------------------- sources


@dataclass(frozen=True)
class ReaderSource:
    """A PySpark Python Data Source's stream reader.

    ``reader`` is a `DataSourceStreamReader` or a `SimpleDataSourceStreamReader`; a copy goes to each slot.
    """

    reader: Any


@dataclass(frozen=True)
class IterableSource:
    """Python iterables, one a partition.

    Each of ``partitions`` is a function without arguments that returns a fresh iterator of the same items every
    time it is called: records, or whole `pa.RecordBatch`es. Bounded when all of them end.
    """

    partitions: tuple[Callable[[], Iterable[Any]], ...]


@dataclass(frozen=True)
class PushSource:
    """Records that come by callback.

    ``start(push)`` is called once in the slot of each subtask and may return a function that stops it.
    ``push(records)`` takes a list of records from any thread and returns once they are persisted.
    """

    start: Callable[[Callable[[list[Any]], None]], Callable[[], None] | None]


SourceConnector = ReaderSource | IterableSource | PushSource


@dataclass(frozen=True)
class Source:
    """Where records come into a topology; each becomes a root."""

    uid: str
    connector: SourceConnector
    schema: pa.Schema
    rules: RetryRules = NO_RULES


@dataclass(frozen=True)
class Replay:
    """The vertex as an input: sends the replays of ``stream`` where ``of`` would have sent the records.

    Wired in by `OpFTLayerBuilder`, one for each source and for each output of an operator with timers. ``tag``
    is the side output whose records these are, "" for the main one.
    """

    uid: str
    stream: str
    of: str
    schema: pa.Schema
    tag: str = ""
    rules: RetryRules = NO_RULES


# ---------------------------------------------------------------- event time, two inputs


@dataclass(frozen=True)
class AssignWatermarks:
    """Take each record's time from ``column`` (a timestamp, or int64 milliseconds since 1970).

    The watermark is the highest time seen less ``out_of_orderness_ms``; a subtask without records for
    ``idle_ms`` (None: never) does not hold the others' watermarks back.
    """

    uid: str
    column: str
    out_of_orderness_ms: int
    idle_ms: int | None
    schema: pa.Schema
    rules: RetryRules = NO_RULES


@dataclass(frozen=True)
class Join:
    """Pairs of equal keys with left.time + ``lower_ms`` <= right.time <= left.time + ``upper_ms``.

    ``function(left, right)`` makes the record of a pair. Each pair is anchored to both sides.
    """

    uid: str
    function: Callable[[Any, Any], Any]
    keys: tuple[tuple[str, ...], tuple[str, ...]]
    inputs: tuple[pa.Schema, pa.Schema]
    lower_ms: int
    upper_ms: int
    schema: pa.Schema
    volatile_state: bool = False
    rules: RetryRules = NO_RULES


# ---------------------------------------------------------------- iterations


@dataclass(frozen=True)
class IterationHead:
    """Where records that come back enter their loop again, beside those that come for the first time.

    Passes on what it gets. Once its ordinary inputs have ended, and nothing has come back for ``max_wait_ms``,
    the loop has ended.
    """

    uid: str
    max_wait_ms: int
    schema: pa.Schema


@dataclass(frozen=True)
class IterationTail:
    """Where records leave for their loop's head: passes them on by the feedback edge, in the same slot."""

    uid: str
    schema: pa.Schema


# ---------------------------------------------------------------- sinks


@dataclass(frozen=True)
class FunctionSink:
    """``function(batch)`` is called with each `pa.RecordBatch`; where it raises, halves are tried."""

    function: Callable[[pa.RecordBatch], Any]


@dataclass(frozen=True)
class WriterSink:
    """A Python Data Source's stream writer (plain or Arrow): ``write`` and ``commit`` for each batch of rows.

    A batch is cut after ``max_rows`` or ``every_ms``. Records are acknowledged once ``commit`` returned.
    """

    writer: Any
    every_ms: int
    max_rows: int


SinkConnector = FunctionSink | WriterSink


@dataclass(frozen=True)
class Sink:
    """Where records leave a topology."""

    uid: str
    connector: SinkConnector
    schema: pa.Schema
    rules: RetryRules = NO_RULES


FunctionOperator = Map | FlatMap | Filter | MapBatches | MapAsync | Reduce | Process
Operator = (
    Source
    | Replay
    | FunctionOperator
    | AssignWatermarks
    | CoProcess
    | Join
    | IterationHead
    | IterationTail
    | Sink
)
