"""The driver of the demo: ``python -m ftlayer.demo.driver DIRECTORY KIND``, started by the screen.

What it runs is in `ftlayer.demo.query`, `ftlayer.demo.tracked` and `ftlayer.demo.checkpointed`, and looks like a
user's own program: nothing in it knows that it is going to be killed. It prints events (`ftlayer.demo.events`);
everything else goes to the log.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ftlayer.demo.choices import Kind
from ftlayer.demo.events import Event, Finished, Starting, to_line
from ftlayer.demo.layout import RunDirectory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHORT_RUN = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A run of a minute on two cores: what Java's second compiler costs it never gives back (1.5 s a batch, 1.0
without it)."""

Tell = Callable[[Event], None]


def main(directory: RunDirectory, kind: Kind) -> None:
    """Run until nothing is left to do."""
    tell = _event_channel()
    tell(Starting("Spark"))
    spark = _session(directory)
    import_module(f"ftlayer.demo.{kind}").run(spark, directory, tell)
    spark.stop()
    tell(Finished())


def _session(directory: RunDirectory) -> SparkSession:
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    return (
        SparkSession.builder.master("local[2]")
        .appName("ftlayer demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "WARN")
        .config("spark.driver.extraJavaOptions", SHORT_RUN)
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(directory.scratch))
        .config("spark.sql.warehouse.dir", str(directory.scratch / "warehouse"))
        .config("spark.sql.shuffle.partitions", "2")
        .getOrCreate()
    )


def _event_channel() -> Tell:
    """Keep stdout for events: what Spark's JVM and others print goes to the log."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def tell(event: Event) -> None:
        with lock:
            events.write(to_line(event))
            events.flush()

    return tell


def _end_with_screen() -> None:
    """End when stdin does: the screen is gone, and this run would go unseen."""
    while os.read(0, 4_096):
        pass
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=_end_with_screen, name="demo-screen", daemon=True).start()
    main(RunDirectory(Path(sys.argv[1])), Kind(sys.argv[2]))
