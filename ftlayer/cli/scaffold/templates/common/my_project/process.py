"""What any program of Spark that runs for long needs: a session, a log, and a way to be stopped."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any

from pyspark.sql import SparkSession

from .settings import MASTER, NAME


def start_log() -> None:
    """Log to standard error, which is the journal under systemd."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("py4j").setLevel(logging.WARNING)


def session() -> SparkSession:
    """Make the Spark session."""
    if MASTER.startswith("local"):
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return (
        SparkSession.builder.master(MASTER)
        .appName(NAME)
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )


class StopSignal:
    """Notes that SIGTERM or Ctrl-C came. A second Ctrl-C interrupts whatever goes on."""

    def __init__(self) -> None:
        """Listen from now on; make the session first, since Spark sets a handler of its own."""
        self.came = False
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self.came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
