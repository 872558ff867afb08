"""The directory of a vertex: what is in it beside the stores of the shards."""

from __future__ import annotations

import json
import os
import resource
import shlex
from pathlib import Path

from ftlayer import __version__
from ftlayer.common.printable import described
from ftlayer.config import VertexOptions
from ftlayer.errors import (
    ConfigError,
    MachineError,
    StoreLockedError,
    StorePathError,
    StoreVersionError,
    other_format,
)
from ftlayer.vertex.service.access import ACCESS_FILE, NEW_ACCESS_FILE, is_process, read_access, served_here
from ftlayer.vertex.store.directory import check_no_others, holder_of

MODE = 0o700
DESCRIPTION = "vertex.json"
ROUTES = "routes.json"
LOG_FILE = "vertex.log"
SOCKET = "socket"
"""A directory that no other user can enter, even where the store's is another."""
_NEW_DESCRIPTION = "vertex.new"
_FORMAT = 1
# Made by mkfs: a volume that has just been mounted is as good as empty.
_LOST_AND_FOUND = "lost+found"

# What a vertex has open at rest and while its kernels load, what each shard adds, callers of its metrics port, and
# what stays for clients.
_FILES, _FILES_PER_SHARD, _FILES_OF_METRICS, _FILES_OF_CLIENTS = 24, 5, 32, 24
# Beside the stores: code, stacks, Arrow's pools, kernels that are compiled; with less gRPC or LLVM ends the process.
_SPACE, _SPACE_PER_SHARD = 4 << 30, 128 << 20


def check_limits(options: VertexOptions) -> None:
    """Raise `MachineError` where the limits of this process keep a vertex from starting, or clients from it.

    Before what needs much is imported: without descriptors or address space that ends in any way.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = _FILES + _FILES_PER_SHARD * options.shards + _FILES_OF_CLIENTS
    least += 0 if options.metrics_port is None else _FILES_OF_METRICS
    if files != resource.RLIM_INFINITY and files < least:
        raise MachineError(
            f"this process may open {files} files: a vertex with shards={options.shards} needs {least}, with "
            "clients' connections. Raise the limit (ulimit -n; LimitNOFILE= in a unit)"
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    least = options.max_store_bytes + _SPACE + _SPACE_PER_SHARD * options.shards
    if space != resource.RLIM_INFINITY and space < least:
        raise MachineError(
            f"this process may use {space} bytes of address space: too few for a vertex with a store of "
            f"{options.max_store_bytes}, which needs {least}. Raise the limit (ulimit -v) or lower max_store_bytes"
        )


def prepare_vertex(path: Path) -> None:
    """Make ``path`` a private directory, or check that it is a vertex's, or empty. Raises `StorePathError`."""
    try:
        path.mkdir(mode=MODE, parents=True, exist_ok=True)
        if not (path / DESCRIPTION).exists():
            shards = {shard.name for shard in path.glob("shard-*")}
            own = {_NEW_DESCRIPTION, ROUTES, LOG_FILE, ACCESS_FILE, NEW_ACCESS_FILE, SOCKET, _LOST_AND_FOUND}
            check_no_others(path, own | shards)
    except OSError as error:
        raise _unusable(path, error) from error


def check_unheld(path: Path) -> None:
    """Raise `StoreLockedError`, which names who has it and how that is asked, for a vertex that is open elsewhere."""
    store = Path(os.path.realpath(path))
    holder = next((found for shard in store.glob("shard-*") if (found := holder_of(shard)) is not None), None)
    if holder is None:
        return
    who, asked = f"process {holder or 'unknown'}", f"ftlayer jobs --vertex {shlex.quote(str(path))}"
    if (address := served_here().get(store)) is not None:
        who = f"{who}, a vertex that listens at {address}"
    elif (store / ACCESS_FILE).exists() and is_process((access := read_access(store / ACCESS_FILE)).pid):
        # The vertex' own process would be started again.
        who = f"process {access.pid}, whose vertex listens at {access.address}"
        asked = "it is this program: use the FTLayer that has it" if access.pid == os.getpid() else asked
    else:
        asked = "a vertex with --listen is asked by its address"
    raise StoreLockedError(
        f"{path} is held by {who}: stop that, or give this one another directory ({asked})"
    )


def fix_shards(path: Path, shards: int) -> None:
    """Write down the number of shards of a store that is new; `ConfigError` if it has another number.

    The top bits of stored root ids name the shard, so the number cannot change. Raises `StorePathError` too, and
    `StoreVersionError` for a directory of another format.
    """
    try:
        _fix_shards(path, shards)
    except OSError as error:
        raise _unusable(path, error) from error


def _fix_shards(path: Path, shards: int) -> None:
    file = path / DESCRIPTION
    if file.exists():
        try:
            said = json.loads(file.read_text("utf-8"))
            stored, found = int(said["shards"]), int(said["format"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: not a vertex's description ({described(error)})") from error
        if found != _FORMAT:
            raise StoreVersionError(other_format(file, found, _FORMAT, said.get("ftlayer")))
        if stored != shards:
            raise ConfigError(
                f"shards: the store in {path} was made with shards={stored}, not {shards}, and its root ids "
                f"depend on that: open it with shards={stored}, or begin a new store"
            )
        return
    temporary = path / _NEW_DESCRIPTION
    description = {"format": _FORMAT, "shards": shards, "ftlayer": __version__}
    temporary.write_text(json.dumps(description), "utf-8")
    temporary.rename(file)


def _unusable(path: Path, error: OSError) -> StorePathError:
    why = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    return StorePathError(f"{path}: the store's directory cannot be used: {why}")
