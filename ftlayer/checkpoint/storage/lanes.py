"""Pieces of several threads, one behind the other in one file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable

from ftlayer.checkpoint.storage.files import FileOutput, Files
from ftlayer.errors import CheckpointStorageError

logger = logging.getLogger(__name__)

NamePath = Callable[[int, int], str]
"""(first, last) checkpoint that a file may get pieces for → its path."""


class PieceFile:
    """A file with pieces. Appended to under its lane's lock; an error stays with it."""

    def __init__(
        self, files: Files, copies: Files | None, path: str, last: int, buffer_bytes: int | None = None
    ) -> None:
        self.path = path
        self.last = last
        self.size = 0
        self.is_open = True
        self.is_retired = False
        self._files = files
        self._copies = copies
        self._buffer_bytes = buffer_bytes
        self._output = files.create(path, buffer_bytes)
        self._copy = None if copies is None else self._create_copy(copies)
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
                self._write_copy(chunk)
                self.size += len(chunk)
        except CheckpointStorageError as error:
            self._fail(error)
            raise
        except BaseException:
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
        if self._error is not None or begin == self.size:
            return
        try:
            if self._output.rewind(begin):
                self.size = begin
                self._rewind_copy()
        except CheckpointStorageError as error:
            self._fail(error)

    # ---------------------------------------------------------------- the local copy: never a reason to fail

    def _create_copy(self, copies: Files) -> FileOutput | None:
        try:
            return copies.create(self.path, self._buffer_bytes)
        except CheckpointStorageError as error:
            _no_copy(error)
            return None

    def _write_copy(self, chunk: bytes) -> None:
        if self._copy is not None:
            try:
                self._copy.write(chunk)
            except CheckpointStorageError as error:
                _no_copy(error)
                self._drop_copy()

    def _rewind_copy(self) -> None:
        if self._copy is not None:
            try:
                self._copy.rewind(self.size)
            except CheckpointStorageError as error:
                _no_copy(error)
                self._drop_copy()

    def _close_copy(self) -> None:
        if self._copy is not None:
            copy, self._copy = self._copy, None
            try:
                copy.close()
            except CheckpointStorageError as error:
                _no_copy(error)

    def _drop_copy(self) -> None:
        try:
            if self._copy is not None:
                copy, self._copy = self._copy, None
                copy.abandon()
            elif self._copies is not None:
                self._copies.delete(self.path)
        except CheckpointStorageError as error:
            _no_copy(error)


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
        self._files = files
        self._copies = copies
        self._name = name
        self._span = span
        self._reach = reach
        self._max_bytes = max_bytes
        self._buffer_bytes = buffer_bytes
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
        """Append no more to a file that is one of ``paths``."""
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


def _no_copy(error: CheckpointStorageError) -> None:
    logger.warning("there is no local copy of a part of a checkpoint: %s", error)
