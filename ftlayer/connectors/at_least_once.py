"""Sinks that send each row at least once, as stream writers: for Spark's own queries, and wrapped ones."""

from __future__ import annotations

import base64
import datetime as dt
import itertools
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import check_text
from ftlayer.common.failures import RowsRejected
from ftlayer.connectors.connections import Reconnecting
from ftlayer.errors import ConfigError, SinkError
from ftlayer.functions.data_sources import DataSourceStreamArrowWriter

Message = TypeVar("Message")


def bodies_of(batch: pa.RecordBatch, body: str | None, option: str) -> list[bytes]:
    """Return a body for each row: the column ``body``, a null as no bytes; None: a JSON object of all columns.

    There bytes are in base64 and times in ISO 8601. Raises `ConfigError`, which names the ``option``, for a column that
    is missing or neither a text nor bytes, and `ValueError` for a number that JSON does not have.
    """
    if body is None:
        return [json.dumps(row, default=as_json, allow_nan=False).encode() for row in batch.to_pylist()]
    column = column_of(batch, body, option)
    if not (pa.types.is_string(column.type) or pa.types.is_binary(column.type)):
        raise ConfigError(f"{option}: column {body!r} is {column.type}, expected a text or bytes")
    values = column.cast(pa.binary()).to_pylist()
    return [b"" if value is None else value for value in values]


def texts_of(
    batch: pa.RecordBatch, name: str | None, option: str, otherwise: str | None = None
) -> list[str | None]:
    """Return a text for each row: of the column ``name``; None: ``otherwise``. Raises `ConfigError` as `bodies_of`."""
    if name is None:
        return [otherwise] * batch.num_rows
    values = column_of(batch, name, option).to_pylist()
    return [None if value is None else str(value) for value in values]


def column_of(batch: pa.RecordBatch, name: str, option: str) -> pa.Array:
    if name not in batch.schema.names:
        raise ConfigError(
            f"{option}: rows have no column {name!r}; they have {', '.join(batch.schema.names)}"
        )
    return batch.column(name)


def as_json(value: object) -> object:
    """Return what JSON has for a value that is none of its own: bytes in base64, times in ISO 8601, others' texts."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    return str(value)


@dataclass(slots=True)
class Publishing(Generic[Message]):
    """Messages by their rows. ``left``: they are not confirmed; ``errors``: why some will not be."""

    left: dict[int, Message]
    errors: dict[int, Exception] = field(default_factory=dict)


def check_columns(**columns: object) -> None:
    """Raise `ConfigError` for an option that names no column; None names none, and will do."""
    for option, column in columns.items():
        if column is not None:
            check_text(column, option, "the name of a column")


class PublishingSink(ABC, Generic[Message]):
    """A function that publishes each row over a connection, which it makes again where it is lost.

    Attributes:
        place: how errors and the log name what is published to.
        _connection: None while there is none; a copy has none.
        _patience_ms: for how long the server may be away.
    """

    place: str
    _connection: Any = None
    _patience_ms: int
    _secrets: Sequence[str]

    def __call__(self, batch: pa.RecordBatch) -> None:
        """Publish rows, and wait until the server has taken them.

        Raises `RowsRejected` for those that it has not taken, and `ConfigError` for a column.
        """
        if batch.num_rows and (errors := self._published(batch)):
            raise RowsRejected(dict[int, Exception | str](errors))

    @abstractmethod
    def _published(self, batch: pa.RecordBatch) -> dict[int, Exception]:
        """Publish rows; return why some were not taken."""

    @abstractmethod
    def _publish_once(self, attempt: Publishing[Message]) -> None:
        """Publish what is left of an attempt, and wait until nothing is. Raises what the client does."""

    @abstractmethod
    def _is_away(self, error: Exception) -> bool:
        """Whether the connection is lost, and may be made again."""

    def _publish(self, attempt: Publishing[Message]) -> None:
        """Publish what is left of an attempt, again where the connection is lost.

        Raises `SinkError` if the server stays away, and what else the client does.
        """
        away = Reconnecting(self.place, self._patience_ms, self._secrets, error=SinkError)
        while attempt.left:
            before = len(attempt.left)
            try:
                self._publish_once(attempt)
            except Exception as error:
                connection, self._connection = self._connection, None
                if connection is not None:
                    connection.close()
                if not self._is_away(error):
                    raise
                if len(attempt.left) < before:
                    away.works()
                away.failed(error)
                away.wait(self._patience_ms / 1_000)
        away.works()

    def __getstate__(self) -> dict[str, Any]:
        # A copy connects by itself.
        return {**self.__dict__, "_connection": None}


class WriterNumbers:
    """Gives a number to each message of one copy of a writer. A copy of this object begins again, as another writer.

    Messages of a writer are committed in the order of their numbers, as long as one subtask has it, so the highest
    one that is committed says nearly all.
    """

    def __init__(self) -> None:
        self.writer = secrets.token_hex(8)
        self._numbers: Iterator[int] = itertools.count(1)

    def next(self) -> int:
        return next(self._numbers)

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


@dataclass(frozen=True)
class SentMessage(WriterCommitMessage):
    rows: int


class SendingWriter(DataSourceStreamArrowWriter):
    """Sends rows in ``write``, in the tasks; ``commit`` and ``abort`` have nothing to do.

    A task that fails, or is run again, sends its rows again.
    """

    def __init__(self, send: Callable[[pa.RecordBatch], Any]) -> None:
        """``send`` is the function that is the sink of a topology; it returns when the rows have arrived."""
        self._send = send

    def write(self, iterator: Iterator[pa.RecordBatch]) -> SentMessage:
        """Send rows. Raises what ``send`` does; `RowsRejected` numbers the rows through all batches."""
        rows = 0
        rejected: dict[int, Exception | str] = {}
        for batch in iterator:
            try:
                self._send(batch)
            except RowsRejected as error:
                rejected |= {rows + row: reason for row, reason in error.errors.items()}
            rows += batch.num_rows
        if rejected:
            raise RowsRejected(rejected)
        return SentMessage(rows)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Nothing is left to do."""

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """What was sent cannot be called back."""
