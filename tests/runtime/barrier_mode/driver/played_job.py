"""A job in barrier mode of one slot that is played, and its sink, whose commits a test lets through."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.letters import ChainLetter
from ftlayer.checkpoint.options import CheckpointConfig, FailurePolicy, Retention
from ftlayer.checkpoint.snapshots import Committable, SubtaskSnapshot
from ftlayer.common.rules.restart import NoRestart, RestartStrategy
from ftlayer.config import TopologyOptions
from ftlayer.runtime.barrier_mode.driver.checkpointing import BarrierDriver
from ftlayer.runtime.barrier_mode.driver.opening import open_checkpoints
from ftlayer.runtime.driver.job import Job, TopologyTelling
from ftlayer.runtime.driver.job_thread import JobParts, JobThread
from ftlayer.runtime.protocol.messages import (
    KEY_BYTES,
    AskStack,
    Cancel,
    DataEnded,
    Deploy,
    EndTasks,
    Hello,
    Readmit,
    SlotEnded,
    SlotFailed,
    StackTaken,
    SubtaskAcked,
    SubtaskDeclined,
    TasksStarted,
    TriggerCheckpoint,
    seal,
)
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Sink, Source, WriterSink

WAIT_S = 600
ID = pa.schema([("id", pa.int64())])
COMMITS: list[int] = []
MAY_COMMIT = threading.Event()
COMMITTING = threading.Event()
ERRORS: list[Exception] = []


class Writer(DataSourceStreamWriter):
    def write(self, iterator: Any) -> Any:
        raise AssertionError("the slots write")

    def commit(self, messages: list[Any], batch: int) -> None:
        COMMITTING.set()
        assert MAY_COMMIT.wait(WAIT_S)
        for error in ERRORS:
            raise error
        COMMITS.append(batch)

    def abort(self, messages: list[Any], batch: int) -> None:
        raise AssertionError("nothing is to be aborted")


class Played:
    """A job of one slot, whose instance does what it is told; it starts its tasks when it is let.

    ``bounded``: its source ends at once. ``declined``: what it says of its part of the first checkpoint. ``vertex`` and
    ``failures`` are for its dead letters: those in ``letters`` are in each snapshot, with ``readmitted``. ``slot_key``:
    what the instance seals with, unless with the job's ``key``.
    """

    def __init__(
        self,
        directory: Path,
        *,
        starts: bool = True,
        bounded: bool = False,
        run: str = "played-1",
        restore_from: str | None = None,
        restart: RestartStrategy | None = None,
        declined: SubtaskDeclined | None = None,
        retention: Retention | None = None,
        vertex: Any = None,
        failures: FailurePolicy | None = None,
        slot_key: bytes | None = None,
    ) -> None:
        source = Source("numbers", IterableSource((range(3).__iter__,)), ID)
        vertices = (JobVertex("numbers", (source, Sink("out", WriterSink(Writer(), 1, 1), ID)), 1, failures),)
        graph = JobGraph("played", vertices, (), tracked=False, max_parallelism=12)
        config = CheckpointConfig(
            interval=None if bounded else "1ms", directory=str(directory), retention=retention
        )
        self.thread = JobThread(run)
        self.job = Job(self.thread)
        self.key = os.urandom(KEY_BYTES)
        checkpoints, _ = open_checkpoints(graph, config, run, restore_from, self.key)
        checkpoints = replace(checkpoints, letters=replace(checkpoints.letters, vertex=vertex))
        self.letters: tuple[ChainLetter, ...] = ()
        self.waiting = 0
        self.readmitted: tuple[bytes, ...] = ()
        self.telling = TopologyTelling(self.thread, graph, "barrier", config)
        self._key, self._starts, self._bounded = slot_key or self.key, starts, bounded
        self.triggered: list[int] = []
        self.stack = ""
        self._declined = declined
        self.deployed = threading.Event()
        self.submitter = Mock(cancel=self._spark_job_ends)
        self.over = Mock()
        self._is_over = threading.Event()
        self.thread.start(
            JobParts(
                graph,
                TopologyOptions(),
                restart or NoRestart(),
                server=Mock(send=self._told),
                submitter=self.submitter,
                planners=Mock(lags=dict, away=dict),
                mode=partial(BarrierDriver, checkpoints),
                on_over=self._left,
            )
        )
        PLAYED.append(self)
        self.say(Hello(0, "a", "grpc://a", "host", 1))

    def start_tasks(self) -> None:
        """Let the tasks begin that the job has told to."""
        assert self.deployed.wait(WAIT_S)
        self.say(TasksStarted())
        if self._bounded:
            self.say(DataEnded("numbers", 0))

    def end(self) -> None:
        """End what is not over yet, and wait until its threads are done."""
        self.job.cancel(0)
        assert self._is_over.wait(WAIT_S)

    def _spark_job_ends(self, slot: int, attempt: int) -> None:
        self.thread.spark_job_ended(slot, attempt, None)

    def _left(self) -> None:
        self.over()
        self._is_over.set()

    def fail(self, failed: SlotFailed) -> None:
        """Let the slot fail, and its Spark job end."""
        self.say(failed)
        self.thread.spark_job_ended(0, 1, None)

    def say(self, message: Any) -> None:
        """Let the instance say something."""
        self.thread.slot_said(0, "a", message)

    def _told(self, instance: str, message: Any) -> None:
        match message:
            case Deploy():
                self.deployed.set()
                if self._starts:
                    self.start_tasks()
            case AskStack(number) if self.stack:
                self.say(StackTaken(number, self.stack))
            case TriggerCheckpoint(barrier):
                self.triggered.append(barrier.checkpoint)
                number = barrier.checkpoint
                if self._declined is not None:
                    self.say(self._declined)
                    return
                made = Committable("out", seal(WriterCommitMessage(), self._key), number)
                snapshot = SubtaskSnapshot(
                    "numbers",
                    0,
                    committables=(made,),
                    letters=self.letters,
                    waiting=self.waiting,
                    read=100 * number,
                    readmitted=self.readmitted,
                )
                self.say(SubtaskAcked(number, snapshot))
            case Readmit(letters=letters):
                self.readmitted += tuple(letter.letter for letter in letters)
            case EndTasks():
                self.say(SlotEnded())
                self.thread.spark_job_ended(0, 1, None)
            case Cancel():
                self.thread.spark_job_ended(0, 1, None)


PLAYED: list[Played] = []


def until(condition: Callable[[], bool]) -> None:
    """Wait for something."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def end_all() -> None:
    """End all jobs, and forget what they did."""
    MAY_COMMIT.set()
    while PLAYED:
        PLAYED.pop().end()
    # A commit that was under way would be counted by the next test.
    COMMITS.clear()
    COMMITTING.clear()
    MAY_COMMIT.clear()
    ERRORS.clear()
