"""Where driver and slots get their storage."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeVar

from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.custom_storage import serve
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, Piece, Scope, SubtaskSnapshot
from ftlayer.checkpoint.storage import layout, loading
from ftlayer.checkpoint.storage.files import Files, LocalFiles, StoragePool, open_files, raise_together
from ftlayer.checkpoint.storage.keys import Signer, key_of, packed_key
from ftlayer.checkpoint.storage.writer import Amplification, FileLane, FileWriter, PieceWriter, given_up
from ftlayer.common.secret_files import unused
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    FTLayerError,
)

Result = TypeVar("Result")

logger = logging.getLogger(__name__)

LOCK = "_lock"


class LocalCopies:
    """Second copies of a slot's files on its own disk, for a quick restore (task-local recovery in Flink).

    ```
    <local_recovery>/<job>/<run>/slot-<n>/_lock, chk-<n>/…, shared/…
    ```

    The instances that run a slot one after the other share its directory: what one that was killed has left is what
    the next one restores from. A copy that is missing or does not fit is ignored. OSError if it cannot be made.
    """

    def __init__(self, directory: str, job: str, run: str, slot: int) -> None:
        own_run = Path(layout.run_directory(directory, job, run))
        self._root = own_run / f"slot-{slot}"
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._root)
        self.files = LocalFiles(str(self._root))
        # What slots of earlier runs have left on this machine.
        for slot_of_other in Path(layout.job_directory(directory, job)).glob("*/slot-*"):
            # Others may have put anything there: no link is followed, and what is theirs stays.
            if slot_of_other.parent.name != layout.part(run) and not slot_of_other.parent.is_symlink():
                with (
                    contextlib.suppress(OSError),
                    unused(slot_of_other, os.O_DIRECTORY),
                    unused(slot_of_other / LOCK, os.O_RDWR),
                ):
                    _remove(slot_of_other)

    def completed(self, checkpoint: int, shared: Iterable[str]) -> None:
        """Remove copies for older checkpoints, and of shared files but those of these paths."""
        kept = set(shared)
        for entry in self.files.walk():
            directory, _, _ = entry.path.rpartition("/")
            number = layout.checkpoint_number(directory)
            is_old = number is not None and number < checkpoint
            if is_old or (directory == layout.SHARED and entry.path not in kept):
                self.files.delete(entry.path)
        for path in self._root.iterdir():
            number = layout.checkpoint_number(path.name)
            if number is not None and number < checkpoint:
                self.files.delete_empty(path.name)

    def close(self, *, over: bool) -> None:
        """Let the next instance have them, or, if the job is ``over``, remove them."""
        if over:
            _remove(self._root)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Hold the directory's lock while this process lives; None: another process (a zombie) still does."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(slot: Path) -> None:
    def report(_function: object, path: str, error: tuple[object, BaseException, object]) -> None:
        if not isinstance(error[1], FileNotFoundError):
            logger.warning("a local copy of a part of a checkpoint cannot be removed: %s: %s", path, error[1])

    shutil.rmtree(slot, onerror=report)
    # The run's and the job's directories go with the last slot's.
    for directory in (slot.parent, slot.parent.parent):
        try:
            directory.rmdir()
        except OSError:
            return


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
    slot: int
    epoch: int
    instance: str

    def file_name(self, first: int = 0, last: int = 0) -> str:
        """Return a new name, unique over all processes and runs."""
        return str(layout.FileName(self.slot, self.epoch, self.instance, layout.new_unique(), first, last))


class SlotStorage:
    """The storage as one slot instance sees it. For several threads at once.

    Here is what driver memory and directories share (savepoints, reading, and when writers end), and driver memory.

    ``location``: the directory that paths of checkpoints' pieces are relative to (those of a savepoint are relative
    to the savepoint's); "" for driver memory. New checkpoints may refer to pieces of restored ones only if those
    lie in the same, or were brought there (`adopt`).
    """

    def __init__(self, config: CheckpointConfig, seat: WriterName, key: bytes, location: str) -> None:
        self.location = location
        self._config = config
        self._seat = seat
        self._buffer_bytes = max(config.write_buffer_size, config.memory_threshold)
        self._signer = Signer(key)
        self._lock = threading.Lock()
        self._writers: dict[int, tuple[SnapshotKind, PieceWriter]] = {}
        self._given_up: dict[int, None] = {}
        self._latest = 0
        self._sources: dict[str, tuple[Files, Signer]] = {}
        # Threads of a pool are made when the first work comes.
        self._upkeep = ThreadPoolExecutor(1, "checkpoint-upkeep")

    def writer(self, barrier: Barrier) -> PieceWriter:
        """Return the writer of a checkpoint or savepoint, the same at every call for one checkpoint.

        That of one that was given up refuses everything.
        """
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

    def log_writer(self) -> PieceWriter:
        """Return a writer that belongs to no checkpoint, for changelogs: SHARED pieces, written ahead of barriers.

        They are never inline. Each call returns another writer, whose `sync` is about what was written with it. After
        an error ask for a new one, and write again what was not synced. A file is kept while a completed checkpoint
        refers to it, and until all checkpoints that its pieces can be new in are complete or given up.
        """
        raise ConfigError("changelog, directory: a log that is written all the time needs a directory")

    def open(self, location: str, piece: Piece) -> BinaryIO:
        """Open a piece for reading, checked against its digest; `CheckpointDamagedError` if it does not fit.

        ``location`` is the directory its path is relative to (`pieces_directory`, for inline ones too, since it says
        which key they are signed with). What the slot has a local copy of is read from there.
        """
        return self._read(loading.open_piece, location, piece)

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        self._read(functools.partial(loading.fetch_piece, path=path), location, piece)

    def adopt(self, location: str, pieces: Sequence[Piece]) -> list[Piece] | None:
        """Return SHARED pieces of a restored checkpoint as new ones may refer to them; None: they are to be written.

        Those of an earlier run of the job have their files brought here by the storage itself, if it can. They share
        what is in them: where one is damaged, the other is.
        """
        return None

    def completed(self, checkpoint: int) -> None:
        """It is complete: older ones that are still written are given up (subsumed), their local copies removed."""
        with self._lock:
            self._latest = max(self._latest, checkpoint)
            entry = self._writers.pop(checkpoint, None)
            is_checkpoint = entry is not None and entry[0] is SnapshotKind.CHECKPOINT
            others = [
                number for number, (kind, _) in self._writers.items() if kind is SnapshotKind.CHECKPOINT
            ]
        for number in (each for each in others if is_checkpoint and each < checkpoint):
            self.aborted(number)
        if entry is not None:
            self._later(entry[1].close)
        if is_checkpoint:
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
        """Close what is open; what no checkpoint refers to may be removed, and what was being removed is.

        ``over``: the job is over, so that local copies are of no use to the next instance.
        """
        self._upkeep.shutdown(wait=True)
        with self._lock:
            writers, self._writers = self._writers, {}
        for _, writer in writers.values():
            if isinstance(writer, FileWriter):
                writer.release()

    def _checkpoint_writer(self, barrier: Barrier) -> PieceWriter:
        return MemoryWriter(self._signer, self._config.max_memory_state)

    def _tidy(self, checkpoint: int) -> None:
        pass

    def _local(self, location: str, piece: Piece) -> Files | None:
        return None

    def _later(self, work: Callable[[], None]) -> None:
        """Do it beside the slot's loop. What cannot be removed is found again by the driver's sweep."""
        self._upkeep.submit(work).add_done_callback(_report)

    def _savepoint_writer(self, barrier: Barrier) -> PieceWriter:
        files, threshold = open_files(barrier.location), self._config.memory_threshold
        name = self._seat.file_name
        lane = FileLane(files, None, lambda _first, _last: name(), buffer_bytes=self._buffer_bytes)

        def wasteful(_owner: str, _pieces: Iterable[Piece]) -> set[str]:
            return set()

        number = barrier.checkpoint
        return FileWriter(lambda: number, lane, lane, self._signer, threshold, wasteful, own=(lane,))

    def _read(
        self, read: Callable[[Files | None, Piece, Signer], Result], location: str, piece: Piece
    ) -> Result:
        files, signer = self._source(location)
        local = self._local(location, piece)
        if local is not None:
            try:
                return read(local, piece, signer)
            except (CheckpointDamagedError, CheckpointStorageError) as error:
                logger.info("restoring from the checkpoint itself: %s", error)
        return read(files, piece, signer)

    def _source(self, location: str) -> tuple[Files | None, Signer]:
        if not location:
            return None, self._signer
        location = layout.normal(location)
        with self._lock:
            known = self._sources.get(location)
        if known is None:
            key = None if location == self.location else key_of(location, self._config.key)
            known = open_files(location), self._signer if key is None else Signer(key)
            with self._lock:
                self._sources[location] = known
        return known


class FileSlotStorage(SlotStorage):
    def __init__(self, config: CheckpointConfig, job: str, run: str, seat: WriterName, key: bytes) -> None:
        assert config.directory is not None
        super().__init__(config, seat, key, layout.run_directory(config.directory, job, run))
        self._files = open_files(self.location)
        self._copies = _local_copies(config, job, run, seat.slot)
        self._copy_files = copies = None if self._copies is None else self._copies.files
        self._lane = functools.partial(FileLane, self._files, copies, buffer_bytes=self._buffer_bytes)
        self._sizes: dict[str, int] = {}
        self._amplification = Amplification(self._size_of, config.max_space_amplification)
        self._across: FileLane | None = None
        most = config.max_file_size
        if config.file_merging_across and self._files.appends:
            self._across = self._lane(self._shared_path, span=ACROSS_SPAN, reach=ACROSS_SPAN, max_bytes=most)

        def log_path(first: int, last: int) -> str:
            return self._shared_path(first, last if first else layout.NEVER)

        self._log_lane = self._lane(log_path, span=LOG_SPAN, reach=LOG_REACH, max_bytes=most)

    def log_writer(self) -> PieceWriter:
        lane, wasteful = self._log_lane, self._amplification.report
        return FileWriter(lambda: self._latest, lane, lane, self._signer, -1, wasteful, own=())

    def close(self, *, over: bool = False) -> None:
        super().close(over=over)
        for lane in (self._across, self._log_lane):
            if lane is not None:
                lane.close()
        if self._copies is not None:
            self._copies.close(over=over)

    def _checkpoint_writer(self, barrier: Barrier) -> PieceWriter:
        number, directory = barrier.checkpoint, layout.checkpoint_name(barrier.checkpoint)

        def new_lane() -> FileLane:
            return self._lane(lambda _first, _last: layout.join(directory, self._seat.file_name()))

        exclusive = new_lane()
        shared = self._across or self._lane(self._shared_path)
        return FileWriter(
            lambda: number,
            exclusive,
            shared,
            self._signer,
            self._config.memory_threshold,
            self._amplification.report,
            own=(exclusive,) if shared is self._across else (exclusive, shared),
            new_in_flight=new_lane,
            share_in_flight=self._config.max_subtasks_per_channel_state_file,
        )

    def _size_of(self, path: str) -> int | None:
        size = self._sizes.get(path)
        if size is None:
            size = self._files.size(path)
            if size is not None and not self._files.appends:
                # It is there when it is whole, and keeps its size.
                self._sizes[path] = size
        return size

    def _shared_path(self, first: int, last: int) -> str:
        return layout.join(layout.SHARED, self._seat.file_name(first, last))

    def adopt(self, location: str, pieces: Sequence[Piece]) -> list[Piece] | None:
        if location == self.location:
            return list(pieces)
        _, signer = self._source(location)
        if layout.parent(location) != layout.parent(self.location) or not signer.is_like(self._signer):
            return None
        mine, theirs = layout.last_name(self.location), layout.last_name(location)
        job = open_files(layout.parent(location))
        here: dict[str, str] = {}
        try:
            for path in {piece.path for piece in pieces if piece.inline is None}:
                name = layout.parse_file_name(layout.last_name(path))
                if name is None:
                    return None
                # Under its own mark: who looks for checkpoints that share nothing knows it by that.
                own = replace(name, **asdict(self._seat), first=0, last=layout.NEVER)
                here[path] = layout.join(layout.SHARED, str(own))
                if not job.copy(layout.join(theirs, path), layout.join(mine, here[path])):
                    return None
        except CheckpointError as error:
            logger.info("state is written anew, as what it was restored from cannot be taken over: %s", error)
            return None
        return [replace(piece, path=here.get(piece.path, piece.path)) for piece in pieces]

    def _local(self, location: str, piece: Piece) -> Files | None:
        if piece.inline is not None or layout.normal(location) != self.location:
            return None
        return self._copy_files

    def _tidy(self, checkpoint: int) -> None:
        if self._copies is not None:
            self._copies.completed(checkpoint, (entry.path for entry in self._files.walk(layout.SHARED)))


def _local_copies(config: CheckpointConfig, job: str, run: str, slot: int) -> LocalCopies | None:
    if config.local_recovery is None:
        return None
    try:
        return LocalCopies(config.local_recovery, job, run, slot)
    except OSError as error:
        where = layout.job_directory(config.local_recovery, job)
        logger.warning("no local copies (local_recovery): %s: %s", where, error)
        return None


def _report(work: Future[None]) -> None:
    error = work.exception()
    if isinstance(error, FTLayerError):
        logger.warning("after a checkpoint: %s", error)
    elif error is not None:
        logger.error("after a checkpoint", exc_info=error)


class MemoryWriter:
    def __init__(self, signer: Signer, max_bytes: int) -> None:
        self._signer = signer
        self._max_bytes = max_bytes
        self._is_discarded = False

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        gathered: list[bytes] = []
        length = 0
        for chunk in chunks:
            if self._is_discarded:
                raise given_up()
            gathered.append(chunk)
            length += len(chunk)
            if length > self._max_bytes:
                raise too_large("a snapshot", length, self._max_bytes)
        data = b"".join(gathered)
        return Piece(self._signer.digest(data), length, data, scope=scope)

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        return set()

    def sync(self) -> None:
        if self._is_discarded:
            raise given_up()

    def close(self) -> None:
        pass

    def discard(self) -> None:
        self._is_discarded = True


def too_large(what: str, length: int, most: int) -> CheckpointStorageError:
    return CheckpointStorageError(
        f"{what} has {length:,} bytes or more, and without a directory checkpoints are kept in the driver's memory, up "
        f"to {most:,} bytes for each subtask: set CheckpointConfig.directory, or raise max_memory_state"
    )


class DriverStorage:
    """The storage as the driver sees it: publishes, finds and removes whole checkpoints.

    Here is what driver memory and directories share (savepoints, and all that is named by its URL), and driver memory:
    the coordinator itself holds the checkpoints, there is nothing to find or to remove.
    """

    def __init__(self, config: CheckpointConfig, job: str, key: bytes) -> None:
        self._config = config
        self._key = key
        self._signer = Signer(key)
        self._crew = StoragePool()
        self._own = None if config.directory is None else layout.job_directory(config.directory, job)
        self._undecided: dict[int, tuple[Files, str]] = {}

    def publish(self, checkpoint: Checkpoint, location: str = "") -> Checkpoint:
        """Write the metadata, atomically, once all files are there; returns the checkpoint with its location.

        ``location``: directory of a savepoint. Raises `CheckpointStorageError`; then it is not there, unless it is
        `undecided`.
        """
        if checkpoint.kind != SnapshotKind.SAVEPOINT:
            return self._publish(checkpoint)
        files = open_files(location)
        savepoint = replace(checkpoint, location=files.url)
        loading.check_present(files, savepoint, self._crew)
        if self._config.key is None:
            # It has to be readable wherever it is moved to.
            files.put_new(layout.KEY, packed_key(self._key))
        self._write_metadata(files, layout.METADATA, savepoint)
        return savepoint

    def undecided(self) -> dict[int, CheckpointStorageError]:
        """Return the ids of what `publish` has failed to write, and which may be there all the same, with the reason.

        Tries again to remove their metadata. One that is not returned any more will never be there. Until then its
        files stay: a user may find it, and restore it.
        """
        left: dict[int, CheckpointStorageError] = {}
        for number, (files, path) in list(self._undecided.items()):
            try:
                files.delete(path)
                _make_deletion_last(files, layout.parent(path))
            except CheckpointStorageError as error:
                left[number] = error
            else:
                self._is_decided(number)
        return left

    def completed(self, job: str) -> list[str]:
        """Return the locations of the checkpoints of a job (of all its runs), the latest first."""
        return []

    def load(self, location: str) -> Checkpoint:
        """Read a checkpoint or savepoint; `CheckpointDamagedError`, `CheckpointStorageError` if that cannot be."""
        return loading.load_checkpoint(location, self._key_of(layout.normal(location)))

    def verify(self, checkpoint: Checkpoint) -> None:
        """Read everything that it refers to; `CheckpointDamagedError` names what is missing or does not fit."""
        loading.verify_checkpoint(checkpoint, self._key_of(checkpoint.location), self._crew)

    def discard(self, checkpoint: Checkpoint, keep: Iterable[Checkpoint]) -> None:
        """Remove a checkpoint: its own files, and shared ones that none of ``keep`` refers to.

        Missing files are fine. What cannot be removed is raised as one `CheckpointStorageError`, when everything
        else is removed; `sweep` tries again.
        """
        if checkpoint.location:
            loading.discard_checkpoint(checkpoint, keep, self._crew)

    def discard_parts(
        self,
        checkpoint: int,
        parts: Iterable[SubtaskSnapshot],
        keep: Iterable[Checkpoint],
        location: str = "",
    ) -> None:
        """Remove what was written for a checkpoint, or a savepoint at ``location``, that was given up.

        Slots remove what they have written when they are told so; this finds what dead ones have left. What is
        `undecided` is left alone.
        """
        if checkpoint in self._undecided:
            return
        if location:
            raise_together(loading.delete_savepoint(open_files(location), self._crew), location)
        else:
            self._discard_parts(checkpoint, parts, keep)

    def sweep(self, keep: Iterable[Checkpoint], is_alive: Callable[[str], bool]) -> Iterator[str]:
        """Remove unreferenced files of this run; yields their paths.

        ``keep``: all completed checkpoints. ``is_alive(instance)``: whether an instance of a slot may still write.
        """
        return iter(())

    def close(self, keep: Iterable[Checkpoint]) -> None:
        """The run is over: remove everything of it but ``keep``."""
        self._crew.close()

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        for subtask in checkpoint.subtasks:
            length = sum(piece.length for piece in subtask.pieces())
            if length > self._config.max_memory_state:
                name = f"the snapshot of {subtask.uid}[{subtask.subtask}]"
                raise too_large(name, length, self._config.max_memory_state)
        return replace(checkpoint, location="")

    def _discard_parts(
        self, checkpoint: int, parts: Iterable[SubtaskSnapshot], keep: Iterable[Checkpoint]
    ) -> None:
        pass

    def _write_metadata(self, files: Files, path: str, checkpoint: Checkpoint) -> None:
        """Publish it. Where that fails it may be there all the same: remove it, or remember that it may be."""
        try:
            files.publish(path, loading.encode(checkpoint, self._signer))
        except BaseException:
            self._undecided[checkpoint.checkpoint] = files, path
            self.undecided()
            raise

    def _is_decided(self, checkpoint: int) -> None:
        del self._undecided[checkpoint]

    def _key_of(self, location: str) -> bytes | None:
        """Return the key of what lies there; None: the one that is kept with it."""
        if self._config.key is not None or not location:
            return self._key
        is_own = self._own is not None and location.startswith(f"{self._own}/")
        return self._key if is_own else None


def _make_deletion_last(files: Files, directory: str) -> None:
    """Else what was deleted might be there again once the machine has failed."""
    try:
        files.sync_names(directory)
    except CheckpointStorageError as error:
        if not directory or not isinstance(error.__cause__, FileNotFoundError):
            raise
        # It was never made, or is not mounted now: then what it lies in is not there either.
        files.sync_names("")


class FileDriverStorage(DriverStorage):
    """Below ``config.directory``.

    What this object has published and not discarded is kept whatever ``keep`` says, so that a list of the kept ones
    that is a moment old does no harm.
    """

    def __init__(self, config: CheckpointConfig, job: str, run: str, key: bytes) -> None:
        assert config.directory is not None
        super().__init__(config, job, key)
        self._directory = config.directory
        self._run = layout.run_directory(config.directory, job, run)
        self._files = open_files(self._run)
        self._lock = threading.Lock()
        self._published: dict[int, set[str]] = {}
        self._latest = 0
        self._unsettled: set[str] = set()

    def completed(self, job: str) -> list[str]:
        return loading.find_checkpoints(layout.job_directory(self._directory, job))

    def discard(self, checkpoint: Checkpoint, keep: Iterable[Checkpoint]) -> None:
        if layout.pieces_directory(checkpoint) != self._run:
            super().discard(checkpoint, keep)
            return
        with self._lock:
            self._published.pop(checkpoint.checkpoint, None)
            self._latest = max(self._latest, checkpoint.checkpoint)
            self._unsettled |= loading.shared_paths(loading.all_pieces(checkpoint))
            shared = self._take_settled(keep)
        name = layout.checkpoint_name(checkpoint.checkpoint)
        errors = loading.delete_directory(self._files, name, self._crew)
        errors += self._crew.delete(self._files, shared)
        raise_together(errors, checkpoint.location)

    def _discard_parts(
        self, checkpoint: int, parts: Iterable[SubtaskSnapshot], keep: Iterable[Checkpoint]
    ) -> None:
        shared = loading.shared_paths(piece for snapshot in parts for piece in snapshot.pieces())
        with self._lock:
            used = self._used(keep)
            bound = [path for path in shared - used if loading.is_bound(path, checkpoint)]
            # Later checkpoints may refer to the others: a changelog goes on after a checkpoint was given up.
            self._unsettled |= shared - used - set(bound)
        errors = loading.delete_directory(self._files, layout.checkpoint_name(checkpoint), self._crew)
        errors += self._crew.delete(self._files, bound)
        raise_together(errors, layout.join(self._run, layout.checkpoint_name(checkpoint)))

    def sweep(self, keep: Iterable[Checkpoint], is_alive: Callable[[str], bool]) -> Iterator[str]:
        kept = [one for one in keep if layout.pieces_directory(one) == self._run]
        paths = [entry.path for entry in self._files.walk()]
        with self._lock:
            used = self._used(kept)
            completed = {one.checkpoint for one in kept} | set(self._published)
            found = loading.orphans(paths, used, completed, self._latest, is_alive)
        errors = []
        for path in found:
            failed = self._crew.delete(self._files, (path,))
            errors += failed
            if not failed:
                yield path
        for name in {path.partition("/")[0] for path in found}:
            number = layout.checkpoint_number(name)
            if number is not None and number not in completed:
                self._files.delete_empty(name)
        raise_together(errors, self._run)

    def close(self, keep: Iterable[Checkpoint]) -> None:
        # The job's key stays: other runs have it too.
        kept = [one for one in keep if layout.pieces_directory(one) == self._run]
        try:
            used = loading.files_of(kept)
            used |= {layout.join(layout.checkpoint_name(one.checkpoint), layout.METADATA) for one in kept}
            entries = [entry.path for entry in self._files.walk() if entry.path not in used]
            # Without its metadata a checkpoint is none: a half-removed one is not found.
            entries.sort(key=lambda path: not path.endswith(f"/{layout.METADATA}"))
            errors = self._crew.delete(self._files, entries)
            directories = {layout.checkpoint_name(one) for one in self._published} | {layout.SHARED}
            directories |= {path.partition("/")[0] for path in entries if "/" in path}
            for name in directories - {path.partition("/")[0] for path in used}:
                self._files.delete_empty(name)
            if not used:
                self._files.delete_empty("")
        finally:
            super().close(keep)
        raise_together(errors, self._run)

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        number = checkpoint.checkpoint
        name = layout.checkpoint_name(number)
        located = replace(checkpoint, location=layout.join(self._run, name))
        with self._lock:
            self._published[number] = loading.files_of([checkpoint])
        try:
            loading.check_present(self._files, located, self._crew)
            self._write_metadata(self._files, layout.join(name, layout.METADATA), located)
        except BaseException:
            if number not in self._undecided:
                with self._lock:
                    self._published.pop(number, None)
            raise
        with self._lock:
            self._latest = max(self._latest, number)
        return located

    def _is_decided(self, checkpoint: int) -> None:
        super()._is_decided(checkpoint)
        with self._lock:
            self._published.pop(checkpoint, None)

    def _take_settled(self, keep: Iterable[Checkpoint]) -> list[str]:
        """Return the shared files that are no longer needed, and forget them."""
        used = self._used(keep)
        self._unsettled -= used
        settled = [path for path in self._unsettled if loading.is_settled(path, self._latest)]
        self._unsettled.difference_update(settled)
        return settled

    def _used(self, keep: Iterable[Checkpoint]) -> set[str]:
        used: set[str] = set().union(*self._published.values())
        for one in keep:
            if layout.pieces_directory(one) == self._run:
                used |= loading.files_of([one])
                self._latest = max(self._latest, one.checkpoint)
        return used


def absolute(config: CheckpointConfig) -> CheckpointConfig:
    """Return the options with absolute paths: slots have another working directory than the driver.

    To be called in the driver, before the options go anywhere.
    """
    places = (config.directory, config.savepoint_directory)
    directory, savepoints = (None if place is None else layout.normal(place) for place in places)
    return replace(config, directory=directory, savepoint_directory=savepoints)


def slot_storage(
    config: CheckpointConfig, job: str, run: str, slot: int, epoch: int, instance: str, key: bytes
) -> SlotStorage:
    """Return the storage of one slot instance.

    ``config`` has absolute paths (`absolute`), ``key`` is what the driver got by `storage_key`. ``run`` is part of the
    path, ``slot``, ``epoch`` and ``instance`` are parts of the names of files.
    Raises `ConfigError` for a URL that fsspec does not know, or a relative path.
    """
    seat = WriterName(slot, epoch, instance)
    if config.directory is None:
        return SlotStorage(config, seat, key, "")
    if layout.is_local(config.directory) and layout.normal(config.directory) != config.directory:
        raise ConfigError(
            f"directory: {config.directory!r} means another place in each process; expected an absolute path"
        )
    if config.storage is not None:
        serve(config.storage, config.directory)
    return FileSlotStorage(config, job, run, seat, key)


def driver_storage(config: CheckpointConfig, job: str, run: str, key: bytes) -> DriverStorage:
    """Return the storage as the driver of one execution sees it; arguments as `slot_storage`."""
    if config.directory is None:
        return DriverStorage(config, job, key)
    return FileDriverStorage(config, job, run, key)
