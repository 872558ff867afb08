"""Barrier mode on Spark: state and sink are exact, whatever fails; and what users do with checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftlayer import (
    CheckpointConfig,
    Context,
    FixedDelay,
    FTLayer,
    JobState,
    ProcessFunction,
    Retention,
    StreamEnvironment,
)
from ftlayer.checkpoint.storage.loading import load_checkpoint
from ftlayer.checkpoint.storage.report import find_reports
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, ConfigError, SlotLostError
from ftlayer.runtime.environment import LATEST
from ftlayer.vertex.calls import Deliverable, GetJob

pytestmark = pytest.mark.spark

GUIDE = Path(__file__).parents[3] / "docs/how-to/barrier-mode/storage.md"
RETAIN = Retention.RETAIN_ON_CANCELLATION


@pytest.fixture(scope="module")
def kit(load_script: Callable[[str], ModuleType]) -> ModuleType:
    return load_script("barrier_job")


@pytest.fixture
def environment(spark: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make an environment in barrier mode; what still runs at the end of a test is cancelled."""
    jobs = []

    class Environment(StreamEnvironment):
        def execute_async(self, **options: Any) -> Any:
            jobs.append(super().execute_async(**options))
            return jobs[-1]

    def make(
        *, name: str = "", parallelism: int = 2, restart: Any = None, board: Any = None, **config: Any
    ) -> Any:
        config = {"interval": "200ms", "directory": str(tmp_path / "checkpoints"), **config}
        return Environment(
            spark,
            name=name or request.node.name.replace("[", "-").replace("]", ""),
            parallelism=parallelism,
            restart=restart or FixedDelay(attempts=100, delay="10ms"),
            checkpointing=CheckpointConfig(**config),
            board=board,
        )

    yield make
    for job in jobs:
        assert job.cancel(), job.status()


def until(job: Any, holds: Callable[[], Any]) -> Any:
    """Wait for a condition; a job that is over meanwhile says why."""
    while not (found := holds()):
        if job.over(0.02):
            job.wait()
            raise AssertionError(f"the job is over: {job.status()}")
    return found


def completed(job: Any) -> int:
    return int(job.status().checkpoints.completed)


def files(directory: Path) -> list[str]:
    """Return the names of files, but for what the driver has said last, which it may be writing now."""
    names = (str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())
    return sorted(name for name in names if "_last" not in name)


@pytest.mark.parametrize("parallelism", [1, 2])
def test_a_bounded_job_ends_with_a_checkpoint_that_commits_everything(
    environment: Any, kit: ModuleType, tmp_path: Path, parallelism: int
) -> None:
    env = environment(parallelism=parallelism)
    kit.build(env, tmp_path, pace_s=0.02)
    job = env.execute_async()
    assert job.wait(600)
    ledger = kit.Ledger(tmp_path)
    ledger.check()
    assert job.state is JobState.ENDED
    assert ledger.commits() == sorted(set(ledger.commits()))
    assert job.checkpoints()[0].final
    # A job that came to its end well leaves its result, and nothing to restore.
    left = {name.partition("/")[2] for name in files(tmp_path / "checkpoints")}
    assert left == {"_key", "_owners/1", "_result"}
    assert not list((tmp_path / "staged").iterdir())
    (report,) = find_reports(str(tmp_path / "checkpoints"))
    assert report.job.run == job.result.run


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"unaligned": True, "aligned_timeout": "20ms", "backend": "lmdb", "incremental": True},
        {"directory": None},
        {"changelog": True, "max_concurrent": 3, "interval": "50ms"},
    ],
    ids=lambda config: "-".join(map(str, config)) or "heap",
)
def test_a_function_that_fails_once_leaves_no_trace(
    environment: Any, kit: ModuleType, tmp_path: Path, config: dict[str, Any]
) -> None:
    env = environment(name="fails-once", **config)
    kit.build(env, tmp_path, pace_s=0.04, function=kit.FailOnce(tmp_path / "failed", 2_000))
    job = env.execute_async()
    before = until(job, lambda: [slot.pid for slot in job.status().slots if slot.pid])
    assert job.wait(600)
    kit.Ledger(tmp_path).check()
    status = job.status()
    assert status.restarts == 1
    assert "meant to fail once" in status.last_failure
    assert status.checkpoints is not None
    assert status.checkpoints.restored <= 1, (
        "the start has nothing to restore, nor has a failure before a checkpoint"
    )
    # In place: the processes are the same.
    assert set(before) <= {slot.pid for slot in status.slots}


def test_slots_are_killed(environment: Any, kit: ModuleType, tmp_path: Path) -> None:
    draw = random.Random(7)
    env = environment(name="killed", unaligned=True, backend="lmdb", incremental=True)
    kit.build(env, tmp_path, count=6_000, pace_s=0.08)
    job = env.execute_async()
    for _ in range(2):
        before = completed(job)
        until(job, lambda seen=before: completed(job) > seen)  # type: ignore[misc]
        victim = draw.choice([slot for slot in job.status().slots if slot.pid])
        os.kill(victim.pid, signal.SIGKILL)
        until(job, lambda gone=victim: job.status().slots[gone.slot].pid not in (0, gone.pid))  # type: ignore[misc]
    assert job.wait(600)
    kit.Ledger(tmp_path, count=6_000).check()
    assert job.status().restarts >= 2


def test_all_slots_are_killed_at_once(environment: Any, kit: ModuleType, tmp_path: Path) -> None:
    env = environment()
    kit.build(env, tmp_path, count=4_000, pace_s=0.05)
    job = env.execute_async()
    until(job, lambda: completed(job) >= 2)
    slots = until(job, lambda: [slot for slot in job.status().slots if slot.pid])
    for slot in slots:
        os.kill(slot.pid, signal.SIGKILL)
    assert job.wait(600)
    kit.Ledger(tmp_path, count=4_000).check()


def test_a_savepoint_is_moved_and_restored_at_other_parallelisms(tmp_path: Path) -> None:
    """2 → 3 → 1 → 4 subtasks, in a process of its own: this one's session has two task slots.

    There, workers begin with ftlayer imported.
    """
    script = Path(__file__).with_name("rescaling.py")
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.splitlines()[-1] == "exact"


def test_a_savepoint_of_a_job_that_goes_on_disturbs_nothing(
    environment: Any, kit: ModuleType, tmp_path: Path
) -> None:
    env = environment()
    kit.build(env, tmp_path, count=4_000, gate=tmp_path / "gate")
    job = env.execute_async()
    until(job, lambda: completed(job) >= 1)
    # From another process: it finds the job by what this one leaves for tools of its user.
    command = [sys.executable, "-c", "from ftlayer.cli.main import main; main()", "savepoint", job.name]
    asked = subprocess.run(
        [*command, "--directory", str(tmp_path / "savepoints")], capture_output=True, text=True, timeout=600
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    location = asked.stdout.strip()
    assert load_checkpoint(location).kind == "savepoint"
    job.checkpoint()
    (tmp_path / "gate").touch()
    assert job.wait(600)
    kit.Ledger(tmp_path, count=4_000).check()
    assert load_checkpoint(location).kind == "savepoint"


def test_a_cancelled_job_goes_on_from_its_latest_checkpoint(
    environment: Any, kit: ModuleType, tmp_path: Path, vertex: FTLayer
) -> None:
    for _ in range(2):
        # A vertex that tracks nothing of it shows it, and keeps what it said last.
        env = environment(name="retained", retention=RETAIN, board=vertex, changelog=True)
        kit.build(env, tmp_path, count=4_000, pace_s=0.08)
        job = env.execute_async(restore_from=LATEST)
        until(job, lambda running=job: completed(running) >= 3)  # type: ignore[misc]
        job.cancel()

        def last(running: Any = job) -> Any:
            found = vertex.client.call(GetJob("retained"))
            return found.job.run == running.job and found.job.final and found.job

        while not (told := last()):
            pass
        assert (told.state, told.mode, told.checkpoint_totals.completed >= 3) == (
            "cancelled",
            "barrier",
            True,
        )
        assert told.checkpoint_totals.retained
    env = environment(name="retained", retention=RETAIN, changelog=True)
    kit.build(env, tmp_path, count=4_000)
    env.execute_async(restore_from=LATEST).wait()
    kit.Ledger(tmp_path, count=4_000).check()


def test_checkpoints_lie_in_a_storage_of_ones_own(
    environment: Any, kit: ModuleType, tmp_path: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide's, in SQLite: its module reaches the slots as any other does."""
    (program,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    module = tmp_path / "modules" / "spark_table_storage.py"
    module.parent.mkdir()
    module.write_text(
        program.replace('os.environ["CHECKPOINT_DATABASE"]', repr(str(tmp_path / "checkpoints.db")), 1)
    )
    monkeypatch.syspath_prepend(module.parent)
    spark.sparkContext.addPyFile(str(module))
    options = {"storage": "spark_table_storage:TableStorage", "directory": "tables://checkpoints"}
    env = environment(name="in-tables", retention=RETAIN, changelog=True, **options)
    kit.build(env, tmp_path, count=4_000, pace_s=0.08)
    job = env.execute_async()
    until(job, lambda: completed(job) >= 3)
    os.kill(next(slot.pid for slot in job.status().slots if slot.pid), signal.SIGKILL)
    until(job, lambda: job.status().restarts and completed(job) >= 5)
    where = job.stop_with_savepoint("tables://checkpoints/savepoints", 600)
    assert where.startswith("tables://checkpoints/savepoints/savepoint-")
    env = environment(name="in-tables", retention=RETAIN, **options)
    kit.build(env, tmp_path, count=4_000)
    env.execute_async(restore_from=where).wait(600)
    kit.Ledger(tmp_path, count=4_000).check()


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    environment: Any, kit: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"name": "damaged", "retention": RETAIN, "retained": 3, "memory_threshold": 0}
    env = environment(**options)
    kit.build(env, tmp_path, count=4_000, pace_s=0.08)
    job = env.execute_async()
    until(job, lambda: completed(job) >= 4)
    job.cancel()
    latest = max(
        (path for path in (tmp_path / "checkpoints").rglob("chk-*")), key=lambda path: int(path.name[4:])
    )
    for path in latest.iterdir():
        if path.name != "_metadata":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
    env = environment(**options)
    kit.build(env, tmp_path, count=4_000)
    job = env.execute_async(restore_from=LATEST)
    assert job.wait(600)
    (text,) = [each.text for each in job.status().incidents if each.kind == "restore"]
    assert text in caplog.text
    assert re.search(r"is damaged .*committed again: [\d,]+ records of source", text), text
    # Rows that the damaged checkpoint had committed are committed again: nothing is lost, which is all there is.
    rows = {(row["key"], row["partition"], row["number"]) for row in kit.Ledger(tmp_path).rows()}
    assert rows == kit.Ledger(tmp_path, count=4_000).expected


def test_a_storage_that_cannot_be_written_fails_checkpoints_and_then_the_job(
    environment: Any, kit: ModuleType, tmp_path: Path
) -> None:
    env = environment(memory_threshold=0, tolerable_failures=1, restart=FixedDelay(attempts=2, delay="10ms"))
    kit.build(env, tmp_path, count=100_000, pace_s=0.05)
    job = env.execute_async()
    until(job, lambda: completed(job) >= 1)
    runs = [path for path in (tmp_path / "checkpoints").glob("*/*") if path.is_dir() and path.name[0] != "_"]
    for run in runs:
        _put_a_file_in_its_place(run, tmp_path)
    with pytest.raises(SlotLostError, match="restart strategy has given up"):
        job.wait(600)
    assert job.status().checkpoints.failed >= 2


def _put_a_file_in_its_place(directory: Path, aside: Path) -> None:
    """Let nothing be written to a directory any more, whose job writes to it and makes it anew meanwhile."""
    for number in itertools.count():
        directory.rename(aside / f"{directory.name}-{number}")
        with contextlib.suppress(FileExistsError):
            directory.touch(exist_ok=False)
            return


def test_what_cannot_be_restored_is_said_before_anything_runs(
    environment: Any, kit: ModuleType, tmp_path: Path
) -> None:
    env = environment()
    kit.build(env, tmp_path)
    with pytest.raises(CheckpointStorageError, match="nowhere"):
        env.execute_async(restore_from=str(tmp_path / "nowhere"))
    (tmp_path / "_key").write_bytes(os.urandom(32))
    broken = tmp_path / "chk-1"
    broken.mkdir()
    (broken / "_metadata").write_bytes(b"not at all")
    with pytest.raises(CheckpointDamagedError):
        env.execute_async(restore_from=str(broken))


def test_one_of_the_two_modes_has_to_be_chosen(spark: Any) -> None:
    with pytest.raises(ConfigError, match="checkpointing"):
        StreamEnvironment(spark, name="neither")


class Remembering(ProcessFunction):
    """Counts in an attribute, which is in no checkpoint, and says so."""

    def __init__(self) -> None:
        self.calls = 0

    def process(self, record: Any, ctx: Context) -> Any:
        self.calls += 1
        yield (*record, self.calls)


def test_an_instance_in_the_same_process_has_functions_of_its_own(
    environment: Any, kit: ModuleType, tmp_path: Path
) -> None:
    env = environment(parallelism=1)
    failing = kit.FailOnce(tmp_path / "failed", 2_000)
    kit.build(env, tmp_path, pace_s=0.04, sources=1, function=failing, process=Remembering())
    job = env.execute_async()
    assert job.wait(600)
    rows = kit.Ledger(tmp_path, sources=1).rows()
    assert len(rows) == 3_000
    # What came behind the restore was counted from 1 again.
    assert max(row["count"] for row in rows) < 3_000


def test_records_that_cannot_be_read_again_come_from_the_vertex(
    environment: Any, kit: ModuleType, tmp_path: Path
) -> None:
    with FTLayer.embedded(tmp_path / "ft") as layer:
        numbered = layer.ingest("numbered", "key string, partition long, number long")
        env = environment(name="ingested")
        failing = kit.FailOnce(tmp_path / "failed", 150)
        source = env.source(numbered.reader("ingested"), kit.NUMBERED, uid="numbers")
        keyed = source.map(failing, kit.NUMBERED, uid="passing").key_by("key")
        keyed.process(kit.Counting(), kit.COUNTED, uid="counting").sink(
            kit.StagingWriter(tmp_path), uid="staging"
        )
        job = env.execute_async()
        ledger = kit.Ledger(tmp_path, count=300, sources=1)
        for key, partition, number in kit.numbers(0, 300, 40, 0):
            numbered.put({"key": key, "partition": partition, "number": number})
            if number % 50 == 0:
                seen = completed(job)
                until(job, lambda seen=seen: completed(job) > seen)  # type: ignore[misc]
        until(job, lambda: len(ledger.rows()) == 300)
        assert job.drain(600)
        ledger.check()
        assert job.status().restarts == 1
        # Complete checkpoints have removed them.
        assert layer.client.call(Deliverable("ingest/numbered", 0, 1)).end >= 300
