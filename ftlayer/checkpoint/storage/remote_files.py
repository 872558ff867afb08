"""A directory that fsspec or a storage of one's own reaches: an object store, HDFS, a database, another machine.

A file is there once it is closed, so each `sync` ends the file and the next piece begins another one. Options of
a file system (credentials, endpoints) come from fsspec's own configuration or the environment.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime
from typing import Any

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
from ftlayer.checkpoint.storage.files import Files, LocalFiles, reading, storage_errors
from ftlayer.checkpoint.storage.layout import is_local, new_unique, normal, parent, scheme_of
from ftlayer.common.printable import described, raise_from, secrets_of, shown_url
from ftlayer.errors import CheckpointStorageError, ConfigError

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
    """What is asked of `Files`, of a storage that keeps whole files, and whose errors are anything."""

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
        """See `Files.sync_names`; they last at once."""

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
        """An object is copied, and then deleted."""
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
