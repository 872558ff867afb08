"""Rows as messages of NATS, and packed into chunks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack
import pyarrow as pa

from ftlayer.errors import ConfigError
from ftlayer.failures import RowsRejected
from ftlayer.sinks.bodies import bodies_of, column_of, texts_of

ID_HEADER = "Nats-Msg-Id"
"""A message with the id of one that came within the stream's ``duplicate_window`` is left out by the server."""

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Of a header."""

_OWN = "Nats-"
"""Headers that begin so tell the server something: those of a message that is copied are not for the copy."""

CHUNK_BYTES = 256 * 1024
"""Rows are staged so much at a time."""

OVERHEAD_BYTES = 1_024
"""What a message takes beside body, id and headers, at most."""


class NatsRow(NamedTuple):
    """A message: its body, its id if a column says it, its headers."""

    body: bytes
    id: str | None
    headers: Sequence[tuple[str, str]]

    @property
    def size(self) -> int:
        """How many bytes it takes, about."""
        named = sum(len(name.encode()) + len(value.encode()) + 4 for name, value in self.headers)
        return len(self.body) + named + len((self.id or "").encode())


@dataclass(frozen=True)
class NatsColumns:
    """Which columns of the rows are what of a message.

    Attributes:
        value: the body, a text or bytes; None: a JSON object of all columns.
        id: what names the message; None: it is named by where it was written.
        headers: a map of texts.
    """

    value: str | None
    id: str | None
    headers: str | None

    def messages(self, batch: pa.RecordBatch, most_bytes: int, first: int = 0) -> list[NatsRow]:
        """Return rows as messages.

        Raises `ConfigError` for a column that is missing or of another type, and `RowsRejected`, which counts rows from
        ``first``, for rows that are larger than ``most_bytes``, or have headers that NATS does not take.
        """
        count = batch.num_rows
        ids = [None] * count if self.id is None else texts_of(batch, self.id, "id_column")
        bodies, headers = bodies_of(batch, self.value, "value"), self._headers(batch)
        rows = [NatsRow(body, _id(name), each) for body, name, each in zip(bodies, ids, headers, strict=True)]
        refused = {first + place: why for place, row in enumerate(rows) if (why := _refusal(row, most_bytes))}
        if refused:
            raise RowsRejected(refused)
        return rows

    def _headers(self, batch: pa.RecordBatch) -> Sequence[Sequence[tuple[str, str]]]:
        if self.headers is None:
            return [()] * batch.num_rows
        column = column_of(batch, self.headers, "headers")
        texts = pa.map_(pa.string(), pa.string())
        try:
            found = column.cast(texts).to_pylist()
        except pa.ArrowException as error:
            raise ConfigError(
                f"headers: column {self.headers!r} is {column.type}, expected a map of texts"
            ) from error
        return [
            [(name, value) for name, value in each or () if value is not None and not name.startswith(_OWN)]
            for each in found
        ]


def _id(name: str | None) -> str | None:
    """Return an id as it comes back: without spaces around it."""
    return (name or "").strip() or None


def _refusal(row: NatsRow, most_bytes: int) -> str | None:
    """Return why the server, or its client, would not take a message."""
    if row.size > most_bytes - OVERHEAD_BYTES:
        return f"it takes {row.size:,} bytes as a message, and the stream takes {most_bytes:,}"
    for name, value in (*row.headers, (ID_HEADER, row.id or "")):
        if not _NAME.fullmatch(name) or {"\r", "\n"} & set(value):
            return f"its header {name!r} has a name or a value that NATS does not take"
    return None


def to_chunks(rows: Iterable[NatsRow]) -> Iterator[bytes]:
    """Pack rows into chunks, in order."""
    chunk: list[bytes] = []
    size = 0
    for row in rows:
        packed = msgpack.packb([row.body, row.id, [list(pair) for pair in row.headers]])
        if chunk and size + len(packed) > CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
        chunk.append(packed)
        size += len(packed)
    if chunk:
        yield b"".join(chunk)


def of_chunk(chunk: bytes) -> Iterator[NatsRow]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(chunk)
    for body, name, headers in unpacker:
        yield NatsRow(body, name, [(key, value) for key, value in headers])


def headers_of(row: NatsRow, name: str) -> Mapping[str, str]:
    """Return the headers that a message is published with, under this name if it has none of its own."""
    return {**dict(row.headers), ID_HEADER: row.id or name}
