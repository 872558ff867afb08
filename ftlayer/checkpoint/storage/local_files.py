"""A directory of this machine (or one that is mounted): files are synced, appended to, published by rename."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from io import BufferedWriter, FileIO
from pathlib import Path

from ftlayer.checkpoint.storage.files import CHUNK_BYTES, FileStatus, reading, storage_errors
from ftlayer.checkpoint.storage.layout import new_unique, normal
from ftlayer.config import MIB

BUFFER_BYTES = 1 << 18

BEHIND_BYTES = 8 * MIB
"""Of a large file so much at a time goes to the disk while more is written."""

_KEPT_WINDOWS = 4
"""So long the disk may take before what is written stays in memory all the same."""

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_TRIES = 3
"""A directory may be removed, as empty, between the moments when it is made and when a file is made in it."""


def _sync_content(file: int) -> None:
    """Have the disk hold a file's content and its size: all that another process needs to read it."""
    if sys.platform == "darwin":  # It can sync no less than all.
        os.fsync(file)
    else:
        os.fdatasync(file)


class LocalFileOutput:
    """A file that is written. See `ftlayer.checkpoint.storage.files.FileOutput`."""

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
        """See `FileOutput.sync`: the file, and with the first call the directory that it is in."""
        with storage_errors(self._url, self._path, "written"):
            self._file.flush()
            _sync_content(self._file.fileno())
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

    def publish_new(self, path: str, data: bytes) -> bool:
        return self._put_new(path, data, 0o666)

    def put_new(self, path: str, data: bytes) -> bool:
        return self._put_new(path, data, 0o600)

    def _put_new(self, path: str, data: bytes, mode: int) -> bool:
        target = self._root / path
        with storage_errors(self.url, path, "written"):
            if target.exists():
                return False
            temporary = self._write_new(target, data, mode)
            try:
                is_new = _link(temporary, target)
            finally:
                temporary.unlink(missing_ok=True)
            sync_directory(target.parent)
        return is_new

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
        found: list[FileStatus] = []
        with storage_errors(self.url, path, "read"):
            for directory, _, names in os.walk(self._root / path, onerror=_unless_missing):
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


def _link(temporary: Path, target: Path) -> bool:
    """Give the file its name unless another file has it."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        temporary.rename(target)
    return True


def _unless_missing(error: OSError) -> None:
    if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
        raise error
