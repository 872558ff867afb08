"""What the benchmarks of topologies share: a Spark session, a folder for each job, waiting, and the peer."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import scratch

SLOTS = 2


@contextmanager
def session(master: str = "local[4]", options: dict[str, str] | None = None) -> Iterator[tuple[Path, Any]]:
    """Give a new directory and a Spark session with room for the slots; both go in the end."""
    from pyspark.sql import SparkSession

    with scratch() as root:
        spark = (
            SparkSession.builder.master(master)
            .appName("ftlayer-bench")
            .config("spark.ui.enabled", "false")
            .config("spark.python.daemon.module", "ftlayer.runtime.worker_daemon")
            .config("spark.sql.warehouse.dir", str(root / "warehouse"))
            .config(map=options or {})
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield root, spark
        finally:
            spark.stop()


class Jobs:
    """A Spark session, and a fresh folder for each job."""

    def __init__(self, root: Path, spark: Any) -> None:
        self.root, self.spark = root, spark
        self._jobs = 0

    @property
    def name(self) -> str:
        """Of the job that has the latest folder."""
        return f"bench-{self._jobs}"

    def folder(self) -> Path:
        self._jobs += 1
        folder = self.root / str(self._jobs)
        folder.mkdir()
        return folder


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the topology was not as far as that within {timeout_s:.0f} s")
        time.sleep(0.01)


def has_bytewax() -> bool:
    try:
        import bytewax  # noqa: F401 - asked for, not used
    except ImportError:
        return False
    return True


def bytewax_rate(records: int, *options: str) -> float:
    """Run the peer in two processes of its own, with more ``options`` of its command; return records a second."""
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as folder:
        subprocess.run(
            [
                *(sys.executable, "-m", "bytewax.testing", "bench.peers.bytewax_job:flow", "-p", str(SLOTS)),
                *options,
            ],
            env={**os.environ, "BENCH_RECORDS": str(records), "BENCH_OUT": folder},
            check=True,
            capture_output=True,
        )
        return records / _seconds(Path(folder))


def bytewax_recovery_rate(records: int) -> float:
    """Run the same with its recovery store, a snapshot a second; return records a second."""
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as store:
        subprocess.run(
            [sys.executable, "-m", "bytewax.recovery", store, str(SLOTS)], check=True, capture_output=True
        )
        return bytewax_rate(records, "-r", store, "-s", "1", "-b", "0")


def pathway() -> str | None:
    """Return the interpreter that has Pathway: ``BENCH_PATHWAY_PYTHON``, or this one; ``None`` if there is none."""
    named = os.environ.get("BENCH_PATHWAY_PYTHON")
    return named or (sys.executable if importlib.util.find_spec("pathway") else None)


def pathway_rate(interpreter: str, records: int) -> float:
    """Run the peer in two processes of its own; return records a second."""
    with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as folder:
        ids = Path(folder, "ids")
        ids.mkdir()
        for process in range(SLOTS):
            numbers = "\n".join(map(str, range(process, records, SLOTS)))
            (ids / f"{process}.csv").write_text(f"number\n{numbers}\n")
        command = (interpreter, "-m", "pathway", "spawn", "-n", str(SLOTS))
        subprocess.run(
            [*command, interpreter, "-m", "bench.peers.pathway_job"],
            env={**os.environ, "BENCH_IN": str(ids), "BENCH_OUT": folder},
            check=True,
            capture_output=True,
        )
        return records / _seconds(Path(folder))


def _seconds(folder: Path) -> float:
    """Return how long a peer's processes took, from the first start to the last end that they noted."""
    first = min(float(path.read_text()) for path in folder.glob("start-*"))
    end = max(float(path.read_text()) for path in folder.glob("end-*"))
    return end - first
