"""Access files: how tools of the same user find a server that a driver started for itself, and get in."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftlayer.common.printable import described
from ftlayer.common.secret_files import read_own_secret
from ftlayer.config import check_token
from ftlayer.errors import ConfigError, StorePathError
from ftlayer.transport.address import Address, parse_address
from ftlayer.transport.sockets import remove_left, socket_directories

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
    """What a client needs to connect, and ``pid``, the driver whose end is the server's end, and its ``directory``.

    ``job`` is what is said of that where it was killed, and no store tells what it ran.
    ``root_certs`` and ``client_pem`` are PEM, None where the server speaks no TLS.
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
