"""Acker mode beside a chain of functions: the vertex is told what was settled and what failed."""

from __future__ import annotations

from ftlayer.clock import Now
from ftlayer.handler.xor import XorHandler
from ftlayer.runtime.task.actions import Action
from ftlayer.runtime.task.reports import reports


class AckerCompanion:
    """`ftlayer.runtime.task.companion.ChainCompanion` of acker mode."""

    rest_ms: int | None = None

    def __init__(self, xor: XorHandler) -> None:
        """``xor`` is the one of the chain's handler."""
        self._xor = xor

    def opened(self) -> None:
        """Do nothing: functions keep no state."""

    def closed(self) -> None:
        """Do nothing."""

    def reports(self) -> list[Action]:
        """Return failures first, so that no root of theirs is open."""
        return reports(self._xor)

    def loop_ended(self) -> list[Action]:
        return []

    def data_ended(self) -> list[Action]:
        """Return nothing: the vertex knows."""
        return []

    def tend(self, records: int, now: Now) -> list[Action]:
        return []
