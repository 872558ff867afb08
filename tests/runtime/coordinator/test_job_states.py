"""A job in barrier mode with a played slot: when it counts as running, and what waits for what."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.options import CheckpointConfig, Retention
from ftlayer.checkpoint.snapshots import Committable, SubtaskSnapshot
from ftlayer.config import TopologyOptions
from ftlayer.errors import CheckpointError
from ftlayer.restart import NoRestart
from ftlayer.runtime.coordinator.events import JobState
from ftlayer.runtime.coordinator.job import Job, JobParts
from ftlayer.runtime.coordinator.opening import open_checkpoints
from ftlayer.runtime.messages import (
    Cancel,
    Deploy,
    Hello,
    SubtaskAcked,
    TasksStarted,
    TriggerCheckpoint,
)
from ftlayer.runtime.sealed import seal
from ftlayer.stream.job_graph import JobGraph, JobVertex
from ftlayer.stream.operators import IterableSource, Sink, Source, WriterSink

WAIT_S = 60
ID = pa.schema([("id", pa.int64())])
COMMITS: list[int] = []
MAY_COMMIT = threading.Event()
COMMITTING = threading.Event()


class Writer(DataSourceStreamWriter):
    def write(self, iterator: Any) -> Any:
        raise AssertionError("the slots write")

    def commit(self, messages: list[Any], batch: int) -> None:
        COMMITTING.set()
        assert MAY_COMMIT.wait(WAIT_S)
        COMMITS.append(batch)

    def abort(self, messages: list[Any], batch: int) -> None:
        raise AssertionError("nothing is to be aborted")


class Played:
    """A job of one slot, whose instance does what it is told; it starts its tasks when it is let."""

    def __init__(self, directory: Path, *, starts: bool = True) -> None:
        source = Source("numbers", IterableSource((range(3).__iter__,)), ID)
        vertices = (JobVertex("numbers", (source, Sink("out", WriterSink(Writer(), 1, 1), ID)), 1),)
        graph = JobGraph("played", vertices, (), tracked=False, max_parallelism=12)
        config = CheckpointConfig(
            interval="1ms", directory=str(directory), retention=Retention.RETAIN_ON_CANCELLATION
        )
        self.job = Job("played-1")
        checkpoints, plan = open_checkpoints(graph, config, "played-1", None)
        self._key, self._starts = plan.key, starts
        self.triggered: list[int] = []
        self._deployed = threading.Event()
        self.over = Mock()
        self.job.start(
            JobParts(
                graph,
                TopologyOptions(),
                NoRestart(),
                server=Mock(send=self._told),
                submitter=Mock(),
                vertex=None,
                planners=Mock(capture=lambda subtasks: {}),
                on_over=self.over,
                checkpoints=checkpoints,
            )
        )
        self._say(Hello(0, "a", "grpc://a", "host", 1))

    def start_tasks(self) -> None:
        """Let the tasks begin that the job has told to."""
        assert self._deployed.wait(WAIT_S)
        self._say(TasksStarted())

    def _say(self, message: Any) -> None:
        self.job.slot_said(0, "a", message)

    def _told(self, instance: str, message: Any) -> None:
        match message:
            case Deploy():
                self._deployed.set()
                if self._starts:
                    self.start_tasks()
            case TriggerCheckpoint(barrier):
                self.triggered.append(barrier.checkpoint)
                number = barrier.checkpoint
                made = Committable("out", seal(WriterCommitMessage(), self._key), number)
                self._say(SubtaskAcked(number, SubtaskSnapshot("numbers", 0, committables=(made,))))
            case Cancel():
                self.job.spark_job_ended(0, 1, None)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    COMMITS.clear()
    COMMITTING.clear()
    MAY_COMMIT.clear()


def test_no_checkpoint_begins_before_all_tasks_are_restored(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path, starts=False)
    job = played.job
    assert not job.wait_until_running(0.2)
    assert job.state is JobState.INITIALIZING
    assert [slot.state for slot in job.status().slots] == ["initializing"]
    assert not played.triggered
    with pytest.raises(TimeoutError, match="'played' is initializing after"):
        job.checkpoint(timeout=0.1)
    played.start_tasks()
    assert job.wait_until_running(WAIT_S)
    assert job.state is JobState.RUNNING
    assert job.cancel(WAIT_S)
    assert not job.wait_until_running(WAIT_S)


def test_a_savepoint_that_is_asked_for_too_early_waits_until_the_job_runs(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path / "c", starts=False)
    where: list[str] = []
    asking = threading.Thread(target=lambda: where.append(played.job.savepoint(str(tmp_path / "s"), WAIT_S)))
    asking.start()
    played.start_tasks()
    asking.join(WAIT_S)
    assert where
    assert Path(where[0], "_metadata").exists()
    assert played.job.cancel(WAIT_S)
    with pytest.raises(CheckpointError, match="the job is cancelled"):
        played.job.savepoint(str(tmp_path / "s"))


def test_a_slow_commit_does_not_hold_a_cancellation_up(tmp_path: Path) -> None:
    played = Played(tmp_path)
    assert COMMITTING.wait(WAIT_S)
    assert played.job.cancel(2.0)
    assert played.job.state is JobState.CANCELLED
    assert not COMMITS
    # Another job of this name would commit the same rows at the same time: the name is not free yet.
    played.over.assert_not_called()
    freed = threading.Event()
    played.over.side_effect = freed.set
    MAY_COMMIT.set()
    assert freed.wait(WAIT_S)
    assert COMMITS == [1]


def test_a_quick_end_frees_the_name_before_the_job_is_over(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path)
    assert played.job.wait_until_running(WAIT_S)
    assert played.job.cancel(WAIT_S)
    played.over.assert_called_once_with()
