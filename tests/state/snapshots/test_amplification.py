"""Files of a slot, which several backends share, never take up much more than what is of use in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from time import monotonic, sleep
from typing import Any, cast

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import Checkpoint, SubtaskRestore, SubtaskSnapshot
from ftlayer.checkpoint.storage.opening import driver_storage, slot_storage
from ftlayer.state.contract import BackendSpec
from ftlayer.state.opening import LayeredBackend, open_backend

SCHEMA = pa.schema([("k", pa.int64())])
BOUND = 2.0
FILE = 8 << 10
KEY = b"k" * 32
rounds = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 1_500)), max_size=30),
        st.sampled_from(["complete", "complete", "complete", "abort"]),
    ),
    min_size=5,
    max_size=25,
)


def log_is_written(backend: LayeredBackend) -> None:
    """Wait for the changelog's own thread: a base that comes late lets the files before it live longer."""
    changelog = cast(LayeredBackend, backend)._changelog
    until = monotonic() + 300
    while changelog is not None and changelog.readers():
        assert monotonic() < until, "the changelog's thread writes nothing"
        sleep(0.001)


class Job:
    """Two subtasks in one slot, on a real directory, and the driver."""

    def __init__(self, root: Path, config: CheckpointConfig) -> None:
        self.root, self.config = root, config
        self.slot = slot_storage(config, "job", "run", 0, 0, "i", KEY)
        self.driver = driver_storage(config, "job", "run", KEY)
        self.backends = [self.opened(i, None) for i in range(2)]
        self.models: list[dict[int, bytes]] = [{}, {}]
        self.number = 0
        self.kept: Checkpoint | None = None

    def opened(self, subtask: int, restore: SubtaskRestore | None) -> LayeredBackend:
        spec = BackendSpec(0, 16, 16, {f"op-{subtask}": SCHEMA}, str(self.root / "state"))
        return open_backend(self.config, spec, restore, self.slot, self.slot.location)

    def put(self, subtask: int, key: int, size: int) -> None:
        self.backends[subtask].state(f"op-{subtask}").values("v")[key] = bytes(size)
        self.models[subtask][key] = bytes(size)

    def checkpoint(self, outcome: str) -> None:
        self.number += 1
        barrier = Barrier(self.number, 0)
        writer = self.slot.writer(barrier)
        parts = []
        for subtask, backend in enumerate(self.backends):
            frozen = backend.freeze(barrier)
            written = frozen.write(writer, lambda: False)
            frozen.release()
            parts.append(SubtaskSnapshot(f"op-{subtask}", 0, keyed=written.keyed))
            for now_ms in range(3):
                backend.tend(self.number * 1_000 + now_ms)
                log_is_written(backend)
        writer.sync()
        keep = [] if self.kept is None else [self.kept]
        if outcome == "abort":
            self.slot.aborted(self.number)
            self.driver.discard_parts(self.number, parts, keep)
            for backend in self.backends:
                backend.aborted(self.number)
            return
        whole = Checkpoint(self.number, "job", "run", "checkpoint", 0, 0, 16, (), tuple(parts))
        old, self.kept = self.kept, self.driver.publish(whole)
        self.slot.completed(self.number)
        for backend in self.backends:
            backend.completed(self.number)
        if old is not None:
            self.driver.discard(old, [self.kept])

    def check_state(self) -> None:
        assert self.kept is not None
        for subtask, part in enumerate(self.kept.subtasks):
            keyed = () if part.keyed is None else (part.keyed,)
            restored = self.opened(subtask, SubtaskRestore(part.uid, 0, keyed, ()))
            found = dict(restored.state(f"op-{subtask}").values("v").items())
            restored.close()
            assert found == self.models[subtask]

    def shared_files(self) -> dict[str, tuple[int, int]]:
        """Return by shared file that the last checkpoint refers to: bytes that are of use, and its size."""
        assert self.kept is not None
        pieces = {piece for part in self.kept.subtasks for piece in part.pieces() if piece.path}
        live: Counter[str] = Counter()
        for piece in pieces:
            if piece.path.startswith("shared/"):
                live[piece.path] += piece.length
        root = Path(self.slot.location)
        return {path: (used, (root / path).stat().st_size) for path, used in live.items()}

    def close(self) -> None:
        for backend in self.backends:
            backend.close()
        self.slot.close()


def options(root: Path, mode: str, **others: Any) -> CheckpointConfig:
    return CheckpointConfig(
        directory=str(root / "checkpoints"),
        incremental=mode == "incremental",
        changelog=mode == "changelog",
        max_file_size=FILE,
        max_space_amplification=BOUND,
        memory_threshold=0,
        key=KEY,
        **others,
    )


@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(
    mode=st.sampled_from(["incremental", "changelog"]),
    backend=st.sampled_from(["heap", "lmdb"]),
    across=st.booleans(),
    rounds=rounds,
)
def test_files_waste_no_more_than_the_bound(
    tmp_path_factory: Any,
    mode: str,
    backend: Any,
    across: bool,
    rounds: list[tuple[list[tuple[int, int, int]], str]],
) -> None:
    root = tmp_path_factory.mktemp("job")
    config = options(root, mode, backend=backend, file_merging_across=across)
    job = Job(root, config)
    try:
        for puts, outcome in rounds:
            for put in puts:
                job.put(*put)
            job.checkpoint(outcome)
        # What one backend leaves another one sees at its next checkpoint, and moves at the one after that.
        for _ in range(6):
            job.checkpoint("complete")
        job.check_state()
        for path, (live, size) in job.shared_files().items():
            assert size <= BOUND * live, path
    finally:
        job.close()


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("mode", ["incremental", "changelog"])
def test_a_small_piece_leaves_a_file_whose_rest_is_of_no_use(tmp_path: Path, mode: str, across: bool) -> None:
    """One subtask changes nothing any more while the other one, in the same files, writes everything anew."""
    job = Job(tmp_path, options(tmp_path, mode, file_merging_across=across, materialization_interval="1s"))
    job.put(1, 0, 100)
    for size in range(1_000, 1_012):
        for key in range(20):
            job.put(0, key, size)
        job.checkpoint("complete")
    for _ in range(3):
        job.checkpoint("complete")
    job.check_state()
    assert job.kept is not None
    (kept,) = {piece.path for piece in job.kept.subtasks[1].pieces()}
    live, size = job.shared_files()[kept]
    assert size <= BOUND * live
    job.close()
