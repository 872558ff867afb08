"""The driver's face of a Python Data Source's stream reader: offsets, splits, commit. As Spark calls it.

Spark 4.2 gave ``latestOffset`` its arguments (start, limit); readers written before have none. A
`SimpleDataSourceStreamReader` reads in the driver, while it looks for the latest offset: what it read travels
with the split, and is read again (``readBetweenOffsets``) only where it got lost.

Offsets are JSON texts here. They go through JSON before the reader gets them back, as with Spark.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

from ftlayer.errors import ConfigError, SourceChangedError
from ftlayer.topology.lag import lag_behind, lies_before


class OffsetReader(Protocol):
    """What plans the ranges of a reader source. Any method may block, and raise whatever the reader raises."""

    def initial(self) -> str:
        """Return the offset that a source begins at."""

    def latest(self, start: str, *, all_of_it: bool) -> str:
        """Return how far the source can be read from ``start`` now; ``all_of_it``: without the reader's limit."""

    def is_behind(self, start: str, end: str) -> bool:
        """Whether more than up to ``end`` could be read from ``start`` now: the reader's limit is in the way."""

    def prepare_to_stop(self) -> bool:
        """Have the reader take what is there now for all there will be; False if it knows no such thing."""

    def splits(self, start: str, end: str) -> list[Any]:
        """Return the objects that `read_split` takes, one a split."""

    def lag(self, at: str) -> int | None:
        """Return how many records there are behind this offset now; None if the reader cannot tell."""

    def commit(self, end: str) -> None:
        """Tell the reader that everything up to ``end`` is accepted."""

    def stop(self) -> None:
        """Free the reader's resources."""


@dataclass(frozen=True)
class SimpleSplit:
    """The one split of a range of a simple reader; ``rows`` None: they have to be read."""

    start: str
    end: str
    rows: list[Any] | None


def without_rows(split: Any) -> Any:
    """Return what a split is kept as: rows that were read ahead are read again."""
    if isinstance(split, SimpleSplit) and split.rows is not None:
        return SimpleSplit(split.start, split.end, None)
    return split


def offset_reader(source: str, reader: Any) -> OffsetReader:
    """Return the face of ``reader``; `ConfigError` if it is no stream reader."""
    from pyspark.sql.datasource import DataSourceStreamReader, SimpleDataSourceStreamReader

    if isinstance(reader, DataSourceStreamReader):
        return _PartitionedReader(source, reader)
    if isinstance(reader, SimpleDataSourceStreamReader):
        return _SimpleReader(source, reader)
    raise ConfigError(
        f"source {source!r}: expected a DataSourceStreamReader or a SimpleDataSourceStreamReader of "
        f"pyspark.sql.datasource, got a {type(reader).__name__}"
    )


def read_split(reader: Any, split: Any) -> Iterator[Any]:
    """Read one of `OffsetReader.splits`, in a slot."""
    if not isinstance(split, SimpleSplit):
        return iter(reader.read(split))
    if split.rows is not None:
        return iter(split.rows)
    return iter(reader.readBetweenOffsets(json.loads(split.start), json.loads(split.end)))


class _PartitionedReader:
    """A `DataSourceStreamReader`."""

    def __init__(self, source: str, reader: Any) -> None:
        self._source = source
        self._reader = reader
        self._takes_start = bool(inspect.signature(reader.latestOffset).parameters)

    def initial(self) -> str:
        return _json(self._source, self._reader.initialOffset())

    def latest(self, start: str, *, all_of_it: bool) -> str:
        if not self._takes_start:
            return _behind(self._source, start, self._reader.latestOffset())
        limit = _read_all() if all_of_it else self._reader.getDefaultReadLimit()
        return _behind(self._source, start, self._reader.latestOffset(json.loads(start), limit))

    def is_behind(self, start: str, end: str) -> bool:
        return self._takes_start and self.latest(start, all_of_it=True) != end

    def prepare_to_stop(self) -> bool:
        return _prepare_to_stop(self._reader)

    def splits(self, start: str, end: str) -> list[Any]:
        plan = getattr(self._reader, "log_ranges", self._reader.partitions)  # that of a `LogReader`
        return list(plan(json.loads(start), json.loads(end)))

    def lag(self, at: str) -> int | None:
        return lag_behind(json.loads(at), self._reader.reportLatestOffset())

    def commit(self, end: str) -> None:
        self._reader.commit(json.loads(end))

    def stop(self) -> None:
        self._reader.stop()


class _SimpleReader:
    """A `SimpleDataSourceStreamReader`; keeps the rows that were read last until they are planned."""

    def __init__(self, source: str, reader: Any) -> None:
        self._source = source
        self._reader = reader
        self._read: SimpleSplit | None = None

    def initial(self) -> str:
        return _json(self._source, self._reader.initialOffset())

    def latest(self, start: str, *, all_of_it: bool) -> str:
        found, reached = self._reader.read(json.loads(start))
        rows, end = list(found), _behind(self._source, start, reached)
        if end == start and rows:
            raise ConfigError(
                f"source {self._source!r}: {type(self._reader).__name__}.read gave {len(rows)} rows and the offset "
                f"it was given, {start}: they would be read without end"
            )
        self._read = SimpleSplit(start, end, rows)
        return end

    def is_behind(self, start: str, end: str) -> bool:
        return False  # it has no limit, and what it reads next is known only when it is read

    def prepare_to_stop(self) -> bool:
        return _prepare_to_stop(self._reader)

    def splits(self, start: str, end: str) -> list[Any]:
        read, self._read = self._read, None
        if read is not None and (read.start, read.end) == (start, end):
            return [read]
        return [SimpleSplit(start, end, None)]

    def lag(self, at: str) -> int | None:
        return None  # what there is it knows only by reading it

    def commit(self, end: str) -> None:
        self._reader.commit(json.loads(end))

    def stop(self) -> None:
        """Do nothing: simple readers have nothing of the kind."""


def _prepare_to_stop(reader: Any) -> bool:
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    if not isinstance(reader, SupportsTriggerAvailableNow):
        return False
    reader.prepareForTriggerAvailableNow()
    return True


def _read_all() -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return ReadAllAvailable()


def _behind(source: str, start: str, end: Any) -> str:
    """Return the end of a range as JSON. Raises `SourceChangedError` for one before its start."""
    if lies_before(end, json.loads(start)):
        raise SourceChangedError(
            f"source {source!r}: it was read up to {start}, and its reader says that it ends at {_json(source, end)} "
            "now: it was cut, or made anew. Give it back what it had; or give it another uid, with which it begins at "
            "its initialOffset"
        )
    return _json(source, end)


def _json(source: str, offset: Any) -> str:
    try:
        return json.dumps(offset)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"source {source!r}: the offset {offset!r} cannot be written as JSON: {error}"
        ) from error


# ---------------------------------------------------------------- digests


def digest_of(splits: Sequence[Any]) -> bytes:
    """Return 32 bytes that are the same, in every process, for splits that say the same.

    Classes and functions count by name: pickled by value, as those of a main program are, they differ from
    process to process.
    """
    digest = hashlib.sha256()
    for split in splits:
        said = (split.start, split.end) if isinstance(split, SimpleSplit) else split
        pickled = _stable_pickle(said)
        digest.update(len(pickled).to_bytes(8, "little") + pickled)
    return digest.digest()


class _StablePickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, type | FunctionType):
            return value.__module__, value.__qualname__
        return None


def _stable_pickle(value: Any) -> bytes:
    from pyspark import cloudpickle

    written = io.BytesIO()
    pickler = _StablePickler(written, protocol=4)
    # Without a memo: whether equal values are one object or two is nothing that a split says.
    pickler.fast = True
    try:
        pickler.dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        pickled: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
        return pickled
    return written.getvalue()
