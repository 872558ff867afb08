"""The storage as the driver sees it. See `ftlayer.checkpoint.storage.contract.DriverStorage`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from ftlayer.checkpoint.barrier import SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskSnapshot
from ftlayer.checkpoint.storage.deleting import StoragePool, raise_together
from ftlayer.checkpoint.storage.file_systems import open_files
from ftlayer.checkpoint.storage.files import Files
from ftlayer.checkpoint.storage.keys import packed_key
from ftlayer.checkpoint.storage.layout import (
    KEY,
    METADATA,
    SHARED,
    checkpoint_name,
    checkpoint_number,
    job_directory,
    join,
    normal,
    parent,
    pieces_directory,
    run_directory,
)
from ftlayer.checkpoint.storage.loading import (
    all_pieces,
    check_present,
    find_checkpoints,
    load_checkpoint,
    paths_of,
    verify_checkpoint,
)
from ftlayer.checkpoint.storage.memory import too_large
from ftlayer.checkpoint.storage.metadata import encode
from ftlayer.checkpoint.storage.orphans import is_bound, is_settled, orphans
from ftlayer.checkpoint.storage.removing import (
    delete_directory,
    delete_savepoint,
    discard_checkpoint,
    shared_paths,
)
from ftlayer.checkpoint.storage.signing import Signer
from ftlayer.errors import CheckpointStorageError


class DriverStorageBase:
    """The part that driver memory and directories share: savepoints, and all that is named by its URL."""

    def __init__(self, config: CheckpointConfig, job: str, key: bytes) -> None:
        self._config = config
        self._key = key
        self._signer = Signer(key)
        self._crew = StoragePool()
        self._own = None if config.directory is None else job_directory(config.directory, job)
        self._undecided: dict[int, tuple[Files, str]] = {}

    def publish(self, checkpoint: Checkpoint, location: str = "") -> Checkpoint:
        """See `DriverStorage.publish`. It makes sure that all files are there that it refers to."""
        if checkpoint.kind != SnapshotKind.SAVEPOINT:
            return self._publish(checkpoint)
        files = open_files(location)
        savepoint = replace(checkpoint, location=files.url)
        check_present(files, savepoint, self._crew)
        if self._config.key is None:
            # It has to be readable wherever it is moved to.
            files.put_new(KEY, packed_key(self._key))
        self._write_metadata(files, METADATA, savepoint)
        return savepoint

    def undecided(self) -> dict[int, CheckpointStorageError]:
        left: dict[int, CheckpointStorageError] = {}
        for number, (files, path) in list(self._undecided.items()):
            try:
                files.delete(path)
                _make_deletion_last(files, parent(path))
            except CheckpointStorageError as error:
                left[number] = error
            else:
                self._is_decided(number)
        return left

    def load(self, location: str) -> Checkpoint:
        """See `DriverStorage.load`; any checkpoint or savepoint of any job."""
        return load_checkpoint(location, self._key_of(normal(location)))

    def verify(self, checkpoint: Checkpoint) -> None:
        verify_checkpoint(checkpoint, self._key_of(checkpoint.location), self._crew)

    def discard(self, checkpoint: Checkpoint, keep: Iterable[Checkpoint]) -> None:
        if checkpoint.location:
            discard_checkpoint(checkpoint, keep, self._crew)

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        raise NotImplementedError

    def _write_metadata(self, files: Files, path: str, checkpoint: Checkpoint) -> None:
        """Publish it. Where that fails it may be there all the same: remove it, or remember that it may be."""
        try:
            files.publish(path, encode(checkpoint, self._signer))
        except BaseException:
            self._undecided[checkpoint.checkpoint] = files, path
            self.undecided()
            raise

    def _is_decided(self, checkpoint: int) -> None:
        """It is not there, and will not be."""
        del self._undecided[checkpoint]

    def _discard_savepoint(self, location: str) -> None:
        """Remove what is left of one that was given up."""
        files = open_files(location)
        raise_together(delete_savepoint(files, self._crew), location)

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


class FileDriverStorage(DriverStorageBase):
    """Below ``config.directory``.

    What this object has published and not discarded is kept whatever ``keep`` says, so that a list of the kept ones
    that is a moment old does no harm.
    """

    def __init__(self, config: CheckpointConfig, job: str, run: str, key: bytes) -> None:
        assert config.directory is not None
        super().__init__(config, job, key)
        self._directory = config.directory
        self._run = run_directory(config.directory, job, run)
        self._files = open_files(self._run)
        self._lock = threading.Lock()
        self._published: dict[int, set[str]] = {}
        self._latest = 0
        self._unsettled: set[str] = set()

    def completed(self, job: str) -> list[str]:
        return find_checkpoints(job_directory(self._directory, job))

    def discard(self, checkpoint: Checkpoint, keep: Iterable[Checkpoint]) -> None:
        if pieces_directory(checkpoint) != self._run:
            super().discard(checkpoint, keep)
            return
        with self._lock:
            self._published.pop(checkpoint.checkpoint, None)
            self._latest = max(self._latest, checkpoint.checkpoint)
            self._unsettled |= shared_paths(all_pieces(checkpoint))
            shared = self._take_settled(keep)
        name = checkpoint_name(checkpoint.checkpoint)
        errors = delete_directory(self._files, name, self._crew)
        errors += self._crew.delete(self._files, shared)
        raise_together(errors, checkpoint.location)

    def discard_parts(
        self,
        checkpoint: int,
        parts: Iterable[SubtaskSnapshot],
        keep: Iterable[Checkpoint],
        location: str = "",
    ) -> None:
        if checkpoint in self._undecided:
            return
        if location:
            self._discard_savepoint(location)
            return
        shared = shared_paths(piece for part in parts for piece in part.pieces())
        with self._lock:
            used = self._used(keep)
            bound = [path for path in shared - used if is_bound(path, checkpoint)]
            # Later checkpoints may refer to the others: a changelog goes on after a checkpoint was given up.
            self._unsettled |= shared - used - set(bound)
        errors = delete_directory(self._files, checkpoint_name(checkpoint), self._crew)
        errors += self._crew.delete(self._files, bound)
        raise_together(errors, join(self._run, checkpoint_name(checkpoint)))

    def sweep(self, keep: Iterable[Checkpoint], is_alive: Callable[[str], bool]) -> Iterator[str]:
        kept = [one for one in keep if pieces_directory(one) == self._run]
        entries = self._files.walk()
        with self._lock:
            used = self._used(kept)
            completed = {one.checkpoint for one in kept} | set(self._published)
            found = orphans((entry.path for entry in entries), used, completed, self._latest, is_alive)
        errors = []
        for path in found:
            failed = self._crew.delete(self._files, (path,))
            errors += failed
            if not failed:
                yield path
        for name in {path.partition("/")[0] for path in found}:
            number = checkpoint_number(name)
            if number is not None and number not in completed:
                self._files.delete_empty(name)
        raise_together(errors, self._run)

    def close(self, keep: Iterable[Checkpoint]) -> None:
        """See `DriverStorage.close`. The job's key stays: other runs have it too."""
        kept = [one for one in keep if pieces_directory(one) == self._run]
        try:
            used = {path for one in kept for path in paths_of(all_pieces(one))}
            used |= {join(checkpoint_name(one.checkpoint), METADATA) for one in kept}
            entries = [entry.path for entry in self._files.walk() if entry.path not in used]
            # Without its metadata a checkpoint is none: a half-removed one is not found.
            entries.sort(key=lambda path: not path.endswith(f"/{METADATA}"))
            errors = self._crew.delete(self._files, entries)
            directories = {checkpoint_name(one) for one in self._published} | {SHARED}
            directories |= {path.partition("/")[0] for path in entries if "/" in path}
            for name in directories - {path.partition("/")[0] for path in used}:
                self._files.delete_empty(name)
            if not used:
                self._files.delete_empty("")
        finally:
            self._crew.close()
        raise_together(errors, self._run)

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        number = checkpoint.checkpoint
        name = checkpoint_name(number)
        located = replace(checkpoint, location=join(self._run, name))
        with self._lock:
            self._published[number] = paths_of(all_pieces(checkpoint))
        try:
            check_present(self._files, located, self._crew)
            self._write_metadata(self._files, join(name, METADATA), located)
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
        settled = [path for path in self._unsettled if is_settled(path, self._latest)]
        self._unsettled.difference_update(settled)
        return settled

    def _used(self, keep: Iterable[Checkpoint]) -> set[str]:
        used: set[str] = set().union(*self._published.values())
        for one in keep:
            if pieces_directory(one) == self._run:
                used |= paths_of(all_pieces(one))
                self._latest = max(self._latest, one.checkpoint)
        return used


class MemoryDriverStorage(DriverStorageBase):
    """Without a directory: the coordinator itself holds the checkpoints, there is nothing to find or to remove."""

    def completed(self, job: str) -> list[str]:
        """See `DriverStorage.completed`: none that a later run could find."""
        return []

    def discard_parts(
        self,
        checkpoint: int,
        parts: Iterable[SubtaskSnapshot],
        keep: Iterable[Checkpoint],
        location: str = "",
    ) -> None:
        if location and checkpoint not in self._undecided:
            self._discard_savepoint(location)

    def sweep(self, keep: Iterable[Checkpoint], is_alive: Callable[[str], bool]) -> Iterator[str]:
        return iter(())

    def close(self, keep: Iterable[Checkpoint]) -> None:
        self._crew.close()

    def _publish(self, checkpoint: Checkpoint) -> Checkpoint:
        for subtask in checkpoint.subtasks:
            length = sum(piece.length for piece in subtask.pieces())
            if length > self._config.max_memory_state:
                name = f"the snapshot of {subtask.uid}[{subtask.subtask}]"
                raise too_large(name, length, self._config.max_memory_state)
        return replace(checkpoint, location="")
