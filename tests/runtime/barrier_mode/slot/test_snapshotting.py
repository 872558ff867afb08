"""What becomes of a snapshot that cannot be written: the coordinator hears why, and whether a restart can mend it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Piece, Scope, SnapshotTimes, SubtaskSnapshot
from ftlayer.errors import CheckpointStorageError, StateSerializationError
from ftlayer.runtime.barrier_mode.slot.shell import SnapshotRunner
from ftlayer.runtime.barrier_mode.task.mode import ChainSnapshot
from ftlayer.runtime.protocol.messages import SubtaskAcked, SubtaskDeclined
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend

WAIT_S = 60
KEY = ("count", 0)


class Storage:
    """A `SlotStorage` that keeps nothing."""

    def writer(self, barrier: Barrier) -> Any:
        return Writer()

    def close(self, *, over: bool = False) -> None:
        pass


class Writer:
    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE, in_flight_of: str = "") -> Piece:
        data = b"".join(chunks)
        return Piece(b"", len(data), data)

    def sync(self) -> None:
        pass

    close = sync


class Pending:
    def __init__(self, write: Callable[[], Any]) -> None:
        self._write = write
        self.released = False

    def write(self, writer: Any, cancelled: Callable[[], bool]) -> Any:
        return self._write()

    def release(self) -> None:
        self.released = True


class Running:
    def __init__(self) -> None:
        self.said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.runner = SnapshotRunner(Storage(), 1, self.said.put, lambda event: None)  # type: ignore[arg-type]

    def take(self, pending: Any, checkpoint: int = 1) -> Any:
        """Have a part taken, and return what the coordinator is told."""
        self.runner.begin(KEY, Barrier(checkpoint, 0), pending)
        self.runner.captured(KEY, checkpoint, (), SnapshotTimes())
        return self.said.get(timeout=WAIT_S)


@pytest.fixture
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.runner.close()


def raising(error: BaseException) -> Pending:
    def write() -> Any:
        raise error

    return Pending(write)


@pytest.mark.parametrize(
    ("error", "reason", "code"),
    [
        (
            StateSerializationError("a lock cannot be written"),
            "a lock cannot be written",
            "STATE_SERIALIZATION",
        ),
        (CheckpointStorageError("no space left"), "no space left", ""),
        (OSError("no such device"), "OSError: no such device", ""),
        (SystemExit("no"), "SystemExit: no", ""),
    ],
)
def test_a_part_that_cannot_be_taken_is_declined_with_the_code_of_what_no_restart_mends(
    running: Running, error: BaseException, reason: str, code: str
) -> None:
    declined = SubtaskDeclined(1, *KEY, reason, counts=True, code=code, lasting=bool(code))
    assert running.take(raising(error)) == declined
    # The next one is written all the same.
    whole = SubtaskSnapshot(*KEY)
    acked = running.take(Pending(lambda: whole), 2)
    assert isinstance(acked, SubtaskAcked)
    assert acked.checkpoint == 2


def test_state_that_cannot_be_written_is_named(running: Running) -> None:
    spec = BackendSpec(0, 8, 8, {"count": pa.schema([("k", pa.int64())])})
    backend: Any = open_backend(CheckpointConfig(directory="/chk"), spec, None, Storage(), "")  # type: ignore[arg-type]
    backend.state("count").values("held")[1] = threading.Lock()
    frozen = backend.freeze(Barrier(1, 0))
    declined = running.take(ChainSnapshot(SubtaskSnapshot(*KEY), 1, frozen, None))
    assert declined.code == StateSerializationError.code
    assert "operator 'count', table 'held'" in declined.reason
    assert "lock" in declined.reason
    frozen.release()
    backend.close()
