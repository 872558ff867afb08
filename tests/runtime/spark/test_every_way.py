"""Ways to run Spark that other tests do not take: a wrapped query and both modes of topologies in each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.campaign]


@pytest.mark.parametrize(
    ("master", "settings"),
    [
        # Each task has a Python process of its own, which ends with it.
        pytest.param("local[2]", {"spark.python.worker.reuse": "false"}, id="no-reuse"),
        # Executors are processes beside the driver.
        pytest.param("local-cluster[2,1,512]", {}, id="local-cluster"),
    ],
)
def test_every_record_is_accounted_for(
    master: str,
    settings: dict[str, str],
    load_module: Callable[[Path], ModuleType],
    real_lines: list[str],
    tmp_path: Path,
) -> None:
    """The script compares what comes out with the recounts."""
    script = load_module(Path(__file__).with_name("every_way.py"))
    java = {
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": os.environ["SPARK_DAEMON_JAVA_OPTS"],
    }
    job = script.EveryWayJob(str(tmp_path), master, {**settings, **java}, real_lines[:2_000])
    log = tmp_path / "log"
    with log.open("wb") as output:
        done = subprocess.run(
            [sys.executable, script.__file__, job.save()],
            stdout=output,
            stderr=output,
            timeout=900,
            check=False,
        )
    assert done.returncode == 0, log.read_text("utf-8", "replace")[-8_000:]
