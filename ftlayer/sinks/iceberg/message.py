"""What an `IcebergSink` has staged: data files, in plain values that any version of pyiceberg can be given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyspark.sql.datasource import WriterCommitMessage

COUNTS = (
    "column_sizes",
    "value_counts",
    "null_value_counts",
    "nan_value_counts",
    "lower_bounds",
    "upper_bounds",
)


@dataclass(frozen=True)
class StagedDataFile:
    """A data file that no snapshot has yet. ``metrics``: pyiceberg's, by their names."""

    path: str
    size: int
    rows: int
    partition: tuple[Any, ...]
    metrics: dict[str, Any]


@dataclass(frozen=True)
class IcebergMessage(WriterCommitMessage):
    """The result of one `IcebergSink.write`. ``query``: see `streaming_query`.

    ``writer`` and ``number``: see `WriterNumbers`. ``table`` is the table's UUID, ``spec`` the partition spec then.
    """

    writer: str
    number: int
    written_ms: int
    files: tuple[StagedDataFile, ...]
    rows: int
    table: str
    spec: int
    query: str

    @property
    def id(self) -> str:
        return f"{self.writer}-{self.number}"


def staged(file: Any) -> StagedDataFile:
    partition = tuple(file.partition[at] for at in range(len(file.partition)))
    metrics = {name: getattr(file, name) for name in (*COUNTS, "split_offsets")}
    return StagedDataFile(file.file_path, file.file_size_in_bytes, file.record_count, partition, metrics)


def data_file(file: StagedDataFile, spec: int) -> Any:
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.typedef import Record

    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=file.path,
        file_format=FileFormat(file.path.rpartition(".")[2].upper()),
        partition=Record(*file.partition),
        record_count=file.rows,
        file_size_in_bytes=file.size,
        sort_order_id=None,
        spec_id=spec,
        equality_ids=None,
        key_metadata=None,
        **file.metrics,
    )
