"""Looking into a store without changing it, beside a live vertex too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ftlayer.store.directory import holder_of
from ftlayer.store.kv import TABLES
from ftlayer.store.lmdb_store import LmdbStore


@dataclass(frozen=True, slots=True)
class TableReport:
    """One table: the number of its entries, and the bytes of their values."""

    entries: int
    value_bytes: int


@dataclass(frozen=True, slots=True)
class StoreReport:
    """A store.

    ``incarnation`` is that of its last vertex; ``holder`` the process id of the one that is live, None
    when it is not open, 0 when the holder's id cannot be read. ``used_bytes`` counts pages, so it
    exceeds the sum of the values.
    """

    path: Path
    format_version: int
    incarnation: int
    holder: int | None
    max_bytes: int
    used_bytes: int
    used_share: float
    file_bytes: int
    tables: dict[str, TableReport]


def inspect_store(path: str | os.PathLike[str]) -> StoreReport:
    """Report on the store in the directory ``path``, from one snapshot; reads keys, and no large values.

    Raises what `LmdbStore.open` does for reading: `StorePathError`, `StoreVersionError`,
    `StoreDamagedError`, and `StoreError` when this very process has the store open.
    """
    holder = holder_of(Path(path)) if Path(path).is_dir() else None
    store = LmdbStore.open(path, read_only=True)
    try:
        with store.read() as transaction:
            tables = {}
            for table in TABLES:
                sizes = sum(transaction.sizes(table))
                tables[table] = TableReport(transaction.count(table), sizes)
        return StoreReport(
            path=store.path,
            format_version=store.format_version,
            incarnation=store.incarnation,
            holder=holder,
            max_bytes=store.max_bytes,
            used_bytes=store.used_bytes,
            used_share=store.used_share,
            file_bytes=store.file_bytes,
            tables=tables,
        )
    finally:
        store.close()
