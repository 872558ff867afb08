"""The operators of a topology beside the user's functions (`ftlayer.functions.steps`): what each has to know.

All are frozen values that travel to the slots inside Spark's closures. ``uid`` is unique in a graph and stays
the same over restarts: record ids, state and a source's positions are filed under it. ``schema`` is what an
operator emits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import pyarrow as pa

from ftlayer.common.checks import check_function
from ftlayer.common.rules.restart import RestartStrategy, default_restart
from ftlayer.functions.aggregates import KeyedAggregate
from ftlayer.functions.retry_rules import NO_RULES, RetryRules
from ftlayer.functions.steps import CoProcess as CoProcess
from ftlayer.functions.steps import FunctionStep, Process, Reduce, TwoInputStep

# What a connector of a message queue implements, once for all ways in which a topology or a query reads it.
#
# A queue delivers again what was not acknowledged: a Redis consumer group, AMQP, MQTT. (A log, whose records can be
# read again by their offsets, is a `DataSourceStreamReader` of pyspark instead.) In Flink's words a `Queue` is a
# source, a `QueueReader` its reader: `fetch` is ``pollNext``, `wake_up` its reader's ``wakeUp``, a `Fetched.position`
# what ``snapshotState`` would return, and `acknowledge` is called as ``notifyCheckpointComplete`` is.


@dataclass(frozen=True, slots=True)
class Member:
    """One of those who share a queue's messages.

    Attributes:
        owner: names who reads: the same over restarts, and no one else's.
        subtask, parallelism: which one of how many.
    """

    owner: str
    subtask: int
    parallelism: int

    def reads_for(self, subtask: int) -> bool:
        """Whether messages of that subtask are this one's, which is there no more if there are fewer now."""
        return subtask % self.parallelism == self.subtask


@dataclass(frozen=True, slots=True)
class Fetched:
    """Messages that were delivered.

    Attributes:
        rows: of the queue's schema.
        of: the subtask that they were delivered to: the reader's own, or one that is there no more.
        position: what a reader has to be opened with for that subtask to go on behind these rows; no other fetch's, of
            this reader or another, is the same.
        receipt: what `QueueReader.acknowledge` takes.
    """

    rows: pa.RecordBatch
    of: int
    position: bytes
    receipt: Any


class QueueReader(Protocol):
    """A connection to a queue; one thread uses it, `wake_up` aside. What a method raises ends it, and it is closed.

    Who derives from it has a reader of a queue that is not told what is durable, never away, and does not count.
    """

    @abstractmethod
    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """Return up to ``max_rows`` messages; None if there were none for about ``wait_s`` seconds.

        While the server is away that is None as well, and this connects again by itself. Raises `SourceError` for
        what is no matter of the connection.
        """

    def acknowledge(self, receipts: Sequence[Any]) -> None:
        """These messages are durable, and all that were fetched before them for the same subtasks.

        While the server is away this remembers them.
        """
        return

    def waiting(self) -> int | None:
        """Return how many messages this would fetch if no more came, and no one else read; None: that is not known."""
        return None

    @property
    def is_away(self) -> bool:
        """Whether the server could not be reached the last time: what it has is not known."""
        return False

    def wake_up(self) -> None:
        """There is something to acknowledge: a fetch that waits may return. Any thread may call this."""
        return

    def close(self) -> None:
        """Disconnect. What is not acknowledged will be delivered again."""


class Queue(ABC):
    """A queue of messages, to be given to `StreamEnvironment.source`; travels to the slots.

    Attributes:
        schema: of its rows.
        most_subtasks: how many find something to do; None: any number.
    """

    schema: pa.Schema
    most_subtasks: int | None = None

    @abstractmethod
    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> QueueReader:
        """Connect.

        Args:
            member: who is going to read.
            positions: of this subtask, and of those that it `reads_for`; none for one that has never read. Messages up
                to there are not fetched again.
            stored: whether the rows up to ``positions`` are durable: then they are acknowledged now. Otherwise the
                reader takes over in the middle, and they are with the next `QueueReader.acknowledge`.

        Raises `SourceError` if the queue cannot be read, and `ConfigError` for positions of something else.
        """


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
class Join(TwoInputStep):
    """Pairs of equal keys with left.time + ``lower_ms`` <= right.time <= left.time + ``upper_ms``.

    ``function(left, right)`` makes the record of a pair. Each pair is anchored to both sides.
    """

    lower_ms: int
    upper_ms: int


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
    uid: str
    connector: SinkConnector
    schema: pa.Schema
    rules: RetryRules = NO_RULES


FunctionOperator = FunctionStep | Reduce | KeyedAggregate | Process
TwoInputOperator = CoProcess | Join
PassingOperator = AssignWatermarks | IterationHead | IterationTail
Operator = Source | Replay | FunctionOperator | TwoInputOperator | PassingOperator | Sink
