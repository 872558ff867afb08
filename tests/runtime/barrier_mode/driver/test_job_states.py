"""A job in barrier mode with a played slot: when it counts as running, and what waits for what."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType

import pytest

from ftlayer.common.rules.circuit import CircuitState, CircuitStatus
from ftlayer.common.rules.restart import FixedDelay
from ftlayer.errors import CheckpointError, JobStartError, StateSerializationError, UncommittableError
from ftlayer.runtime.barrier_mode.driver import checkpointing as checkpoint_io
from ftlayer.runtime.barrier_mode.driver.opening import LATEST
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.protocol.messages import Heartbeat, SlotFailed, SubtaskDeclined


def test_no_checkpoint_begins_before_all_tasks_are_restored(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, starts=False)
    job = played.job
    assert not job.wait_until_running(0.2)
    assert job.state is JobState.INITIALIZING
    assert [slot.state for slot in job.status().slots] == ["initializing"]
    assert not played.triggered
    with pytest.raises(TimeoutError, match="'played' is initializing after"):
        job.checkpoint(timeout=0.1)
    played.start_tasks()
    assert job.wait_until_running(play.WAIT_S)
    assert job.state is JobState.RUNNING
    assert job.cancel(play.WAIT_S)
    assert not job.wait_until_running(play.WAIT_S)


def test_a_savepoint_that_is_asked_for_too_early_waits_until_the_job_runs(
    play: ModuleType, tmp_path: Path
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c", starts=False)
    where: list[str] = []
    asking = threading.Thread(
        target=lambda: where.append(played.job.savepoint(str(tmp_path / "s"), play.WAIT_S))
    )
    asking.start()
    played.start_tasks()
    asking.join(play.WAIT_S)
    assert where
    assert Path(where[0], "_metadata").exists()
    assert played.job.cancel(play.WAIT_S)
    with pytest.raises(CheckpointError, match="the job is cancelled"):
        played.job.savepoint(str(tmp_path / "s"))


def test_the_last_line_of_a_failed_job_has_what_was_read_since_the_last_heartbeat(
    play: ModuleType, tmp_path: Path
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path)
    job = played.job
    assert job.wait_until_running(play.WAIT_S)
    played.thread.slot_said(0, "a", Heartbeat(0, 1, False, {"records_in": 2}))
    played.fail(SlotFailed("it raised", counters={"records_in": 7}))
    assert job.over(play.WAIT_S)
    assert " · 7 in · " in job.status().line()


def test_circuit_breakers_of_chains_are_in_the_jobs_status(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path)
    job = played.job
    assert job.wait_until_running(play.WAIT_S)
    opened = CircuitStatus(CircuitState.OPEN, 1, 20, 5, 800)
    played.thread.slot_said(0, "a", Heartbeat(0, 1, False, circuits={"numbers": opened}))
    play.until(lambda: job.status().circuits)
    assert job.status().circuits == {"numbers": opened}
    assert " · circuit numbers open · " in job.status().line()
    assert played.telling.details(0, with_plan=False).circuits == {"numbers": opened}
    assert job.cancel(play.WAIT_S)
    assert job.status().circuits == {}


def test_a_savepoint_of_a_job_that_has_failed_says_why_it_has(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path)
    job = played.job
    assert job.wait_until_running(play.WAIT_S)
    played.fail(SlotFailed("MemoryError: as if"))
    assert job.over(play.WAIT_S)
    where = str(tmp_path / "s")
    asks = (lambda: job.stop_with_savepoint(where), lambda: job.savepoint(where), job.checkpoint)
    for ask in asks:
        with pytest.raises(CheckpointError, match=r"'played' has failed: .*MemoryError: as if") as refused:
            ask()
        assert refused.value.__cause__ is job.exception()


def test_a_savepoint_that_the_jobs_failure_ends_says_why_too(play: ModuleType, tmp_path: Path) -> None:
    played = play.Played(tmp_path)
    assert played.job.wait_until_running(play.WAIT_S)
    raised: list[CheckpointError] = []

    def stop() -> None:
        try:
            played.job.stop_with_savepoint(str(tmp_path / "s"), play.WAIT_S)
        except CheckpointError as error:
            raised.append(error)

    assert play.COMMITTING.wait(play.WAIT_S)
    asking = threading.Thread(target=stop)
    asking.start()
    played.fail(SlotFailed("MemoryError: as if"))
    play.MAY_COMMIT.set()
    asking.join(play.WAIT_S)
    assert isinstance(raised[0], CheckpointError)
    assert "MemoryError: as if" in str(raised[0])
    assert raised[0].__cause__ is played.job.exception()


def test_a_slow_commit_does_not_hold_a_cancellation_up(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is waited for as long as `cancel` says, which is not at all; otherwise longer than this test waits.
    monkeypatch.setattr(checkpoint_io, "CLOSE_WAIT_S", 10 * play.WAIT_S)
    played = play.Played(tmp_path)
    assert play.COMMITTING.wait(play.WAIT_S)
    played.job.cancel(0)
    assert played.job.over(play.WAIT_S)
    assert played.job.state is JobState.CANCELLED
    assert not play.COMMITS
    # Another job of this name would commit the same rows at the same time: the name is not free yet.
    played.over.assert_not_called()
    freed = threading.Event()
    played.over.side_effect = freed.set
    play.MAY_COMMIT.set()
    assert freed.wait(play.WAIT_S)
    assert play.COMMITS == [1]


def test_what_can_never_be_committed_ends_the_job_at_once(play: ModuleType, tmp_path: Path) -> None:
    """Whether it runs, or begins with a checkpoint: no pause of the restart strategy is waited for."""
    played = play.Played(tmp_path, restart=FixedDelay(1_000, "10h"))
    assert play.COMMITTING.wait(play.WAIT_S)
    play.ERRORS.append(UncommittableError("a.part is gone"))
    play.MAY_COMMIT.set()
    gone = (
        r"sink 'out': checkpoint 1 is complete, .* can never be committed: a\.part is gone\. .*restore_from"
    )
    with pytest.raises(UncommittableError, match=gone):
        played.job.wait(play.WAIT_S)
    assert played.job.status().restarts == 0


def test_state_that_can_never_be_written_ends_the_job_at_once(play: ModuleType, tmp_path: Path) -> None:
    declined = SubtaskDeclined(1, "numbers", 0, "'count' holds a lock", code=StateSerializationError.code)
    job = play.Played(tmp_path, restart=FixedDelay(1_000, "10h"), declined=declined).job
    with pytest.raises(StateSerializationError, match="'count' holds a lock"):
        job.wait(play.WAIT_S)
    assert job.status().restarts == 0
    assert "'count' holds a lock" in job.checkpoints()[0].failure


def test_a_mistake_of_the_program_ends_the_job_at_its_first_checkpoint(
    play: ModuleType, tmp_path: Path
) -> None:
    declined = SubtaskDeclined(1, "numbers", 0, "table orders is not there", lasting=True)
    job = play.Played(tmp_path, restart=FixedDelay(1_000, "10h"), declined=declined).job
    with pytest.raises(
        JobStartError, match="'numbers', subtask 0, cannot do its part: table orders is not there"
    ):
        job.wait(play.WAIT_S)
    assert job.status().restarts == 0


def test_a_checkpoint_that_fails_for_another_reason_restarts_the_job(
    play: ModuleType, tmp_path: Path
) -> None:
    declined = SubtaskDeclined(1, "numbers", 0, "the disk is full")
    job = play.Played(tmp_path, restart=FixedDelay(1_000, "10h"), declined=declined).job
    play.until(lambda: job.status().restarts == 1)
    assert "the disk is full" in job.status().last_failure
    assert job.cancel(play.WAIT_S)


def test_a_job_that_cannot_commit_what_it_begins_with_says_what_it_is_at(
    play: ModuleType, tmp_path: Path
) -> None:
    play.ERRORS.append(OSError("the database is down"))
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, restart=FixedDelay(1_000, "10h")).job
    play.until(lambda: first.status().restarts == 1)
    assert first.cancel(play.WAIT_S)
    again = play.Played(tmp_path, run="played-2", restore_from=LATEST, restart=FixedDelay(1_000, "10h")).job
    play.until(lambda: again.status().last_failure != "")
    assert again.state is JobState.RECOVERING
    assert "OSError: the database is down" in again.status().last_failure
    assert again.cancel(play.WAIT_S)
    play.ERRORS[:] = [UncommittableError("a.part is gone")]
    last = play.Played(tmp_path, run="played-3", restore_from=LATEST, restart=FixedDelay(1_000, "10h")).job
    with pytest.raises(UncommittableError, match=r"a\.part is gone"):
        last.wait(play.WAIT_S)
