"""What a `KafkaSink` hands from its writers to its commit: rows, inside of the message or in a file beside it."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, cast

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.checkpoint.storage.files import FileOutput, Files
from ftlayer.checkpoint.storage.layout import join
from ftlayer.errors import CheckpointDamagedError, UncommittableError

INLINE_BYTES = 1 << 16
"""Rows of this size are in the message itself. It lies in the checkpoint, and is sent to the driver as a whole."""


@dataclass(frozen=True)
class KafkaMessage(WriterCommitMessage):
    """The rows of one `KafkaSink.write`.

    Attributes:
        sink: name of the sink.
        execution: of the program that wrote it; `writer` in it; ``number`` of the message, from 1.
        rows: how many.
        query: see `streaming_query`.
        written_ms: when, by the clock of the writer (milliseconds since 1970).
        content: the rows as an Arrow stream; b"": they are in a file.
        path: of this file, below the staging directory; ``size`` in bytes.
    """

    sink: str
    execution: str
    writer: str
    number: int
    rows: int
    query: str
    written_ms: int
    content: bytes = b""
    path: str = ""
    size: int = 0


class StagedMessages(io.RawIOBase):
    """Takes the bytes of a message: they are kept in memory, and in a new file once they are too many.

    The file lasts when `finish` has returned; `abandon` removes it.
    """

    def __init__(self, files: Files, path: str) -> None:
        """``path`` is the file's, if one is needed."""
        super().__init__()
        self._files, self._path = files, path
        self._kept = bytearray()
        self._output: FileOutput | None = None
        self.size = 0

    @property
    def content(self) -> bytes:
        return bytes(self._kept)

    @property
    def path(self) -> str:
        """Of the file; "": there is none."""
        return "" if self._output is None else self._path

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        """Return how many bytes it has taken."""
        return self.size

    def write(self, data: object) -> int:
        chunk = bytes(data)  # type: ignore[call-overload]
        self.size += len(chunk)
        if self._output is None and self.size > INLINE_BYTES:
            self._output = self._files.create(self._path)
            self._output.write(bytes(self._kept))
            self._kept.clear()
        if self._output is None:
            self._kept += chunk
        else:
            self._output.write(chunk)
        return len(chunk)

    def finish(self) -> None:
        if self._output is not None:
            self._output.sync()
            self._output.close()

    def abandon(self) -> None:
        """Remove the file, if there is one."""
        if self._output is not None:
            self._output.abandon()


def encode(batches: Iterable[pa.RecordBatch], schema: pa.Schema, into: StagedMessages) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with pa.ipc.new_stream(cast(BinaryIO, into), schema, options=options) as stream:
        for batch in batches:
            stream.write_batch(batch)


def content_of(message: KafkaMessage, files: Files) -> bytes:
    """Return the rows as `encode` wrote them. Raises `UncommittableError` if their file is gone or was cut."""
    if not message.path:
        return message.content
    where = join(files.url, message.path)
    try:
        content = files.read(message.path)
    except CheckpointDamagedError as error:
        raise UncommittableError(
            f"{where} is gone, with {message.rows:,} rows that were not committed: has something else removed it "
            "(KafkaSink.clean with a checkpoint that was kept, say), is staging another directory than where they were "
            "written, or were they committed so long ago that the brokers have forgotten (offsets.retention.minutes)?"
        ) from error
    if len(content) != message.size:
        raise UncommittableError(f"{where} has {len(content):,} bytes and was written with {message.size:,}")
    return content


def batches_of(content: bytes) -> Iterator[pa.RecordBatch]:
    """Return the rows that `encode` wrote. Raises `UncommittableError` for other bytes."""
    try:
        with pa.ipc.open_stream(pa.py_buffer(content)) as stream:
            yield from stream
    except (pa.ArrowException, OSError) as error:
        raise UncommittableError(f"staged rows were damaged after they were written: {error}") from error
