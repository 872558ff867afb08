"""How long a job's checkpoints and their parts took, and what they wrote, since its begin: for metrics."""

from __future__ import annotations

from collections.abc import Sequence

from ftlayer.checkpoint.coordinator.statistics import CheckpointState, CheckpointStats
from ftlayer.histogram import BATCH_BOUNDS, Histogram

WHOLE = "checkpoint|"
"""The histogram of whole checkpoints; those of parts are ``checkpoint_<part>|<uid of the chain>``."""


class CheckpointTimes:
    """Counts each completed checkpoint once, however often it is shown the history that has it."""

    def __init__(self) -> None:
        self.histograms: dict[str, Histogram] = {}
        self.written_bytes = 0
        self._counted: set[int] = set()

    def take(self, history: Sequence[CheckpointStats]) -> None:
        """Count what of a job's history has completed since the last time."""
        completed = {each.checkpoint: each for each in history if each.state is CheckpointState.COMPLETED}
        for number in completed.keys() - self._counted:
            self._count(completed[number])
        # What has left the history does not come back.
        self._counted = set(completed)

    def _count(self, stats: CheckpointStats) -> None:
        self.written_bytes += stats.written_bytes
        self._observe(WHOLE, stats.duration_ms)
        for part in stats.parts:
            self._observe(f"checkpoint_start_delay|{part.uid}", part.start_delay_ms)
            self._observe(f"checkpoint_alignment|{part.uid}", part.alignment_ms)
            self._observe(f"checkpoint_sync|{part.uid}", part.sync_ms)
            self._observe(f"checkpoint_async|{part.uid}", part.async_ms)

    def _observe(self, name: str, milliseconds: float) -> None:
        self.histograms.setdefault(name, Histogram(BATCH_BOUNDS)).observe(milliseconds / 1_000)
