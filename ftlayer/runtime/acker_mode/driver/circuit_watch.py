"""Saying in the driver's log what the vertex does with a topology's circuit breakers. No I/O, no threads, no clock."""

from __future__ import annotations

from collections.abc import Mapping

from ftlayer.circuit import CircuitState, CircuitStatus

ASK_MS = 1_000
"""The vertex is asked this often, and no breaker is open for less."""


class CircuitWatch:
    """Told where the breakers are, it says what has changed. Asks for nothing where there are none."""

    def __init__(self, job: str, *, has_any: bool) -> None:
        self._job = job
        self._has_any = has_any
        self._asked_ms: int | None = None
        self._known: dict[str, CircuitStatus] = {}

    def is_due(self, now_ms: int) -> bool:
        """Whether to ask now; if so, that is taken as done."""
        if not self._has_any or (self._asked_ms is not None and now_ms - self._asked_ms < ASK_MS):
            return False
        self._asked_ms = now_ms
        return True

    def told(self, circuits: Mapping[str, CircuitStatus]) -> list[str]:
        """Return a line for each breaker that has opened, or closed, since the last time."""
        lines = []
        for name, status in circuits.items():
            before = self._known.get(name, CircuitStatus())
            where = f"topology {self._job!r}" + (f", {name!r}" if name else "")
            if status.opened > before.opened:
                lines.append(
                    f"{where}: {status.failed:,} of {status.records:,} records failed, more than max_failing: its "
                    f"sources pause, and no attempt is used up; the next trial comes in {status.next_trial_in_ms:,} ms"
                )
            if status.state is CircuitState.CLOSED and (
                before.state is not CircuitState.CLOSED or status.opened > before.opened
            ):
                lines.append(f"{where}: the trial went well, it goes on")
        self._known = dict(circuits)
        return lines
