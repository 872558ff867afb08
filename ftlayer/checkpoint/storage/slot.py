"""The storage as a slot sees it. See `ftlayer.checkpoint.storage.contract.SlotStorage`."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.pieces import Piece
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.keys import key_of
from ftlayer.checkpoint.storage.lanes import FileLane
from ftlayer.checkpoint.storage.layout import (
    NEVER,
    SHARED,
    FileName,
    checkpoint_name,
    job_directory,
    join,
    new_unique,
    normal,
    run_directory,
)
from ftlayer.checkpoint.storage.local_copies import LocalCopies
from ftlayer.checkpoint.storage.reading import fetch_piece, open_piece
from ftlayer.checkpoint.storage.signing import Signer
from ftlayer.checkpoint.storage.writer import Amplification, FileWriter
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, FTLayerError

logger = logging.getLogger(__name__)

ACROSS_SPAN = 15
"""With `CheckpointConfig.file_merging_across` a file takes pieces for so many checkpoints behind its first one."""

LOG_SPAN = 16
LOG_REACH = 64
"""A log's file is changed for another one after LOG_SPAN checkpoints, and its name promises LOG_REACH: a log does not
know exactly for which checkpoint its pieces will be new, as barriers run ahead of what a slot has heard of. Before it
has heard of any, its first file promises all there will be: it is kept until the instance is gone."""

MOST_GIVEN_UP = 1 << 10
"""Numbers of given-up checkpoints that are remembered, for barriers that still come."""


@dataclass(frozen=True, slots=True)
class WriterName:
    """Who writes: part of every file's name."""

    slot: int
    epoch: int
    instance: str

    def file_name(self, first: int = 0, last: int = 0) -> str:
        """Return a new name, unique over all processes and runs."""
        return str(FileName(self.slot, self.epoch, self.instance, new_unique(), first, last))


class SlotStorageBase:
    """The part that driver memory and directories share: savepoints, reading, and when writers end."""

    def __init__(self, config: CheckpointConfig, seat: WriterName, key: bytes, location: str) -> None:
        self.location = location
        self._config = config
        self._seat = seat
        self._signer = Signer(key)
        self._lock = threading.Lock()
        self._writers: dict[int, tuple[SnapshotKind, PieceWriter]] = {}
        self._given_up: dict[int, None] = {}
        self._latest = 0
        self._sources: dict[str, tuple[Files, Signer]] = {}
        # Threads of a pool are made when the first work comes.
        self._upkeep = ThreadPoolExecutor(1, "checkpoint-upkeep")

    def writer(self, barrier: Barrier) -> PieceWriter:
        """See `SlotStorage.writer`. The writer of a checkpoint that was given up refuses everything."""
        number = barrier.checkpoint
        with self._lock:
            self._latest = max(self._latest, number)
            if number not in self._writers:
                if barrier.location:
                    writer = self._savepoint_writer(barrier)
                else:
                    writer = self._checkpoint_writer(barrier)
                if number in self._given_up:
                    writer.discard()
                    return writer
                self._writers[number] = (barrier.kind, writer)
            return self._writers[number][1]

    def open(self, location: str, piece: Piece) -> BinaryIO:
        files, signer = self._source(location)
        local = self._local(location, piece)
        if local is not None:
            try:
                return open_piece(local, piece, signer)
            except (CheckpointDamagedError, CheckpointStorageError) as error:
                logger.info("restoring from the checkpoint itself: %s", error)
        return open_piece(files, piece, signer)

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        files, signer = self._source(location)
        local = self._local(location, piece)
        if local is not None:
            try:
                return fetch_piece(local, piece, signer, path)
            except (CheckpointDamagedError, CheckpointStorageError) as error:
                logger.info("restoring from the checkpoint itself: %s", error)
        return fetch_piece(files, piece, signer, path)

    def completed(self, checkpoint: int) -> None:
        """See `SlotStorage.completed`; older checkpoints that are still written are given up by it (subsumed)."""
        with self._lock:
            self._latest = max(self._latest, checkpoint)
            entry = self._writers.pop(checkpoint, None)
            subsumed = []
            if entry is not None and entry[0] is SnapshotKind.CHECKPOINT:
                subsumed = [
                    number
                    for number, (kind, _) in self._writers.items()
                    if number < checkpoint and kind is SnapshotKind.CHECKPOINT
                ]
        for number in subsumed:
            self.aborted(number)
        if entry is not None:
            self._later(entry[1].close)
            if entry[0] is SnapshotKind.CHECKPOINT:
                self._later(functools.partial(self._tidy, checkpoint))

    def aborted(self, checkpoint: int) -> None:
        with self._lock:
            self._latest = max(self._latest, checkpoint)
            entry = self._writers.pop(checkpoint, None)
            self._given_up[checkpoint] = None
            while len(self._given_up) > MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        if entry is not None:
            self._later(entry[1].discard)

    def close(self, *, over: bool = False) -> None:
        """See `SlotStorage.close`. What was being removed is removed when it returns."""
        self._upkeep.shutdown(wait=True)
        with self._lock:
            writers, self._writers = self._writers, {}
        for _, writer in writers.values():
            if isinstance(writer, FileWriter):
                writer.release()

    # ---------------------------------------------------------------- for subclasses

    def _checkpoint_writer(self, barrier: Barrier) -> PieceWriter:
        raise NotImplementedError

    def _tidy(self, checkpoint: int) -> None:
        """Remove what a completed checkpoint has made useless."""

    def _local(self, location: str, piece: Piece) -> Files | None:
        """Return the directory of local copies if there may be one of this piece."""
        return None

    def _later(self, work: Callable[[], None]) -> None:
        """Do it beside the slot's loop. What cannot be removed is found again by the driver's sweep."""
        self._upkeep.submit(work).add_done_callback(_report)

    def _savepoint_writer(self, barrier: Barrier) -> PieceWriter:
        files = open_files(barrier.location)
        lane = FileLane(files, None, lambda _first, _last: self._seat.file_name())
        return FileWriter(
            lambda: barrier.checkpoint,
            lane,
            lane,
            self._signer,
            self._config.memory_threshold,
            lambda _owner, _pieces: set(),
            own=(lane,),
        )

    # ---------------------------------------------------------------- reading

    def _source(self, location: str) -> tuple[Files | None, Signer]:
        """Return the directory and what its pieces are signed with."""
        if not location:
            return None, self._signer
        location = normal(location)
        with self._lock:
            known = self._sources.get(location)
        if known is None:
            key = None if location == self.location else key_of(location, self._config.key)
            known = open_files(location), self._signer if key is None else Signer(key)
            with self._lock:
                self._sources[location] = known
        return known


class FileSlotStorage(SlotStorageBase):
    """Below ``config.directory``."""

    def __init__(self, config: CheckpointConfig, job: str, run: str, seat: WriterName, key: bytes) -> None:
        assert config.directory is not None
        super().__init__(config, seat, key, run_directory(config.directory, job, run))
        self._files = open_files(self.location)
        self._copies = _local_copies(config, job, run, seat.slot)
        self._copy_files = None if self._copies is None else self._copies.files
        self._sizes: dict[str, int] = {}
        self._amplification = Amplification(self._size_of, config.max_space_amplification)
        self._across: FileLane | None = None
        if config.file_merging_across and self._files.appends:
            self._across = self._shared_lane(
                span=ACROSS_SPAN, reach=ACROSS_SPAN, max_bytes=config.max_file_size
            )
        self._log_lane = FileLane(
            self._files,
            self._copy_files,
            self._log_path,
            span=LOG_SPAN,
            reach=LOG_REACH,
            max_bytes=config.max_file_size,
        )

    def log_writer(self) -> PieceWriter:
        return FileWriter(
            lambda: self._latest,
            self._log_lane,
            self._log_lane,
            self._signer,
            -1,
            self._amplification.report,
            own=(),
        )

    def close(self, *, over: bool = False) -> None:
        super().close(over=over)
        for lane in (self._across, self._log_lane):
            if lane is not None:
                lane.close()
        if self._copies is not None:
            self._copies.close(over=over)

    def _checkpoint_writer(self, barrier: Barrier) -> PieceWriter:
        number = barrier.checkpoint
        exclusive = FileLane(
            self._files,
            self._copy_files,
            lambda _first, _last: join(checkpoint_name(number), self._seat.file_name()),
        )
        shared = self._across or self._shared_lane()
        return FileWriter(
            lambda: number,
            exclusive,
            shared,
            self._signer,
            self._config.memory_threshold,
            self._amplification.report,
            own=(exclusive,) if shared is self._across else (exclusive, shared),
        )

    def _shared_lane(self, span: int = 0, reach: int = 0, max_bytes: int | None = None) -> FileLane:
        def name(first: int, last: int) -> str:
            return join(SHARED, self._seat.file_name(first, last))

        return FileLane(self._files, self._copy_files, name, span=span, reach=reach, max_bytes=max_bytes)

    def _size_of(self, path: str) -> int | None:
        size = self._sizes.get(path)
        if size is None:
            size = self._files.size(path)
            if size is not None and not self._files.appends:
                # It is there when it is whole, and keeps its size.
                self._sizes[path] = size
        return size

    def _log_path(self, first: int, last: int) -> str:
        return join(SHARED, self._seat.file_name(first, last if first else NEVER))

    def _local(self, location: str, piece: Piece) -> Files | None:
        if piece.inline is not None or normal(location) != self.location:
            return None
        return self._copy_files

    def _tidy(self, checkpoint: int) -> None:
        if self._copies is not None:
            self._copies.completed(checkpoint, (entry.path for entry in self._files.walk(SHARED)))


def _local_copies(config: CheckpointConfig, job: str, run: str, slot: int) -> LocalCopies | None:
    if config.local_recovery is None:
        return None
    try:
        return LocalCopies(config.local_recovery, job, run, slot)
    except OSError as error:
        logger.warning(
            "no local copies (local_recovery): %s: %s", job_directory(config.local_recovery, job), error
        )
        return None


def _report(work: Future[None]) -> None:
    error = work.exception()
    if isinstance(error, FTLayerError):
        logger.warning("after a checkpoint: %s", error)
    elif error is not None:
        logger.error("after a checkpoint", exc_info=error)
