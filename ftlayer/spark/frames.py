"""The vertex's records as DataFrames: records that are pending, waiting, on their way, or dead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftlayer.dead_letters.letter import json_text, shown_record
from ftlayer.spark.sessions import check_is_session
from ftlayer.vertex.calls import ListRecords, RecordInfo, RecordList

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from ftlayer.vertex.client.client import VertexClient

PAGE = 1_000

COLUMNS = (
    "key string, stream string, state string, root bigint, origin bigint, attempt int, not_before timestamp, "
    "reason string, operator string, traceback string, "
    "history array<struct<number: int, at: timestamp, reason: string, operator: string, place: string, "
    "traceback: string>>, record string"
)
"""The columns of `record_frame` (DDL). Ids are shown as signed 64-bit; ``key`` is hexadecimal, as `Requeue`
takes it; ``record`` is the payload as JSON."""


def list_records(client: VertexClient, state: str, stream: str = "") -> Iterator[RecordInfo]:
    """List all records in a state ("pending", "waiting", "delivery", "dead"), page by page."""
    after = b""
    while True:
        reply = client.call(ListRecords(state, stream, PAGE, after))
        assert isinstance(reply, RecordList)
        yield from reply.records
        after = reply.more
        if not after:
            return


def record_frame(spark: SparkSession, client: VertexClient, state: str, stream: str = "") -> DataFrame:
    """Return the records in ``state`` as a DataFrame (`COLUMNS`), as they were at the call.

    Raises `ConfigError` for what is no session.
    """
    check_is_session(spark)
    rows = [record_row(info) for info in list_records(client, state, stream)]
    return spark.createDataFrame(rows, COLUMNS)


def record_row(info: RecordInfo) -> tuple[Any, ...]:
    """Return one record as a row of `COLUMNS`."""
    import json
    from datetime import UTC, datetime

    def at(wall_ms: int) -> datetime | None:
        return datetime.fromtimestamp(wall_ms / 1000, UTC) if wall_ms > 0 else None

    return (
        info.key.hex(),
        info.stream,
        info.state,
        _signed(info.root),
        _signed(info.origin),
        info.attempt,
        at(info.not_before_ms),
        info.reason,
        info.operator,
        info.traceback,
        [
            (each.number, at(each.at_ms), each.reason, each.operator, each.place, each.traceback)
            for each in info.history
        ],
        json.dumps(shown_record(info.payload), default=json_text, ensure_ascii=False),
    )


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
