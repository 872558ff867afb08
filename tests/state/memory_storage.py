"""A storage in memory, as state backends see it."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.snapshots import Piece, Scope
from ftlayer.errors import CheckpointDamagedError


class MemoryWriter:
    """Writes pieces into a dict of files. Counts bytes."""

    def __init__(self, storage: MemoryStorage, name: str) -> None:
        self.storage = storage
        self.name = name
        self.count = 0
        self.bytes = 0
        self.synced = 0
        self.fail: Exception | None = None

    def write(self, chunks: Iterable[bytes], scope: Scope = Scope.EXCLUSIVE) -> Piece:
        data = b"".join(chunks)
        if self.fail is not None:
            raise self.fail
        self.count += 1
        self.bytes += len(data)
        path = f"{self.name}/{self.count}"
        self.storage.files[path] = data
        return Piece(hashlib.blake2b(data).digest(), len(data), None, path, 0, scope)

    def wasteful(self, owner: str, pieces: Iterable[Piece]) -> set[str]:
        """Every other time the first one: what is moved, and when, is up to the storage."""
        self.storage.asked += 1
        return {piece.path for piece in list(pieces)[:1]} if self.storage.asked % 2 else set()

    def sync(self) -> None:
        self.synced = self.count

    def close(self) -> None:
        self.sync()

    def discard(self) -> None:
        self.storage.discard(self.name)


class MemoryStorage:
    """`ftlayer.checkpoint.storage.opening.SlotStorage` in a dict of files."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.writers: dict[str, MemoryWriter] = {}
        self.opened: list[str] = []
        self.asked = 0
        self.location = ""

    def discard(self, name: str) -> None:
        for path in [path for path in self.files if path.startswith(name + "/")]:
            del self.files[path]

    def writer(self, barrier: Barrier) -> MemoryWriter:
        return self._named(f"chk-{barrier.checkpoint}")

    def log_writer(self) -> MemoryWriter:
        return self._named("log")

    def _named(self, name: str) -> MemoryWriter:
        return self.writers.setdefault(name, MemoryWriter(self, name))

    def open(self, location: str, piece: Piece) -> BinaryIO:
        self.opened.append(piece.path)
        data = self.files.get(piece.path)
        if data is None or hashlib.blake2b(data).digest() != piece.digest:
            raise CheckpointDamagedError(f"{location}/{piece.path}")
        return io.BytesIO(data)

    def fetch(self, location: str, piece: Piece, path: Path) -> None:
        with self.open(location, piece) as file, path.open("xb") as out:
            out.write(file.read())

    def adopt(self, location: str, pieces: Sequence[Piece]) -> None:
        return None

    def completed(self, checkpoint: int) -> None:
        pass

    def aborted(self, checkpoint: int) -> None:
        self.discard(f"chk-{checkpoint}")

    def close(self) -> None:
        pass
