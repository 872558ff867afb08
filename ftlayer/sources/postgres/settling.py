"""When no transaction can commit a row any more below one that is there. Rules alone: no I/O.

A transaction takes its number from a sequence, or its time, before it commits, and others commit meanwhile: their rows
are seen first, and have higher values. All that may still come below a row were running when it was seen.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Generic, TypeVar

Row = TypeVar("Row")


class Settling(Generic[Row]):
    """Waits for the transactions that were running when a row was seen."""

    def __init__(self, row: Row, running: AbstractSet[str]) -> None:
        """``running``: the virtual ids of transactions, asked for after the row was seen."""
        self.row = row
        self._running = frozenset(running)
        # A transaction that is prepared has another name, and may be one of those.
        self._prepared: frozenset[str] | None = None

    def is_settled(self, running: AbstractSet[str], prepared: AbstractSet[str]) -> bool:
        """Whether they have all ended. ``prepared``: prepared transactions, asked for after those that run now."""
        if self._running & running:
            return False
        if self._prepared is None:
            self._prepared = frozenset(prepared)
        return not self._prepared & prepared
