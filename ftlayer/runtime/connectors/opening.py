"""Which reader a source has."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.push import PushReader
from ftlayer.runtime.connectors.readers import IterableReader, SourceReader, SplitReader
from ftlayer.stream.operators import IterableSource, ReaderSource, Source


def open_reader(
    source: Source,
    subtask: int,
    parallelism: int,
    *,
    positions: Mapping[str, bytes],
    limits: BatchLimits,
    key: bytes,
    wake: Callable[[], None],
) -> SourceReader:
    """Make the reader of one subtask; `SourceReader.start` starts it.

    Args:
        source: the source.
        subtask, parallelism: which of how many.
        positions: what `OpenStream` answered for the source's stream; empty with FTStatus.OFF.
        limits: how batches are cut. ``rows`` may not be more than the stream's ``max_pending``.
        key: the job's key, which splits are sealed by.
        wake: called from the reader's threads when the loop should ask `take` and `ended` again.
    """
    if isinstance(source.connector, IterableSource):
        return IterableReader(source, subtask, parallelism, positions, limits, wake)
    if isinstance(source.connector, ReaderSource):
        return SplitReader(source, subtask, positions, key, limits, wake)
    return PushReader(source, subtask, limits, wake)
