"""What a job in barrier mode leaves at its end, and what its next start makes of that."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from ftlayer.checkpoint.options import CheckpointConfig, FailurePolicy, Retention
from ftlayer.checkpoint.storage import loading, opening
from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.checkpoint.storage.keys import Ownership, Signer, key_of, packed_key
from ftlayer.checkpoint.storage.layout import OWNERS, checkpoint_number, last_name, pieces_directory
from ftlayer.checkpoint.storage.loading import encode, load_checkpoint
from ftlayer.errors import (
    CheckpointDamagedError,
    CheckpointError,
    CheckpointStorageError,
    ConfigError,
    StaleOwnerError,
    UnauthorizedError,
)
from ftlayer.runtime.barrier_mode.driver import checkpointing as checkpoint_io
from ftlayer.runtime.barrier_mode.driver import opening as opening_of_jobs
from ftlayer.runtime.barrier_mode.driver.committing import Committer
from ftlayer.runtime.barrier_mode.driver.opening import LATEST
from ftlayer.runtime.driver.job import Job
from ftlayer.runtime.driver.rules.events import JobState
from ftlayer.runtime.environment import StreamEnvironment
from ftlayer.runtime.protocol.messages import SlotFailed, unseal
from ftlayer.vertex.calls.jobs import CheckpointTotals

DELETE, NEVER = Retention.DELETE_ON_CANCELLATION, Retention.NO_EXTERNALIZED_CHECKPOINTS


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
    play: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, bounded=True).job
    assert first.wait(play.WAIT_S)
    assert play.COMMITS == [1]
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
    assert again.status().checkpoints == CheckpointTotals()
    assert again.result == first.result
    assert again.result is not None
    assert (again.result.run, again.result.checkpoint, again.result.savepoint) == ("played-1", 1, "")
    assert "restore_from=None runs it anew" in caplog.text
    with pytest.raises(CheckpointError, match="topology 'played' ended at"):
        again.savepoint(str(tmp_path))

    # A new run is asked for: that it had ended before means nothing any more.
    with pytest.raises(ConfigError, match="nothing may be started"):
        started_again(tmp_path, None)
    second = play.Played(tmp_path, starts=False).job
    with pytest.raises(ConfigError, match="nothing may be started"):
        started_again(tmp_path, LATEST)
    assert second.cancel(play.WAIT_S)
    assert second.result is None


def test_the_result_of_a_job_that_was_stopped_with_a_savepoint_names_it(
    play: ModuleType, tmp_path: Path
) -> None:
    play.MAY_COMMIT.set()
    where = play.Played(tmp_path / "c").job.stop_with_savepoint(str(tmp_path / "s"), play.WAIT_S)
    result = started_again(tmp_path / "c", LATEST).result
    assert result is not None
    assert result.savepoint == where
    assert f"restore_from={where!r} goes on from there" in str(result)


@pytest.mark.parametrize("waiting", [0, 62])
def test_the_status_of_a_job_that_was_stopped_with_a_savepoint_says_what_waits_in_it(
    play: ModuleType, tmp_path: Path, waiting: int
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c", failures=FailurePolicy())
    played.waiting = waiting
    where = played.job.stop_with_savepoint(str(tmp_path / "s"), play.WAIT_S)
    status = played.job.status()
    assert status.savepoint == where
    assert [chain.waiting for chain in status.chains if chain.uid == "numbers"] == [waiting]
    said = " · 62 waiting in the savepoint, 0 dead" if waiting else ""
    # A checkpoint of the interval may have been in time.
    line = re.sub(r"\d+ checkpoints", "N checkpoints", status.line())
    assert line.endswith(f" · 0 out{said} · N checkpoints · stopped with savepoint {where}")
    assert played.telling.details(0, with_plan=False).counters["waiting/numbers"] == waiting
    again = started_again(tmp_path / "c", LATEST)
    assert again.status().line().endswith(f"stopped with savepoint {where}")


def test_checkpoints_stay_where_the_result_cannot_be_kept(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(config: Any, result: Any) -> None:
        raise CheckpointStorageError("it is full")

    monkeypatch.setattr(checkpoint_io, "put_result", full)
    play.MAY_COMMIT.set()
    job = play.Played(tmp_path, bounded=True).job
    assert job.wait(play.WAIT_S)
    assert job.state is JobState.ENDED
    assert len(list(tmp_path.rglob("_metadata"))) == 1


def test_a_result_that_cannot_be_read_is_no_reason_to_run_again(tmp_path: Path) -> None:
    (tmp_path / "played").mkdir()
    (tmp_path / "played" / "_result").write_text("{")
    with pytest.raises(CheckpointDamagedError, match=r"_result is not a job's result"):
        started_again(tmp_path, LATEST)


@pytest.mark.parametrize(("damaged", "more"), [(1, ""), (2, ""), (7, "; and 2 more")])
def test_all_checkpoints_that_cannot_be_read_are_named(
    play: ModuleType, tmp_path: Path, damaged: int, more: str
) -> None:
    for number in range(1, damaged + 1):
        where = tmp_path / "played" / "run" / f"chk-{number}"
        where.mkdir(parents=True)
        (where / "_metadata").write_bytes(b"FTLCHKPT?")
    with pytest.raises(CheckpointDamagedError, match="no checkpoint that can be read") as raised:
        play.Played(tmp_path, restore_from=LATEST)
    said = str(raised.value)
    assert said.count("cut off") == min(damaged, 5)
    assert f"{more}; restore_from takes any" in said


@pytest.mark.parametrize(
    ("key", "left", "said"),
    [
        (b"another key 1234", None, "again: 1,050 records of source 'numbers'"),
        (
            b"another key 1234",
            90,
            "again: of all records that were read since; what is left does not tell how many",
        ),
        (
            b"another key 1234",
            9,
            "again: of all records that were read since; what is left does not tell how many",
        ),
    ],
)
def test_a_start_that_goes_further_back_says_what_is_committed_again(
    play: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    key: bytes,
    left: int | None,
    said: str,
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path)
    first.job.checkpoint(play.WAIT_S)
    first.job.cancel(play.WAIT_S)
    (metadata,) = tmp_path.rglob("_metadata")
    whole = load_checkpoint(str(metadata.parent))
    (part,) = whole.subtasks
    newer = replace(
        whole,
        checkpoint=whole.checkpoint + 1,
        completed_ms=whole.completed_ms + 1_000,
        subtasks=(replace(part, read=part.read + 1_050),),
    )
    damaged = metadata.parent.with_name(f"chk-{newer.checkpoint}") / "_metadata"
    damaged.parent.mkdir()
    damaged.write_bytes(encode(newer, Signer(key))[:left])
    second = play.Played(tmp_path, run="played-2", restore_from=LATEST)
    assert second.job.wait_until_running(play.WAIT_S)
    (text,) = [each.text for each in second.job.status().incidents if each.kind == "restore"]
    assert text in caplog.text
    assert text.startswith(
        f"{damaged.parent} is damaged: the job goes back to checkpoint {whole.checkpoint} of 20"
    )
    assert text.endswith(said)
    told = second.telling.details(0, with_plan=False).incidents
    assert any(each.kind == "restore" and said in each.text for each in told)


def test_a_driver_that_another_one_takes_over_from_ends_and_commits_nothing_more(
    play: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, retention=NEVER)
    first.job.checkpoint(play.WAIT_S)
    second = play.Played(tmp_path, run="played-2", restore_from=LATEST, starts=False)
    with pytest.raises(StaleOwnerError, match=r"another driver \(run played-2 on .*this one ends"):
        first.job.wait(play.WAIT_S)
    assert first.job.state is JobState.FAILED
    # What the second one was restored from is still there, though nothing is retained of a job that has failed.
    assert "is removed" not in caplog.text
    play.COMMITS.clear()
    second.start_tasks()
    taken = second.job.checkpoint(play.WAIT_S).checkpoint
    assert second.job.cancel(play.WAIT_S)
    assert taken in play.COMMITS
    assert sorted(set(play.COMMITS)) == play.COMMITS


def test_what_a_driver_removes_while_another_one_looks_is_not_missed(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path)
    first.job.checkpoint(play.WAIT_S)
    found = loading.find_checkpoints
    listed: list[str] = []

    def outdated(url: str) -> list[str]:
        listed[:] = found(url)
        while not first.job.over(0) and set(listed) & set(found(url)):
            pass
        return listed

    monkeypatch.setattr(loading, "find_checkpoints", outdated)
    second = play.Played(tmp_path, run="played-2", restore_from=LATEST)
    monkeypatch.undo()
    until_s = play.WAIT_S
    with pytest.raises(StaleOwnerError):
        first.job.wait(until_s)
    assert second.job.checkpoint(until_s).checkpoint > checkpoint_number(last_name(listed[0]))
    assert second.job.status().checkpoints.restored == 1


def test_a_job_that_ends_while_another_driver_looks_is_not_begun_anew(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, bounded=True, starts=False)
    found = loading.find_checkpoints

    def outdated(url: str) -> list[str]:
        first.start_tasks()
        assert first.job.wait(play.WAIT_S)
        return found(url)

    monkeypatch.setattr(loading, "find_checkpoints", outdated)
    with pytest.raises(CheckpointError, match=r"'played' ended at .*start it again"):
        play.Played(tmp_path, run="played-2", restore_from=LATEST)
    monkeypatch.undo()
    assert started_again(tmp_path, LATEST).state is JobState.ENDED
    assert play.COMMITS == [1]


@pytest.mark.parametrize("place", ["publish", "commit"])
def test_what_fails_as_another_driver_takes_over_is_said_to_be_that(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """It has looked, and then the other one comes, removes files that no checkpoint refers to, and commits."""

    def taken(*_: Any) -> None:
        Ownership(LocalFiles(str(tmp_path / "played")), "played", "played-2")
        raise CheckpointStorageError("it is not there any more; does something else remove files from there?")

    play.MAY_COMMIT.set()
    whose = opening.FileDriverStorage if place == "publish" else Committer
    monkeypatch.setattr(whose, place, taken)
    job = play.Played(tmp_path, bounded=True).job
    with pytest.raises(StaleOwnerError, match="run played-2"):
        job.wait(play.WAIT_S)


def test_of_two_first_runs_the_owner_has_the_key_that_is_kept(
    play: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an object store the other one may have written its key over it, and lost the directory."""
    take_over = opening_of_jobs.take_over
    kept = packed_key(b"k" * 32)

    def overtaking(*arguments: Any) -> Any:
        (tmp_path / "played" / "_key").write_bytes(kept)
        return take_over(*arguments)

    monkeypatch.setattr(opening_of_jobs, "take_over", overtaking)
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path)
    location = first.job.checkpoint(play.WAIT_S).location
    assert first.job.interrupt(play.WAIT_S)
    (left,) = tmp_path.rglob("_metadata")
    assert load_checkpoint(str(left.parent)).checkpoint >= int(location.rpartition("-")[2] or 0)


def test_a_driver_that_finds_itself_fenced_removes_nothing(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, bounded=True, starts=False)
    Ownership(LocalFiles(str(tmp_path / "played")), "played", "played-2")
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    first.start_tasks()
    with pytest.raises(StaleOwnerError):
        first.job.wait(play.WAIT_S)
    assert play.COMMITS == []
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_quick_end_frees_the_name_before_the_job_is_over(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path)
    assert played.job.wait_until_running(play.WAIT_S)
    assert played.job.cancel(play.WAIT_S)
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
    play: ModuleType,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    retention: Retention | None,
    end: str,
    left: bool,
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, retention=retention, run="first")
    played.job.checkpoint(play.WAIT_S)
    match end:
        case "cancel":
            assert played.job.cancel(play.WAIT_S)
        case "interrupt":
            assert played.job.interrupt(play.WAIT_S)
        case _:
            played.fail(SlotFailed("broken"))
            assert played.job.over(play.WAIT_S)
    assert bool(list(tmp_path.rglob("_metadata"))) == left
    assert ("and its last checkpoint is removed" in caplog.text) == (not left)
    caplog.clear()
    again = play.Played(tmp_path, retention=retention, run="second", restore_from=LATEST)
    assert ("has been started before" in caplog.text) == (not left)
    assert again.job.cancel(play.WAIT_S)


def test_a_job_that_fails_while_it_is_interrupted_leaves_its_checkpoint(
    play: ModuleType, tmp_path: Path
) -> None:
    """PySpark cancels the session's Spark jobs before it raises what Ctrl-C is: slots may fail first."""
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path, retention=NEVER)
    played.submitter.cancel = Mock()  # its Spark job ends below
    played.job.checkpoint(play.WAIT_S)
    played.say(SlotFailed("its Spark job was cancelled"))
    play.until(lambda: played.job.state is JobState.STOPPING)
    interrupting = threading.Thread(target=played.job.interrupt, args=(play.WAIT_S,))
    interrupting.start()
    play.until(lambda: played.thread.interrupted)
    # Only now is it over.
    played.thread.spark_job_ended(0, 1, None)
    interrupting.join(play.WAIT_S)
    assert played.job.state is JobState.FAILED
    assert list(tmp_path.rglob("_metadata"))


def test_a_restore_that_fails_leaves_what_it_was_made_from(
    play: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play.MAY_COMMIT.set()
    first = play.Played(tmp_path, retention=NEVER, run="first")
    first.job.checkpoint(play.WAIT_S)
    assert first.job.interrupt(play.WAIT_S)
    before = kept(tmp_path)
    caplog.clear()
    for attempt in range(2):
        again = play.Played(
            tmp_path, retention=NEVER, run=f"again-{attempt}", restore_from=LATEST, starts=False
        )
        assert again.deployed.wait(play.WAIT_S)
        again.fail(SlotFailed("its function has no state of that name"))
        assert again.job.over(play.WAIT_S)
        assert again.job.state is JobState.FAILED
        assert kept(tmp_path) == before
    assert caplog.text.count("is removed") == caplog.text.count("started before") == 0


def test_of_a_savepoint_that_stays_nothing_is_told(
    play: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    play.MAY_COMMIT.set()
    where = play.Played(tmp_path / "a").job.stop_with_savepoint(str(tmp_path / "s"), play.WAIT_S)
    again = play.Played(tmp_path / "b", retention=DELETE, run="again", restore_from=where, starts=False)
    assert again.job.cancel(play.WAIT_S)
    assert kept(tmp_path / "s")
    assert "is removed" not in caplog.text


def kept(directory: Path) -> dict[Path, bytes]:
    """Return the files of checkpoints and savepoints, and what they hold."""
    return {
        path: path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.parent.name != OWNERS
    }


def test_the_first_start_warns_of_nothing(
    play: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    played = play.Played(tmp_path, restore_from=LATEST)
    assert played.job.cancel(play.WAIT_S)
    assert "started before" not in caplog.text
    assert "removed" not in caplog.text


def test_who_reads_the_directory_has_not_the_key_of_driver_and_slots(
    play: ModuleType, tmp_path: Path
) -> None:
    play.MAY_COMMIT.set()
    played = play.Played(tmp_path / "c")
    where = played.job.stop_with_savepoint(str(tmp_path / "s"), play.WAIT_S)
    kept = key_of(pieces_directory(load_checkpoint(where)))
    (made,) = load_checkpoint(where).subtasks[0].committables
    assert unseal(made.message, kept)
    assert played.key != kept
    with pytest.raises(UnauthorizedError):
        unseal(made.message, played.key)
    # What the next run restores is sealed for it, and what the kept key has sealed is none of a slot's.
    commits = len(play.COMMITS)
    again = play.Played(tmp_path / "d", run="played-2", restore_from=where, slot_key=kept)
    play.until(lambda: len(play.COMMITS) > commits)
    with pytest.raises(CheckpointError, match="was not sealed by the key of its job"):
        again.job.savepoint(str(tmp_path / "t"), play.WAIT_S)


def test_neither_status_nor_result_shows_the_secret_of_a_url(play: ModuleType, tmp_path: Path) -> None:
    play.MAY_COMMIT.set()
    directory = "memory://me:hunter2@status"
    played = play.Played(directory)
    assert "hunter2" in (where := played.job.stop_with_savepoint(f"{directory}/saved", play.WAIT_S))
    status, details = played.job.status(), played.telling.details(0, with_plan=False)
    said = (
        status.line(),
        str(status),
        repr(status),
        repr(details),
        str(started_again(directory, LATEST).result),
    )
    assert [text for text in said if "hunter2" in text] == []
    assert status.savepoint == where
