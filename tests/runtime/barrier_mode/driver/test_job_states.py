"""A job in barrier mode with a played slot: when it counts as running, and what waits for what."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.coordinator.statistics import CheckpointCounts
from ftlayer.checkpoint.options import CheckpointConfig, Retention
from ftlayer.checkpoint.snapshots import Committable, SubtaskSnapshot
from ftlayer.checkpoint.storage.layout import OWNERS
from ftlayer.checkpoint.storage.local_files import LocalFiles
from ftlayer.checkpoint.storage.ownership import Ownership
from ftlayer.config import TopologyOptions
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    StaleOwnerError,
    StateSerializationError,
    UncommittableError,
    UnsupportedError,
)
from ftlayer.restart import FixedDelay, NoRestart, RestartStrategy
from ftlayer.runtime.barrier_mode.driver import checkpoint_io
from ftlayer.runtime.barrier_mode.driver.driver_mode import BarrierDriver
from ftlayer.runtime.barrier_mode.driver.opening import LATEST, open_checkpoints
from ftlayer.runtime.driver.events import JobState
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.job_thread import JobParts, JobThread
from ftlayer.runtime.driver.telling import TopologyTelling
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.runtime.protocol.messages import (
    AskStack,
    Cancel,
    DataEnded,
    Deploy,
    EndTasks,
    Heartbeat,
    Hello,
    SlotEnded,
    SlotFailed,
    StackTaken,
    SubtaskAcked,
    SubtaskDeclined,
    TasksStarted,
    TriggerCheckpoint,
)
from ftlayer.runtime.protocol.sealed import seal
from ftlayer.topology.job_graph import JobGraph, JobVertex
from ftlayer.topology.operators import IterableSource, Sink, Source, WriterSink
from ftlayer.vertex.calls import AnnounceJob, JobOrder, JobPlan, OrderAction, PlanNode
from ftlayer.vertex.wire.job_checks import check_job_call

WAIT_S = 600
ID = pa.schema([("id", pa.int64())])
DELETE, NEVER = Retention.DELETE_ON_CANCELLATION, Retention.NO_EXTERNALIZED_CHECKPOINTS
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

    ``bounded``: its source ends at once. ``declined``: what it says of its part of the first checkpoint.
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
    ) -> None:
        source = Source("numbers", IterableSource((range(3).__iter__,)), ID)
        vertices = (JobVertex("numbers", (source, Sink("out", WriterSink(Writer(), 1, 1), ID)), 1),)
        graph = JobGraph("played", vertices, (), tracked=False, max_parallelism=12)
        config = CheckpointConfig(
            interval=None if bounded else "1ms",
            directory=str(directory),
            retention=retention,
        )
        self.thread = JobThread(run)
        self.job = Job(self.thread)
        checkpoints, plan = open_checkpoints(graph, config, run, restore_from)
        self.telling = TopologyTelling(self.thread, graph, "barrier", config)
        self._key, self._starts, self._bounded = plan.key, starts, bounded
        self.triggered: list[int] = []
        self.stack = ""
        self._declined = declined
        self.deployed = threading.Event()
        self.over = Mock()
        self._is_over = threading.Event()
        self.thread.start(
            JobParts(
                graph,
                TopologyOptions(),
                restart or NoRestart(),
                server=Mock(send=self._told),
                submitter=Mock(),
                planners=Mock(),
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
                self.say(SubtaskAcked(number, SubtaskSnapshot("numbers", 0, committables=(made,))))
            case EndTasks():
                self.say(SlotEnded())
                self.thread.spark_job_ended(0, 1, None)
            case Cancel():
                self.thread.spark_job_ended(0, 1, None)


PLAYED: list[Played] = []


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    MAY_COMMIT.set()
    while PLAYED:
        PLAYED.pop().end()
    # A commit that was under way would be counted by the next test.
    COMMITS.clear()
    COMMITTING.clear()
    MAY_COMMIT.clear()
    ERRORS.clear()


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


def test_the_last_line_of_a_failed_job_has_what_was_read_since_the_last_heartbeat(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path)
    job = played.job
    assert job.wait_until_running(WAIT_S)
    played.thread.slot_said(0, "a", Heartbeat(0, 1, False, {"records_in": 2}))
    played.fail(SlotFailed("it raised", counters={"records_in": 7}))
    assert job.over(WAIT_S)
    assert " · 7 in · " in job.status().line()


def test_a_savepoint_of_a_job_that_has_failed_says_why_it_has(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path)
    job = played.job
    assert job.wait_until_running(WAIT_S)
    played.fail(SlotFailed("MemoryError: as if"))
    assert job.over(WAIT_S)
    where = str(tmp_path / "s")
    asks = (lambda: job.stop_with_savepoint(where), lambda: job.savepoint(where), job.checkpoint)
    for ask in asks:
        with pytest.raises(CheckpointError, match=r"'played' has failed: .*MemoryError: as if") as refused:
            ask()
        assert refused.value.__cause__ is job.exception()


def test_a_savepoint_that_the_jobs_failure_ends_says_why_too(tmp_path: Path) -> None:
    played = Played(tmp_path)
    assert played.job.wait_until_running(WAIT_S)
    raised: list[CheckpointError] = []

    def stop() -> None:
        try:
            played.job.stop_with_savepoint(str(tmp_path / "s"), WAIT_S)
        except CheckpointError as error:
            raised.append(error)

    assert COMMITTING.wait(WAIT_S)
    asking = threading.Thread(target=stop)
    asking.start()
    played.fail(SlotFailed("MemoryError: as if"))
    MAY_COMMIT.set()
    asking.join(WAIT_S)
    assert isinstance(raised[0], CheckpointError)
    assert "MemoryError: as if" in str(raised[0])
    assert raised[0].__cause__ is played.job.exception()


def test_a_slow_commit_does_not_hold_a_cancellation_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is waited for as long as `cancel` says, which is not at all; otherwise longer than this test waits.
    monkeypatch.setattr(checkpoint_io, "CLOSE_WAIT_S", 10 * WAIT_S)
    played = Played(tmp_path)
    assert COMMITTING.wait(WAIT_S)
    played.job.cancel(0)
    assert played.job.over(WAIT_S)
    assert played.job.state is JobState.CANCELLED
    assert not COMMITS
    # Another job of this name would commit the same rows at the same time: the name is not free yet.
    played.over.assert_not_called()
    freed = threading.Event()
    played.over.side_effect = freed.set
    MAY_COMMIT.set()
    assert freed.wait(WAIT_S)
    assert COMMITS == [1]


def test_what_can_never_be_committed_ends_the_job_at_once(tmp_path: Path) -> None:
    """Whether it runs, or begins with a checkpoint: no pause of the restart strategy is waited for."""
    played = Played(tmp_path, restart=FixedDelay(1_000, "10h"))
    assert COMMITTING.wait(WAIT_S)
    ERRORS.append(UncommittableError("a.part is gone"))
    MAY_COMMIT.set()
    gone = (
        r"sink 'out': checkpoint 1 is complete, .* can never be committed: a\.part is gone\. .*restore_from"
    )
    with pytest.raises(UncommittableError, match=gone):
        played.job.wait(WAIT_S)
    assert played.job.status().restarts == 0


def test_state_that_can_never_be_written_ends_the_job_at_once(tmp_path: Path) -> None:
    declined = SubtaskDeclined(1, "numbers", 0, "'count' holds a lock", code=StateSerializationError.code)
    job = Played(tmp_path, restart=FixedDelay(1_000, "10h"), declined=declined).job
    with pytest.raises(StateSerializationError, match="'count' holds a lock"):
        job.wait(WAIT_S)
    assert job.status().restarts == 0
    assert "'count' holds a lock" in job.checkpoints()[0].failure


def test_a_checkpoint_that_fails_for_another_reason_restarts_the_job(tmp_path: Path) -> None:
    declined = SubtaskDeclined(1, "numbers", 0, "the disk is full")
    job = Played(tmp_path, restart=FixedDelay(1_000, "10h"), declined=declined).job
    until(lambda: job.status().restarts == 1)
    assert "the disk is full" in job.status().last_failure
    assert job.cancel(WAIT_S)


def test_a_job_that_cannot_commit_what_it_begins_with_says_what_it_is_at(tmp_path: Path) -> None:
    ERRORS.append(OSError("the database is down"))
    MAY_COMMIT.set()
    first = Played(tmp_path, restart=FixedDelay(1_000, "10h")).job
    until(lambda: first.status().restarts == 1)
    assert first.cancel(WAIT_S)
    again = Played(tmp_path, run="played-2", restore_from=LATEST, restart=FixedDelay(1_000, "10h")).job
    until(lambda: again.status().last_failure != "")
    assert again.state is JobState.RECOVERING
    assert "OSError: the database is down" in again.status().last_failure
    assert again.cancel(WAIT_S)
    ERRORS[:] = [UncommittableError("a.part is gone")]
    last = Played(tmp_path, run="played-3", restore_from=LATEST, restart=FixedDelay(1_000, "10h")).job
    with pytest.raises(UncommittableError, match=r"a\.part is gone"):
        last.wait(WAIT_S)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class NoSession:
    """There is none in this program: what asks it for something begins what it should not."""

    conf = None

    def __getattr__(self, name: str) -> Any:
        raise ConfigError("nothing may be started")


def started_again(directory: Path, restore_from: str | None) -> Job:
    env = StreamEnvironment(
        NoSession(), name="played", checkpointing=CheckpointConfig(directory=str(directory))
    )
    env.source([1, 2, 3], "id bigint").sink(print)
    return env.execute_async(restore_from=restore_from)


def test_a_job_that_has_ended_is_not_run_again_with_its_program(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MAY_COMMIT.set()
    first = Played(tmp_path, bounded=True).job
    assert first.wait(WAIT_S)
    assert COMMITS == [1]
    assert not list(tmp_path.rglob("_metadata"))

    again = started_again(tmp_path, LATEST)
    assert again.state is JobState.ENDED
    assert again.wait(0)
    assert again.drain(0)
    assert again.cancel(0)
    assert again.wait_until_running(0)
    assert again.name == "played"
    assert again.status().line().startswith("played: ended")
    assert again.checkpoints() == ()
    assert again.status().checkpoints == CheckpointCounts()
    assert again.result == first.result
    assert again.result is not None
    assert (again.result.run, again.result.checkpoint, again.result.savepoint) == ("played-1", 1, "")
    assert "restore_from=None runs it anew" in caplog.text
    with pytest.raises(CheckpointError, match="topology 'played' ended at"):
        again.savepoint(str(tmp_path))

    # A new run is asked for: that it had ended before means nothing any more.
    with pytest.raises(ConfigError, match="nothing may be started"):
        started_again(tmp_path, None)
    second = Played(tmp_path, starts=False).job
    with pytest.raises(ConfigError, match="nothing may be started"):
        started_again(tmp_path, LATEST)
    assert second.cancel(WAIT_S)
    assert second.result is None


def test_the_result_of_a_job_that_was_stopped_with_a_savepoint_names_it(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    where = Played(tmp_path / "c").job.stop_with_savepoint(str(tmp_path / "s"), WAIT_S)
    result = started_again(tmp_path / "c", LATEST).result
    assert result is not None
    assert result.savepoint == where
    assert f"restore_from={where!r} goes on from there" in str(result)


def test_checkpoints_stay_where_the_result_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(config: Any, result: Any) -> None:
        raise CheckpointStorageError("it is full")

    monkeypatch.setattr(checkpoint_io, "put_result", full)
    MAY_COMMIT.set()
    job = Played(tmp_path, bounded=True).job
    assert job.wait(WAIT_S)
    assert job.state is JobState.ENDED
    assert len(list(tmp_path.rglob("_metadata"))) == 1


def test_a_result_that_cannot_be_read_is_no_reason_to_run_again(tmp_path: Path) -> None:
    (tmp_path / "played").mkdir()
    (tmp_path / "played" / "_result").write_text("{")
    with pytest.raises(CheckpointDamagedError, match=r"_result is not a job's result"):
        started_again(tmp_path, LATEST)


@pytest.mark.parametrize(("damaged", "more"), [(1, ""), (2, ""), (7, "; and 2 more")])
def test_all_checkpoints_that_cannot_be_read_are_named(tmp_path: Path, damaged: int, more: str) -> None:
    for number in range(1, damaged + 1):
        where = tmp_path / "played" / "run" / f"chk-{number}"
        where.mkdir(parents=True)
        (where / "_metadata").write_bytes(b"FTLCHKPT?")
    with pytest.raises(CheckpointDamagedError, match="no checkpoint that can be read") as raised:
        Played(tmp_path, restore_from=LATEST)
    said = str(raised.value)
    assert said.count("cut off") == min(damaged, 5)
    assert f"{more}; restore_from takes any" in said


def test_a_driver_that_another_one_takes_over_from_ends_and_commits_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MAY_COMMIT.set()
    first = Played(tmp_path, retention=NEVER)
    first.job.checkpoint(WAIT_S)
    second = Played(tmp_path, run="played-2", restore_from=LATEST, starts=False)
    with pytest.raises(StaleOwnerError, match=r"another driver \(run played-2 on .*this one ends"):
        first.job.wait(WAIT_S)
    assert first.job.state is JobState.FAILED
    # What the second one was restored from is still there, though nothing is retained of a job that has failed.
    assert "is removed" not in caplog.text
    COMMITS.clear()
    second.start_tasks()
    taken = second.job.checkpoint(WAIT_S).checkpoint
    assert second.job.cancel(WAIT_S)
    assert taken in COMMITS
    assert sorted(set(COMMITS)) == COMMITS


def test_a_driver_that_finds_itself_fenced_removes_nothing(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    first = Played(tmp_path, bounded=True, starts=False)
    Ownership(LocalFiles(str(tmp_path / "played")), "played", "played-2")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    first.start_tasks()
    with pytest.raises(StaleOwnerError):
        first.job.wait(WAIT_S)
    assert COMMITS == []
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_quick_end_frees_the_name_before_the_job_is_over(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path)
    assert played.job.wait_until_running(WAIT_S)
    assert played.job.cancel(WAIT_S)
    played.over.assert_called_once_with()


@pytest.mark.parametrize(
    ("retention", "end", "left"),
    [
        (None, "cancel", True),
        (None, "interrupt", True),
        (DELETE, "interrupt", True),
        (DELETE, "cancel", False),
        (NEVER, "interrupt", True),
        (NEVER, "cancel", False),
        (NEVER, "fail", False),
    ],
)
def test_a_checkpoint_that_goes_with_its_job_is_told_of_and_so_is_a_start_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, retention: Retention | None, end: str, left: bool
) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path, retention=retention, run="first")
    played.job.checkpoint(WAIT_S)
    match end:
        case "cancel":
            assert played.job.cancel(WAIT_S)
        case "interrupt":
            assert played.job.interrupt(WAIT_S)
        case _:
            played.fail(SlotFailed("broken"))
            assert played.job.over(WAIT_S)
    assert bool(list(tmp_path.rglob("_metadata"))) == left
    assert ("and its last checkpoint is removed" in caplog.text) == (not left)
    caplog.clear()
    again = Played(tmp_path, retention=retention, run="second", restore_from=LATEST)
    assert ("has been started before" in caplog.text) == (not left)
    assert again.job.cancel(WAIT_S)


def test_a_job_that_fails_while_it_is_interrupted_leaves_its_checkpoint(tmp_path: Path) -> None:
    """PySpark cancels the session's Spark jobs before it raises what Ctrl-C is: slots may fail first."""
    MAY_COMMIT.set()
    played = Played(tmp_path, retention=NEVER)
    played.job.checkpoint(WAIT_S)
    played.say(SlotFailed("its Spark job was cancelled"))
    until(lambda: played.job.state is JobState.STOPPING)
    interrupting = threading.Thread(target=played.job.interrupt, args=(WAIT_S,))
    interrupting.start()
    until(lambda: played.thread.interrupted)
    # Only now is it over.
    played.thread.spark_job_ended(0, 1, None)
    interrupting.join(WAIT_S)
    assert played.job.state is JobState.FAILED
    assert list(tmp_path.rglob("_metadata"))


def test_a_restore_that_fails_leaves_what_it_was_made_from(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    MAY_COMMIT.set()
    first = Played(tmp_path, retention=NEVER, run="first")
    first.job.checkpoint(WAIT_S)
    assert first.job.interrupt(WAIT_S)
    before = kept(tmp_path)
    caplog.clear()
    for attempt in range(2):
        again = Played(tmp_path, retention=NEVER, run=f"again-{attempt}", restore_from=LATEST, starts=False)
        assert again.deployed.wait(WAIT_S)
        again.fail(SlotFailed("its function has no state of that name"))
        assert again.job.over(WAIT_S)
        assert again.job.state is JobState.FAILED
        assert kept(tmp_path) == before
    assert caplog.text.count("is removed") == caplog.text.count("started before") == 0


def test_of_a_savepoint_that_stays_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    MAY_COMMIT.set()
    where = Played(tmp_path / "a").job.stop_with_savepoint(str(tmp_path / "s"), WAIT_S)
    again = Played(tmp_path / "b", retention=DELETE, run="again", restore_from=where, starts=False)
    assert again.job.cancel(WAIT_S)
    assert kept(tmp_path / "s")
    assert "is removed" not in caplog.text


def kept(directory: Path) -> dict[Path, bytes]:
    """Return the files of checkpoints and savepoints, and what they hold."""
    return {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.parent.name != OWNERS
    }


def test_the_first_start_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    played = Played(tmp_path, restore_from=LATEST)
    assert played.job.cancel(WAIT_S)
    assert "started before" not in caplog.text
    assert "removed" not in caplog.text


# ---------------------------------------------------------------- what is announced of it


def order_to(action: OrderAction, directory: str = "") -> JobOrder:
    return JobOrder("o1", "played", "played-1", action, "me", 1, directory)


def test_a_job_is_told_with_its_graph_its_slots_and_its_checkpoints(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path / "c")
    assert played.job.wait_until_running(WAIT_S)
    where = played.telling.carry_out(order_to(OrderAction.SAVEPOINT, str(tmp_path / "s")))
    assert Path(where, "_metadata").exists()

    def told() -> bool:
        return any(
            each.kind == "savepoint" for each in played.telling.details(0, with_plan=False).checkpoints
        )

    until(told)
    details = played.telling.details(0, with_plan=True)
    assert (details.owner, details.run, details.kind, details.mode) == (
        "played",
        "played-1",
        "topology",
        "barrier",
    )
    assert (details.state, details.final, details.ended_ms) == ("running", False, 0)
    assert details.plan == JobPlan((PlanNode("numbers", ("numbers", "out"), 1),), ())
    assert [(slot.slot, slot.state, slot.host) for slot in details.slots] == [(0, "running", "host")]
    (savepoint,) = [each for each in details.checkpoints if each.kind == "savepoint"]
    assert (savepoint.location, savepoint.state, savepoint.expected) == (where, "completed", 1)
    assert [(part.uid, part.subtask) for part in savepoint.subtasks] == [("numbers", 0)]
    totals = details.checkpoint_totals
    assert totals is not None
    assert totals.completed >= 1
    assert totals.last_completed_ms >= savepoint.ended_ms
    assert (totals.interval_ms, totals.directory) == (1, str(tmp_path / "c"))
    assert sum(details.histograms["checkpoint|"].counts) >= 1
    assert sum(details.histograms["checkpoint_async|numbers"].counts) >= 1
    assert "checkpoint_bytes" in details.counters
    later = played.telling.details(savepoint.number, with_plan=False)
    assert later.plan is None
    assert all(each.number > savepoint.number or not each.ended_ms for each in later.checkpoints)
    check_job_call(AnnounceJob(details))


def test_an_order_to_stop_ends_the_job_with_a_savepoint_and_the_last_word_says_so(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path / "c")
    where = played.telling.carry_out(order_to(OrderAction.STOP, str(tmp_path / "s")))
    assert Path(where, "_metadata").exists()
    details = played.telling.details(0, with_plan=False)
    assert (details.state, details.final) == ("ended", True)
    assert details.ended_ms >= details.since_ms
    assert details.incidents[-1].text.endswith("→ ended")
    assert where in {each.location for each in details.checkpoints}
    with pytest.raises(UnsupportedError, match="is ended"):
        played.telling.carry_out(order_to(OrderAction.CANCEL))


def test_orders_that_end_a_job_say_what_has_become_of_it(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    assert Played(tmp_path / "a").telling.carry_out(order_to(OrderAction.CANCEL)) == "it is cancelled"
    played = Played(tmp_path / "b", bounded=True)
    assert "is done" in played.telling.carry_out(order_to(OrderAction.DRAIN))


def test_a_failed_checkpoint_is_an_incident(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    declined = SubtaskDeclined(1, "numbers", 0, "the disk is full")
    played = Played(tmp_path, declined=declined)
    assert played.job.over(WAIT_S)
    texts = [each.text for each in played.telling.details(0, with_plan=False).incidents]
    assert any("checkpoint 1 failed: " in text and "the disk is full" in text for text in texts)


def test_what_cannot_be_asked_of_a_job_without_checkpoints_is_refused_with_the_ways_out() -> None:
    execution = Mock()
    execution.wait_until_over.return_value = False
    execution.name = "tracked"
    telling = TopologyTelling(execution, Mock(), "acker")
    with pytest.raises(UnsupportedError, match=r"drain it.*or cancel it"):
        telling.carry_out(order_to(OrderAction.STOP))


def test_a_job_whose_thread_is_busy_is_told_without_news_of_its_checkpoints(tmp_path: Path) -> None:
    played = Played(tmp_path, starts=False)
    let_go = threading.Event()
    played.thread.later(lambda: _wait(let_go))
    details = played.telling.details(0, with_plan=False)
    assert details.checkpoints == ()
    assert details.state in ("starting", "initializing")
    let_go.set()
    MAY_COMMIT.set()


def test_a_stack_is_what_the_slot_answers(tmp_path: Path) -> None:
    MAY_COMMIT.set()
    played = Played(tmp_path)
    assert played.job.wait_until_running(WAIT_S)
    played.stack = "File numbers.py, line 7, in hangs"
    assert played.telling.carry_out(replace(order_to(OrderAction.STACK), slot=0)) == played.stack
    with pytest.raises(ConfigError, match="no process runs slot 5"):
        played.telling.carry_out(replace(order_to(OrderAction.STACK), slot=5))


def test_a_slot_that_gives_no_stack_is_said_to_hold_the_interpreter(tmp_path: Path) -> None:
    played = Played(tmp_path, starts=False)
    assert played.deployed.wait(WAIT_S)
    assert "has not answered within 0.01 s" in played.thread.stack(0, 0.01)
    played.say(StackTaken(1, "too late"))
    MAY_COMMIT.set()
    played.stack = "now it does"
    assert played.thread.stack(0) == "now it does"


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S)
