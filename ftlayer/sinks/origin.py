"""Which streaming query of Spark's writes, if any."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

from ftlayer.errors import UncommittableError


class StagedRows(Protocol):
    """A message of a sink. ``query``: see `streaming_query`."""

    @property
    def rows(self) -> int:
        """How many rows it is about."""

    @property
    def query(self) -> str:
        """Of which query they are."""


Message = TypeVar("Message", bound=StagedRows)


def by_query(messages: Iterable[Any], kind: type[Message], sink: str) -> dict[str, list[Message]]:
    """Return the messages that have rows, by query; tasks that failed have no message.

    Raises `UncommittableError` for what is no message of this ``kind``, which is that of the ``sink``.
    """
    found: dict[str, list[Message]] = {}
    for message in messages:
        if message is None:
            continue
        if not isinstance(message, kind):
            raise UncommittableError(f"expected the messages of a {sink}, got a {type(message).__name__}")
        if message.rows:
            found.setdefault(message.query, []).append(message)
    return found


def streaming_query() -> str:
    """Return the id of the Structured Streaming query that this task belongs to; "" for a topology's.

    It stays the same over restarts from the query's checkpoint. Within a query a batch id says what is committed: a
    batch that is run again writes the same rows, with other messages. Without a query the messages say it.
    """
    return _property("sql.streaming.queryId")


def streaming_batch() -> str:
    """Return the batch of the query that this task belongs to, as it is committed; "" if that is unknown."""
    return _property("streaming.sql.batchId")


def _property(name: str) -> str:
    from pyspark import TaskContext

    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty(name) or ""
