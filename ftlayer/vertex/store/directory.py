"""The directory of a store: whether it can be used, and who holds it."""

from __future__ import annotations

import errno
import fcntl
import os
import weakref
from collections.abc import Collection
from pathlib import Path

from ftlayer.errors import StoreLockedError, StorePathError

DATA_FILE = "data.mdb"
_LMDB_LOCK_FILE = "lock.mdb"
_LOCK_FILE = "ftlayer.lock"


def prepare(path: Path) -> None:
    """Make ``path`` a directory of mode 0700, or check that it is one with a store in it. Raises `StorePathError`."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError as error:
        raise StorePathError(
            f"{path}: the directory above it does not exist; create {path.parent} first"
        ) from error
    except FileExistsError:
        check_directory(path)
        if not (path / DATA_FILE).exists():
            check_no_others(path, {DATA_FILE, _LMDB_LOCK_FILE, _LOCK_FILE})
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        if path.stat().st_mode & 0o077:
            path.chmod(0o700)
    except OSError as error:
        raise _cannot_write(path, error) from error


def check_directory(path: Path) -> None:
    if not path.exists():
        raise StorePathError(f"{path} does not exist")
    if not path.is_dir():
        raise StorePathError(f"{path} is not a directory: a store is one")


def check_no_others(path: Path, own: Collection[str]) -> None:
    """Raise `StorePathError` if the directory ``path`` has files in it other than those of a store, ``own``."""
    others = sorted({entry.name for entry in path.iterdir()} - {*own})
    if others:
        raise StorePathError(f"{path} has other files in it ({others[0]}): name an empty or a new directory")


class DirectoryLock:
    """The right to write a store, for this process's life: a ``flock``, which no forked child keeps."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def take(cls, path: Path) -> DirectoryLock:
        """Take the lock of the store at ``path``, or raise `StoreLockedError` naming the holder at once."""
        try:
            file = os.open(path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _cannot_write(path, error) from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(file, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(file)
            raise StoreLockedError(
                f"{path} is held by process {holder}: stop that vertex, or give this one another directory"
            ) from error
        os.ftruncate(file, 0)
        try:
            os.pwrite(file, f"{os.getpid()}\n".encode("ascii"), 0)
        except OSError as error:
            os.close(file)
            raise _cannot_write(path, error) from error
        lock = cls(file)
        _held.add(lock)
        return lock

    def release(self) -> None:
        """Let others have it; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def holder_of(path: Path) -> int | None:
    """Return the id of the process that holds the store for writing, None when none does. Raises `StorePathError`."""
    try:
        file = os.open(path / _LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorePathError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 32, 0).decode("ascii", "replace").strip()
        return int(holder) if holder.isdigit() else 0
    finally:
        os.close(file)
    return None


def _cannot_write(path: Path, error: OSError) -> StorePathError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StorePathError(f"{path} cannot be created: its disk is full")
    return StorePathError(
        f"{path} cannot be written ({error.strerror}): change its owner or mode, or name another directory"
    )


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _drop_in_child() -> None:
    # A child that kept the file open would keep the parent's lock alive after the parent's death.
    for lock in _held:
        lock.release()


os.register_at_fork(after_in_child=_drop_in_child)
