"""Whatever file of a job's checkpoints is damaged, one that can be restored is among those that are retained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.coordinator import coordinator as completed
from ftlayer.checkpoint.coordinator.coordinator import CompletedStore
from ftlayer.checkpoint.options import CheckpointConfig, Retention
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskRestore, SubtaskSnapshot
from ftlayer.checkpoint.storage.files import StoragePool, open_files
from ftlayer.checkpoint.storage.keys import storage_key
from ftlayer.checkpoint.storage.layout import pieces_directory
from ftlayer.checkpoint.storage.loading import (
    find_checkpoints,
    load_checkpoint,
    sweep_earlier_runs,
    verify_checkpoint,
)
from ftlayer.checkpoint.storage.opening import driver_storage, slot_storage
from ftlayer.errors import CheckpointError
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import open_backend

SPEC = BackendSpec(0, 16, 16, {"op": pa.schema([("k", pa.int64())])})


class Job:
    """One subtask in one slot on a real directory, the driver's storage, and the rules of what is retained."""

    def __init__(self, root: Path, **options: Any) -> None:
        self.config = CheckpointConfig(
            directory=str(root / "checkpoints"),
            state_directory=str(root),
            memory_threshold=0,
            retention=Retention.RETAIN_ON_CANCELLATION,
            **options,
        )
        self.readers = StoragePool()
        self.runs = 0
        self.store = CompletedStore(self.config, (), claimed=True)
        self.start()
        self.state: dict[int, bytes] = {}
        self.states: dict[int, dict[int, bytes]] = {}
        self.number = 0

    def start(self) -> None:
        """Begin a run, with the latest checkpoint there is; the driver before was killed."""
        self.runs += 1
        key, run = storage_key(self.config, "job"), f"run-{self.runs}"
        self.slot = slot_storage(self.config, "job", run, 0, 0, f"i{self.runs}", key)
        self.driver = driver_storage(self.config, "job", run, key)
        latest = self.store.latest
        if latest is None:
            self.backend = open_backend(self.config, SPEC, None, self.slot, self.slot.location)
            return
        self.state = dict(self.states[latest.checkpoint])
        self.store = CompletedStore(self.config, self.store.checkpoints, claimed=True)
        self.store.restored(latest)
        (part,) = latest.subtasks
        assert part.keyed is not None
        restore = SubtaskRestore("op", 0, (part.keyed,), ())
        self.backend = open_backend(self.config, SPEC, restore, self.slot, pieces_directory(latest))
        assert self.config.directory is not None
        list(sweep_earlier_runs(self.config.directory, "job", run))
        list(self.driver.sweep(self.store.checkpoints, {f"i{self.runs}"}.__contains__))

    def checkpoint(self, writes: dict[int, int], *, completes: bool) -> None:
        self.number += 1
        for key, size in writes.items():
            value = bytes([self.number % 256]) * size
            self.backend.state("op").values("v")[key] = self.state[key] = value
        barrier = Barrier(self.number, 0, full=self.store.needs_full)
        writer = self.slot.writer(barrier)
        frozen = self.backend.freeze(barrier)
        written = frozen.write(writer, lambda: False)
        frozen.release()
        writer.sync()
        self.backend.tend(self.number * 1_000)
        parts = (SubtaskSnapshot("op", 0, keyed=written.keyed),)
        if not completes:
            self.slot.aborted(self.number)
            self.driver.discard_parts(self.number, parts, self.store.checkpoints)
            self.backend.aborted(self.number)
            return
        whole = Checkpoint(
            self.number, "job", f"run-{self.runs}", "checkpoint", 0, self.number, 16, (), parts
        )
        self.store.add(self.driver.publish(whole), full=barrier.full)
        self.states[self.number] = dict(self.state)
        self.slot.completed(self.number)
        self.backend.completed(self.number)
        for gone in self.store.subsume():
            self.driver.discard(gone, self.store.checkpoints)

    def close(self) -> None:
        self.backend.close()
        self.slot.close()

    def restorable(self) -> list[Checkpoint]:
        """Return the checkpoints that a new driver, which knows nothing but the directory, can read as a whole."""
        assert self.config.directory is not None
        found = []
        for location in find_checkpoints(self.config.directory):
            try:
                checkpoint = load_checkpoint(location)
                verify_checkpoint(checkpoint, None, self.readers)
            except CheckpointError:
                continue
            found.append(checkpoint)
        return found

    def restored(self, checkpoint: Checkpoint) -> dict[Any, Any]:
        (part,) = checkpoint.subtasks
        keyed = () if part.keyed is None else (part.keyed,)
        backend = open_backend(
            self.config, SPEC, SubtaskRestore("op", 0, keyed, ()), self.slot, pieces_directory(checkpoint)
        )
        found = dict(backend.state("op").values("v").items())
        backend.close()
        return found


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    mode=st.sampled_from(["incremental", "changelog", "full"]),
    backend=st.sampled_from(["heap", "lmdb"]),
    across=st.booleans(),
    retained=st.integers(2, 3),
    rounds=st.lists(
        st.tuples(
            st.dictionaries(st.integers(0, 9), st.integers(0, 300), max_size=5),
            st.sampled_from([True, True, True, False, "driver"]),
        ),
        min_size=2,
        max_size=16,
    ),
    place=st.floats(0, 1, exclude_max=True),
)
def test_one_flipped_byte_in_any_file_leaves_a_way_back(
    tmp_path_factory: Any,
    mode: str,
    backend: Any,
    across: bool,
    retained: int,
    rounds: list[tuple[dict[int, int], Any]],
    place: float,
) -> None:
    before, completed.FULL_EVERY = completed.FULL_EVERY, 4
    root = tmp_path_factory.mktemp("job")
    job = Job(
        root,
        backend=backend,
        incremental=mode == "incremental",
        changelog=mode == "changelog",
        file_merging_across=across,
        retained=retained,
    )
    try:
        for writes, completes in [({1: 5}, True), *rounds, ({2: 5}, True)]:
            if completes == "driver":
                job.close()
                job.start()
            job.checkpoint(writes, completes=bool(completes))
        assert len(job.restorable()) == len(job.store.checkpoints) <= retained + 1
        for file in sorted(path for path in (root / "checkpoints").rglob("*") if path.is_file()):
            whole = file.read_bytes()
            if not whole:
                continue
            at = int(place * len(whole))
            file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            left = job.restorable()
            assert left, f"{file} is in the way of all {len(job.store.checkpoints)}"
            latest = max(left, key=lambda each: each.checkpoint)
            assert job.restored(latest) == job.states[latest.checkpoint]
            # The way back that is furthest is never an old one.
            completions = [number for number in job.states if number > latest.checkpoint]
            assert len(completions) <= completed.FULL_EVERY + retained
            file.write_bytes(whole)
    finally:
        completed.FULL_EVERY = before
        job.close()


@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_a_changelog_goes_on_with_what_it_was_restored_from(tmp_path: Path, backend: Any) -> None:
    """Behind each restore within a run a checkpoint writes what has changed, and not the whole state."""
    job = Job(tmp_path, changelog=True, backend=backend)
    job.checkpoint(dict.fromkeys(range(200), 1_000), completes=True)
    for round_ in range(4):
        (latest, *_) = job.store.checkpoints[-1:]
        (part,) = latest.subtasks
        assert part.keyed is not None
        job.backend.close()
        job.backend = open_backend(
            job.config, SPEC, SubtaskRestore("op", 0, (part.keyed,), ()), job.slot, job.slot.location
        )
        before = {entry.path: entry.size for entry in open_files(job.slot.location).walk()}
        job.checkpoint({round_: 100}, completes=round_ != 1)
        after = {entry.path: entry.size for entry in open_files(job.slot.location).walk()}
        written = sum(size - before.get(path, 0) for path, size in after.items() if "_metadata" not in path)
        assert written < 5_000
        for checkpoint in job.restorable():
            assert job.restored(checkpoint) == job.states[checkpoint.checkpoint]
        assert job.restorable()
        if round_ == 1:
            # What was given up is not in what is restored next.
            job.state = dict(job.states[latest.checkpoint])
    job.close()


@pytest.mark.parametrize("retained", [1, 2])
@pytest.mark.parametrize("backend", ["heap", "lmdb"])
def test_a_changelog_goes_on_over_drivers(tmp_path: Path, backend: Any, retained: int) -> None:
    """A new driver's first checkpoint writes what has changed, and its run needs no file of the one before."""
    job = Job(tmp_path, changelog=True, backend=backend, retained=retained)
    job.checkpoint(dict.fromkeys(range(200), 1_000), completes=True)
    job.checkpoint({1: 10}, completes=True)
    job.checkpoint({2: 10}, completes=True)
    for round_ in range(3):
        job.close()
        job.start()
        files = open_files(str(tmp_path / "checkpoints"))
        before = {entry.path for entry in files.walk()}
        job.checkpoint({round_: 100}, completes=True)
        new = [entry for entry in files.walk() if entry.path not in before and "_metadata" not in entry.path]
        # With more than one retained there has to be one that shares nothing, now and then.
        assert retained > 1 or sum(entry.size for entry in new) < 5_000
        for checkpoint in job.restorable():
            assert job.restored(checkpoint) == job.states[checkpoint.checkpoint]
        assert len(job.restorable()) == len(job.store.checkpoints)
        if retained == 1:
            runs = {entry.path.split("/")[1] for entry in files.walk() if "/" in entry.path} - {"_key"}
            assert {run for run in runs if run.startswith("run-")} == {f"run-{job.runs}"}
    job.close()


def test_a_changelog_begins_anew_where_pieces_are_anothers(tmp_path: Path) -> None:
    """Of another directory, of other key groups: what they hold is written, and found again."""
    job = Job(tmp_path / "one", changelog=True)
    job.checkpoint(dict.fromkeys(range(9), 10), completes=True)
    (part,) = job.store.checkpoints[-1].subtasks
    assert part.keyed is not None
    other = Job(tmp_path / "two", changelog=True)
    other.backend.close()
    restore = SubtaskRestore("op", 0, (part.keyed,), ())
    other.backend = open_backend(other.config, SPEC, restore, other.slot, job.slot.location)
    other.state = dict(job.state)
    other.checkpoint({}, completes=True)
    (found,) = other.restorable()
    assert other.restored(found) == job.state
    other.close()
    job.close()
