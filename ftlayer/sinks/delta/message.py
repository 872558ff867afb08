from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.errors import UncommittableError


@dataclass(frozen=True)
class StagedFile:
    """A Parquet file of a table that no commit names yet: what the commit will say about it."""

    path: str
    size: int
    partition_values: tuple[tuple[str, str | None], ...]
    stats: str


@dataclass(frozen=True)
class DeltaMessage(WriterCommitMessage):
    """The result of one `DeltaSink.write`. ``query``: see `streaming_query`.

    ``writer`` and ``number``: see `WriterNumbers`. ``schema``: of the table then, as Arrow writes it.
    """

    writer: str
    number: int
    written_ms: int
    files: tuple[StagedFile, ...]
    rows: int
    schema: bytes
    partition_by: tuple[str, ...]
    query: str

    @property
    def id(self) -> str:
        """The name by which commits of the table know it."""
        return f"{self.writer}-{self.number}"


def by_query(messages: Iterable[WriterCommitMessage | None]) -> dict[str, list[DeltaMessage]]:
    """Return the messages that have rows, by query; tasks that failed have no message."""
    found: dict[str, list[DeltaMessage]] = {}
    for message in messages:
        if message is None:
            continue
        if not isinstance(message, DeltaMessage):
            raise UncommittableError(f"expected the messages of a DeltaSink, got a {type(message).__name__}")
        if message.rows:
            found.setdefault(message.query, []).append(message)
    return found
