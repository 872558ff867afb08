"""What all rooms' tests share: Java's check, one Spark session a process, the real logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftlayer.errors import JavaMissingError
from ftlayer.machine import check_java

ROOT = Path(__file__).parents[1]
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
