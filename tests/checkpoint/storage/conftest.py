"""Storages of every kind, a file system that fails on command, and checkpoints to put into them."""

from __future__ import annotations

import errno
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from ftlayer.checkpoint import custom_storage
from ftlayer.checkpoint.barrier import Barrier, SnapshotKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, KeyedSnapshot, Piece, StatePiece, SubtaskSnapshot
from ftlayer.checkpoint.storage.files import Files, open_files
from ftlayer.checkpoint.storage.keys import storage_key
from ftlayer.checkpoint.storage.opening import DriverStorage, SlotStorage, driver_storage, slot_storage

JOB = "job"
RUN = "run-1"
_numbers = itertools.count()


PAGE = Path(__file__).parents[3] / "docs/how-to/barrier-mode/storage.md"


@pytest.fixture(scope="module")
def table_storage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The module of the guide, importable here and in processes that are begun from here."""
    directory = tmp_path_factory.mktemp("guide")
    program = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (directory / "table_storage.py").write_text(program[0], "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        patch.setenv("CHECKPOINT_DATABASE", str(directory / "checkpoints.db"))
        yield importlib.import_module("table_storage")
    del sys.modules["table_storage"]
    custom_storage._served.pop("table", None)


@dataclass
class Kit:
    """A storage with what a test needs around it."""

    config: CheckpointConfig
    key: bytes
    job: str = JOB
    run: str = RUN
    opened: list[Any] = field(default_factory=list)

    def slot(self, slot: int = 0, epoch: int = 1, instance: str = "a") -> SlotStorage:
        storage = slot_storage(self.config, self.job, self.run, slot, epoch, instance, self.key)
        self.opened.append(storage)
        return storage

    def driver(self, run: str = "") -> DriverStorage:
        return driver_storage(self.config, self.job, run or self.run, self.key)

    @property
    def directory(self) -> Files:
        """The run's directory."""
        location: str = slot_storage(self.config, self.job, self.run, 9, 0, "looker", self.key).location
        return open_files(location)

    def paths(self) -> set[str]:
        """All files of the run."""
        return {entry.path for entry in self.directory.walk()}


@dataclass
class Faults:
    """What goes wrong in ``faulty://``: set from a test."""

    write_error: int | None = None
    torn_at: int | None = None
    answer_error: int | None = None
    """Files are written, and no one is told."""
    delete_error: int | None = None
    vanished: bool = False
    written: list[int] = field(default_factory=list)
    """How many bytes each write had."""

    def clear(self) -> None:
        self.write_error = self.torn_at = self.answer_error = self.delete_error = None
        self.vanished = False
        self.written = []


class FaultyFile(MemoryFile):  # type: ignore[misc]
    """Fails at a byte, or silently writes nothing behind it."""

    def write(self, data: bytes) -> int:
        faults = FaultyFileSystem.faults
        if faults.write_error is not None:
            raise OSError(faults.write_error, "made to fail", self.path)
        if faults.torn_at is not None and self.tell() + len(data) > faults.torn_at:
            data = data[: max(0, faults.torn_at - self.tell())]
        faults.written.append(len(data))
        return int(super().write(data))


class FaultyFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """Memory that fails on command."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    faults: ClassVar[Faults] = Faults()

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        self._look()
        if mode == "wb":
            if self.faults.write_error is not None:
                raise OSError(self.faults.write_error, "made to fail", path)
            file = FaultyFile(self, self._strip_protocol(path))
            file.commit()
            return file
        return super()._open(path, mode, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        with self._open(path, "wb") as file:
            file.write(value)
        if self.faults.answer_error is not None:
            raise OSError(self.faults.answer_error, "made to fail", path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._look()
        super().makedirs(path, exist_ok)

    def info(self, path: str, **kwargs: Any) -> Any:
        self._look()
        return super().info(path, **kwargs)

    def find(self, path: str, **kwargs: Any) -> Any:
        self._look()
        return super().find(path, **kwargs)

    def rm_file(self, path: str) -> None:
        self._look()
        if self.faults.delete_error is not None:
            raise OSError(self.faults.delete_error, "made to fail", path)
        super()._rm(path)

    def _look(self) -> None:
        if self.faults.vanished:
            raise FileNotFoundError(errno.ENOENT, "the storage has vanished")


fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


@pytest.fixture
def faults() -> Iterator[Faults]:
    """The faults of ``faulty://``, none to begin with."""
    FaultyFileSystem.faults.clear()
    FaultyFileSystem.store.clear()
    yield FaultyFileSystem.faults
    FaultyFileSystem.faults.clear()


@pytest.fixture
def make_kit(tmp_path: Path) -> Iterator[Callable[..., Kit]]:
    """Return ``make_kit(kind, **options)``; kinds are driver, local, remote, secret and faulty."""
    kits: list[Kit] = []

    def make(kind: str = "local", **options: Any) -> Kit:
        directories = {
            "driver": None,
            "local": str(tmp_path / "checkpoints"),
            "remote": f"memory://checkpoints-{next(_numbers)}",
            "secret": f"memory://me:hunter2@checkpoints-{next(_numbers)}",
            "faulty": f"faulty://checkpoints-{next(_numbers)}",
            "table": f"table://checkpoints-{next(_numbers)}",
        }
        config = CheckpointConfig(directory=directories[kind], **options)
        kits.append(Kit(config, storage_key(config, JOB)))
        return kits[-1]

    yield make
    for kit in kits:
        for storage in kit.opened:
            storage.close()


@pytest.fixture(params=["driver", "local", "remote", "faulty"])
def kit(request: pytest.FixtureRequest, make_kit: Callable[..., Kit], faults: Faults) -> Kit:
    """A storage of each kind."""
    return make_kit(request.param)


@pytest.fixture(params=["local", "remote"])
def files_kit(request: pytest.FixtureRequest, make_kit: Callable[..., Kit]) -> Kit:
    """A storage of each kind that has files."""
    return make_kit(request.param)


def a_barrier(number: int, location: str = "") -> Barrier:
    kind = SnapshotKind.SAVEPOINT if location else SnapshotKind.CHECKPOINT
    return Barrier(number, started_ms=1_000 * number, kind=kind, location=location)


def a_subtask(pieces: Iterable[Piece], subtask: int = 0) -> SubtaskSnapshot:
    parts = tuple(StatePiece("entries", piece, 1, 1) for piece in pieces)
    return SubtaskSnapshot("count", subtask, KeyedSnapshot(0, 128, (), parts))


def a_checkpoint(
    number: int, *subtasks: SubtaskSnapshot, run: str = RUN, savepoint: bool = False
) -> Checkpoint:
    kind = SnapshotKind.SAVEPOINT if savepoint else SnapshotKind.CHECKPOINT
    return Checkpoint(number, JOB, run, kind, 1_000 * number, 1_000 * number + 5, 128, (), subtasks)


@dataclass(frozen=True)
class Made:
    """Makers of values; a class so that tests get them from a fixture."""

    barrier: Callable[..., Barrier] = a_barrier
    subtask: Callable[..., SubtaskSnapshot] = a_subtask
    checkpoint: Callable[..., Checkpoint] = a_checkpoint


@pytest.fixture(scope="session")
def made() -> Made:
    return Made()
