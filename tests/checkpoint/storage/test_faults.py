"""Storage that is full, read-only, torn or gone: a clear error, and nothing refers to what is not there."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.snapshots import Scope
from ftlayer.checkpoint.storage.files import LocalFiles
from ftlayer.checkpoint.storage.layout import new_savepoint
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, SnapshotCancelledError

LARGE = b"x" * 300_000


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (errno.ENOSPC, "make room"),
        (errno.EROFS, "only be read"),
        (errno.EACCES, "permission"),
        (errno.EIO, "made to"),
    ],
)
def test_a_failed_write_names_the_path_and_what_to_do(
    make_kit: Any, made: Any, faults: Any, number: int, way_out: str
) -> None:
    kit = make_kit("faulty")
    slot = kit.slot()
    writer = slot.writer(made.barrier(1))
    faults.write_error = number
    for _ in range(2):
        with pytest.raises(CheckpointStorageError, match=rf"faulty://checkpoints-.*/chk-1/.*{way_out}"):
            writer.write([LARGE])
    with pytest.raises(CheckpointStorageError, match=way_out):
        writer.sync()
    with pytest.raises(CheckpointStorageError, match=way_out):
        writer.close()
    faults.clear()
    assert kit.paths() == set()
    again = slot.writer(made.barrier(2))
    piece = again.write([LARGE])
    again.close()
    assert slot.open(slot.location, piece).read() == LARGE


def test_a_write_that_fails_in_the_middle_fails_all_that_share_the_file(
    make_kit: Any, made: Any, faults: Any
) -> None:
    kit = make_kit("faulty")
    writer = kit.slot().writer(made.barrier(1))
    writer.write([LARGE])
    faults.write_error = errno.ENOSPC
    with pytest.raises(CheckpointStorageError):
        writer.write([LARGE])
    faults.clear()
    with pytest.raises(CheckpointStorageError, match="make room"):
        writer.sync()
    assert kit.paths() == set()


@pytest.mark.parametrize("torn_at", [0, 1, 299_999, 300_000, 599_999])
def test_a_torn_write_is_found_before_anybody_refers_to_it(
    make_kit: Any, made: Any, faults: Any, torn_at: int
) -> None:
    kit = make_kit("faulty")
    writer = kit.slot().writer(made.barrier(1))
    faults.torn_at = torn_at
    writer.write([LARGE])
    writer.write([LARGE])
    with pytest.raises(CheckpointStorageError, match="600,000 bytes were written, and"):
        writer.sync()


@pytest.mark.parametrize("torn_at", [0, 20, 40, 80])
def test_torn_metadata_is_no_checkpoint(make_kit: Any, made: Any, faults: Any, torn_at: int) -> None:
    kit = make_kit("faulty")
    driver = kit.driver()
    good = driver.publish(made.checkpoint(1, made.subtask([])))
    faults.torn_at = torn_at
    bad = driver.publish(made.checkpoint(2, made.subtask([])))
    faults.clear()
    assert set(driver.completed(kit.job)) == {good.location, bad.location}
    with pytest.raises(CheckpointDamagedError):
        driver.load(bad.location)
    assert driver.load(good.location) == good


def test_metadata_that_cannot_be_written_is_not_there(make_kit: Any, made: Any, faults: Any) -> None:
    kit = make_kit("faulty")
    driver = kit.driver()
    faults.write_error = errno.ENOSPC
    with pytest.raises(CheckpointStorageError, match=r"_metadata.*make room"):
        driver.publish(made.checkpoint(1, made.subtask([])))
    faults.clear()
    assert driver.completed(kit.job) == []
    assert kit.paths() == set()


def test_metadata_that_may_have_been_written_is_removed(make_kit: Any, made: Any, faults: Any) -> None:
    """Or a later job would find a checkpoint that this one has gone back behind, and aborted the rows of."""
    kit = make_kit("faulty")
    driver = kit.driver()
    location = new_savepoint("faulty://savepoints", kit.run)
    faults.answer_error = errno.ETIMEDOUT
    with pytest.raises(CheckpointStorageError, match=r"_metadata.*made to fail"):
        driver.publish(made.checkpoint(1, made.subtask([])))
    faults.clear()
    assert driver.completed(kit.job) == []
    assert driver.undecided() == {}
    # The key of the savepoint comes first.
    driver.publish(made.checkpoint(2, savepoint=True), location)
    faults.answer_error = errno.ETIMEDOUT
    with pytest.raises(CheckpointStorageError, match="made to fail"):
        driver.publish(made.checkpoint(3, savepoint=True), location)
    faults.clear()
    with pytest.raises(CheckpointStorageError, match="there is no checkpoint"):
        driver.load(location)


@pytest.mark.parametrize("run_is_there", [True, False])
def test_metadata_that_was_never_written_is_not_there_if_its_disk_is(
    make_kit: Any, made: Any, monkeypatch: pytest.MonkeyPatch, run_is_there: bool
) -> None:
    kit = make_kit("local")
    driver = kit.driver()
    if run_is_there:
        driver.publish(made.checkpoint(1, made.subtask([])))

    def fail(*_: object) -> None:
        raise CheckpointStorageError("made to fail")

    monkeypatch.setattr(LocalFiles, "publish", fail)
    with pytest.raises(CheckpointStorageError, match="made to fail"):
        driver.publish(made.checkpoint(2, made.subtask([])))
    assert set(driver.undecided()) == (set() if run_is_there else {2})


def test_what_may_have_been_published_and_cannot_be_removed_keeps_its_files(
    make_kit: Any, made: Any, faults: Any
) -> None:
    kit = make_kit("faulty")
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    pieces = [writer.write([LARGE], scope) for scope in Scope]
    writer.close()
    parts = [made.subtask(pieces)]
    checkpoint = made.checkpoint(1, *parts)
    faults.answer_error, faults.delete_error = errno.ETIMEDOUT, errno.EACCES
    with pytest.raises(CheckpointStorageError, match="made to fail"):
        driver.publish(checkpoint)
    assert "permission" in str(driver.undecided()[1])
    faults.clear()
    # As a driver that finds it later would see it.
    driver.discard_parts(1, parts, [])
    later = driver.publish(made.checkpoint(2, made.subtask([])))
    assert list(driver.sweep([later], lambda _: False)) == []
    (found,) = set(driver.completed(kit.job)) - {later.location}
    driver.verify(driver.load(found))
    assert driver.undecided() == {}
    assert driver.completed(kit.job) == [later.location]
    assert len(list(driver.sweep([later], lambda _: False))) == 2


def test_storage_that_vanishes(make_kit: Any, made: Any, faults: Any) -> None:
    kit = make_kit("faulty")
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    piece = writer.write([LARGE])
    writer.sync()
    checkpoint = driver.publish(made.checkpoint(1, made.subtask([piece])))
    faults.vanished = True
    with pytest.raises(CheckpointDamagedError, match="missing"):
        slot.open(slot.location, piece)
    with pytest.raises(CheckpointStorageError, match="is it mounted"):
        slot.writer(made.barrier(2)).write([LARGE])
    with pytest.raises(CheckpointStorageError, match="is not there any more"):
        driver.publish(made.checkpoint(2, made.subtask([piece])))
    with pytest.raises(CheckpointDamagedError):
        driver.verify(checkpoint)
    faults.clear()
    driver.verify(checkpoint)


def test_what_cannot_be_deleted_is_told_once_and_swept_later(make_kit: Any, made: Any, faults: Any) -> None:
    kit = make_kit("faulty")
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    pieces = [writer.write([LARGE], scope) for scope in Scope]
    writer.close()
    checkpoint = driver.publish(made.checkpoint(1, made.subtask(pieces)))
    last = driver.publish(made.checkpoint(2, made.subtask([])))
    faults.delete_error = errno.EACCES
    with pytest.raises(CheckpointStorageError, match=r"chk-1: .* could not be removed: .*permission"):
        driver.discard(checkpoint, [last])
    with pytest.raises(CheckpointStorageError, match="could not be removed"):
        list(driver.sweep([last], lambda _: True))
    faults.clear()
    assert set(driver.sweep([last], lambda _: True)) == {"chk-1/_metadata", *(piece.path for piece in pieces)}
    assert kit.paths() == {"chk-2/_metadata"}


def test_a_local_disk_that_is_full(make_kit: Any, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kit = make_kit("local")
    slot = kit.slot()
    writer = slot.writer(made.barrier(1))
    first = writer.write([LARGE])
    writer.sync()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        second = writer.write([LARGE])
        assert second.path == first.path
        with pytest.raises(CheckpointStorageError, match="make room"):
            writer.sync()
    with pytest.raises(CheckpointStorageError, match="make room"):
        writer.sync()
    # What was synced before may be referred to.
    assert slot.open(slot.location, first).read() == LARGE
    slot.aborted(1)
    slot.close()
    assert kit.paths() == set()


def test_a_log_goes_on_behind_a_failed_write(
    make_kit: Any, made: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = make_kit("local")
    slot = kit.slot()
    one, other = slot.log_writer(), slot.log_writer()
    first = one.write([LARGE], Scope.SHARED)
    one.sync()
    one.write([LARGE], Scope.SHARED)
    other.write([LARGE], Scope.SHARED)

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        with pytest.raises(CheckpointStorageError, match="make room"):
            one.sync()
    # It was the other one's file too: neither takes for durable what is not.
    for writer in (one, other, other):
        with pytest.raises(CheckpointStorageError, match="make room"):
            writer.sync()
    again = slot.log_writer()
    second = again.write([LARGE], Scope.SHARED)
    again.sync()
    assert second.path != first.path
    assert slot.open(slot.location, first).read() == LARGE
    assert slot.open(slot.location, second).read() == LARGE


def test_a_directory_that_is_a_file(make_kit: Any, made: Any, tmp_path: Path) -> None:
    kit = make_kit("local")
    run = Path(kit.slot().location)
    run.parent.mkdir(parents=True, exist_ok=True)
    run.write_text("not a directory")
    with pytest.raises(CheckpointStorageError, match="choose another directory"):
        kit.slot().writer(made.barrier(1)).write([LARGE])


def test_a_file_that_was_cut_or_changed_is_named(files_kit: Any, made: Any) -> None:
    slot, driver = files_kit.slot(), files_kit.driver()
    writer = slot.writer(made.barrier(1))
    piece = writer.write([LARGE])
    writer.close()
    checkpoint = driver.publish(made.checkpoint(1, made.subtask([piece])))
    files = files_kit.directory
    files.delete(piece.path)
    files.publish(piece.path, LARGE[:-1])
    with pytest.raises(
        CheckpointDamagedError, match=rf"{piece.path} at 0: 300,000 bytes were written, 299,999"
    ):
        driver.verify(checkpoint)
    files.delete(piece.path)
    files.publish(piece.path, LARGE[:-1] + b"y")
    with pytest.raises(CheckpointDamagedError, match="changed after it was written"):
        driver.verify(checkpoint)
    files.delete(piece.path)
    with pytest.raises(CheckpointDamagedError, match="is missing"):
        driver.verify(checkpoint)
    assert load_checkpoint(checkpoint.location) == checkpoint


def test_a_writer_that_waits_for_the_file_is_cancelled_with_the_checkpoint(kit: Any, made: Any) -> None:
    slot = kit.slot()
    writer = slot.writer(made.barrier(1))

    def chunks() -> Any:
        yield LARGE * 10
        writer.discard()
        yield LARGE

    with pytest.raises(SnapshotCancelledError):
        writer.write(chunks())
    slot.close()
