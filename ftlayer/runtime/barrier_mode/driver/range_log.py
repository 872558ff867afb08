"""The driver's memory of a reader source's ranges, so that a checkpoint can be restored exactly.

A reader may plan the same range otherwise when it is asked again, and a checkpoint's positions count rows of single
splits. So a checkpoint holds the splits themselves of every range that it has begun and not ended. That may be more
than one: subtasks take their snapshots at different moments, and a quick one may be ranges ahead of a slow one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgpack

from ftlayer.errors import IncompatibleCheckpointError
from ftlayer.runtime.connectors.positions import RangeProgress, SplitPosition, partition_key, unpack_split
from ftlayer.runtime.driver.splits import PlannedRange
from ftlayer.runtime.protocol.sealed import reseal

Positions = Mapping[str, SplitPosition]
"""By partition: the last split that was read under its number, and how far."""


@dataclass(frozen=True, slots=True)
class Captured:
    """The part of a checkpoint that a source has beside its positions.

    Attributes:
        at: the offset at which the first range begins that it has read nothing of.
        last: highest number of a range that it has read of, 0 for none.
        ranges: those up to ``last`` that it has not read to their end.
    """

    at: str
    last: int
    ranges: tuple[PlannedRange, ...]

    @property
    def end(self) -> str | None:
        """The offset up to which everything is read; None if nothing is."""
        if not self.last:
            return None
        return self.ranges[0].start if self.ranges else self.at

    def pack(self) -> bytes:
        """Return it as `Checkpoint.sources` has it."""
        packed: bytes = msgpack.packb(
            [
                self.at,
                self.last,
                [[one.number, one.start, one.end, one.digest, list(one.payloads)] for one in self.ranges],
            ]
        )
        return packed


def unpack_captured(packed: bytes) -> Captured:
    """Read what `Captured.pack` wrote."""
    at, last, ranges = msgpack.unpackb(packed)
    return Captured(
        at,
        last,
        tuple(
            PlannedRange(number, start, end, digest, tuple(payloads))
            for number, start, end, digest, payloads in ranges
        ),
    )


@dataclass(frozen=True, slots=True)
class Restored:
    """What a checkpoint says of one source; with no positions and None: there is none, the source begins again."""

    positions: Positions
    captured: Captured | None


def unpack_restored(source: str, positions: Mapping[str, bytes], captured: bytes | None) -> Restored:
    """Read the positions of all subtasks of a source in a checkpoint, and what `Captured.pack` wrote for it.

    Raises `IncompatibleCheckpointError`, or `ConfigError`, for a checkpoint whose source was of another kind.
    """
    if not captured and positions:
        raise IncompatibleCheckpointError(
            f"source {source!r}: the checkpoint has positions of a source without a reader; give the new "
            "source a uid of its own"
        )
    return Restored(_unpacked(source, positions), unpack_captured(captured) if captured else None)


def reseal_captured(packed: bytes, old: bytes, new: bytes) -> bytes:
    """Return what `Captured.pack` wrote, its splits sealed with ``new`` in place of ``old``.

    Raises `UnauthorizedError` for one that was not sealed with the old key.
    """
    captured = unpack_captured(packed) if packed else None
    if captured is None:
        return b""
    ranges = (
        replace(one, payloads=tuple(reseal(payload, old, new) for payload in one.payloads))
        for one in captured.ranges
    )
    return replace(captured, ranges=tuple(ranges)).pack()


class RangeLog:
    """The ranges of one source. For one thread at a time, save `capture`."""

    def __init__(self, source: str) -> None:
        self._source = source
        # Its ``ranges`` are those that a checkpoint may still be in the middle of. Replaced, never changed.
        self._book: Captured | None = None
        self._origin: str | None = None
        self._restored: Positions = {}

    # ------------------------------------------------------------ as ranges are planned

    def begin(self, at: str) -> None:
        """The source is read from ``at``. A restore of no checkpoint leads back here."""
        self._origin = at
        self._book = Captured(at, 0, ())

    @property
    def now(self) -> Captured | None:
        """All ranges that are remembered, and where the next one begins; None before `begin`."""
        return self._book

    def opened(self, planned: PlannedRange) -> None:
        """A range is going to be read. Its payloads are what a checkpoint will hold of it."""
        assert self._book is not None
        self._book = Captured(planned.end, planned.number, (*self._book.ranges, planned))

    def moved(self, at: str) -> None:
        """There is nothing to read up to ``at``."""
        assert self._book is not None
        self._book = replace(self._book, at=at)

    def forget_below(self, number: int) -> None:
        """All checkpoints that can still be captured have read the ranges of lower numbers to their end."""
        assert self._book is not None
        if self._book.ranges and self._book.ranges[0].number < number:
            ranges = tuple(planned for planned in self._book.ranges if planned.number >= number)
            self._book = replace(self._book, ranges=ranges)

    # ------------------------------------------------------------ checkpoints

    def capture(self, positions: Mapping[str, bytes]) -> Captured | None:
        """Return what a checkpoint with these positions has to hold; None if the source has not begun. Any thread."""
        book, read = self._book, _unpacked(self._source, positions)
        if book is None:
            return None
        last = max((position.range for position in read.values()), default=0)
        at = next((planned.start for planned in book.ranges if planned.number > last), book.at)
        begun = (planned for planned in book.ranges if planned.number <= last and not _is_read(planned, read))
        return Captured(at, last, tuple(begun))

    def restore(self, restored: Restored) -> None:
        """Go back to a checkpoint; without one to the begin."""
        captured = restored.captured
        if captured is None and self._origin is not None:
            captured = Captured(self._origin, 0, ())
        self._restored = restored.positions
        self._book = captured

    def progress(self, planned: PlannedRange) -> RangeProgress:
        """Return how far the restored checkpoint had read a range."""
        splits = range(len(planned.payloads))
        rows, done = zip(*(_read_of(planned, split, self._restored) for split in splits), strict=True)
        return RangeProgress(planned.number, planned.start, planned.end, planned.digest, rows, done)


def _unpacked(source: str, positions: Mapping[str, bytes]) -> Positions:
    return {key: unpack_split(source, packed) for key, packed in positions.items()}


def _is_read(planned: PlannedRange, read: Positions) -> bool:
    return all(_read_of(planned, split, read)[1] for split in range(len(planned.payloads)))


def _read_of(planned: PlannedRange, split: int, read: Positions) -> tuple[int, bool]:
    """Return how many rows of a split are read, and whether those are all.

    The splits of one number are read one after the other, by one subtask: a later one says that this one is done.
    """
    position = read.get(partition_key(split))
    if position is None or position.range < planned.number:
        return 0, False
    if position.range > planned.number:
        return 0, True
    return position.rows, position.done
