"""The files of a Delta table: of this machine, synced, or of a store that speaks S3.

deltalake has a file system of its own, which is not used: it holds Python's lock while the store answers.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from ftlayer.checkpoint.storage.layout import is_local
from ftlayer.checkpoint.storage.local_files import sync_directory
from ftlayer.clients.s3 import s3_file_system


class TableFiles(Protocol):
    """Files in the directory of a table. Paths are relative to it. Raises OSError and Arrow's errors."""

    def write(self, path: str, rows: pa.Table) -> int:
        """Write a Parquet file that lasts; returns its size. If it raises there is none, or one that no commit has."""

    def size(self, path: str) -> int | None:
        """Return a file's size; None: there is none."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def names(self) -> list[str]:
        """Return the files that are in the directory itself."""

    def sync_commit(self, version: int) -> None:
        """Make a commit last that is written: a checkpoint that relied on it is forgotten next."""


def open_table_files(url: str, options: dict[str, str]) -> TableFiles:
    """Return the files of the table at ``url``; ``options`` as deltalake takes them."""
    return _LocalTableFiles(url) if is_local(url) else _S3TableFiles(url, options)


class _LocalTableFiles:
    def __init__(self, url: str) -> None:
        self._root = Path(url)

    def write(self, path: str, rows: pa.Table) -> int:
        import pyarrow.parquet as pq

        target = self._root / path
        try:
            with target.open("wb") as file:
                pq.write_table(rows, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            target.unlink(missing_ok=True)
            raise
        sync_directory(self._root)
        return target.stat().st_size

    def size(self, path: str) -> int | None:
        try:
            return (self._root / path).stat().st_size
        except FileNotFoundError:
            return None

    def delete(self, path: str) -> None:
        (self._root / path).unlink(missing_ok=True)

    def names(self) -> list[str]:
        return [entry.name for entry in os.scandir(self._root) if entry.is_file()]

    def sync_commit(self, version: int) -> None:
        log = self._root / "_delta_log"
        with (log / f"{version:020}.json").open("rb") as file:
            os.fsync(file.fileno())
        sync_directory(log)


class _S3TableFiles:
    def __init__(self, url: str, options: dict[str, str]) -> None:
        self._fs = s3_file_system(options)
        self._root = url.partition("://")[2]

    def write(self, path: str, rows: pa.Table) -> int:
        import pyarrow.parquet as pq

        try:
            # An object is there once its upload has ended.
            with self._fs.open_output_stream(f"{self._root}/{path}") as file:
                pq.write_table(rows, file)
        except BaseException:
            self.delete(path)
            raise
        size = self.size(path)
        if size is None:
            raise FileNotFoundError(f"{path} was written, and is not there")
        return size

    def size(self, path: str) -> int | None:
        from pyarrow.fs import FileType

        (found,) = self._fs.get_file_info([f"{self._root}/{path}"])
        return None if found.type == FileType.NotFound else int(found.size)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(f"{self._root}/{path}")

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector, FileType

        found = self._fs.get_file_info(FileSelector(self._root, recursive=False))
        return [each.base_name for each in found if each.type == FileType.File]

    def sync_commit(self, version: int) -> None:
        """It lasts as it is written."""
