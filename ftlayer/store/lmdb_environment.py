"""Opening LMDB's environment: every check comes before LMDB sees the file."""

from __future__ import annotations

import os
import resource
import struct
import sys
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb

from ftlayer import __version__
from ftlayer.errors import (
    MachineError,
    StoreDamagedError,
    StorePathError,
    StoreVersionError,
    newer_format,
)
from ftlayer.store.directory import DATA_FILE, DirectoryLock, check_directory, holder_of, prepare
from ftlayer.store.kv import TABLES
from ftlayer.store.lmdb_errors import translate
from ftlayer.store.lmdb_file import Meta, check_file
from ftlayer.store.lmdb_transaction import PARTS

FORMAT_VERSION = 3

# Stores of format 1 lack them: a writer makes them, and a reader takes them for empty.
_SINCE_FORMAT_2 = frozenset({"groups", "by_group", "by_root", "board", "audit"})

# The last 10 % of a smaller store would be too few pages for deletes to work in.
MIN_STORE_BYTES = 8 << 20

_HEADER_TABLE = "header"
# The header's is made first: with any other table and without it, the file would be taken for another program's.
_DATABASES = (_HEADER_TABLE, *TABLES, PARTS)
_HEADER_KEY = b"header"
# The ftlayer that opened the store for writing last, as text. Stores of 0.1 have none.
_WRITER_KEY = b"writer"
_MAGIC = b"ftlayer\n"
_HEADER_START = struct.Struct("<8sI")  # magic and format version: the same in every version
_HEADER_REST = struct.Struct("<QQ")  # incarnation, max bytes; a CRC-32 of all follows

# What the process needs beside the map: threads' stacks, Arrow's pools, allocations in between.
_ADDRESS_SPACE_BESIDE = 256 << 20

_MAX_READERS = 256


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """The store's own record of itself."""

    format_version: int
    incarnation: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Opened:
    """An open environment and what belongs to it; ``lock`` is None when it is for reading only."""

    path: Path
    environment: lmdb.Environment
    databases: dict[str, lmdb._Database]
    header: StoreHeader
    data_file: int
    lock: DirectoryLock | None


def open_for_writing(path: Path, max_bytes: int, *, sync: bool) -> Opened:
    """Open or create the store at ``path``, hold it against others, and begin a new incarnation.

    Raises what `LmdbStore.open` lists.
    """
    prepare(path)
    lock = DirectoryLock.take(path)
    try:
        meta = _check_data_file(path)
        map_bytes = max(max_bytes, 0 if meta is None else meta.end)
        _check_address_space(map_bytes)
        environment = _open_environment(path, map_bytes=map_bytes, sync=sync)
        try:
            old = _read_header(environment, path)
            databases = _make_databases(environment)
            header = _begin_incarnation(environment, databases[_HEADER_TABLE], old, max_bytes)
            environment.sync(True)
            data_file = os.open(path / DATA_FILE, os.O_RDWR)
        except BaseException:
            environment.close()
            raise
    except lmdb.Error as error:
        lock.release()
        raise translate(error, path) from error
    except BaseException:
        lock.release()
        raise
    return Opened(path, environment, databases, header, data_file, lock)


def open_for_reading(path: Path) -> Opened:
    """Open the store at ``path`` without changing it, beside a live vertex too."""
    check_directory(path)
    if not (path / DATA_FILE).exists():
        raise StorePathError(f"{path} holds no store: there is no {DATA_FILE} in it")
    live = holder_of(path) is not None
    if not live:
        _check_data_file(path)
    try:
        data_file = os.open(path / DATA_FILE, os.O_RDONLY)
    except OSError as error:
        raise StorePathError(f"{path} cannot be read: {error.strerror}") from error
    try:
        # A live writer must know of this reader; without one, a directory that cannot be written will do.
        environment = _open_environment(path, readonly=True, lock=live)
        try:
            header = _read_header(environment, path)
            if header is None:
                raise StorePathError(f"{path} holds an LMDB file that no ftlayer has written")
            databases = _find_databases(environment, path, header)
        except BaseException:
            environment.close()
            raise
    except lmdb.Error as error:
        os.close(data_file)
        raise translate(error, path) from error
    except BaseException:
        os.close(data_file)
        raise
    return Opened(path, environment, databases, header, data_file, None)


def _check_data_file(path: Path) -> Meta | None:
    """Return what the data file says of itself, None when there is none yet."""
    try:
        # LMDB makes the file and then writes its first pages: killed in between, it left it empty.
        if not (path / DATA_FILE).exists() or not (path / DATA_FILE).stat().st_size:
            return None
        return check_file(path / DATA_FILE)
    except OSError as error:
        raise StorePathError(f"{path / DATA_FILE} cannot be read: {error.strerror}") from error


def _check_address_space(map_bytes: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or sys.platform != "linux":  # Other systems do not say what is in use.
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[0]) * resource.getpagesize()
    if in_use + map_bytes + _ADDRESS_SPACE_BESIDE > limit:
        raise MachineError(
            f"this process may use {limit} bytes of address space and uses {in_use}: too few for a store of "
            f"{map_bytes}. Raise the limit (ulimit -v; spark.executor.pyspark.memory sets one too) or lower "
            "max_store_bytes"
        )


def _open_environment(
    path: Path, *, map_bytes: int = 0, sync: bool = True, readonly: bool = False, lock: bool = True
) -> lmdb.Environment:
    return lmdb.open(
        os.fspath(path),
        map_size=map_bytes,
        readonly=readonly,
        metasync=sync,
        sync=sync,
        mode=0o600,
        create=False,
        max_readers=_MAX_READERS,
        max_dbs=len(_DATABASES),
        max_spare_txns=8,
        lock=lock,
    )


def _begin_incarnation(
    environment: lmdb.Environment, database: lmdb._Database, old: StoreHeader | None, max_bytes: int
) -> StoreHeader:
    header = StoreHeader(FORMAT_VERSION, 1, max_bytes)
    if old is not None:
        header = replace(header, incarnation=old.incarnation + 1)
    with environment.begin(write=True) as transaction:
        transaction.put(_HEADER_KEY, _encode_header(header), db=database)
        transaction.put(_WRITER_KEY, __version__.encode(), db=database)
    return header


def _make_databases(environment: lmdb.Environment) -> dict[str, lmdb._Database]:
    # Without a transaction of ours each would begin its own, with Python's lock held while it waits.
    with environment.begin(write=True) as transaction:
        return {name: environment.open_db(name.encode(), txn=transaction) for name in _DATABASES}


def _find_databases(
    environment: lmdb.Environment, path: Path, header: StoreHeader
) -> dict[str, lmdb._Database]:
    """Open the tables that a store of this format has; `StoreDamagedError` if one is missing."""
    databases = {}
    for name in _DATABASES:
        try:
            databases[name] = environment.open_db(name.encode(), create=False)
        except lmdb.NotFoundError as error:
            if header.format_version >= 2 or name not in _SINCE_FORMAT_2:
                raise StoreDamagedError(f"{path} is damaged: its table {name!r} is missing") from error
    return databases


def _read_header(environment: lmdb.Environment, path: Path) -> StoreHeader | None:
    """Return the store's header, None for a file without any entry."""
    if not environment.stat()["entries"]:
        return None
    try:
        with environment.begin() as transaction:
            database = environment.open_db(_HEADER_TABLE.encode(), txn=transaction, create=False)
            data = transaction.get(_HEADER_KEY, db=database)
            writer = transaction.get(_WRITER_KEY, db=database)
    except lmdb.NotFoundError as error:
        raise StorePathError(
            f"{path} holds an LMDB file that no ftlayer has written: name another directory"
        ) from error
    # Killed between making the table and writing to it: a new store.
    return None if data is None else _decode_header(data, writer, path)


def _encode_header(header: StoreHeader) -> bytes:
    data = _HEADER_START.pack(_MAGIC, header.format_version)
    data += _HEADER_REST.pack(header.incarnation, header.max_bytes)
    return data + zlib.crc32(data).to_bytes(4, "little")


def _decode_header(data: bytes, writer: bytes | None, path: Path) -> StoreHeader:
    damaged = StoreDamagedError(f"{path} is damaged: its header fails its checksum")
    if len(data) < _HEADER_START.size:
        raise damaged
    magic, version = _HEADER_START.unpack_from(data)
    if magic == _MAGIC and version > FORMAT_VERSION:
        raise StoreVersionError(newer_format(path, version, FORMAT_VERSION, writer))
    if magic != _MAGIC or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
        raise damaged
    if len(data) != _HEADER_START.size + _HEADER_REST.size + 4:
        raise damaged
    return StoreHeader(version, *_HEADER_REST.unpack_from(data, _HEADER_START.size))
