"""A directory that fsspec reaches: an object store, HDFS, another machine.

A file is there once it is closed, so each `sync` ends the file and the next piece begins another one. Options of
a file system (credentials, endpoints) come from fsspec's own configuration or the environment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from ftlayer.checkpoint.storage.files import CHUNK_BYTES, FileStatus, reading, storage_errors
from ftlayer.checkpoint.storage.layout import new_unique, normal, parent, scheme_of
from ftlayer.errors import CheckpointStorageError, ConfigError
from ftlayer.printable import shown_url

RENAMING = frozenset({"hdfs", "arrow_hdfs", "webhdfs", "sftp", "ssh", "smb", "ftp"})
"""File systems whose rename is atomic, and whose files can be seen half-written. Others put objects as a whole."""

_TIMES = ("mtime", "LastModified", "last_modified", "modified", "updated", "created", "modificationTime")


class RemoteFileOutput:
    """A file that is written. See `ftlayer.checkpoint.storage.files.FileOutput`."""

    def __init__(self, files: RemoteFiles, path: str, file: Any) -> None:
        self._files = files
        self._path = path
        self._file = file
        self._written = 0

    def write(self, data: bytes) -> None:
        with storage_errors(self._files.url, self._path, "written"):
            self._file.write(data)
            self._written += len(data)

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
        with storage_errors(self._files.url, self._path, "written"):
            self._file.close()

    def abandon(self) -> None:
        """See `FileOutput.abandon`; an upload that has begun is given up where the file system can."""
        with storage_errors(self._files.url, self._path, "deleted"):
            if not self._file.closed:
                # Without this, closing would upload what is buffered.
                discard = getattr(self._file, "discard", None)
                with contextlib.suppress(OSError, NotImplementedError):
                    if discard is not None:
                        discard()
                    self._file.close()
        self._files.delete(self._path)


class RemoteFiles:
    appends = False

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = normal(url)
        try:
            self._fs, root = url_to_fs(self.url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"directory: {self.url} cannot be reached: {error}. The scheme has to be one of fsspec's, and the "
                "package that it names has to be installed for driver and slots"
            ) from error
        self._root: str = root.rstrip("/")

    def create(self, path: str) -> RemoteFileOutput:
        with storage_errors(self.url, path, "written"):
            return RemoteFileOutput(self, path, self._open_new(self._at(path)))

    def publish(self, path: str, data: bytes) -> None:
        with storage_errors(self.url, path, "written"):
            target = self._at(path)
            self._fs.makedirs(parent(target), exist_ok=True)
            if scheme_of(self.url) not in RENAMING:
                self._fs.pipe_file(target, data)
                return
            temporary = f"{parent(target)}/.{new_unique()}"
            self._fs.pipe_file(temporary, data)
            self._fs.mv(temporary, target)

    def put_new(self, path: str, data: bytes) -> bool:
        """See `Files.put_new`; two that do it in the same moment may both be told that it was new."""
        return self.publish_new(path, data)

    def publish_new(self, path: str, data: bytes) -> bool:
        if self.size(path) is not None:
            return False
        self.publish(path, data)
        return True

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        return b"".join(self.chunks(path, offset, 1 << 62 if length is None else length))

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        with (
            reading(self.url, path),
            self._fs.open(self._at(path), "rb", block_size=4 * CHUNK_BYTES) as file,
        ):
            file.seek(offset)
            while length and (chunk := file.read(min(length, CHUNK_BYTES))):
                length -= len(chunk)
                yield bytes(chunk)

    def size(self, path: str) -> int | None:
        with storage_errors(self.url, path, "read"):
            try:
                self._fs.invalidate_cache()
                return int(self._fs.info(self._at(path))["size"])
            except FileNotFoundError:
                return None

    def walk(self, path: str = "") -> list[FileStatus]:
        with storage_errors(self.url, path, "read"):
            try:
                self._fs.invalidate_cache()
                found = self._fs.find(self._at(path), detail=True)
            except FileNotFoundError:
                return []
            return [
                FileStatus(name[len(self._root) + 1 :], int(info["size"] or 0), modified_ms(info))
                for name, info in found.items()
            ]

    def move(self, path: str, target: str) -> bool:
        """See `Files.move`; an object is copied, and then deleted."""
        with storage_errors(self.url, target, "written"):
            try:
                self._fs.makedirs(parent(self._at(target)), exist_ok=True)
                self._fs.mv(self._at(path), self._at(target))
            except FileNotFoundError:
                return False
        return True

    def sync_names(self, path: str) -> None:
        """See `Files.sync_names`; they last at once."""

    def delete(self, path: str) -> None:
        with storage_errors(self.url, path, "deleted"), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._at(path))

    def delete_empty(self, path: str) -> None:
        # A store without directories, or with something in this one, says so in one of many ways.
        with contextlib.suppress(OSError, NotImplementedError, ValueError):
            self._fs.rmdir(self._at(path))

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _open_new(self, target: str) -> Any:
        self._fs.makedirs(parent(target), exist_ok=True)
        return self._fs.open(target, "wb")


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
