"""Which pieces the next incremental snapshot can build on, and which layers it has to write itself.

Freezes are numbered; a layer has the number of the freeze that made it. A snapshot of freeze n on top of a completed
checkpoint of freeze m refers to that one's pieces and writes one more, of the layers m < number <= n. What was
written for a checkpoint that did not complete is never built on: its layers are written again.

When a checkpoint completes, pieces that only older ones refer to are removed. So while others are under way, of
which any may complete first, a snapshot builds on what all of them build on, and on nothing if one of them is full,
or writes pieces anew that others would go on to refer to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftlayer.checkpoint.snapshots import StatePiece
from ftlayer.state.tables.layers import Layer

MAX_PIECES = 50
"""Pieces of a snapshot: each has to be found and opened when it is restored."""


@dataclass(frozen=True, slots=True)
class Written:
    """The pieces that hold the state at a freeze; the first ``full`` of them are a full snapshot."""

    freeze: int
    pieces: tuple[StatePiece, ...]
    full: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to write for the freeze ``freeze``: the layers of each table, the newest first, behind ``base``'s pieces.

    ``base`` None: everything. ``moved``: files whose pieces in ``base`` are written anew.
    """

    freeze: int
    base: Written | None
    layers: Mapping[int, tuple[Layer, ...]]
    moved: frozenset[str] = frozenset()


class PieceLineage:
    """Belongs to the task's thread, save `wrote` and `distrust`."""

    def __init__(self, max_space_amplification: float, max_kept: int) -> None:
        """Set limits.

        ``max_space_amplification``: bytes of all pieces ÷ bytes of the full ones, at most; 0: no bound.
        ``max_kept``: bytes of layers that are kept for the next snapshot; if it needs more it is a full one.
        """
        self._amplification = max_space_amplification
        self._max_kept = max_kept
        self._layers: list[tuple[int, dict[int, Layer]]] = []
        self._kept = 0
        self._completed: tuple[int, Written] | None = None
        self._under_way: dict[int, Written | None] = {}
        self._written: dict[int, Written] = {}
        self._wasteful: frozenset[str] = frozenset()
        self._distrusted: Written | None = None

    def pushed(self, freeze: int, layers: dict[int, Layer]) -> None:
        if self._completed is None and not self._under_way:
            # Nothing to build on is under way: the next snapshot is full anyway.
            return
        self._layers.append((freeze, layers))
        self._kept += sum(layer.bytes for layer in layers.values())
        if self._kept > self._max_kept:
            self._forget()

    def plan(self, freeze: int, checkpoint: int, *, full: bool = False) -> Plan:
        """Return how the freeze is written for ``checkpoint``; ``full``: on top of nothing."""
        base = None if full else self._base()
        if base is None:
            self._under_way[checkpoint] = None
            return Plan(freeze, None, {})
        moved = self._wasteful.intersection(part.piece.path for part in base.pieces)
        self._under_way[checkpoint] = None if moved else base
        newer = [tables for number, tables in reversed(self._layers) if base.freeze < number <= freeze]
        tables = {table for layers in newer for table in layers}
        layers = {t: tuple([layers[t] for layers in newer if t in layers]) for t in sorted(tables)}
        return Plan(freeze, base, layers, moved)

    def _base(self) -> Written | None:
        if self._completed is None:
            return None
        bases = list(self._under_way.values()) or [self._completed[1]]
        base = bases[0]
        if base is None or any(other is not base for other in bases) or self._is_too_much(base):
            return None
        if base is self._distrusted:
            return None
        return base

    def wrote(self, checkpoint: int, written: Written, wasteful: Iterable[str]) -> None:
        """The snapshot was written; ``wasteful``: files that its pieces had better not lie in. In any thread."""
        self._written[checkpoint] = written
        self._wasteful = frozenset(wasteful)

    def distrust(self, base: Written) -> None:
        """Build on this never more: it cannot be read. In any thread."""
        self._distrusted = base

    def completed(self, checkpoint: int) -> None:
        written = self._written.get(checkpoint)
        is_known = checkpoint in self._under_way
        for older in [number for number in {*self._under_way, *self._written} if number <= checkpoint]:
            self.aborted(older)
        if written is None or not is_known:
            return
        self._completed = (checkpoint, written) if written.pieces else None
        needed = [base.freeze for base in self._under_way.values() if base is not None]
        first = min([written.freeze, *needed])
        while self._layers and self._layers[0][0] <= first:
            self._kept -= sum(layer.bytes for layer in self._layers.pop(0)[1].values())

    def aborted(self, checkpoint: int) -> None:
        self._under_way.pop(checkpoint, None)
        self._written.pop(checkpoint, None)

    def _is_too_much(self, written: Written) -> bool:
        lengths = [part.piece.length for part in written.pieces]
        grown = self._amplification and sum(lengths) > self._amplification * sum(lengths[: written.full])
        return bool(grown) or len(lengths) >= MAX_PIECES

    def _forget(self) -> None:
        """Keep no layers; the next snapshots are full, until one of them completes."""
        self._layers = []
        self._kept = 0
        self._completed = None
        self._under_way = {}
