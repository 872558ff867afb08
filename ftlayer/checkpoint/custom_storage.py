"""Checkpoint storage of one's own: what its author writes, and how URLs find it."""

from __future__ import annotations

import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from ftlayer.common.printable import described, shown_url
from ftlayer.config import MIB
from ftlayer.errors import ConfigError

ENTRY_POINTS = "ftlayer.checkpoint_storages"
"""The group of entry points by which an installed package tells its storage: the scheme's name, and its class."""

VARIABLE = "FTLAYER_CHECKPOINT_STORAGES"
"""The same for all programs and commands that are started with it: ``scheme=package.module:Class``, with commas."""

CHUNK_BYTES = MIB
"""Files are read in parts of this size."""

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_served: dict[str, type[CheckpointStorage]] = {}


@dataclass(frozen=True, slots=True)
class FileStatus:
    """A file: path relative to the directory, bytes, when it was changed (ms since 1970; 0: unknown)."""

    path: str
    size: int
    modified_ms: int = 0


class StoredOutput(Protocol):
    """A file that is written; it is there, as a whole, once it is closed."""

    def write(self, data: bytes, /) -> object:
        """Append."""

    def close(self) -> None:
        """Return when it is there, and lasts."""

    def discard(self) -> None:
        """It is not wanted; `close` is not called, or has failed."""


class CheckpointStorage(ABC):
    """The files below one URL, kept by a class of one's own: see `CheckpointConfig.storage`.

    Driver, slots and commands each make one from the URL alone, in processes of their own, and call its methods in
    several threads at once. Paths are relative to the URL, and their parts divided by ``/``. Whatever a method raises
    is a failure of the storage, which fails the checkpoint that needs it. A call that begins when another one has
    returned, in any process, sees what that one did. `ftlayer.checkpoint.storage.conformance` tries all that is asked.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Put a file there, or in the place of the one that is; readers see one of them, as a whole.

        It outlives processes and machines when this returns.
        """

    @abstractmethod
    def write_new(self, path: str, data: bytes) -> bool:
        """As `write` unless a file is there; returns whether none was. Of several at once one is told so.

        What other people may not read (a key) is written with it.
        """

    @abstractmethod
    def read(self, path: str, offset: int, length: int) -> bytes:
        """Return bytes of a file, fewer than ``length`` only at its end; `FileNotFoundError` if there is none."""

    @abstractmethod
    def list(self, path: str) -> Iterable[FileStatus]:
        """Return all files below a directory, ``""`` for all; none where there is no such directory.

        A file that is there all the time must not be missed, whatever comes and goes meanwhile.
        """

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove a file; a missing one is fine."""

    def size(self, path: str) -> int | None:
        """Return the size of a file, None if there is none. To be overridden where a look at one file is cheaper."""
        above = path.rpartition("/")[0]
        return next((entry.size for entry in self.list(above) if entry.path == path), None)

    def create(self, path: str) -> StoredOutput:
        """Begin a file. To be overridden where it need not be gathered in memory, up to a slot's whole snapshot."""
        return _Gathered(self, path)

    def chunks(self, path: str, offset: int, length: int) -> Iterator[bytes]:
        """Return what `read` does, in parts."""
        while length:
            asked = min(length, CHUNK_BYTES)
            chunk = self.read(path, offset, asked)
            offset, length = offset + len(chunk), length - len(chunk)
            if chunk:
                yield chunk
            if len(chunk) < asked:
                return

    def move(self, path: str, target: str) -> None:
        """Give a file another name, in the place of what has it; `FileNotFoundError` if there is none."""
        self.write(target, b"".join(self.chunks(path, 0, 1 << 62)))
        self.delete(path)

    def copy(self, path: str, target: str) -> bool:
        """Have a file under another name too, where the storage can do so by itself; returns whether it has.

        A new driver's first checkpoint then need not write again what it was restored from (``changelog``).
        """
        return False

    def delete_empty(self, path: str) -> None:  # noqa: B027 - most have no directories
        """Remove a directory without files, where there are directories."""


class _Gathered:
    def __init__(self, storage: CheckpointStorage, path: str) -> None:
        self._storage = storage
        self._path = path
        self._parts: list[bytes] = []

    def write(self, data: bytes, /) -> None:
        self._parts.append(bytes(data))

    def close(self) -> None:
        self._storage.write(self._path, b"".join(self._parts))
        self.discard()

    def discard(self) -> None:
        self._parts.clear()


def serve(storage: str | type[CheckpointStorage], url: str | None, option: str = "storage") -> None:
    """Have URLs with the scheme of ``url`` kept by a class, or by ``"package.module:Class"``, in this process."""
    expected = "'package.module:Class', of a module that driver, slots and commands can import"
    kind = imported(storage, option, expected) if isinstance(storage, str) else storage
    if not (isinstance(kind, type) and issubclass(kind, CheckpointStorage)):
        raise ConfigError(f"{option}: expected a class that derives from CheckpointStorage, got {kind!r}")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ConfigError(f"{option}: {kind.__qualname__} lacks {missing}, which CheckpointStorage asks for")
    found = _SCHEME.match(url or "")
    if found is None:
        raise ConfigError(
            f"{option}, directory: a storage of your own keeps URLs of a scheme of its own: expected a directory like "
            f"'mine://place', got {None if url is None else shown_url(url)!r}"
        )
    scheme = found[1].lower()
    if scheme in {"file", "local"} | fsspec_schemes():
        raise ConfigError(
            f"{option}, directory: {scheme}:// means files of this machine, or is fsspec's; choose another scheme for "
            f"{kind.__qualname__}"
        )
    before = _served.setdefault(scheme, kind)
    if (before.__module__, before.__qualname__) != (kind.__module__, kind.__qualname__):
        raise ConfigError(
            f"{option}: {scheme}:// is kept by {before.__module__}:{before.__qualname__} in this process, and cannot "
            f"be by {kind.__module__}:{kind.__qualname__} too; choose another scheme"
        )
    # A class that travels by value, or is defined again in a notebook, is another one each time.
    _served[scheme] = kind


def served(scheme: str) -> type[CheckpointStorage] | None:
    return _served.get(scheme)


def installed(scheme: str) -> type[CheckpointStorage] | None:
    """Return the class that `VARIABLE` or an installed package names for URLs of a scheme; None: neither does."""
    for named in os.environ.get(VARIABLE, "").split(","):
        name, _, storage = named.strip().partition("=")
        if named.strip() and not (name and storage):
            raise ConfigError(
                f"{VARIABLE}: expected 'scheme=package.module:Class', several with commas between them, "
                f"got {named.strip()!r}"
            )
        if name == scheme:
            serve(storage, f"{scheme}://", VARIABLE)
    if scheme in _served:
        return _served[scheme]
    # Late: it takes a tenth of a command's start.
    from importlib.metadata import entry_points

    for entry in entry_points(group=ENTRY_POINTS, name=scheme):
        serve(entry.value, f"{scheme}://", f"entry point {scheme} of the group {ENTRY_POINTS}")
    return _served.get(scheme)


def fsspec_schemes() -> set[str]:
    """Return the schemes that fsspec knows: those that need a package, and those that a program has registered."""
    # Late: a directory of this machine needs no fsspec.
    from fsspec.registry import known_implementations, registry

    return {*known_implementations, *registry}


def imported(name: str, option: str, expected: str) -> object:
    """Return what ``package.module:name`` names. Raises `ConfigError`, which says what is ``expected``."""
    module, _, attribute = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    # What a module raises that is imported is its author's.
    except Exception as error:
        raise ConfigError(
            f"{option}: {name!r} cannot be imported in this process ({described(error)}); expected {expected}"
        ) from error
