"""A directory of any file system, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ftlayer.checkpoint.custom_storage import CHUNK_BYTES as CHUNK_BYTES
from ftlayer.checkpoint.custom_storage import FileStatus as FileStatus
from ftlayer.checkpoint.storage.layout import join
from ftlayer.errors import CheckpointDamagedError, CheckpointError, CheckpointStorageError, FTLayerError
from ftlayer.printable import described, raise_from, secrets_of, shown_url

_WAYS_OUT = {
    errno.ENOSPC: "it is full: make room there, or choose another directory",
    errno.EDQUOT: "the quota is used up: raise it, or choose another directory",
    errno.EFBIG: "the file is larger than is allowed there: choose another directory",
    errno.EROFS: "it can only be read: remount it, or choose another directory",
    errno.EACCES: "permission is missing: grant it, or choose another directory",
    errno.EPERM: "permission is missing: grant it, or choose another directory",
    errno.ENOENT: "it is not there (any more): is it mounted, on the machines of driver and slots?",
    errno.ENOTDIR: "a part of the path is no directory: choose another directory",
    errno.EEXIST: "a part of the path is no directory: choose another directory",
    errno.ESTALE: "it is not there any more: is it still mounted?",
    errno.EMFILE: "too many files are open: raise the limit (ulimit -n)",
}


class FileOutput(Protocol):
    """A new file that is written from its beginning on. Not for several threads at once."""

    def write(self, data: bytes) -> None:
        """Append."""

    def sync(self) -> bool:
        """Make what was written last, as the file system can. Returns whether more can be appended."""

    def rewind(self, size: int) -> bool:
        """Take back what was written behind ``size``; False: that cannot be done here, it stays."""

    def close(self) -> None:
        """Close; what was not synced may be there or not."""

    def abandon(self) -> None:
        """Close and remove the file; errors are raised."""


class Files(Protocol):
    """The files below one directory. Paths are relative to it. For several threads at once.

    Errors are `CheckpointStorageError`, and `CheckpointDamagedError` where something to be read is missing.
    """

    url: str
    appends: bool
    """Whether `FileOutput.sync` leaves a file open."""

    def create(self, path: str, buffer_bytes: int | None = None) -> FileOutput:
        """Begin a new file, making its directory.

        What is smaller than ``buffer_bytes`` is gathered before it is written; None: as suits the file system.
        """

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file, of which readers see all or nothing, and make it last."""

    def publish_new(self, path: str, data: bytes) -> bool:
        """As `publish`, unless the file is there; returns whether it was not."""

    def put_new(self, path: str, data: bytes) -> bool:
        """Write a small secret file unless it is there; returns whether it was not. For its owner's eyes alone."""

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        """Return bytes of a file; fewer than ``length`` at its end."""

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        """Return bytes of a file in parts; fewer than ``length`` at its end."""

    def size(self, path: str) -> int | None:
        """Return a file's size; None: there is none."""

    def walk(self, path: str = "") -> list[FileStatus]:
        """Return all files below a directory; none if it is missing."""

    def move(self, path: str, target: str) -> bool:
        """Give a file another name, in a directory that is there or not; False: the file is missing.

        Readers see it under the new name as a whole or not at all. To last it takes `sync_names`.
        """

    def copy(self, path: str, target: str) -> bool:
        """Have a file under another name too, without reading it, if the file system can; returns whether it has.

        A target that is there is the same file. It lasts when this returns.
        """

    def sync_names(self, path: str) -> None:
        """Make the names in a directory last."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def delete_empty(self, path: str) -> None:
        """Remove a directory, where there are such things; one that is missing or not empty is left."""


@contextlib.contextmanager
def storage_errors(url: str, path: str, doing: str) -> Iterator[None]:
    """Raise whatever a file system raises as `CheckpointStorageError`, with the path and what to do."""
    try:
        yield
    except FTLayerError:
        raise
    except Exception as error:  # noqa: BLE001
        failed = CheckpointStorageError(f"{_at(url, path)} cannot be {doing}: {_reason(error)}")
        raise_from(failed, error, secrets_of(url))


@contextlib.contextmanager
def reading(url: str, path: str) -> Iterator[None]:
    """As `storage_errors`; a missing file is `CheckpointDamagedError`."""
    with storage_errors(url, path, "read"):
        try:
            yield
        except FileNotFoundError as error:
            raise_from(CheckpointDamagedError(f"{_at(url, path)} is missing"), error, secrets_of(url))


def raised(error: CheckpointError) -> None:
    """Raise it: for who reads many files and is to be told of each that cannot be read."""
    raise error


def _at(url: str, path: str) -> str:
    return shown_url(join(url, path) if path else url)


def _reason(error: Exception) -> str:
    said = described(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, FileNotFoundError):
        number = errno.ENOENT
    if number is None and isinstance(error, PermissionError):
        number = errno.EACCES
    way_out = None if number is None else _WAYS_OUT.get(number)
    return said if way_out is None else f"{said}; {way_out}"


THREADS = 8
"""Deletions and look-ups under way at a time: their time is the way to the storage and back."""

NAMED = 5
"""Of many errors, so many are told."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoragePool:
    """A few threads for what waits for the storage."""

    def __init__(self) -> None:
        # Threads are made with the first work, and end with the interpreter.
        self._pool = ThreadPoolExecutor(THREADS, "checkpoint-storage")

    def map(self, work: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Do it for all items; raises the first error when all are done."""
        futures = [self._pool.submit(work, item) for item in items]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def delete(self, files: Files, paths: Iterable[str]) -> list[CheckpointStorageError]:
        """Remove files, and return what could not be done."""

        def delete(path: str) -> CheckpointStorageError | None:
            try:
                files.delete(path)
            except CheckpointStorageError as error:
                return error
            return None

        return [error for error in self.map(delete, paths) if error is not None]

    def close(self) -> None:
        """End the threads; nothing can be done afterwards."""
        self._pool.shutdown(wait=True)


def raise_together(errors: list[CheckpointStorageError], what: str) -> None:
    """Raise one error for all of them; none: do nothing."""
    if not errors:
        return
    named = "; ".join(str(error) for error in errors[:NAMED])
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    raise CheckpointStorageError(f"{what}: {len(errors)} could not be removed: {named}{more}") from errors[0]
