"""Why checkpoints are given up, and how many failures in a row the job stands: Flink's `CheckpointFailureManager`."""

from __future__ import annotations

from collections import deque
from enum import Enum


class AbortReason(Enum):
    """Why a checkpoint was given up: its text, and whether it counts as a failure."""

    EXPIRED = ("it took longer than the timeout", True)
    HELD = ("a chain holds its input", False)
    DECLINED = ("a task could not write its part", True)
    STORAGE = ("its metadata could not be written", True)
    GIVEN_UP = ("a task gave it up", False)
    SUBSUMED = ("a later checkpoint was completed before it", False)
    BASE_GONE = ("it builds on a checkpoint that was discarded meanwhile", False)
    JOB_RESTARTS = ("the job restarts", False)
    JOB_OVER = ("the job is over", False)

    def __init__(self, text: str, counts: bool) -> None:
        self.text = text
        self.counts = counts


class FailureCounter:
    """Counts consecutive failures. Savepoints are none of its business."""

    REMEMBERED = 1_000
    """So many failed checkpoints are told apart, so that none counts twice."""

    def __init__(self, tolerable: int) -> None:
        self._tolerable = tolerable
        self._succeeded = 0
        self._in_a_row = 0
        self._counted: deque[int] = deque(maxlen=self.REMEMBERED)

    @property
    def in_a_row(self) -> int:
        """Failures since the last success, or since the job was failed for them."""
        return self._in_a_row

    def failed(self, checkpoint: int, reason: AbortReason) -> bool:
        """Take a failure; returns whether it is one too many, and begins to count anew then."""
        if not reason.counts or checkpoint <= self._succeeded or checkpoint in self._counted:
            return False
        self._counted.append(checkpoint)
        self._in_a_row += 1
        if self._in_a_row <= self._tolerable:
            return False
        self._in_a_row = 0
        return True

    def succeeded(self, checkpoint: int) -> None:
        """Take a success; failures of earlier checkpoints that are reported late do not count."""
        if checkpoint > self._succeeded:
            self._succeeded = checkpoint
            self._in_a_row = 0
