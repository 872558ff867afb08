"""A job that had ended before it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.errors import CheckpointError
from ftlayer.runtime.driver.events import JobState
from ftlayer.runtime.driver.job_status import JobStatus


class EndedJob:
    """What is in a `JobThread`'s place where ``restore_from="latest"`` finds a result: nothing runs."""

    state = JobState.ENDED
    error = None
    ends_by = None

    def __init__(self, result: JobResult) -> None:
        self.job = result.run
        self.name = result.name
        self.result = result

    @property
    def checkpoints(self) -> NoReturn:
        """Raise `CheckpointError`: there are none any more."""
        raise self._refusal()

    def status(self) -> JobStatus:
        """Return that it has ended; what an earlier driver had counted is gone."""
        return JobStatus(
            self.name,
            self.job,
            JobState.ENDED,
            epoch=0,
            uptime_s=0.0,
            slots=(),
            chains=(),
            checkpoints=CheckpointCounts(),
        )

    def history(self) -> tuple[CheckpointStats, ...]:
        """Return none: they were the earlier driver's."""
        return ()

    def later(self, work: Callable[[], None]) -> NoReturn:
        """Raise `CheckpointError`: the job has no thread, and what users have done in it is of checkpoints."""
        raise self._refusal()

    def drain(self) -> None:
        """It is over."""

    def cancel(self, close_by_s: float | None) -> None:
        """It is over."""

    def interrupt(self) -> None:
        """Its result stays in any case."""

    def wait_until_over(self, timeout: float | None) -> bool:
        """Return that it is over."""
        return True

    def wait_until_up(self, timeout: float | None) -> bool:
        """Return that it is over."""
        return True

    def _refusal(self) -> CheckpointError:
        return CheckpointError(f"no checkpoint: {self.result}")
