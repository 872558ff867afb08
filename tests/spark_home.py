"""The Spark that tests run on: a home of its own, and JVMs and Python workers that start in half the CPU time.

A run of all tests starts some sixty JVMs, and most live for seconds. Half of what such a JVM does is to read, check and
link Spark's classes, always the same ones. Java keeps them in an archive that it maps instead (application class-data
sharing, JEP 350): the first test of Spark on a machine makes it, in half a minute, for all later runs.

Run as a program this file is the session that shows Java which classes those are; with ``--archive`` it makes the
archive, so that tests find it.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Drivers live for seconds or minutes here: a JVM that compiles once, and quickly, takes half the CPU time.
SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Python workers are forked with ftlayer imported. What a user's script has without it, tests/spark/script shows.
DAEMON = "-Dspark.python.daemon.module=ftlayer.runtime.worker_daemon"
QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off -Xlog:class+path=off"
KEEP_S = 900


def use_home() -> None:
    """Have this process, and those that it starts, run the Spark of `_home`, unless ``SPARK_HOME`` names another."""
    os.environ.setdefault("SPARK_LAUNCHER_OPTS", SHORT_RUN)
    os.environ.setdefault("SPARK_SUBMIT_OPTS", f"{SHORT_RUN} {DAEMON}")
    # For master and workers of a standalone cluster; tests give it to executors too.
    os.environ.setdefault("SPARK_DAEMON_JAVA_OPTS", SHORT_RUN)
    if "SPARK_HOME" not in os.environ:
        os.environ["SPARK_HOME"] = str(_home())


def use_class_archive(java: str) -> None:
    """Have JVMs of Spark's that are started from now on map the archive; ``java`` is the program that runs them.

    The first call on a machine makes it. Where Java cannot, a warning says why, and JVMs start as they would anyway.
    """
    home = Path(os.environ["SPARK_HOME"])
    if home.parent != _cache() or "SharedArchiveFile" in os.environ["SPARK_SUBMIT_OPTS"]:
        return
    said = subprocess.run([java, "-version"], capture_output=True, check=True).stderr
    name = hashlib.sha256(f"{java} {said!r} {SHORT_RUN}".encode()).hexdigest()[:16]
    archive, failed = home / f"{name}.jsa", home / f"{name}.failed"
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not archive.exists() and not failed.exists():
            _make_archive(archive, failed)
    if archive.exists():
        for options in ("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
            os.environ[options] += f" -XX:SharedArchiveFile={archive} {QUIET}"
    else:
        warnings.warn(
            f"JVMs start slowly: Java made no archive of Spark's classes; see {failed}", stacklevel=2
        )


def _home() -> Path:
    """Make a home of Spark that links PySpark's programs and jars, and has no archive of its Python code.

    Workers find that code first in the archive, which holds sources only: each process, and a query starts several,
    would compile them again, for most of a second. On a machine under load one then misses the ten seconds that
    Spark gives it. Without the archive they import it from where pip has put it.

    It stays where it is from run to run: Java's archive holds for one class path alone.
    """
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    pyspark = Path(spec.origin).parent
    jars = sorted((jar.name, jar.stat().st_mtime_ns) for jar in (pyspark / "jars").glob("*.jar"))
    home = _cache() / hashlib.sha256(f"{pyspark} {jars}".encode()).hexdigest()[:16]
    home.mkdir(parents=True, exist_ok=True)
    for name in ("bin", "sbin", "jars"):
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            link = Path(scratch) / name
            link.symlink_to(pyspark / name)
            link.replace(home / name)
    return home


def _cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache"
    return Path(root) / "ftlayer-tests"


def _make_archive(archive: Path, failed: Path) -> None:
    made = archive.with_suffix(".made")
    options = f"{SHORT_RUN} -XX:ArchiveClassesAtExit={made} {QUIET}"
    # Its output ends with the JVM, which writes the archive behind the program's end.
    done = subprocess.run(
        [sys.executable, __file__],
        env={**os.environ, "SPARK_SUBMIT_OPTS": options},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=KEEP_S,
        check=False,
    )
    if done.returncode == 0 and made.exists():
        made.replace(archive)
    else:
        failed.write_bytes(done.stdout)


def main() -> None:
    """Run a streaming query that meets most of what tests use of Spark."""
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")

    def same(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches

    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)

        def write(rows: Any, batch: int) -> None:
            rows = rows.mapInArrow(same, rows.schema).localCheckpoint(eager=True)
            rows.groupBy("value").count().write.json(str(directory / f"counts-{batch}"))
            rows.collect()

        (directory / "lines").mkdir()
        (directory / "lines" / "1.txt").write_text("a\nb\n")
        spark = (
            SparkSession.builder.master("local[2]")
            .config("spark.ui.enabled", "false")
            .config("spark.log.level", "ERROR")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
            .getOrCreate()
        )
        lines = spark.readStream.format("text").load(str(directory / "lines"))
        query = (
            lines.writeStream.trigger(availableNow=True)
            .option("checkpointLocation", str(directory / "checkpoint"))
            .foreachBatch(write)
            .start()
        )
        query.awaitTermination()
        spark.stop()


if __name__ == "__main__":
    if sys.argv[1:] == ["--archive"]:
        from ftlayer.common.java import ensure_java

        use_home()
        use_class_archive(ensure_java().program)
    else:
        main()
