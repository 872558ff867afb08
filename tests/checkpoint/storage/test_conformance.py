"""What every storage has to do: driver memory, a local directory, and fsspec's."""

from __future__ import annotations

import secrets
import threading
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from ftlayer.checkpoint.snapshots import ChannelState, Piece, Scope
from ftlayer.checkpoint.storage import files as local_files
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.layout import new_savepoint, pieces_directory
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, ConfigError, SnapshotCancelledError

LARGE = 300_000


def test_pieces_of_all_sizes_are_read_as_they_were_written(kit: Any, made: Any, tmp_path: Path) -> None:
    slot = kit.slot()
    writer = slot.writer(made.barrier(1))
    contents = [b"", b"x", b"y" * 20_480, b"z" * 20_481, secrets.token_bytes(LARGE)]
    pieces = [
        writer.write([content[:7], content[7:]], scope)
        for content in contents
        for scope in (Scope.EXCLUSIVE, Scope.SHARED)
    ]
    writer.sync()
    for index, piece in enumerate(pieces):
        content = contents[index // 2]
        assert piece.length == len(content)
        with slot.open(slot.location, piece) as file:
            assert file.read() == content
        target = tmp_path / str(index)
        slot.fetch(slot.location, piece, target)
        assert target.read_bytes() == content


def test_small_pieces_are_inline(kit: Any, made: Any) -> None:
    writer = kit.slot().writer(made.barrier(1))
    assert writer.write([b"x" * 20_480]).inline == b"x" * 20_480
    assert (writer.write([b"x" * 20_481]).inline is None) == (kit.config.directory is not None)


def test_a_checkpoint_that_was_published_can_be_loaded_verified_and_discarded(kit: Any, made: Any) -> None:
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    large = writer.write([b"a" * LARGE])
    small = writer.write([b"b"])
    writer.close()
    checkpoint = driver.publish(made.checkpoint(1, made.subtask([large, small])))
    driver.verify(checkpoint)
    slot.completed(1)
    if checkpoint.location:
        assert driver.completed(kit.job) == [checkpoint.location]
        assert driver.load(checkpoint.location) == checkpoint
        assert load_checkpoint(checkpoint.location) == checkpoint
        assert load_checkpoint(checkpoint.location + "/_metadata") == checkpoint
    assert slot.open(pieces_directory(checkpoint), large).read() == b"a" * LARGE
    driver.discard(checkpoint, [])
    driver.discard(checkpoint, [])
    assert driver.completed(kit.job) == []
    driver.close([])


@pytest.mark.parametrize(("most", "files"), [(1, 5), (2, 3), (5, 1), (9, 1)])
@pytest.mark.parametrize("kind", ["local", "remote"])
def test_so_many_subtasks_share_a_file_of_records_in_flight(
    make_kit: Any, made: Any, kind: str, most: int, files: int
) -> None:
    kit = make_kit(kind, max_subtasks_per_channel_state_file=most)
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    snapshots = []
    sharing: dict[str, set[int]] = {}
    for channel in range(2):
        for subtask in range(5):
            content = bytes([channel, subtask]) * LARGE
            frames = writer.write([content], Scope.EXCLUSIVE, f"count/{subtask}")
            sharing.setdefault(frames.path, set()).add(subtask)
            state = writer.write([b"s" * LARGE])
            captured = ChannelState("in", "", "count", 0, channel, subtask, False, frames, 1)
            snapshots.append(replace(made.subtask([state], subtask), channels=(captured,)))
    assert writer.write([b"small"], Scope.EXCLUSIVE, "count/0").inline == b"small"
    writer.close()
    assert len(sharing) == files
    assert max(len(subtasks) for subtasks in sharing.values()) == min(most, 5)
    assert {snapshot.keyed.pieces[0].piece.path for snapshot in snapshots}.isdisjoint(sharing)
    checkpoint = driver.publish(made.checkpoint(1, *snapshots))
    if kind == "local":  # Several readers of a file in memory:// share its position.
        driver.verify(checkpoint)
    slot.completed(1)
    for snapshot in driver.load(checkpoint.location).subtasks:
        (part,) = snapshot.channels
        with slot.open(slot.location, part.frames) as file:
            assert file.read() == bytes([part.sender, part.receiver]) * LARGE
    driver.discard(checkpoint, [])
    assert kit.paths() == set()
    given_up = slot.writer(made.barrier(2))
    for subtask in range(5):
        given_up.write([b"x" * LARGE], Scope.EXCLUSIVE, f"count/{subtask}")
    slot.aborted(2)
    slot.close()
    assert kit.paths() == set()


@pytest.mark.parametrize(
    ("options", "writes"),
    [
        ({"write_buffer_size": 4_096, "memory_threshold": 0}, 25),
        ({"write_buffer_size": 1, "memory_threshold": 0}, 100),
        # The threshold is the least that a buffer has.
        ({"write_buffer_size": 4_096, "memory_threshold": 20_480}, 5),
        ({}, 5),
        ({"write_buffer_size": 50_000}, 2),
        ({"write_buffer_size": 1 << 20}, 1),
    ],
)
@pytest.mark.parametrize("kind", ["local", "faulty"])
def test_what_is_smaller_than_the_buffer_is_gathered(
    make_kit: Any,
    made: Any,
    faults: Any,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, int],
    writes: int,
) -> None:
    class CountedFile(FileIO):
        def write(self, data: Any) -> int:
            faults.written.append(memoryview(data).nbytes)
            return super().write(data)

    monkeypatch.setattr(local_files, "FileIO", CountedFile)
    slot = make_kit(kind, **options).slot()
    writer = slot.writer(made.barrier(1))
    faults.written.clear()
    content = [bytes([number]) * 1_000 for number in range(100)]
    piece = writer.write(content)
    writer.sync()
    assert len(faults.written) == writes
    assert sum(faults.written) == 100_000
    assert slot.open(slot.location, piece).read() == b"".join(content)
    faults.written.clear()
    log = slot.log_writer()
    log.write(content)
    log.sync()
    assert len(faults.written) == writes


def test_savepoints_are_complete_and_relative(kit: Any, made: Any, tmp_path: Path) -> None:
    slot, driver = kit.slot(), kit.driver()
    location = new_savepoint(str(tmp_path / "savepoints"), kit.run)
    writer = slot.writer(made.barrier(3, location))
    pieces = [writer.write([b"a" * LARGE], scope) for scope in Scope]
    writer.close()
    savepoint = driver.publish(made.checkpoint(3, made.subtask(pieces), savepoint=True), location)
    slot.completed(3)
    assert savepoint.location == location
    driver.close([])
    moved = tmp_path / "elsewhere"
    Path(location).rename(moved)
    found = load_checkpoint(str(moved))
    assert found.subtasks == savepoint.subtasks
    reader = kit.slot(slot=1)
    for piece in found.subtasks[0].pieces():
        assert reader.open(pieces_directory(found), piece).read() == b"a" * LARGE
    other = kit.driver("run-2")
    other.verify(found)
    other.discard(found, [])
    assert not moved.exists()
    other.close([])


def test_a_savepoint_that_was_given_up_leaves_nothing(kit: Any, made: Any, tmp_path: Path) -> None:
    slot, dead, driver = kit.slot(), kit.slot(slot=1, instance="dead"), kit.driver()
    location = new_savepoint(str(tmp_path / "savepoints"), kit.run)
    for storage in (slot, dead):
        writer = storage.writer(made.barrier(3, location))
        writer.write([b"a" * LARGE])
        writer.sync()
    slot.aborted(3)
    slot.close()
    driver.discard_parts(3, [], [], location)
    assert not Path(location).exists()


def test_a_chunk_that_raises_leaves_the_writer_as_it_was(kit: Any, made: Any) -> None:
    def chunks() -> Any:
        yield b"a" * LARGE
        yield b"a" * 2_000_000
        raise SnapshotCancelledError("enough")

    slot = kit.slot()
    writer = slot.writer(made.barrier(1))
    before = writer.write([b"b" * LARGE])
    with pytest.raises(SnapshotCancelledError, match="enough"):
        writer.write(chunks())
    behind = writer.write([b"c" * LARGE])
    writer.sync()
    assert slot.open(slot.location, before).read() == b"b" * LARGE
    assert slot.open(slot.location, behind).read() == b"c" * LARGE


def test_nothing_can_be_written_for_a_checkpoint_that_was_given_up(kit: Any, made: Any) -> None:
    slot = kit.slot()
    early = slot.writer(made.barrier(1))
    early.write([b"a" * LARGE])
    slot.aborted(1)
    slot.aborted(2)
    late = slot.writer(made.barrier(2))
    slot.close()
    for writer in (early, late):
        with pytest.raises(SnapshotCancelledError):
            writer.write([b"a"])
        with pytest.raises(SnapshotCancelledError):
            writer.sync()
    if kit.config.directory is not None:
        assert kit.paths() == set()


def test_the_writer_of_a_checkpoint_is_one(kit: Any, made: Any) -> None:
    slot = kit.slot()
    assert slot.writer(made.barrier(1)) is slot.writer(made.barrier(1))
    assert slot.writer(made.barrier(1)) is not slot.writer(made.barrier(2))


def test_many_threads_write_at_once(kit: Any, made: Any) -> None:
    slot = kit.slot()
    writer = slot.writer(made.barrier(1))
    found: dict[int, list[Piece]] = {}

    def write(thread: int) -> None:
        found[thread] = [
            writer.write([bytes([thread]) * 30_000] * 3, Scope.SHARED if index % 2 else Scope.EXCLUSIVE)
            for index in range(10)
        ]
        writer.sync()

    threads = [threading.Thread(target=write, args=(thread,)) for thread in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for thread, pieces in found.items():
        for piece in pieces:
            assert slot.open(slot.location, piece).read() == bytes([thread]) * 90_000


def test_a_piece_that_was_changed_is_not_opened(kit: Any, made: Any, tmp_path: Path) -> None:
    slot = kit.slot()
    piece = slot.writer(made.barrier(1)).write([b"good"])
    bad = Piece(piece.digest, 4, b"evil")
    with pytest.raises(CheckpointDamagedError, match="checksum"):
        slot.open(slot.location, bad)
    with pytest.raises(CheckpointDamagedError, match="checksum"):
        slot.fetch(slot.location, bad, tmp_path / "target")
    assert not (tmp_path / "target").exists()
    short = Piece(piece.digest, 5, b"good")
    with pytest.raises(CheckpointDamagedError, match="5 bytes were written, 4"):
        slot.open(slot.location, short)


def test_driver_memory_has_a_bound(make_kit: Any, made: Any) -> None:
    kit = make_kit("driver", max_memory_state=1_000)
    writer = kit.slot().writer(made.barrier(1))
    with pytest.raises(CheckpointStorageError, match="max_memory_state"):
        writer.write([b"a" * 600, b"b" * 600])
    pieces = [writer.write([b"a" * 600]), writer.write([b"b" * 600])]
    with pytest.raises(CheckpointStorageError, match=r"count\[0\].*max_memory_state"):
        kit.driver().publish(made.checkpoint(1, made.subtask(pieces)))
    with pytest.raises(ConfigError, match="changelog, directory"):
        kit.slot().log_writer()


@pytest.mark.parametrize("kind", ["local", "remote", "table"])
def test_a_later_run_takes_files_over_where_the_storage_can(
    make_kit: Any, made: Any, kind: str, table_storage: Any
) -> None:
    kit = make_kit(kind, **({"storage": "table_storage:TableStorage"} if kind == "table" else {}))
    slot, driver = kit.slot(), kit.driver()
    writer = slot.writer(made.barrier(1))
    pieces = [writer.write([bytes([number]) * LARGE], Scope.SHARED) for number in range(2)]
    writer.close()
    old = driver.publish(made.checkpoint(1, made.subtask(pieces)))
    slot.close()
    key = kit.key
    kit.run = "run-2"
    later, driver = kit.slot(instance="b"), kit.driver()
    assert later.adopt(later.location, pieces) == pieces
    found = later.adopt(pieces_directory(old), pieces)
    if kind == "table":
        assert found is None
        return
    assert later.adopt(pieces_directory(old), pieces) == found
    new = driver.publish(made.checkpoint(2, made.subtask(found), run="run-2"))
    list(driver.sweep([new], {"b"}.__contains__))
    driver.discard(old, [new])
    driver.verify(new)
    kit.key = b"another key of the same job's"
    assert kit.slot(instance="c").adopt(pieces_directory(new), found) == found  # its own run's
    kit.run = "run-3"
    assert (kit.slot(instance="d").adopt(pieces_directory(new), found) is None) == (kit.key != key)
    kit.key = key
    # Where it is gone meanwhile, what is in it is written.
    for piece in found:
        open_files(pieces_directory(new)).delete(piece.path)
    assert kit.slot(instance="e").adopt(pieces_directory(new), found) is None
