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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Protocol

import msgpack
import numpy as np

from ftlayer.common.checks import named_type
from ftlayer.errors import ConfigError, SourceChangedError
from ftlayer.runtime.protocol.messages import ReaderRange
from ftlayer.topology.checks import lag_behind, lies_before
from ftlayer.vertex.calls import SourcePosition

# How far a source's partitions were read, as the vertex keeps it: written in the transaction of the rows.
#
# Partition i of a source is filed under `partition_key` (i). What is filed there is
#
# - for an iterable: the number of its rows that are accepted, and of a table by how many rows it was dealt out;
# - for a reader: which split of which *range* was read last under this number, and how far (`SplitPosition`).
#
# A reader is read range by range: its partitions between two offsets are the splits of the range, and the next
# range begins when all of them are done. Every position names its whole range, so that any one of them tells
# what was under way when everything else is gone. Ranges are numbered upwards; a range whose partitions turn
# out otherwise when it is planned again is read again under a number of its own. So the highest number there
# is belongs to the open range, and positions of lower ones only say where the chain of their partition ended.
#
# With ``replay="source"`` the next range begins before that: several are open, each partition is in one of them, and
# each range was noted before it was opened (`pack_range`).


_KEY_PREFIX = "p"


def partition_key(index: int) -> str:
    return f"{_KEY_PREFIX}{index}"


def partition_index(key: str) -> int:
    return int(key.removeprefix(_KEY_PREFIX))


def pack_rows(rows: int, step: int = 0) -> bytes:
    """Return the position of an iterable of which ``rows`` rows are accepted; ``step`` is that of `IterableSource`."""
    packed: bytes = msgpack.packb([rows, step] if step else rows)
    return packed


def unpack_rows(source: str, positions: Mapping[str, bytes], index: int, step: int) -> int:
    """Return how many rows of a partition are accepted, by what `pack_rows` wrote of all of them.

    Raises `ConfigError` for the position of another kind of source, `SourceChangedError` if these rows were dealt out
    otherwise. Where nothing was read but the first of the first partition, they are the same ones.
    """
    packed = positions.get(partition_key(index))
    if packed is None:
        return 0
    found = _unpack(packed)
    rows, dealt = found if isinstance(found, list) and len(found) == 2 else (found, 0)
    if type(rows) is not int or type(dealt) is not int or min(rows, dealt) < 0:
        raise _another_kind(source)
    if dealt != step and (len(positions) > 1 or index or rows > (step or dealt)):
        raise SourceChangedError(
            f"source {source!r}: {rows} rows of partition {index} were read before, of {_dealt(dealt)}, and now there "
            f"are {_dealt(step)}: some would be left out, others read twice. Give it back what it had; or give the "
            "source another uid, with which it is read from its start"
        )
    return rows


def _dealt(step: int) -> str:
    return f"a table that is dealt out by steps of {step} rows" if step else "partitions that were given"


@dataclass(frozen=True, slots=True)
class SplitPosition:
    """How far one split of a range of a reader was read: ``rows`` of it are accepted; ``done``: those are all."""

    range: ReaderRange
    rows: int
    done: bool

    def pack(self) -> bytes:
        return pack_range(self.range, self.rows, self.done)


def places_of(payloads: Sequence[bytes]) -> bytes:
    """Return a bit for each split, whether it has records in this range; b"" where all have."""
    return b"" if all(payloads) else np.packbits([payload != b"" for payload in payloads]).tobytes()


def unpack_split(source: str, packed: bytes) -> SplitPosition:
    found = _unpack(packed)
    kinds = (int, str, str, int, bytes, int, bool, bytes)
    if not isinstance(found, list) or tuple(map(type, found)) not in (kinds, kinds[:-1]):
        raise _another_kind(source)
    *planned, rows, done = found[:7]
    return SplitPosition(ReaderRange(*planned, *found[7:]), rows, done)


def _unpack(packed: bytes) -> object:
    try:
        return msgpack.unpackb(packed)
    except (ValueError, TypeError, msgpack.UnpackException):
        return None


def _another_kind(source: str) -> ConfigError:
    return ConfigError(
        f"source {source!r}: the positions stored under this uid are of another kind of source (an iterable "
        "counts rows, a reader has offsets); give the new source a uid of its own"
    )


@dataclass(frozen=True, slots=True)
class RangeProgress:
    """The range that positions tell of. ``rows[i]`` of split i are accepted; all of them if ``done[i]``."""

    range: ReaderRange
    rows: tuple[int, ...]
    done: tuple[bool, ...]

    @property
    def complete(self) -> bool:
        return all(self.done)


def pack_range(planned: ReaderRange, *read: int) -> bytes:
    # Of a position, ``read`` is what is known of its split.
    places = [planned.places] if planned.places else []
    values = [planned.number, planned.start, planned.end, planned.splits, planned.digest, *read, *places]
    packed: bytes = msgpack.packb(values)
    return packed


def progress_of(
    source: str, positions: Mapping[str, bytes], planned: Iterable[bytes] = ()
) -> tuple[RangeProgress, ...]:
    """Return the ranges that are not complete, and the last one in any case, in their order; () for none at all.

    ``planned`` are those that were noted (`pack_range`). Of others the last one alone is known, from the positions.
    """
    found = {key: unpack_split(source, packed) for key, packed in positions.items()}
    notes = {note.number: note for note in (ReaderRange(*msgpack.unpackb(packed)) for packed in planned)}
    last = max((position.range for position in found.values()), key=lambda each: each.number, default=None)
    if last is not None and last.number > max(notes, default=0):
        notes[last.number] = last
    ranges = [_progress_in(notes[number], found) for number in sorted(notes)]
    return tuple(each for each in ranges if each is ranges[-1] or not each.complete)


def _progress_in(note: ReaderRange, positions: Mapping[str, SplitPosition]) -> RangeProgress:
    """Return how far a range was accepted; a partition that is in a later one has passed it."""
    rows, done = [], []
    has_records = np.unpackbits(np.frombuffer(note.places, np.uint8)) if note.places else [1] * note.splits
    for index in range(note.splits):
        split = positions.get(partition_key(index))
        is_here = split is not None and split.range.number == note.number
        rows.append(split.rows if split is not None and is_here else 0)
        passed = split is not None and (split.done if is_here else split.range.number > note.number)
        done.append(passed or not has_records[index])
    return RangeProgress(note, tuple(rows), tuple(done))


class PositionChain:
    """The positions of a source's partitions from here on: each begins with the bytes that the last ended with.

    The vertex refuses a position that does not. So two readers of one partition cannot both go on.
    """

    def __init__(self, positions: Mapping[str, bytes]) -> None:
        self._last = dict(positions)

    def last(self, partition: str) -> bytes | None:
        return self._last.get(partition)

    def advance(self, partition: str, end: bytes) -> SourcePosition:
        """Return the position of the next rows, behind which ``partition`` has come to ``end``."""
        position = SourcePosition(partition, self._last.get(partition), end)
        self._last[partition] = end
        return position


class OffsetReader(Protocol):
    """What plans the ranges of a reader source. Any method may block, and raise whatever the reader raises."""

    def initial(self) -> str: ...

    def latest(self, start: str, *, all_of_it: bool) -> str:
        """Return how far the source can be read from ``start`` now; ``all_of_it``: without the reader's limit."""

    def is_behind(self, start: str, end: str) -> bool:
        """Whether more than up to ``end`` could be read from ``start`` now: the reader's limit is in the way."""

    def prepare_to_stop(self) -> bool:
        """Have the reader take what is there now for all there will be; False if it knows no such thing."""

    def splits(self, start: str, end: str) -> list[Any]:
        """Return the objects that `read_split` takes, one a split; None for one of a log that has no records."""

    def lag(self, at: str) -> int | None:
        """Return how many records there are behind this offset now; None if the reader cannot tell."""

    def commit(self, end: str) -> None:
        """Tell the reader that everything up to ``end`` is accepted."""

    def stop(self) -> None: ...


@dataclass(frozen=True)
class SimpleSplit:
    """The one split of a range of a simple reader; ``rows`` None: they have to be read."""

    start: str
    end: str
    rows: list[Any] | None


def without_rows(split: Any) -> Any:
    if isinstance(split, SimpleSplit) and split.rows is not None:
        return SimpleSplit(split.start, split.end, None)
    return split


def offset_reader(source: str, reader: Any) -> OffsetReader:
    from pyspark.sql.datasource import DataSourceStreamReader, SimpleDataSourceStreamReader

    if isinstance(reader, DataSourceStreamReader):
        return _PartitionedReader(source, reader)
    if isinstance(reader, SimpleDataSourceStreamReader):
        return _SimpleReader(source, reader)
    raise ConfigError(
        f"source {source!r}: expected a DataSourceStreamReader or a SimpleDataSourceStreamReader of "
        f"pyspark.sql.datasource, got {named_type(reader)}"
    )


def read_split(reader: Any, split: Any) -> Iterator[Any]:
    if not isinstance(split, SimpleSplit):
        return iter(reader.read(split))
    if split.rows is not None:
        return iter(split.rows)
    return iter(reader.readBetweenOffsets(json.loads(split.start), json.loads(split.end)))


class _Reader:
    def __init__(self, source: str, reader: Any) -> None:
        self._source = source
        self._reader = reader

    def initial(self) -> str:
        return _json(self._source, self._reader.initialOffset())

    def prepare_to_stop(self) -> bool:
        from ftlayer.functions.data_sources import SupportsTriggerAvailableNow

        if not isinstance(self._reader, SupportsTriggerAvailableNow):
            return False
        self._reader.prepareForTriggerAvailableNow()
        return True

    def commit(self, end: str) -> None:
        self._reader.commit(json.loads(end))


class _PartitionedReader(_Reader):
    def __init__(self, source: str, reader: Any) -> None:
        super().__init__(source, reader)
        self._takes_start = bool(inspect.signature(reader.latestOffset).parameters)

    def latest(self, start: str, *, all_of_it: bool) -> str:
        if not self._takes_start:
            return _behind(self._source, start, self._reader.latestOffset())
        from ftlayer.functions.data_sources import ReadAllAvailable

        own = None if all_of_it else getattr(self._reader, "getDefaultReadLimit", None)  # Spark 4.1 has none
        limit = ReadAllAvailable() if own is None else own()
        return _behind(self._source, start, self._reader.latestOffset(json.loads(start), limit))

    def is_behind(self, start: str, end: str) -> bool:
        return self._takes_start and self.latest(start, all_of_it=True) != end

    def splits(self, start: str, end: str) -> list[Any]:
        plan = getattr(self._reader, "log_ranges", self._reader.partitions)  # that of a `LogReader`
        return list(plan(json.loads(start), json.loads(end)))

    def lag(self, at: str) -> int | None:
        report = getattr(self._reader, "reportLatestOffset", None)  # as above
        return None if report is None else lag_behind(json.loads(at), report())

    def stop(self) -> None:
        self._reader.stop()


class _SimpleReader(_Reader):
    """A `SimpleDataSourceStreamReader`; keeps the rows that were read last until they are planned."""

    def __init__(self, source: str, reader: Any) -> None:
        super().__init__(source, reader)
        self._read: SimpleSplit | None = None

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

    def splits(self, start: str, end: str) -> list[Any]:
        read, self._read = self._read, None
        if read is not None and (read.start, read.end) == (start, end):
            return [read]
        return [SimpleSplit(start, end, None)]

    def lag(self, at: str) -> int | None:
        return None  # what there is it knows only by reading it

    def stop(self) -> None: ...


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
