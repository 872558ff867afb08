"""When a task wants to be called again."""

from __future__ import annotations

from ftlayer.runtime.task.actions import Action, WakeAt


class Alarm:
    """Asks for a call at the earliest time something is due, and not again while such a call is to come."""

    def __init__(self) -> None:
        self._set_for: int | None = None

    def rung(self) -> None:
        """The task is called: whatever was asked for may have been it."""
        self._set_for = None

    def set(self, due_ms: int | None) -> list[Action]:
        """Ask to be called at ``due_ms`` (None: nothing is due)."""
        if due_ms is None or (self._set_for is not None and self._set_for <= due_ms):
            return []
        self._set_for = due_ms
        return [WakeAt(due_ms)]
