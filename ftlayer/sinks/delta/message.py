from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql.datasource import WriterCommitMessage


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
