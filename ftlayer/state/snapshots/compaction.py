"""Writes pieces anew that keep shared files which are of little use otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ftlayer.checkpoint.pieces import Scope
from ftlayer.checkpoint.snapshots import StatePiece
from ftlayer.checkpoint.storage.contract import PieceWriter, SlotStorage
from ftlayer.config import MIB
from ftlayer.state.contract import BackendSpec

CHUNK = MIB


class Compaction:
    """The pieces of one backend in the files that it shares with others of its slot. In any thread."""

    def __init__(self, storage: SlotStorage, spec: BackendSpec) -> None:
        self._storage = storage
        self._owner = f"{' '.join(sorted(spec.keys))}/{spec.first_group}"

    def wasteful(self, writer: PieceWriter, parts: Iterable[StatePiece]) -> set[str]:
        """Return the files among those of ``parts`` that waste too much; ``parts`` are what is needed from now on."""
        return writer.wasteful(
            self._owner, [part.piece for part in parts if part.piece.scope is Scope.SHARED]
        )

    def moved(
        self,
        writer: PieceWriter,
        parts: Iterable[StatePiece],
        paths: Collection[str],
        checkpoint: int,
        pace: Callable[[], None],
    ) -> list[StatePiece]:
        """Return ``parts``, with those that lie in ``paths`` written once more. In their order; all are of this run.

        Raises `CheckpointDamagedError` for one that is not what was written.
        """

        def chunks(part: StatePiece) -> Iterator[bytes]:
            with self._storage.open(self._storage.location, part.piece) as file:
                for chunk in iter(partial(file.read, CHUNK), b""):
                    yield chunk
                    pace()

        return [
            replace(part, piece=writer.write(chunks(part), Scope.SHARED), checkpoint=checkpoint)
            if part.piece.path in paths
            else part
            for part in parts
        ]
