"""The operators of a topology beside the user's functions (`ftlayer.functions.steps`): what each has to know.

All are frozen values that travel to the slots inside Spark's closures. ``uid`` is unique in a graph and stays
the same over restarts: record ids, state and a source's positions are filed under it. ``schema`` is what an
operator emits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.checks import check_function
from ftlayer.functions.aggregates.table import KeyedAggregate
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import CoProcess as CoProcess
from ftlayer.functions.steps import Filter, FlatMap, Map, MapAsync, MapBatches, Process, Reduce
from ftlayer.restart import RestartStrategy, default_restart
from ftlayer.topology.queues import Queue

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
    time it is called: records, or whole `pa.RecordBatch`es. Bounded when all of them end. ``step``: a table was dealt
    out to them by so many rows; 0: they were given.
    """

    partitions: tuple[Callable[[], Iterable[Any]], ...]
    step: int = 0


class Push(Protocol):
    """What the listener of a `PushSource` hands its records to. Any thread may; a call takes all records or none.

    Raises `SourceError` for records that do not fit the schema, and once the source has ended.
    """

    def __call__(self, records: list[Any]) -> None:
        """Take records; returns once they are persisted. Raises `SourceError` if that is not known of them."""

    def push_async(self, records: list[Any]) -> Future[None]:
        """Take records and return at once; the future is done once they are persisted, many at a time.

        Waits only while 16 MiB of earlier ones wait to be taken. The future raises what a call would have, cannot be
        cancelled, and runs its callbacks in the slot's loop: they have to be short.
        """


@dataclass(frozen=True)
class PushSource:
    """Records that come by callback.

    ``start(push)`` is called in the slot of each subtask, in a thread of its own: it may stay and push, or return a
    function that stops it. It is called again when it has raised, by the source's restart strategy.
    """

    start: Callable[[Push], Callable[[], None] | None]

    def __post_init__(self) -> None:
        check_function(self.start, "PushSource: start", takes=1)


@dataclass(frozen=True)
class QueueSource:
    """A queue of messages: acknowledged when they are durable, in the vertex or in a completed checkpoint."""

    queue: Queue


SourceConnector = ReaderSource | IterableSource | PushSource | QueueSource


@dataclass(frozen=True)
class Source:
    """Where records come into a topology; each becomes a root. ``restart``: whether it is read again when it fails.

    ``replay`` says where replays come from in acker mode: ``"store"`` or ``"source"``.
    """

    uid: str
    connector: SourceConnector
    schema: pa.Schema
    rules: RetryRules = NO_RULES
    restart: RestartStrategy = field(default_factory=default_restart, repr=False, compare=False)
    replay: str = "store"


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


FunctionOperator = Map | FlatMap | Filter | MapBatches | MapAsync | Reduce | KeyedAggregate | Process
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
