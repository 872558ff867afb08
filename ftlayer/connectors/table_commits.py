"""What the sinks have in common that stage rows and commit them once: messages, tries, and what dead writers leave."""

from __future__ import annotations

import logging
import random
import secrets
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.storage.files import StoragePool
from ftlayer.common.checks import LONGEST_MS, Duration, check_texts, duration_ms, named_type
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, hidden
from ftlayer.errors import ConfigError, FTLayerError, SinkError, UncommittableError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter

logger = logging.getLogger(__name__)

TRIES = 4
"""How often a commit or abort is tried that fails; each has its effect once."""
CONFLICTS = 20
"""How often a commit is tried that others were faster than."""
TRY_AGAIN_S = 0.2

Item = TypeVar("Item")
Result = TypeVar("Result")


class StagedRows(Protocol):
    """A message of a sink. ``query``: see `streaming_query`."""

    @property
    def rows(self) -> int: ...
    @property
    def query(self) -> str: ...


Message = TypeVar("Message", bound=StagedRows)


def by_query(messages: Iterable[Any], kind: type[Message]) -> dict[str, list[Message]]:
    """Return the messages that have rows, by query; tasks that failed have no message.

    Raises `UncommittableError` for what is no message of this ``kind``.
    """
    found: dict[str, list[Message]] = {}
    for message in messages:
        if message is None:
            continue
        if not isinstance(message, kind):
            raise UncommittableError(
                f"expected messages of {kind.__name__.replace('Message', 'Sink')}, got {named_type(message)}"
            )
        if message.rows:
            found.setdefault(message.query, []).append(message)
    return found


def uncommittable(
    said: str, found: Mapping[str, Sequence[StagedRows]], number: int, way: str
) -> UncommittableError:
    """Return the error for what was ``found`` by query and has no place to go any more; ``way`` says where it is."""
    rows = sum(one.rows for written in found.values() for one in written)
    of = "batch" if any(found) else "checkpoint"
    return UncommittableError(f"{said}. {rows:,} rows of {of} {number} are staged{way}")


def streaming_query() -> str:
    """Return the id of the Structured Streaming query that this task belongs to; "" for a topology's.

    It stays the same over restarts from the query's checkpoint. Within a query a batch id says what is committed: a
    batch that is run again writes the same rows, with other messages. Without a query the messages say it.
    """
    return _property("sql.streaming.queryId")


def streaming_batch() -> str:
    return _property("streaming.sql.batchId")


def _property(name: str) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty(name) or ""


class StagingSink(DataSourceStreamArrowWriter, Generic[Message]):
    """A sink whose ``write`` stages rows, and whose ``commit`` lets them be seen, each once.

    Attributes:
        _kind: of its messages.
        _connections: attributes that a copy has None of: it connects by itself.
    """

    _kind: type[Message]
    _connections: ClassVar[tuple[str, ...]] = ()
    _place: str
    _name: str

    def __init__(self) -> None:
        # Copies of this object in slots and driver share it: what other executions have left is told by it.
        self._execution = secrets.token_hex(8)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove what is staged of messages; what is committed stays, and what may be."""
        if written := self._with_rows(messages):
            self._abort(written, batch_id)

    @abstractmethod
    def _abort(self, written: list[Message], batch_id: int) -> None: ...

    def _with_rows(self, messages: Iterable[WriterCommitMessage | None]) -> list[Message]:
        return [one for written in by_query(messages, self._kind).values() for one in written]

    def _lost(self, staged: int, there: int, or_else: str = "") -> UncommittableError:
        return UncommittableError(
            f"{self._place}: {staged:,} rows were staged and {there:,} are there, which were not committed: did "
            f"something else remove them ({type(self).__name__}.clean with a checkpoint that was kept, say)"
            f"{or_else}, or had the sink another name than {self._name!r} when they were committed?"
        )

    def _doing(self, doing: str, work: Callable[[], Result]) -> Result:
        """Do this; any error but ours is a `SinkError`, and what it was done over is connected to anew."""
        try:
            return work()
        except (FTLayerError, RowsRejected):
            raise
        except Exception as error:  # Libraries raise what their clients raise.
            self.__dict__.update(dict.fromkeys(self._connections))
            raise SinkError(f"{self._place}: rows cannot be {doing}: {self._said(error)}") from error

    def _said(self, error: Exception) -> str:
        return described(error)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._connections)}


class CleaningSink(StagingSink[Message]):
    """One that finds what writers have staged that died."""

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than: Duration = "1d"
    ) -> list[str]:
        """Remove what writers have staged that died before they could abort; returns what that was.

        These are ids of messages, or paths or names of files: what other executions than this object's have staged
        under the sink's name, longer ago than ``older_than``, and what neither a commit nor ``keep`` (messages of
        checkpoints that may still be restored) names. Checkpoints and savepoints that hold other rows cannot be
        restored any more, if their commit had not come.
        """
        older_than_ms = duration_ms(older_than, "clean: older_than", least=-LONGEST_MS)
        return self._clean(self._with_rows(keep), older_than_ms)

    @abstractmethod
    def _clean(self, keep: list[Message], older_than_ms: int) -> list[str]: ...


def check_partition_by(partition_by: Sequence[str]) -> None:
    if isinstance(partition_by, str):
        raise ConfigError(f"partition_by: expected names of columns in a list, got {partition_by!r}")
    check_texts(partition_by, "partition_by", "names of columns")


def divided(
    found: Mapping[str, list[Message]],
    number: int,
    is_committed: Callable[[Message], bool],
    batch_of: Callable[[str], int | None],
) -> tuple[list[Message], list[Message]]:
    """Return what is to be committed, and the messages of batches that are run again: other ones, of the same rows."""
    adding: list[Message] = []
    again: list[Message] = []
    for query, written in found.items():
        if not query:
            adding += [message for message in written if not is_committed(message)]
            continue
        last = batch_of(query)
        (adding if last is None or last < number else again).extend(written)
    return adding, again


def commits_of(found: Mapping[str, list[Message]], number: int) -> Iterator[tuple[str, list[Message]]]:
    """Yield what is committed as one, by its id: all messages of a query's batch, and each of a checkpoint."""
    for query, written in found.items():
        if query:
            yield f"{query}/{number}", written
        else:
            for message in written:
                yield message.id, [message]  # type: ignore[attr-defined]


def tried(
    work: Callable[[], Result],
    secrets: Sequence[str],
    *,
    may_help: Callable[[SinkError], bool] = lambda error: error.__cause__ is not None,
    conflict: type[BaseException] | None = None,
) -> Result:
    """Do what raises `SinkError`, again if it fails and another try ``may_help``: each looks first what is committed.

    ``conflict`` is what causes the error if another writer was faster; the log does not tell ``secrets``.
    """
    failures = conflicts = 0
    while True:
        try:
            return work()
        except UncommittableError:
            raise
        except SinkError as error:
            is_conflict = conflict is not None and isinstance(error.__cause__, conflict)
            conflicts, failures = conflicts + is_conflict, failures + (not is_conflict)
            if failures >= TRIES or conflicts >= CONFLICTS or not may_help(error):
                raise
            logger.warning("%s; it is tried again", hidden(error, secrets))
            time.sleep(TRY_AGAIN_S * random.uniform(0.5, 1.5) * (1 << min(failures, 4)))


def for_all(work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    with closing(StoragePool()) as crew:
        return crew.map(work, items)
