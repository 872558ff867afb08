"""How far a source's partitions were read, as the vertex keeps it: written in the transaction of the rows.

Partition i of a source is filed under `partition_key` (i). What is filed there is

- for an iterable: the number of its rows that are accepted, and of a table by how many rows it was dealt out;
- for a reader: which split of which *range* was read last under this number, and how far (`SplitPosition`).

A reader is read range by range: its partitions between two offsets are the splits of the range, and the next
range begins when all of them are done. Every position names its whole range, so that any one of them tells
what was under way when everything else is gone. Ranges are numbered upwards; a range whose partitions turn
out otherwise when it is planned again is read again under a number of its own. So the highest number there
is belongs to the open range, and positions of lower ones only say where the chain of their partition ended.

With ``replay="source"`` the next range begins before that: several are open, each partition is in one of them, and
each range was noted before it was opened (`RangeNote`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgpack

from ftlayer.errors import ConfigError, SourceChangedError
from ftlayer.vertex.calls import SourcePosition

_KEY_PREFIX = "p"


def partition_key(index: int) -> str:
    """Return the name that partition ``index`` of a source has in the vertex."""
    return f"{_KEY_PREFIX}{index}"


def partition_index(key: str) -> int:
    """Return the partition that `partition_key` made a name of."""
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
    """How far one split of a range of a reader was read.

    Attributes:
        range: number of the range.
        start, end: its offsets as JSON.
        splits: how many splits it has.
        digest: of its partition objects; equal digests mean that they are the same ones.
        rows: of this split, how many are accepted.
        done: whether those are all.
    """

    range: int
    start: str
    end: str
    splits: int
    digest: bytes
    rows: int
    done: bool

    def pack(self) -> bytes:
        """Return the position as the vertex stores it."""
        packed: bytes = msgpack.packb(
            [self.range, self.start, self.end, self.splits, self.digest, self.rows, self.done]
        )
        return packed


def unpack_split(source: str, packed: bytes) -> SplitPosition:
    """Read what `SplitPosition.pack` wrote; `ConfigError` for the position of another kind of source."""
    found = _unpack(packed)
    kinds = (int, str, str, int, bytes, int, bool)
    if not isinstance(found, list) or tuple(map(type, found)) != kinds:
        raise _another_kind(source)
    return SplitPosition(*found)


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

    number: int
    start: str
    end: str
    digest: bytes
    rows: tuple[int, ...]
    done: tuple[bool, ...]

    @property
    def complete(self) -> bool:
        """Whether the next range begins at ``end``."""
        return all(self.done)


@dataclass(frozen=True, slots=True)
class RangeNote:
    """A range as the vertex keeps it while rows of it may be read again. The attributes are `SplitPosition`'s."""

    range: int
    start: str
    end: str
    splits: int
    digest: bytes

    def pack(self) -> bytes:
        """Return the note as the vertex stores it."""
        packed: bytes = msgpack.packb([self.range, self.start, self.end, self.splits, self.digest])
        return packed


def unpack_note(packed: bytes) -> RangeNote:
    """Read what `RangeNote.pack` wrote."""
    return RangeNote(*msgpack.unpackb(packed))


def progress_of(
    source: str, positions: Mapping[str, bytes], planned: Iterable[bytes] = ()
) -> tuple[RangeProgress, ...]:
    """Return the ranges that are not complete, and the last one in any case, in their order; () for none at all.

    ``planned`` are those that were noted (`RangeNote`). Of others the last one alone is known, from the positions.
    """
    found = {key: unpack_split(source, packed) for key, packed in positions.items()}
    notes = {note.range: note for note in map(unpack_note, planned)}
    last = max(found.values(), key=lambda position: position.range, default=None)
    if last is not None and last.range > max(notes, default=0):
        notes[last.range] = RangeNote(last.range, last.start, last.end, last.splits, last.digest)
    ranges = [_progress_in(notes[number], found) for number in sorted(notes)]
    return tuple(each for each in ranges if each is ranges[-1] or not each.complete)


def _progress_in(note: RangeNote, positions: Mapping[str, SplitPosition]) -> RangeProgress:
    """Return how far a range was accepted; a partition that is in a later one has passed it."""
    rows, done = [], []
    for index in range(note.splits):
        split = positions.get(partition_key(index))
        is_here = split is not None and split.range == note.range
        rows.append(split.rows if split is not None and is_here else 0)
        done.append(split is not None and (split.done if is_here else split.range > note.range))
    return RangeProgress(note.range, note.start, note.end, note.digest, tuple(rows), tuple(done))


class PositionChain:
    """The positions of a source's partitions from here on: each begins with the bytes that the last ended with.

    The vertex refuses a position that does not. So two readers of one partition cannot both go on.
    """

    def __init__(self, positions: Mapping[str, bytes]) -> None:
        self._last = dict(positions)

    def last(self, partition: str) -> bytes | None:
        """Return where ``partition`` has come to, None before its first rows."""
        return self._last.get(partition)

    def advance(self, partition: str, end: bytes) -> SourcePosition:
        """Return the position of the next rows of ``partition``, behind which it has come to ``end``."""
        position = SourcePosition(partition, self._last.get(partition), end)
        self._last[partition] = end
        return position
