"""A dead letter as a program sees it."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ftlayer.functions.conversion import raw_type, records_of
from ftlayer.functions.steps import Record
from ftlayer.vertex.calls import ListRecords, RecordInfo

if TYPE_CHECKING:
    from ftlayer.vertex.client.client import VertexClient


LETTER_SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("stream", pa.string()),
        ("origin_id", pa.string()),
        ("attempts", pa.int32()),
        ("first_failed_at", pa.timestamp("us", tz="UTC")),
        ("died_at", pa.timestamp("us", tz="UTC")),
        ("reason", pa.string()),
        ("operator", pa.string()),
        ("traceback", pa.string()),
        ("record", pa.string()),
    ]
)
"""The columns of a stream of dead letters; ``record`` is the payload as JSON."""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record whose attempts are used up, or whose failure was not worth another one.

    Attributes:
        key: what `FTLayer.requeue` and `FTLayer.purge` take.
        stream: ``<query>/<source>``, or ``<topology>/<uid of the source>``.
        record: its columns by name; a value that Python cannot hold as bytes or a number.
        reason, operator, traceback: of its last failure.
        attempts: how many it had.
        first_failed_at, died_at: UTC.
        origin: the id of its first attempt, as the command shows it and `CurrentRecord` has it.
    """

    key: str
    stream: str
    record: Record
    reason: str
    operator: str
    traceback: str
    attempts: int
    first_failed_at: dt.datetime
    died_at: dt.datetime
    origin: str


def letter_of(info: RecordInfo) -> DeadLetter:
    """Return a dead letter from its listing."""
    first, last = (info.history[0].at_ms, info.history[-1].at_ms) if info.history else (0, 0)
    return DeadLetter(
        info.key.hex(),
        info.stream,
        shown_record(info.payload),
        info.reason,
        info.operator,
        info.traceback,
        info.attempt,
        dt.datetime.fromtimestamp(first / 1_000, dt.UTC),
        dt.datetime.fromtimestamp(last / 1_000, dt.UTC),
        f"{info.origin:016x}",
    )


def row_of(letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter as a row of `ftlayer.checkpoint.dead_letters.letter.LETTER_SCHEMA`."""
    return {
        "key": letter.key,
        "stream": letter.stream,
        "origin_id": letter.origin,
        "attempts": letter.attempts,
        "first_failed_at": letter.first_failed_at,
        "died_at": letter.died_at,
        "reason": letter.reason,
        "operator": letter.operator,
        "traceback": letter.traceback,
        "record": json.dumps(letter.record, default=json_text, ensure_ascii=False),
    }


def letters_behind(client: VertexClient, stream: str, after: bytes, limit: int) -> tuple[RecordInfo, ...]:
    """Return up to ``limit`` dead letters of a stream behind a position, in the order of their death."""
    return client.call(ListRecords("dead", stream, limit, after)).records


def all_letters_behind(client: VertexClient, stream: str, after: bytes, page: int) -> Iterator[RecordInfo]:
    """Iterate over all dead letters of a stream behind a position."""
    while letters := letters_behind(client, stream, after, page):
        yield from letters
        after = letters[-1].key


def shown_record(payload: pa.RecordBatch) -> Record:
    """Return the one row of ``payload``; a column that Python cannot hold as its bytes or number."""
    (record,) = records_of(payload)
    if not isinstance(record, Exception):
        return record
    shown: Record = {}
    for name, column in zip(payload.schema.names, payload.columns, strict=True):
        (value,) = records_of(pa.RecordBatch.from_arrays([column], [name]))
        shown[name] = (
            column.view(raw_type(column.type))[0].as_py() if isinstance(value, Exception) else value[name]
        )
    return shown


def json_text(value: object) -> str:
    """Return what JSON has no form for as text; bytes as text where they are some."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
