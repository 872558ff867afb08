"""The handle of a job that had ended before it was asked for."""

from __future__ import annotations

from typing import NoReturn

from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts, CheckpointStats
from ftlayer.checkpoint.storage.results import JobResult
from ftlayer.errors import CheckpointError
from ftlayer.runtime.driver.events import JobState, Over
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_status import JobStatus


class EndedJob(Job):
    """What `StreamEnvironment.execute_async` returns where ``restore_from="latest"`` finds a result: nothing runs."""

    def __init__(self, result: JobResult) -> None:
        super().__init__(result.run)
        self._result = result
        self._verdict = Over(JobState.ENDED)
        self._over.set()

    @property
    def name(self) -> str:
        """The topology's name."""
        return self._result.name

    @property
    def state(self) -> JobState:
        """Where the job is: at its end."""
        return JobState.ENDED

    @property
    def result(self) -> JobResult:
        """How it has ended."""
        return self._result

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

    def checkpoints(self) -> tuple[CheckpointStats, ...]:
        """Return none: they were the earlier driver's."""
        return ()

    def _with_checkpoints(self) -> NoReturn:
        raise CheckpointError(f"no checkpoint: {self._result}")
