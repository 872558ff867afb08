"""Writes the pieces of one slot's part of a checkpoint. See `ftlayer.checkpoint.storage.contract.PieceWriter`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from ftlayer.checkpoint.snapshots import Piece, Scope
from ftlayer.checkpoint.storage.keys import Hasher, Signer
from ftlayer.checkpoint.storage.lanes import FileLane, PieceFile
from ftlayer.checkpoint.storage.layout import SHARED
from ftlayer.config import MIB
from ftlayer.errors import CheckpointStorageError, SnapshotCancelledError

GATHER_BYTES = MIB
"""So much of a piece is gathered before other threads have to wait for its file. At least the largest threshold."""

Wasteful = Callable[[str, Iterable[Piece]], set[str]]


class FileWriter:
    """Writes into files, small pieces inline.

    ``own``: the lanes of this writer alone; their files go with `discard`. Others outlive this writer.
    What happens to one of its files is raised by every later `write` and `sync`.
    """

    def __init__(
        self,
        checkpoint: Callable[[], int],
        exclusive: FileLane,
        shared: FileLane,
        signer: Signer,
        threshold: int,
        wasteful: Wasteful,
        *,
        own: tuple[FileLane, ...],
        new_in_flight: Callable[[], FileLane] | None = None,
        share_in_flight: int = 1,
    ) -> None:
        """``new_in_flight`` makes a lane of this writer alone for records in flight, which ``share_in_flight`` subtasks
        share; None: there are none.
        """
        self._checkpoint = checkpoint
        self._lanes = {Scope.EXCLUSIVE: exclusive, Scope.SHARED: shared}
        self._signer = signer
        self._threshold = threshold
        self._wasteful = wasteful
        self._own = own
        self._new_in_flight = new_in_flight
        self._share_in_flight = share_in_flight
        self._in_flight: dict[str, FileLane] = {}
        self._lock = threading.Lock()
        self._touched: dict[PieceFile, FileLane] = {}
        self._written: dict[PieceFile, FileLane] = {}
        self._is_discarded = False
        self._error: CheckpointStorageError | None = None

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        if self._error is not None:
            raise self._error
        hasher = self._signer.hasher()
        rest = self._guarded(chunks)
        head: list[bytes] = []
        length = 0
        for chunk in rest:
            hasher.update(chunk)
            head.append(chunk)
            length += len(chunk)
            if length > GATHER_BYTES:
                break
        if length <= self._threshold:
            return Piece(hasher.digest(), length, b"".join(head), scope=scope)
        counted = _Counted(rest, hasher)
        lane = self._lane(scope, in_flight_of)
        with lane.lock:
            try:
                file, offset = lane.append(self._checkpoint(), chain(head, counted))
            except CheckpointStorageError as error:
                self._error = error
                raise
            with self._lock:
                self._touched[file] = lane
                if lane in self._own:
                    self._written[file] = lane
        # A piece in a file that is used by this checkpoint alone is exclusive whatever was asked for.
        kept = Scope.SHARED if file.path.startswith(f"{SHARED}/") else Scope.EXCLUSIVE
        return Piece(hasher.digest(), length + counted.length, None, file.path, offset, kept)

    def _lane(self, scope: Scope, in_flight_of: str) -> FileLane:
        if not in_flight_of or self._new_in_flight is None:
            return self._lanes[scope]
        with self._lock:
            lane = self._in_flight.get(in_flight_of)
            if lane is None:
                others = list(self._in_flight.values())
                if len(others) % self._share_in_flight:
                    lane = others[-1]
                else:
                    lane = self._new_in_flight()
                    self._own = (*self._own, lane)
                self._in_flight[in_flight_of] = lane
            return lane

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """See `PieceWriter.wasteful`. What is written anew does not go into the same file."""
        found = self._wasteful(owner, pieces)
        if found:
            self._lanes[Scope.SHARED].leave(found)
        return found

    def sync(self) -> None:
        if self._is_discarded:
            raise given_up()
        if self._error is not None:
            raise self._error
        with self._lock:
            touched = dict(self._touched)
        for file, lane in touched.items():
            try:
                file.sync(lane.lock)
            except CheckpointStorageError as error:
                self._error = error
                raise
        with self._lock:
            for file in touched:
                if file.is_settled:
                    self._touched.pop(file, None)

    def close(self) -> None:
        if not self._is_discarded:
            self.sync()
        self.release()

    def release(self) -> None:
        """Close the files of this writer alone; does not sync."""
        for lane in self._own:
            lane.close()
        with self._lock:
            touched = dict(self._touched)
        for file, lane in touched.items():
            if file.is_retired or lane in self._own:
                with lane.lock:
                    file.close()

    def discard(self) -> None:
        """See `PieceWriter.discard`. Writes that are under way raise `SnapshotCancelledError`."""
        self._is_discarded = True
        errors: list[CheckpointStorageError] = []
        for lane in self._own:
            lane.close()
        with self._lock:
            written = dict(self._written)
        for file, lane in written.items():
            try:
                with lane.lock:
                    file.abandon()
            except CheckpointStorageError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _guarded(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        if self._is_discarded:
            raise given_up()
        for chunk in chunks:
            if self._is_discarded:
                raise given_up()
            yield chunk


class _Counted:
    def __init__(self, chunks: Iterator[bytes], hasher: Hasher) -> None:
        self._chunks = chunks
        self._hasher = hasher
        self.length = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._hasher.update(chunk)
            self.length += len(chunk)
            yield chunk


def given_up() -> SnapshotCancelledError:
    return SnapshotCancelledError("the checkpoint was given up while it was written")


# ---------------------------------------------------------------- space amplification


class Amplification:
    """Which shared files of a slot waste too much: kept for a few pieces, which their owners may write anew.

    Over all who have pieces in them. For several threads at once.
    """

    def __init__(self, size_of: Callable[[str], int | None], bound: float) -> None:
        self._size_of = size_of
        self._bound = bound
        self._lock = threading.Lock()
        self._live: dict[str, dict[str, int]] = {}

    def report(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """Take note of the pieces that ``owner`` needs now; returns those of their files that waste too much.

        With an owner's first report there are none: others that share its files may not have reported yet.
        """
        mine = _live_bytes(pieces)
        with self._lock:
            is_first = owner not in self._live
            self._live[owner] = mine
            total = {path: sum(live.get(path, 0) for live in self._live.values()) for path in mine}
        if is_first or not self._bound:
            return set()
        sizes = {path: size for path in total if (size := self._size_of(path)) is not None}
        return {path for path, used in total.items() if sizes.get(path, 0) > self._bound * used}


def _live_bytes(pieces: Iterable[Piece]) -> dict[str, int]:
    """Return by path what is of use in shared files, in bytes; a piece that is named twice counts once."""
    runs = {
        (piece.path, piece.offset, piece.length)
        for piece in pieces
        if piece.scope is Scope.SHARED and piece.inline is None
    }
    live: dict[str, int] = {}
    for path, _, length in runs:
        live[path] = live.get(path, 0) + length
    return live
