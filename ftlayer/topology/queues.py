"""What a connector of a message queue implements, once for all ways in which a topology or a query reads it.

A queue delivers again what was not acknowledged: a Redis consumer group, AMQP, MQTT. (A log, whose records can be read
again by their offsets, is a `DataSourceStreamReader` of pyspark instead.) In Flink's words a `Queue` is a source, a
`QueueReader` its reader: `fetch` is ``pollNext``, `wake_up` its reader's
``wakeUp``, a `Fetched.position` what ``snapshotState`` would return, and
`acknowledge` is called as ``notifyCheckpointComplete`` is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa


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
    """A connection to a queue; one thread uses it, `wake_up` aside. What a method raises ends it, and it is closed."""

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """Return up to ``max_rows`` messages; None if there were none for about ``wait_s`` seconds.

        While the server is away that is None as well, and this connects again by itself. Raises `SourceError` for
        what is no matter of the connection.
        """

    def acknowledge(self, receipts: Sequence[Any]) -> None:
        """These messages are durable, and all that were fetched before them for the same subtasks.

        While the server is away this remembers them.
        """

    def waiting(self) -> int | None:
        """Return how many messages this would fetch if no more came, and no one else read; None: that is not known."""

    @property
    def is_away(self) -> bool:
        """Whether the server could not be reached the last time: what it has is not known."""

    def wake_up(self) -> None:
        """There is something to acknowledge: a fetch that waits may return. Any thread may call this."""

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
