"""LMDB's errors in the store's words."""

from __future__ import annotations

import os
from pathlib import Path

import lmdb

from ftlayer.errors import StoreDamagedError, StoreError, StoreFullError, StorePathError

# A disk with less than this left is the cause of a failed write, whatever the error says: LMDB reports
# a write that was cut short as EIO.
_DISK_FULL_BYTES = 1 << 20


def translate(error: lmdb.Error, path: Path) -> StoreError:
    """Return what to raise instead of an error of LMDB."""
    if isinstance(error, lmdb.MapFullError):
        return StoreFullError(
            f"{path} is full: no page is free for this change; wait until records complete, or open it "
            "with more max_store_bytes"
        )
    if isinstance(error, lmdb.TxnFullError):
        return StoreError(f"{path}: one change is too large for a transaction; split it")
    damage = (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)
    if isinstance(error, damage):
        return StoreDamagedError(
            f"{path} is damaged: {error}. Restore the directory from a copy, or move it away to start empty"
        )
    if isinstance(error, lmdb.ReadonlyError):
        return StorePathError(f"{path} cannot be written: {error}")
    if isinstance(error, lmdb.DiskError) or _disk_is_full(path):
        return disk_full(path)
    return StoreError(f"{path}: {error}")


def disk_full(path: Path) -> StoreFullError:
    """Return the error for a disk without room."""
    return StoreFullError(
        f"{path}: its disk is full; nothing of this change was kept. Free some space on that disk"
    )


def _disk_is_full(path: Path) -> bool:
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < _DISK_FULL_BYTES
