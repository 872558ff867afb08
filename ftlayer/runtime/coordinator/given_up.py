"""What sinks have written for checkpoints that were given up: the next checkpoint holds it, or it is aborted."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ftlayer.checkpoint.snapshots import SubtaskSnapshot


class GivenUp:
    """Parts with messages. While the job goes on, the next checkpoint holds them."""

    def __init__(self) -> None:
        self._parts: list[SubtaskSnapshot] = []

    def add(self, parts: Iterable[SubtaskSnapshot]) -> None:
        """These parts are of a checkpoint that was given up."""
        self._parts += [part for part in parts if part.committables]

    def completed(self, checkpoint: int) -> None:
        """What was written for those before it was in this one."""
        self._parts = [
            part for part in self._parts if any(each.checkpoint > checkpoint for each in part.committables)
        ]

    def take(self, is_gone: Callable[[str, int], bool]) -> list[SubtaskSnapshot]:
        """Return, and forget, the parts of subtasks that are gone (uid, number): they will not be committed.

        Those of others go on, with what they wrote.
        """
        gone = [part for part in self._parts if is_gone(part.uid, part.subtask)]
        self._parts = [part for part in self._parts if not is_gone(part.uid, part.subtask)]
        return gone
