"""What is told of each run of a task where records are traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ftlayer.runtime.slot.events import RunTask, SlotInstruction


class RunTracer(Protocol):
    """Makes spans of runs. Called by the loop, behind each."""

    def ran(self, run: RunTask, decided: Sequence[SlotInstruction], start_ns: int, end_ns: int) -> None:
        """A task has run from ``start_ns`` to ``end_ns`` (Unix), and this was decided in its course."""
