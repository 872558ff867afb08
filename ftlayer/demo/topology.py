"""What the demo's two topologies share: their input, and what they tell while they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ftlayer import Job, JobState, StreamEnvironment, partitions
from ftlayer.demo.events import Event, Progress, Started, Starting
from ftlayer.demo.layout import RunDirectory
from ftlayer.demo.lines import input_partitions, lines_read
from ftlayer.errors import JobError
from ftlayer.runtime.coordinator.job_status import JobStatus

if TYPE_CHECKING:
    from ftlayer.stream.streams import DataStream

PARALLELISM = 2
"""One slot for each core of the demo's Spark."""

POLL_S = 0.1

Figures = Callable[[JobStatus], Mapping[str, int]]


def read_lines(env: StreamEnvironment, directory: RunDirectory) -> DataStream:
    """Return the stream of the input's records, in one column ``value``."""
    parts = input_partitions(directory.input, directory.marks)
    return env.source(partitions(*parts), "value string", uid="lines")


def follow(job: Job, directory: RunDirectory, tell: Callable[[Event], None], figures: Figures) -> None:
    """Tell where a job is until it has ended. Raises what it fails with."""
    before = directory.committed_files()
    tell(Starting("the slots"))
    over = False
    while not over and job.state is not JobState.RUNNING:
        over = job.over(POLL_S)
    tell(Started())
    while not over:
        over = job.over(POLL_S)
        status = job.status()
        tell(
            Progress(
                sum(lines_read(mark) for mark in directory.marks.iterdir()),
                directory.committed_files() - before,
                [slot.pid for slot in status.slots],
                dict(figures(status)),
            )
        )
    job.wait()
    if job.state is not JobState.ENDED:
        raise JobError(f"the job is {job.state}, and should have come to its end")
