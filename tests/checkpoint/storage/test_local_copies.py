"""Copies on the slot's own disk: used where they fit, missed nowhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.snapshots import Scope
from ftlayer.checkpoint.storage.files import LocalFileOutput
from ftlayer.checkpoint.storage.opening import slot_storage
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError

LARGE = b"x" * 300_000


def write(kit: Any, made: Any, slot: Any, number: int = 1, content: bytes = LARGE) -> list[Any]:
    writer = slot.writer(made.barrier(number))
    pieces = [writer.write([content], scope) for scope in Scope]
    writer.close()
    return pieces


@pytest.fixture(params=["local", "remote"])
def copied(request: pytest.FixtureRequest, make_kit: Any, tmp_path: Path) -> Any:
    """A storage with local copies."""
    return make_kit(request.param, local_recovery=str(tmp_path / "copies"))


def copies_of(tmp_path: Path, slot: int = 0) -> Path:
    return tmp_path / "copies" / "job" / "run-1" / f"slot-{slot}"


def test_the_next_instance_reads_copies_even_if_the_storage_is_gone(
    copied: Any, made: Any, tmp_path: Path
) -> None:
    first = copied.slot()
    pieces = write(copied, made, first)
    first.close()
    for piece in pieces:
        copied.directory.delete(piece.path)
    second = copied.slot(epoch=2, instance="b")
    for index, piece in enumerate(pieces):
        assert second.open(second.location, piece).read() == LARGE
        second.fetch(second.location, piece, tmp_path / str(index))
        assert (tmp_path / str(index)).read_bytes() == LARGE
    other = copied.slot(slot=1)
    with pytest.raises(CheckpointDamagedError, match="missing"):
        other.open(other.location, pieces[0])


@pytest.mark.parametrize("harm", ["changed", "cut", "missing"])
def test_a_copy_that_does_not_fit_is_as_good_as_none(
    copied: Any, made: Any, tmp_path: Path, harm: str
) -> None:
    slot = copied.slot()
    for index, piece in enumerate(write(copied, made, slot)):
        copy = copies_of(tmp_path) / piece.path
        if harm == "changed":
            copy.write_bytes(LARGE[:-1] + b"y")
        elif harm == "cut":
            copy.write_bytes(LARGE[:-1])
        else:
            copy.unlink()
        assert slot.open(slot.location, piece).read() == LARGE
        slot.fetch(slot.location, piece, tmp_path / str(index))
        assert (tmp_path / str(index)).read_bytes() == LARGE


def test_a_copy_that_cannot_be_written_is_no_reason_to_fail(
    copied: Any, made: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    slot = copied.slot()
    copies_of(tmp_path).joinpath("chk-1").write_text("in the way")
    copies_of(tmp_path).joinpath("shared").write_text("in the way")
    for piece in write(copied, made, slot):
        assert slot.open(slot.location, piece).read() == LARGE
    assert "no local copy" in caplog.text


def test_a_directory_that_cannot_be_made_is_no_reason_to_fail(
    make_kit: Any, made: Any, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    kit = make_kit("local", local_recovery=str(tmp_path / "file"))
    slot = kit.slot()
    for piece in write(kit, made, slot):
        assert slot.open(slot.location, piece).read() == LARGE


def test_old_copies_go_when_a_checkpoint_is_complete(copied: Any, made: Any, tmp_path: Path) -> None:
    slot = copied.slot()
    first = write(copied, made, slot, 1)
    second = write(copied, made, slot, 2)
    copied.directory.delete(first[1].path)
    slot.completed(2)
    slot.close()
    found = {
        str(path.relative_to(copies_of(tmp_path)))
        for path in copies_of(tmp_path).rglob("*")
        if path.is_file()
    }
    assert found == {"_lock", second[0].path, second[1].path}
    assert not (copies_of(tmp_path) / "chk-1").exists()


def test_copies_of_a_checkpoint_that_was_given_up_go(copied: Any, made: Any, tmp_path: Path) -> None:
    slot = copied.slot()
    slot.writer(made.barrier(1)).write([LARGE])
    slot.aborted(1)
    slot.close()
    assert [path.name for path in copies_of(tmp_path).rglob("*") if path.is_file()] == ["_lock"]


def test_what_dead_runs_have_left_goes_at_the_start(copied: Any, made: Any, tmp_path: Path) -> None:
    dead = copied.slot()
    write(copied, made, dead)
    dead.close()

    def start(run: str) -> Any:
        return slot_storage(copied.config, copied.job, run, 0, 1, "n", copied.key)

    alive = start("run-2")
    assert not copies_of(tmp_path).exists()
    other = start("run-3")
    assert (tmp_path / "copies" / "job" / "run-2").exists()
    alive.close(over=True)
    other.close(over=True)
    assert not (tmp_path / "copies" / "job").exists()


def test_a_full_local_disk_in_the_middle_of_a_piece(
    copied: Any, made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_well = LocalFileOutput.write
    written: list[LocalFileOutput] = []

    def write_badly(output: LocalFileOutput, data: bytes) -> None:
        written.append(output)
        if "/copies/" in output._url and written.count(output) > 1:
            raise CheckpointStorageError(os.strerror(errno.ENOSPC))
        write_well(output, data)

    monkeypatch.setattr(LocalFileOutput, "write", write_badly)
    slot = copied.slot()
    writer = slot.writer(made.barrier(1))
    piece = writer.write([LARGE] * 20)
    writer.sync()
    assert slot.open(slot.location, piece).read() == LARGE * 20
    assert not (copies_of(tmp_path) / piece.path).exists()
