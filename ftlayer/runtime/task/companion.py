"""What a mode does beside a chain of functions."""

from __future__ import annotations

from typing import Protocol

from ftlayer.clock import Now
from ftlayer.runtime.task.actions import Action


class ChainCompanion(Protocol):
    """A mode's part in one chain. Its `ChainTask` owns it, and calls it in its own thread."""

    def opened(self) -> None:
        """All functions are open: no state is declared any more."""

    def closed(self) -> None:
        """All functions are closed, at the chain's end."""

    def reports(self) -> list[Action]:
        """Return what is to be told of the records that failed, and that were settled, since the last call."""

    def loop_ended(self) -> list[Action]:
        """Return what is to be told of the end of the loop that the chain is the head of."""

    def data_ended(self) -> list[Action]:
        """Return what is to be told of the end of the chain's data: no record comes, and none waits."""

    def tend(self, records: int, now: Now) -> list[Action]:
        """Do what is to be done between two calls of functions; the chain has just taken so many records."""

    @property
    def rest_ms(self) -> int | None:
        """None: all goes on. A number: nothing stirs by itself now, look again in so many ms.

        Timers do not fire then, and what comes back to the head of a loop waits.
        """


class NoCompanion:
    rest_ms: int | None = None

    def opened(self) -> None:
        """Do nothing."""

    def closed(self) -> None:
        """Do nothing."""

    def reports(self) -> list[Action]:
        """Return nothing: the first failure was raised, and what was settled has no use."""
        return []

    def loop_ended(self) -> list[Action]:
        return []

    def data_ended(self) -> list[Action]:
        return []

    def tend(self, records: int, now: Now) -> list[Action]:
        return []
