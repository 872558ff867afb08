"""Users' requests for checkpoints and savepoints, from when they are asked for to their answers."""

from __future__ import annotations

from concurrent.futures import Future

from ftlayer.checkpoint.coordinator.instructions import Answer
from ftlayer.checkpoint.snapshots import Checkpoint
from ftlayer.errors import CheckpointError


class Requests:
    """Those that are not answered, by number."""

    def __init__(self) -> None:
        self._waiting: dict[int, Future[Checkpoint]] = {}
        self._last = 0

    def add(self, answer: Future[Checkpoint]) -> int:
        """Take a request; returns its number."""
        self._last += 1
        self._waiting[self._last] = answer
        return self._last

    def answer(self, answer: Answer) -> None:
        """Say what became of one; nothing if that was said."""
        future = self._waiting.pop(answer.request, None)
        if future is None:
            return
        if answer.checkpoint is not None:
            future.set_result(answer.checkpoint)
        else:
            future.set_exception(answer.error or CheckpointError("there is no checkpoint"))

    def refuse_all(self, reason: str) -> None:
        """Say of all that there is no checkpoint."""
        for number in list(self._waiting):
            self.answer(Answer(number, error=CheckpointError(reason)))
