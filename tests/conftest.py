"""What all rooms' tests share: Java's check, one Spark session a process, the real logs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer.errors import JavaMissingError
from ftlayer.machine import check_java

ROOT = Path(__file__).parents[1]
DAEMON_START_S = 120.0
"""For a master or worker of a standalone cluster to say that it is up."""

MASTER = "local[2,4]"
"""Two cores, and up to three failures of a task: tests make tasks fail."""

# After a plain `pip install .` the package in the working directory is the one without its C extension: child
# processes, Spark's workers among them, must import the installed one.
os.environ["PYTHONSAFEPATH"] = "1"


def _java() -> tuple[str, str]:
    """Return what the header says, and what keeps Spark's tests from running ("" if nothing does)."""
    try:
        java = check_java()
    except JavaMissingError as error:
        return f"java: MISSING. {error}", str(error)
    return f"java: {java.version} ({java.program})", ""


JAVA_HEADER, JAVA_FAULT = _java()


def pytest_report_header() -> str:
    return JAVA_HEADER


def _needs_spark(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ()))
    return item.get_closest_marker("spark") is not None or bool(fixtures & {"spark", "make_spark"})


def pytest_runtest_setup(item: pytest.Item) -> None:
    if JAVA_FAULT and _needs_spark(item):
        pytest.fail(JAVA_FAULT, pytrace=False)


@contextlib.contextmanager
def _daemon(directory: Path, name: str, *arguments: str, ready: str) -> Iterator[tuple[int, re.Match[str]]]:
    """Run a daemon of Spark's; yields its process id and the line that said it was ready."""
    import pyspark

    home = Path(pyspark.__file__).parent
    env = os.environ | {
        "SPARK_HOME": str(home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "SPARK_WORKER_DIR": str(directory / "work"),
        "SPARK_LOCAL_DIRS": str(directory / "local"),
    }
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [home / "bin" / "spark-class", *arguments], stdout=output, stderr=output, env=env
        )
    try:
        deadline = time.monotonic() + DAEMON_START_S
        while (said := re.search(ready, log.read_text("utf-8", "replace"))) is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
        yield process.pid, said
    finally:
        # Asked to, a worker ends its executors with it.
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def make_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return the process's session; ``make_spark(master="local[1]", **{"spark.conf": "value"})``.

    There is one JVM a process, whose master cannot change: a test of another one starts a process of its own.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    directory = tmp_path_factory.mktemp("spark")

    def make(master: str = MASTER, **conf: str) -> SparkSession:
        running = SparkSession.getActiveSession()
        if running is not None and running.sparkContext.master != master:
            raise AssertionError(
                f"this process runs Spark on {running.sparkContext.master}; start a process for {master}"
            )
        builder = SparkSession.builder.master(master).appName("ftlayer tests")
        settings = {
            "spark.ui.enabled": "false",
            "spark.log.level": "ERROR",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.session.timeZone": "UTC",
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
            "spark.local.dir": str(directory / "local"),
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.host": "127.0.0.1",
            **conf,
        }
        for key, value in settings.items():
            builder = builder.config(key, value)
        return builder.getOrCreate()

    yield make
    running = SparkSession.getActiveSession()
    if running is not None:
        running.stop()


@pytest.fixture(scope="session")
def start_cluster() -> Callable[[Path, int], contextlib.AbstractContextManager[tuple[str, list[int]]]]:
    """Return ``start_cluster(directory, cores)``: a standalone cluster of a master and two workers of so many cores.

    It yields the master's URL and the workers' process ids. The workers have a host each: Spark speculates on
    another host only.
    """

    @contextlib.contextmanager
    def start(directory: Path, cores: int) -> Iterator[tuple[str, list[int]]]:
        packages, ports = "org.apache.spark.deploy", ("--port", "0", "--webui-port", "0")
        with contextlib.ExitStack() as stack:
            master = (f"{packages}.master.Master", "--host", "127.0.0.1", *ports)
            _, said = stack.enter_context(
                _daemon(directory, "master", *master, ready=r"Starting Spark master at (spark://\S+)")
            )
            workers = []
            for host in ("127.0.0.2", "127.0.0.3"):
                size = ("--cores", str(cores), "--memory", "1g")
                worker = (f"{packages}.worker.Worker", "--host", host, *ports, *size, said[1])
                pid, _ = stack.enter_context(
                    _daemon(directory, host, *worker, ready="Successfully registered with master")
                )
                workers.append(pid)
            yield said[1], workers

    return start


@pytest.fixture(scope="session")
def spark(make_spark: Callable[..., Any]) -> Any:
    """The session most tests run on: `MASTER`, UTC, two shuffle partitions."""
    return make_spark()


@pytest.fixture(scope="session")
def loghub() -> Path:
    """The directory of the real logs: ``FTLAYER_LOGHUB``, or ``shared/data/loghub`` beside the repository."""
    named = os.environ.get("FTLAYER_LOGHUB")
    path = Path(named) if named else ROOT.parent / "shared" / "data" / "loghub"
    if path.is_dir():
        return path
    reason = f"the real logs are not at {path}; set FTLAYER_LOGHUB to their directory"
    if os.environ.get("CI"):
        pytest.fail(f"CI is set and {reason}", pytrace=False)
    pytest.skip(reason)
