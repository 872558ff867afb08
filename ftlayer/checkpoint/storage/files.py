"""A directory of any file system, and what its errors mean."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ftlayer.checkpoint.custom_storage import (
    CHUNK_BYTES,
    ENTRY_POINTS,
    VARIABLE,
    CheckpointStorage,
    FileStatus,
    StoredOutput,
    installed,
    served,
)
from ftlayer.checkpoint.storage.layout import is_local, join, new_unique, normal, parent, scheme_of
from ftlayer.common.printable import described, raise_from, secrets_of, shown_url
from ftlayer.config import MIB
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    FTLayerError,
)

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
    raise error


def _at(url: str, path: str) -> str:
    return shown_url(join(url, path) if path else url)


def _reason(error: Exception) -> str:
    said = described(error)
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        missing = isinstance(error, FileNotFoundError)
        number = errno.ENOENT if missing else errno.EACCES if isinstance(error, PermissionError) else 0
    return f"{said}; {_WAYS_OUT[number]}" if number in _WAYS_OUT else said


THREADS = 8
"""Deletions and look-ups under way at a time: their time is the way to the storage and back."""

NAMED = 5
"""Of many errors, so many are told."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class StoragePool:
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
        def delete(path: str) -> CheckpointStorageError | None:
            try:
                files.delete(path)
            except CheckpointStorageError as error:
                return error
            return None

        return [error for error in self.map(delete, paths) if error is not None]

    def close(self) -> None:
        self._pool.shutdown(wait=True)


def named(errors: Sequence[CheckpointError]) -> str:
    more = f"; and {len(errors) - NAMED} more" if len(errors) > NAMED else ""
    return "; ".join(map(str, errors[:NAMED])) + more


def raise_together(errors: list[CheckpointStorageError], what: str) -> None:
    if errors:
        text = f"{what}: {len(errors)} could not be removed: {named(errors)}"
        raise CheckpointStorageError(text) from errors[0]


BUFFER_BYTES = 1 << 18

BEHIND_BYTES = 8 * MIB
"""Of a large file so much at a time goes to the disk while more is written."""

_KEPT_WINDOWS = 4
"""So long the disk may take before what is written stays in memory all the same."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_TRIES = 3
"""A directory may be removed, as empty, between the moments when it is made and when a file is made in it."""


class LocalFileOutput:
    def __init__(self, url: str, path: str, file: BufferedWriter) -> None:
        self._url = url
        self._path = path
        self._file = file
        self._is_entered = False
        self._size = 0
        self._behind = 0

    def write(self, data: bytes) -> None:
        with storage_errors(self._url, self._path, "written"):
            self._file.write(data)
            self._size += len(data)
            if self._size - self._behind >= BEHIND_BYTES:
                self._write_behind()

    def _write_behind(self) -> None:
        """Let the system begin to write what it holds, and forget what it has written.

        It would keep it for readers, who come only after a failure. To find so much memory takes ten times as long as
        to copy into what was used just now, and what others have on the same disk waits when all comes at its end.
        """
        first = max(0, self._behind - _KEPT_WINDOWS * BEHIND_BYTES)
        self._behind = self._size
        if sys.platform != "darwin":  # It has no such call.
            os.posix_fadvise(self._file.fileno(), first, self._size - first, os.POSIX_FADV_DONTNEED)

    def sync(self) -> bool:
        with storage_errors(self._url, self._path, "written"):
            self._file.flush()
            # Content and size are all that another process needs to read it; macOS can sync no less than all.
            sync_content = os.fsync if sys.platform == "darwin" else os.fdatasync
            sync_content(self._file.fileno())
            if not self._is_entered:
                sync_directory(Path(self._file.name).parent)
                self._is_entered = True
        return True

    def rewind(self, size: int) -> bool:
        with storage_errors(self._url, self._path, "cut"):
            self._file.flush()
            self._file.truncate(size)
            self._file.seek(size)
            self._size, self._behind = size, min(self._behind, size)
        return True

    def close(self) -> None:
        with storage_errors(self._url, self._path, "closed"):
            self._file.close()

    def abandon(self) -> None:
        with storage_errors(self._url, self._path, "deleted"):
            # What the buffer holds is of no use, and may not find room.
            self._file.raw.close()
            Path(self._file.name).unlink(missing_ok=True)


class LocalFiles:
    appends = True

    def __init__(self, url: str) -> None:
        self.url = normal(url)
        self._root = Path(self.url)

    def create(self, path: str, buffer_bytes: int | None = None) -> LocalFileOutput:
        with storage_errors(self.url, path, "written"):
            file = self._open_new(self._root / path, buffer_bytes=buffer_bytes or BUFFER_BYTES)
            return LocalFileOutput(self.url, path, file)

    def publish(self, path: str, data: bytes) -> None:
        target = self._root / path
        with storage_errors(self.url, path, "written"):
            temporary = self._write_new(target, data)
            try:
                temporary.rename(target)
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            sync_directory(target.parent)

    def put_new(self, path: str, data: bytes) -> bool:
        return self._put_new(path, data, 0o600)

    def publish_new(self, path: str, data: bytes) -> bool:
        return self._put_new(path, data, 0o666)

    def _put_new(self, path: str, data: bytes, mode: int) -> bool:
        target = self._root / path
        with storage_errors(self.url, path, "written"):
            if target.exists():
                return False
            temporary = self._write_new(target, data, mode)
            try:
                # Its name, unless another file has it.
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                temporary.rename(target)
            finally:
                temporary.unlink(missing_ok=True)
                sync_directory(target.parent)
        return True

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        with reading(self.url, path), (self._root / path).open("rb") as file:
            file.seek(offset)
            return file.read(-1 if length is None else length)

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        with reading(self.url, path), (self._root / path).open("rb", buffering=0) as file:
            file.seek(offset)
            while length and (chunk := file.read(min(length, CHUNK_BYTES))):
                length -= len(chunk)
                yield chunk

    def size(self, path: str) -> int | None:
        with storage_errors(self.url, path, "read"):
            try:
                return (self._root / path).stat().st_size
            except FileNotFoundError:
                return None

    def walk(self, path: str = "") -> list[FileStatus]:
        def unless_missing(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                raise error

        found: list[FileStatus] = []
        with storage_errors(self.url, path, "read"):
            for directory, _, names in os.walk(self._root / path, onerror=unless_missing):
                for name in names:
                    file = Path(directory, name)
                    try:
                        status = file.stat()
                    except OSError as error:
                        # Removed since it was listed, or a link that leads round in a circle: no file of ours.
                        if error.errno not in (errno.ENOENT, errno.ELOOP):
                            raise
                        continue
                    if stat.S_ISREG(status.st_mode):
                        relative = file.relative_to(self._root).as_posix()
                        found.append(FileStatus(relative, status.st_size, status.st_mtime_ns // 1_000_000))
        return found

    def move(self, path: str, target: str) -> bool:
        with storage_errors(self.url, target, "written"):
            make_directory((self._root / target).parent)
            try:
                (self._root / path).rename(self._root / target)
            except FileNotFoundError:
                return False
        return True

    def copy(self, path: str, target: str) -> bool:
        with reading(self.url, path):
            make_directory((self._root / target).parent)
            try:
                os.link(self._root / path, self._root / target)
            except FileExistsError:
                return True
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                return False
            sync_directory((self._root / target).parent)
        return True

    def sync_names(self, path: str) -> None:
        with storage_errors(self.url, path, "written"):
            sync_directory(self._root / path)

    def delete(self, path: str) -> None:
        with storage_errors(self.url, path, "deleted"):
            (self._root / path).unlink(missing_ok=True)

    def delete_empty(self, path: str) -> None:
        with storage_errors(self.url, path, "deleted"):
            try:
                (self._root / path).rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise

    def _write_new(self, target: Path, data: bytes, mode: int = 0o666) -> Path:
        temporary = target.with_name(f".{target.name}.{new_unique()}")
        try:
            with self._open_new(temporary, mode) as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        return temporary

    def _open_new(self, path: Path, mode: int = 0o666, buffer_bytes: int = BUFFER_BYTES) -> BufferedWriter:
        for tries in range(_TRIES):
            make_directory(path.parent)
            try:
                raw = FileIO(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
                return BufferedWriter(raw, buffer_bytes)
            except FileNotFoundError:
                if tries == _TRIES - 1:
                    raise
        raise AssertionError


def make_directory(path: Path) -> None:
    """Make a directory with all above it, and make that last."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# A directory that fsspec or a storage of one's own reaches: an object store, HDFS, a database, another machine.
#
# A file is there once it is closed, so each `sync` ends the file and the next piece begins another one. Options of
# a file system (credentials, endpoints) come from fsspec's own configuration or the environment.

RENAMING = frozenset({"hdfs", "arrow_hdfs", "webhdfs", "sftp", "ssh", "smb", "ftp"})
"""File systems whose rename is atomic, and whose files can be seen half-written. Others put objects as a whole."""

_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created", "modificationTime")


class RemoteFileOutput:
    def __init__(self, files: RemoteFiles, path: str, file: StoredOutput, buffer_bytes: int) -> None:
        self._files = files
        self._room = self._buffer_bytes = buffer_bytes
        self._gathered: list[bytes] = []
        self._path = path
        self._file = file
        self._written = 0
        self._is_closed = False

    def write(self, data: bytes) -> None:
        self._written += len(data)
        with storage_errors(self._files.url, self._path, "written"):
            if len(data) > self._room:
                self._flush()
            if len(data) >= self._buffer_bytes:
                self._file.write(data)
            else:
                self._gathered.append(data)
                self._room -= len(data)

    def _flush(self) -> None:
        if self._gathered:
            self._file.write(b"".join(self._gathered))
            self._gathered, self._room = [], self._buffer_bytes

    def sync(self) -> bool:
        """See `FileOutput.sync`: the file is closed and its size looked at; nothing can be appended."""
        self.close()
        size = self._files.size(self._path)
        if size != self._written:
            raise CheckpointStorageError(
                f"{shown_url(self._files.url)}/{self._path}: {self._written:,} bytes were written, and "
                f"{'it is not there' if size is None else f'{size:,} are there'}; see whether the storage is well"
            )
        return False

    def rewind(self, size: int) -> bool:
        return False

    def close(self) -> None:
        if not self._is_closed:
            with storage_errors(self._files.url, self._path, "written"):
                self._flush()
                self._file.close()
            self._is_closed = True

    def abandon(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with storage_errors(self._files.url, self._path, "deleted"):
                self._file.discard()
        self._files.delete(self._path)


class RemoteFiles:
    appends = False

    def __init__(self, url: str, storage: CheckpointStorage) -> None:
        self.url = url
        self._storage = storage

    def create(self, path: str, buffer_bytes: int | None = None) -> RemoteFileOutput:
        with storage_errors(self.url, path, "written"):
            return RemoteFileOutput(self, path, self._storage.create(path), buffer_bytes or 0)

    def publish(self, path: str, data: bytes) -> None:
        with storage_errors(self.url, path, "written"):
            self._storage.write(path, data)

    def publish_new(self, path: str, data: bytes) -> bool:
        with storage_errors(self.url, path, "written"):
            return self._storage.write_new(path, data)

    put_new = publish_new

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.chunks(path, offset, 1 << 62 if length is None else length))

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        with reading(self.url, path):
            yield from self._storage.chunks(path, offset, length)

    def size(self, path: str) -> int | None:
        with storage_errors(self.url, path, "read"):
            return self._storage.size(path)

    def walk(self, path: str = "") -> list[FileStatus]:
        with storage_errors(self.url, path, "read"):
            return list(self._storage.list(path))

    def move(self, path: str, target: str) -> bool:
        with storage_errors(self.url, target, "written"):
            try:
                self._storage.move(path, target)
            except FileNotFoundError:
                return False
        return True

    def copy(self, path: str, target: str) -> bool:
        with reading(self.url, path):
            return self._storage.copy(path, target)

    def sync_names(self, path: str) -> None:
        """They last at once."""

    def delete(self, path: str) -> None:
        with storage_errors(self.url, path, "deleted"):
            self._storage.delete(path)

    def delete_empty(self, path: str) -> None:
        # A store without directories, or with something in this one, says so in one of many ways, or its author's.
        with contextlib.suppress(Exception):
            self._storage.delete_empty(path)


_TELLING = ("aiobotocore", "botocore", "boto3", "s3fs", "gcsfs", "adlfs", "fsspec")


def file_system_of(url: str, **options: Any) -> tuple[Any, str]:
    """Return what fsspec has for a URL, and the path there; what is logged for debugging, as credentials, is left out.

    A level that a user has given one of these loggers stays.
    """
    from fsspec.core import url_to_fs

    for library in map(logging.getLogger, _TELLING):
        if library.level == logging.NOTSET and library.isEnabledFor(logging.DEBUG):
            library.setLevel(logging.INFO)
    return url_to_fs(url, **options)  # type: ignore[no-any-return]


class FsspecStorage(CheckpointStorage):
    """What fsspec reaches. Of two that make a file in the same moment both may be told that it is new."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._fs, root = file_system_of(url)
        self._root: str = root.rstrip("/")

    def write(self, path: str, data: bytes) -> None:
        target = self._at(path)
        self._fs.makedirs(parent(target), exist_ok=True)
        if scheme_of(self.url) not in RENAMING:
            self._fs.pipe_file(target, data)
            return
        temporary = f"{parent(target)}/.{new_unique()}"
        self._fs.pipe_file(temporary, data)
        self._fs.mv(temporary, target)

    def write_new(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        self.write(path, data)
        return True

    def read(self, path: str, offset: int, length: int) -> bytes:
        return b"".join(self.chunks(path, offset, length))

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        with self._fs.open(self._at(path), "rb", block_size=4 * CHUNK_BYTES) as file:
            file.seek(offset)
            while length and (chunk := file.read(min(length, CHUNK_BYTES))):
                length -= len(chunk)
                yield bytes(chunk)

    def size(self, path: str) -> int | None:
        try:
            self._fs.invalidate_cache()
            return int(self._fs.info(self._at(path))["size"])
        except FileNotFoundError:
            return None

    def list(self, path: str) -> list[FileStatus]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.find(self._at(path), detail=True)
        except FileNotFoundError:
            return []
        return [
            FileStatus(name[len(self._root) + 1 :], int(info["size"] or 0), modified_ms(info))
            for name, info in found.items()
        ]

    def create(self, path: str) -> StoredOutput:
        self._fs.makedirs(parent(self._at(path)), exist_ok=True)
        return _Upload(self._fs.open(self._at(path), "wb"))

    def move(self, path: str, target: str) -> None:
        self._fs.makedirs(parent(self._at(target)), exist_ok=True)
        self._fs.mv(self._at(path), self._at(target))

    def copy(self, path: str, target: str) -> bool:
        self._fs.makedirs(parent(self._at(target)), exist_ok=True)
        try:
            self._fs.cp_file(self._at(path), self._at(target))
        except NotImplementedError:
            return False
        return True

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def delete_empty(self, path: str) -> None:
        self._fs.rmdir(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root


class _Upload:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.write, self.close = file.write, file.close

    def discard(self) -> None:
        """An upload that has begun is given up where the file system can."""
        if not self._file.closed:
            # Without this, closing would upload what is buffered.
            discard = getattr(self._file, "discard", None)
            with contextlib.suppress(OSError, NotImplementedError):
                if discard is not None:
                    discard()
                self._file.close()


def open_files(url: str) -> Files:
    """Return the directory at ``url``, which need not be there, of whatever keeps such URLs.

    Raises `ConfigError` for a URL that nobody knows.
    """
    if is_local(url):
        return LocalFiles(url)
    url, scheme = normal(url), scheme_of(url)
    own = served(scheme)
    if own is None:
        try:
            return RemoteFiles(url, FsspecStorage(url))
        except (ImportError, ValueError) as error:
            own = installed(scheme)
            if own is None:
                failed = (
                    f"directory: {shown_url(url)} cannot be reached: {error}. The scheme has to be one of fsspec's, "
                    "and the package that it names has to be installed for driver and slots; or it is that of a "
                    "storage of your own: CheckpointConfig(storage=…), --storage of ftlayer checkpoints, "
                    f"{VARIABLE}, or an entry point of the group {ENTRY_POINTS}"
                )
                raise_from(ConfigError(failed), error, secrets_of(url))
        except (OSError, EOFError) as error:
            failed = f"{shown_url(url)} cannot be reached: {described(error)}"
            raise_from(CheckpointStorageError(failed), error, secrets_of(url))
    with storage_errors(url, "", "opened"):
        return RemoteFiles(url, own(url))


def modified_ms(info: dict[str, Any]) -> int:
    """Return when a file was changed, of what fsspec says of it, in ms since 1970; 0: unknown."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), 0)
    try:
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        seconds = value.timestamp() if isinstance(value, datetime) else value
        return int(seconds * 1_000)
    except (ValueError, OverflowError, TypeError):
        return 0  # No time that there is.
