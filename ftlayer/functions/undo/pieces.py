"""Work that is done in pieces where a part of it fails late, so that the part fails alone.

Behind a late failure nothing is known of the records that came after it: they may have seen what it changed. So all is
taken back; the records before it run again, then it alone, then the others in pieces that grow. A record that does not
fail so runs about three times where many fail late, and mostly once; what its functions do outside of state is done as
often.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from ftlayer.functions.undo.log import LateFailure, UndoLog

FIRST_SIZE = 16
"""Records in the piece behind one that failed late …"""

GROWTH = 4
"""… and how much larger the next one is."""


class PieceOfWork(Protocol):
    """What comes of a piece of work."""

    @property
    def size(self) -> int:
        """How many records, or timers, it took."""

    @property
    def has_failures(self) -> bool:
        """Whether one of them failed."""


Result = TypeVar("Result", bound=PieceOfWork)


def in_pieces(
    log: UndoLog, size: int, run: Callable[[int, int], Result | None]
) -> Iterator[tuple[int, Result]]:
    """Run so many records together if none fails late; give what comes of each piece, and where it begins.

    ``run(start, most)`` runs up to ``most`` records, and returns None if there are no more. It may raise `LateFailure`
    with the place of a record from ``start`` on. When a piece is given, what its records that failed have changed is
    taken back, and what the others have changed stays.
    """
    start = 0
    culprit: int | None = None
    while True:
        log.alone = size == 1
        try:
            piece = run(start, size)
        except LateFailure as late:
            log.undo()
            culprit = late.row
            size = max(culprit - start, 1)
            continue
        if piece is None:
            log.forget()
            return
        if log.alone and piece.has_failures:
            log.undo()
        log.forget()
        yield start, piece
        start += piece.size
        size = 1 if start == culprit else max(size * GROWTH, FIRST_SIZE)
