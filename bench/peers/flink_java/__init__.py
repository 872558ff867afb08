"""The `topology` benchmark's job in Flink with Java functions: compiled here, run in a JVM of its own.

Flink is the jars of the wheel ``apache-flink-libraries``, or those in the directory that BENCH_FLINK_JARS names; javac
and java are those on the PATH.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.harness import note

_SOURCE = Path(__file__).parent / "Topology.java"
_OPENED = ("java.lang", "java.util", "java.net", "java.io", "java.time", "java.util.concurrent")
"""Packages that Flink reflects on, as its own scripts open them."""


class FlinkJava:
    """The compiled job."""

    def __init__(self, jars: Path, classes: Path) -> None:
        self._class_path = f"{classes}{os.pathsep}{jars}/*"

    def rate(self, records: int, parallelism: int, *, interval_ms: int = 0) -> float:
        """Run the job; return records a second from the first function's open to the last one's close.

        With ``interval_ms`` there is a checkpoint so often, in files. Raises `CalledProcessError`.
        """
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED]
        with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as folder:
            command = ["java", "-Xmx2g", *opened, "-cp", self._class_path, _SOURCE.stem]
            arguments = [str(records), str(parallelism), str(interval_ms), folder]
            ran = subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)
        found = json.loads(next(line for line in ran.stdout.splitlines() if line.startswith("{")))
        return float(found["records"] / found["seconds"])


@contextmanager
def flink_java() -> Iterator[FlinkJava | None]:
    """Give the compiled job; None, and a note, where there is no Flink or no JDK."""
    jars = _jars()
    if jars is None:
        note("Flink is not installed (pip install '.[bench-flink]'): no vs_flink_java")
        yield None
    elif shutil.which("javac") is None:
        note("vs_flink_java was skipped: it needs javac and java on the PATH (a JDK)")
        yield None
    else:
        with tempfile.TemporaryDirectory(prefix="ftlayer-bench-") as folder:
            subprocess.run(["javac", "-cp", f"{jars}/*", "-d", folder, str(_SOURCE)], check=True)
            yield FlinkJava(jars, Path(folder))


def _jars() -> Path | None:
    if named := os.environ.get("BENCH_FLINK_JARS"):
        return Path(named)
    try:
        files = importlib.metadata.files("apache-flink-libraries") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())).parent for file in files if file.match("flink-dist-*.jar")), None)
