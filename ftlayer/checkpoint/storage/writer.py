"""Writes the pieces of one slot's part of a checkpoint."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import chain
from typing import Protocol

from ftlayer.checkpoint.snapshots import Piece, Scope
from ftlayer.checkpoint.storage.files import FileOutput, Files
from ftlayer.checkpoint.storage.keys import Signer
from ftlayer.checkpoint.storage.layout import SHARED
from ftlayer.config import MIB
from ftlayer.errors import CheckpointStorageError, SnapshotCancelledError

logger = logging.getLogger(__name__)


class PieceWriter(Protocol):
    """Writes pieces of one slot's part of one checkpoint. For several threads at once.

    A piece may be referred to in a `SubtaskSnapshot` once `sync` returned after it was written.
    """

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        """Write one piece; small ones are inline.

        ``in_flight_of``: the subtask of this slot ("uid/subtask", say) that these records in flight are of: they lie
        in a file which so many subtasks share as the options allow, and nothing else.

        Raises `CheckpointStorageError`, and what ``chunks`` raises; nothing refers to what was written then.
        """

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """Return the paths of shared files that are kept for too little, and whose pieces are better written anew.

        ``owner`` names who asks among all who write in this slot ("uid/subtask", say); ``pieces`` are all SHARED ones
        that it needs from now on. To be asked with every checkpoint.
        """

    def sync(self) -> None:
        """Return when all that was written outlives this process and its machine (as the storage gives it).

        On an object store this ends the files: call it once when everybody in the slot has written, not after
        every piece. A writer that has failed once raises that error for good.
        """

    def close(self) -> None:
        """Nothing more is written for this checkpoint; syncs."""

    def discard(self) -> None:
        """The checkpoint is given up: remove what can be removed."""


NamePath = Callable[[int, int], str]
"""(first, last) checkpoint that a file may get pieces for → its path."""


class PieceFile:
    """A file with pieces. Appended to under its lane's lock; an error stays with it."""

    def __init__(
        self, files: Files, copies: Files | None, path: str, last: int, buffer_bytes: int | None = None
    ) -> None:
        self.path, self.last = path, last
        self.size = 0
        self.is_open = True
        self.is_retired = False
        self._files, self._copies = files, copies
        self._output = files.create(path, buffer_bytes)
        self._copy: FileOutput | None = None
        with _never_a_reason_to_fail():
            self._copy = None if copies is None else copies.create(path, buffer_bytes)
        self._error: CheckpointStorageError | None = None
        self._is_dirty = False
        self._was_synced = False
        self._sync_lock = threading.Lock()

    def append(self, chunks: Iterable[bytes]) -> int:
        """Append one piece, and return where it begins. What ``chunks`` raises leaves the file as it was."""
        begin = self.size
        try:
            for chunk in chunks:
                self._is_dirty = True
                self._output.write(chunk)
                if self._copy is not None:
                    self._in_copy(partial(self._copy.write, chunk))
                self.size += len(chunk)
        except CheckpointStorageError as error:
            self._fail(error)
            raise
        except BaseException:
            if self._error is None and begin != self.size:
                self._take_back(begin)
            raise
        return begin

    def sync(self, lock: threading.RLock) -> None:
        """Return when all that was appended is durable; raises what has happened to the file since it was begun."""
        with self._sync_lock:
            with lock:
                if self._error is not None:
                    raise self._error
                if not self._is_dirty:
                    return
                self._is_dirty = False
                if not self._files.appends:
                    # To be durable it has to be closed, which ends all appending.
                    self._sync_now()
                    return
            # Others append while the disk works.
            self._sync_now()
            with lock:
                if self.is_retired and not self._is_dirty:
                    self.close()

    @property
    def is_settled(self) -> bool:
        """Whether all that was appended is durable, and nothing more can be."""
        return not self.is_open and self._error is None

    def retire(self) -> None:
        """Nothing more is appended: close, now or when it is synced."""
        self.is_retired = True
        if not self._is_dirty:
            self.close()

    def close(self) -> None:
        """Close it, and remove it if it never was synced: nothing can refer to it then."""
        if not self.is_open:
            return
        if not self._was_synced:
            self.abandon()
            return
        self.is_open = False
        self._output.close()
        self._close_copy()

    def abandon(self) -> None:
        self.is_open = False
        self._drop_copy()
        self._output.abandon()

    def _sync_now(self) -> None:
        try:
            more = self._output.sync()
        except CheckpointStorageError as error:
            self._fail(error)
            raise
        self._was_synced = True
        if not more:
            self.is_open = False
            self._close_copy()

    def _fail(self, error: CheckpointStorageError) -> None:
        self._error = error
        self.is_open = False
        self._drop_copy()
        try:
            if self._was_synced:
                self._output.close()
            else:
                self._output.abandon()
        except CheckpointStorageError as second:
            # The first one is raised, and says what to do.
            logger.warning("after a failed write: %s", second)

    def _take_back(self, begin: int) -> None:
        try:
            if self._output.rewind(begin):
                self.size = begin
                if self._copy is not None:
                    self._in_copy(partial(self._copy.rewind, begin))
        except CheckpointStorageError as error:
            self._fail(error)

    def _in_copy(self, work: Callable[[], object]) -> None:
        done = False
        with _never_a_reason_to_fail():
            work()
            done = True
        if not done:
            self._drop_copy()

    def _close_copy(self) -> None:
        copy, self._copy = self._copy, None
        with _never_a_reason_to_fail():
            if copy is not None:
                copy.close()

    def _drop_copy(self) -> None:
        copy, self._copy = self._copy, None
        with _never_a_reason_to_fail():
            if copy is not None:
                copy.abandon()
            elif self._copies is not None:
                self._copies.delete(self.path)


@contextlib.contextmanager
def _never_a_reason_to_fail() -> Iterator[None]:
    """Do something with a local copy."""
    try:
        yield
    except CheckpointStorageError as error:
        logger.warning("there is no local copy of a part of a checkpoint: %s", error)


class FileLane:
    """One file at a time. For several threads at once.

    A file that was begun for checkpoint c gets pieces for checkpoints up to c + ``span``, and says in its name that
    it may get some up to c + ``reach``. It is full at ``max_bytes`` (None: never). ``buffer_bytes``: as `Files.create`.
    """

    def __init__(
        self,
        files: Files,
        copies: Files | None,
        name: NamePath,
        *,
        span: int = 0,
        reach: int = 0,
        max_bytes: int | None = None,
        buffer_bytes: int | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._files, self._copies, self._name = files, copies, name
        self._span, self._reach = span, reach
        self._max_bytes, self._buffer_bytes = max_bytes, buffer_bytes
        self._current: PieceFile | None = None

    def append(self, checkpoint: int, chunks: Iterable[bytes]) -> tuple[PieceFile, int]:
        with self.lock:
            file = self._file_for(checkpoint)
            begin = file.append(chunks)
            if self._max_bytes is not None and file.size >= self._max_bytes:
                self.rotate()
            return file, begin

    def rotate(self) -> None:
        with self.lock:
            file, self._current = self._current, None
            if file is not None:
                file.retire()

    def leave(self, paths: Collection[str]) -> None:
        with self.lock:
            if self._current is not None and self._current.path in paths:
                self.rotate()

    def close(self) -> None:
        with self.lock:
            file, self._current = self._current, None
            if file is not None:
                file.close()

    def _file_for(self, checkpoint: int) -> PieceFile:
        file = self._current
        if file is not None and (not file.is_open or checkpoint > file.last):
            self.rotate()
            file = None
        if file is None:
            path = self._name(checkpoint, checkpoint + self._reach)
            last = checkpoint + self._span
            file = self._current = PieceFile(self._files, self._copies, path, last, self._buffer_bytes)
        return file


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
        self._checkpoint, self._signer, self._threshold = checkpoint, signer, threshold
        self._lanes = {Scope.EXCLUSIVE: exclusive, Scope.SHARED: shared}
        self._wasteful, self._own = wasteful, own
        self._new_in_flight, self._share_in_flight = new_in_flight, share_in_flight
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
        found = self._wasteful(owner, pieces)
        # What is written anew does not go into the same file.
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
    def __init__(self, chunks: Iterator[bytes], hasher: blake2b) -> None:
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
    shared = (each for each in pieces if each.scope is Scope.SHARED and each.inline is None)
    live: Counter[str] = Counter()
    for path, _, length in {(each.path, each.offset, each.length) for each in shared}:
        live[path] += length
    return live
