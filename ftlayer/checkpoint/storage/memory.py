"""Driver memory: pieces travel inside the acknowledgements, and are gone with the driver."""

from __future__ import annotations

from collections.abc import Iterable

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.pieces import Piece, Scope
from ftlayer.checkpoint.storage.contract import PieceWriter
from ftlayer.checkpoint.storage.signing import Signer
from ftlayer.checkpoint.storage.slot import SlotStorageBase, WriterName
from ftlayer.checkpoint.storage.writer import given_up
from ftlayer.errors import CheckpointStorageError, ConfigError


class MemoryWriter:
    """Every piece is inline. See `PieceWriter`."""

    def __init__(self, signer: Signer, max_bytes: int) -> None:
        self._signer = signer
        self._max_bytes = max_bytes
        self._is_discarded = False

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE) -> Piece:
        gathered: list[bytes] = []
        length = 0
        for chunk in chunks:
            if self._is_discarded:
                raise given_up()
            gathered.append(chunk)
            length += len(chunk)
            if length > self._max_bytes:
                raise too_large("a snapshot", length, self._max_bytes)
        data = b"".join(gathered)
        return Piece(self._signer.digest(data), length, data, scope=scope)

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        return set()

    def sync(self) -> None:
        if self._is_discarded:
            raise given_up()

    def close(self) -> None:
        """See `PieceWriter.close`."""

    def discard(self) -> None:
        self._is_discarded = True


class MemorySlotStorage(SlotStorageBase):
    """Without a directory; savepoints go to files all the same."""

    def __init__(self, config: CheckpointConfig, seat: WriterName, key: bytes) -> None:
        super().__init__(config, seat, key, "")

    def log_writer(self) -> PieceWriter:
        """Raise `ConfigError`: a changelog needs a directory."""
        raise ConfigError("changelog, directory: a log that is written all the time needs a directory")

    def _checkpoint_writer(self, barrier: Barrier) -> PieceWriter:
        return MemoryWriter(self._signer, self._config.max_memory_state)


def too_large(what: str, length: int, most: int) -> CheckpointStorageError:
    """Return the error for a state that does not go into the driver's memory."""
    return CheckpointStorageError(
        f"{what} has {length:,} bytes or more, and without a directory checkpoints are kept in the driver's memory, up "
        f"to {most:,} bytes for each subtask: set CheckpointConfig.directory, or raise max_memory_state"
    )
