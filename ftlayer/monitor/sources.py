"""Which vertices and boards there are to be looked at: those that are named, or all of this user on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ftlayer.errors import ConfigError, VertexUnavailableError
from ftlayer.transport.address import parse_address
from ftlayer.transport.sockets import remove_left, socket_directories
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.directory import (
    ACCESS_FILE,
    FOUND_ACCESS_FILE,
    is_process,
    read_access,
    served_here,
    working_directory,
)

DEADLINE_MS = 10_000
"""So long a call may take that changes something."""

_ODD = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class VertexSource:
    """A vertex, or a board that a driver serves for itself, and what it takes to be let in.

    Attributes:
        name: a short word for it, of letters, digits and ``. _ -``; two sources may have the same.
        path: the directory of its store, "" where that is not known: then it is known by its address.
        file: the access file that it is known by, "" for an address.
        pid: the driver that serves it, 0 where that is not known.
        directory: where that was started, "" where that is not known.
        job: the first job of a board without a vertex, and where its checkpoints are, "" where that is not known.
        left: "gone" where its program has ended and a command has opened its store, "killed" where that was killed.
    """

    name: str
    address: str
    token: str = field(repr=False)
    root_certs: bytes | None = None
    client_pem: bytes | None = field(default=None, repr=False)
    path: str = ""
    file: str = ""
    pid: int = 0
    directory: str = ""
    job: str = ""
    left: str = ""

    @property
    def identity(self) -> str:
        """What stays the same when its driver is started again: the store, or else the address."""
        return self.path or self.address

    @property
    def is_near(self) -> bool:
        """Whether its driver was started in the directory that is looked from, above or below it."""
        here, there = Path(working_directory()), Path(self.directory)
        return here.is_relative_to(there) or there.is_relative_to(here)

    def refreshed(self) -> VertexSource | None:
        """Return it as its access file has it now; None where its driver has ended and has removed that.

        Raises `ConfigError` as `read_access`.
        """
        if not self.file:
            return self
        return _of_file(Path(self.file)) if Path(self.file).exists() else None

    @property
    def killed(self) -> VertexUnavailableError | None:
        """What to say where its driver was killed, so that its access file was left; None otherwise."""
        if not self.file or is_process(self.pid):
            return None
        path, ran = self.path, f"which ran {self.job}" if self.job else "which served it"
        store = f"; until then ftlayer inspect {path} shows what its store has, and --store {path} asks it"
        text = f"process {self.pid}, {ran}, was killed: start the program again{store if path else ''}"
        return VertexUnavailableError(text)

    def forget(self) -> None:
        """Remove what tools find its driver by, where that was killed; its store stays."""
        if self.killed is not None:
            for directory in socket_directories():
                if (directory / FOUND_ACCESS_FILE).resolve() == Path(self.file):
                    remove_left(directory)
            Path(self.file).unlink(missing_ok=True)

    def client(self, label: str) -> VertexClient:
        """Return a client of it; connects with the first call. Raises `ConfigError` for certificates that are none."""
        certs = {"root_certs": self.root_certs, "client_pem": self.client_pem}
        return VertexClient(self.address, self.token, **certs, client_id=label, deadline_ms=DEADLINE_MS)


@dataclass(frozen=True, slots=True)
class FoundSources:
    """Sources that were found.

    Attributes:
        sources: those whose driver is there.
        killed: those whose driver was killed, until another program of this user sweeps up behind it: of drivers that
            were started in the directory that is looked from, or above or below it.
        elsewhere: the same of other directories, which are of other projects.
        left_out: of each access file that is none a sentence that says why.
    """

    sources: tuple[VertexSource, ...]
    killed: tuple[VertexSource, ...] = ()
    elsewhere: tuple[VertexSource, ...] = ()
    left_out: tuple[str, ...] = ()


def sources_given(
    places: Sequence[str],
    *,
    token: Callable[[], str],
    root_certs: bytes | None = None,
    client_pem: bytes | None = None,
) -> tuple[VertexSource, ...]:
    """Return the vertices at ``places``: addresses, and paths of stores whose driver runs on this machine.

    ``token`` is called for an address, and a store that ``ftlayer serve`` runs; the certificates are those of
    addresses: an embedded vertex has its own. Raises `ConfigError`.
    """
    return tuple(
        _at_address(place, token(), root_certs, client_pem)
        if "://" in place
        else _at_path(Path(place), token)
        for place in dict.fromkeys(places)
    )


def source_of_client(client: VertexClient) -> VertexSource:
    return _at_address(client.address, client.token, client.root_certs, client.client_pem)


def sources_here() -> FoundSources:
    """Return all that drivers of this user serve on this machine, and what those that were killed have left."""
    found: dict[str, VertexSource] = {}
    left_out = []
    for directory in socket_directories():
        path = directory / FOUND_ACCESS_FILE
        # What it leads to may be in a directory that is closed to this user by now.
        if not os.path.exists(path):
            continue  # of slots, or of a driver that is about to begin or end
        try:
            source = _of_file(Path(os.path.realpath(path)))
        except ConfigError as error:
            left_out.append(str(error))
            continue
        found[source.identity] = source
    killed = tuple(source for source in found.values() if source.killed is not None)
    there = tuple(source for source in found.values() if source not in killed)
    of_here = tuple(source for source in killed if source.is_near)
    elsewhere = tuple(source for source in killed if source not in of_here)
    return FoundSources(there, of_here, elsewhere, tuple(left_out))


def _at_address(address: str, token: str, root_certs: bytes | None, client_pem: bytes | None) -> VertexSource:
    where = parse_address(address, "--vertex")
    name = Path(where.path).stem if where.path else f"{where.host}-{where.port}"
    certs = (root_certs, client_pem) if where.tls else (None, None)
    return VertexSource(short_name(name), address, token, *certs)


def _at_path(path: Path, token: Callable[[], str]) -> VertexSource:
    file = path / ACCESS_FILE if path.is_dir() else path
    if not file.exists():
        store = Path(os.path.realpath(path))
        if (address := served_here().get(store)) is not None:
            return VertexSource(short_name(store.name), str(address), token(), path=str(store))
        what = "is served by no program that runs" if path.is_dir() else "is not there"
        raise ConfigError(
            f"--vertex: {path} {what}: name a store's directory while its program runs (it has {ACCESS_FILE} then), by "
            "--store that of one that has ended, or an address like grpc://127.0.0.1:7077"
        )
    return _of_file(Path(os.path.realpath(file)))


def _of_file(file: Path) -> VertexSource:
    access = read_access(file)
    is_store = file.name == ACCESS_FILE
    name = short_name(file.parent.name) if is_store else f"driver-{access.pid}"
    let_in = access.address, access.token, access.root_certs, access.client_pem
    path = str(file.parent) if is_store else ""
    return VertexSource(name, *let_in, path, str(file), access.pid, access.directory, access.job)


def short_name(name: str) -> str:
    return _ODD.sub("-", name).strip("-") or "vertex"


def user_name() -> str:
    """Return the user of this process as the system calls them: who does what this process asks for."""
    import pwd

    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return f"user {os.geteuid()}"
