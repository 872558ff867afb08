"""The directory of a vertex: what is in it beside the stores of the shards."""

from __future__ import annotations

import json
import os
import resource
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftlayer import __version__
from ftlayer.common.printable import described
from ftlayer.common.secret_files import read_own_secret
from ftlayer.config import VertexOptions, check_token
from ftlayer.errors import (
    ConfigError,
    MachineError,
    StoreLockedError,
    StorePathError,
    StoreVersionError,
    other_format,
)
from ftlayer.transport.address import Address, parse_address
from ftlayer.transport.sockets import remove_left, socket_directories
from ftlayer.vertex.store.directory import check_no_others, holder_of

ACCESS_FILE = "vertex.access"
"""Its name in the directory of an embedded vertex's store."""

FOUND_ACCESS_FILE = "access.json"
"""Its name, or that of a link to it, in a `SocketDirectory`: there, tools find all servers of their user."""

STORE, SERVED = "store", "served"
"""Links there to a store that is served, and to the socket."""

NEW_ACCESS_FILE = "vertex.access.new"
"""What `ACCESS_FILE` is called until all of it is there."""


def working_directory() -> str:
    """Return this process's, "" where that is gone."""
    try:
        return os.getcwd()
    except OSError:
        return ""


@dataclass(frozen=True, slots=True)
class AccessFile:
    """What a client needs to connect (PEM, None without TLS), and ``pid``, the driver whose end is the server's end.

    ``directory`` is that one's, ``job`` what is said of it where it was killed, and no store tells what it ran.
    """

    address: str
    token: str
    root_certs: bytes | None
    client_pem: bytes | None
    pid: int
    directory: str = field(default_factory=working_directory)
    job: str = ""


def write_access(path: Path, access: AccessFile) -> None:
    """Write ``path`` with mode 0600, all of it or nothing. Raises `StorePathError`."""
    new = path.with_name(path.name + ".new")
    try:
        new.unlink(missing_ok=True)  # a driver was killed while it wrote
        # Made with its mode: another user never has a moment in which to open it.
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(file, "w", encoding="utf-8") as writer:
            writer.write(_to_json(access))
            writer.flush()
            os.fsync(writer.fileno())
        new.rename(path)
    except OSError as error:
        raise StorePathError(f"{path} cannot be written: {error.strerror}") from error


def read_access(path: Path) -> AccessFile:
    """Return what is in ``path``. Whether its driver is there, and the server answers, is not tried.

    Raises `ConfigError` where it cannot be read, is another user's, can be read by others, or is no access file.
    """
    return _of_json(read_own_secret(path, "access file"), path)


def is_process(pid: int) -> bool:
    """Whether a process of this user has the id ``pid``, as the driver of an access file has that was not killed."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):  # another user's process: the number was given anew
        return False
    try:
        # One that was killed stays, as a zombie, until its parent asks for its end.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except (OSError, IndexError):
        return True


def link_access(directory: Path, path: Path, name: str = FOUND_ACCESS_FILE) -> None:
    """Let tools find ``path`` here, and no more where a killed process left it. Raises `StorePathError`."""
    for other in socket_directories():
        link = other / name
        if other != directory and link.is_symlink() and link.resolve() == path.resolve():
            remove_left(other)
    try:
        (directory / name).symlink_to(path)
    except OSError as error:
        raise StorePathError(f"{directory} cannot be written: {error.strerror}") from error


def served_here() -> dict[Path, Address]:
    """Return where stores are that ``ftlayer serve`` runs for this user without ``--listen``."""
    served = [path for path in socket_directories() if (path / SERVED).exists()]
    return {(path / STORE).resolve(): Address(path=str((path / SERVED).resolve())) for path in served}


def remove_access(path: Path, access: AccessFile) -> None:
    """Remove ``path`` if it has ``access``: another driver may have the store by now. Raises `StorePathError`."""
    try:
        if path.read_text("utf-8") == _to_json(access):
            path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorePathError(f"{path} cannot be removed: {error.strerror}") from error


def _to_json(access: AccessFile) -> str:
    return json.dumps(
        {
            "address": access.address,
            "token": access.token,
            "root_certs": _to_text(access.root_certs),
            "client_pem": _to_text(access.client_pem),
            "pid": access.pid,
            "directory": access.directory,
            "job": access.job,
        }
    )


def _of_json(content: bytes, path: Path) -> AccessFile:
    try:
        values: dict[str, Any] = json.loads(content)
        address, token, pid = values["address"], values["token"], values["pid"]
        if not isinstance(address, str) or not isinstance(token, str) or not isinstance(pid, int) or pid <= 0:
            raise TypeError("address and token are text, and pid is a number above 0")
        parse_address(address, "address")
        check_token(token)
        certs, pem = _of_text(values["root_certs"]), _of_text(values["client_pem"])
        return AccessFile(
            address, token, certs, pem, pid, str(values.get("directory", "")), str(values.get("job", ""))
        )
    except (ValueError, KeyError, TypeError, ConfigError) as error:
        raise ConfigError(f"access file: {path} is none ({described(error)})") from error


def _to_text(pem: bytes | None) -> str | None:
    return None if pem is None else pem.decode("ascii")


def _of_text(pem: object) -> bytes | None:
    if pem is not None and not isinstance(pem, str):
        raise TypeError("certificates are text")
    return None if pem is None else pem.encode("ascii")


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
