"""The demo's two topologies share this: their input at a steady pace, its words, and how they tell of themselves."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ftlayer import Job, JobState, StreamEnvironment, partitions
from ftlayer.demo.events import Event, Progress, Started, Starting
from ftlayer.demo.functions import ENRICHED_SCHEMA, WORDS_SCHEMA, Service, Word, words_of
from ftlayer.demo.layout import RunDirectory
from ftlayer.demo.text import FILES_A_BATCH
from ftlayer.errors import JobError
from ftlayer.runtime.driver.job_status import JobStatus

FILE_S = 1.0
"""Each partition gives a file a second: slow enough to be killed in the middle, quick enough to be watched."""

STEP = 50
"""Lines between two pauses."""


@dataclass(frozen=True)
class Partition:
    """Every so-manyth file, line by line. ``mark`` is a file that holds how many lines have ever been read.

    Up to there a reader that begins again gets the lines at once, behind it at the pace of `FILE_S`.
    """

    files: tuple[str, ...]
    mark: str

    def __call__(self) -> Iterator[str]:
        """Yield the records, the same ones each time."""
        reached = lines_read(Path(self.mark))
        number = 0
        mark = os.open(self.mark, os.O_WRONLY | os.O_CREAT)
        try:
            for file in self.files:
                lines = Path(file).read_bytes().decode().removesuffix("\n").split("\n")
                for place, line in enumerate(lines, 1):
                    yield line
                    number += 1
                    if number > reached and (place % STEP == 0 or place == len(lines)):
                        # Overwritten in place by a number of the same length: whole at any moment.
                        os.pwrite(mark, b"%012d" % number, 0)
                        time.sleep(FILE_S * (1 + (place - 1) % STEP) / len(lines))
        finally:
            os.close(mark)


def lines_read(mark: Path) -> int:
    """Return what a mark holds; 0 where there is none yet."""
    try:
        return int(mark.read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def input_partitions(directory: Path, marks: Path) -> list[Partition]:
    """Return the partitions of the files that `ftlayer.demo.text.prepare` wrote."""
    paths = sorted(str(path) for path in directory.glob("part-*.txt"))
    return [
        Partition(tuple(paths[number::FILES_A_BATCH]), str(marks / f"lines-{number}"))
        for number in range(FILES_A_BATCH)
    ]


if TYPE_CHECKING:
    from ftlayer.topology.streams.data_stream import DataStream

PARALLELISM = 2
"""One slot for each core of the demo's Spark."""

POLL_S = 0.1

Figures = Callable[[JobStatus], Mapping[str, int]]


@dataclass(frozen=True)
class EnrichWord:
    """Adds what the service says of a word."""

    service: Service

    def __call__(self, record: Word) -> tuple[str, int, str, str]:
        line, _, word = record
        return (*record, self.service.kind(line, word))


def enriched_words(env: StreamEnvironment, directory: RunDirectory) -> DataStream:
    """Return the stream of the words of all lines, with their kinds."""
    parts = input_partitions(directory.input, directory.marks)
    return (
        env.source(partitions(*parts), "value string", uid="lines")
        .flat_map(words_of, WORDS_SCHEMA, uid="parse")
        .map(EnrichWord(Service(str(directory.service))), ENRICHED_SCHEMA, uid="enrich")
    )


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
