"""Workers of the daemon that has ftlayer imported have it, and work."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.spark

PROGRAM = """
import sys
from pyspark.sql import SparkSession

spark = (
    SparkSession.builder.master("local[2]")
    .config("spark.ui.enabled", "false")
    .config("spark.python.daemon.module", "ftlayer.runtime.worker_daemon")
    .getOrCreate()
)

def seen(batches):
    import sys
    import pyarrow
    for batch in batches:
        there = "ftlayer.runtime.slot.main" in sys.modules
        yield pyarrow.record_batch({"there": [there] * batch.num_rows})

rows = spark.range(0, 4, 1, 2).mapInArrow(seen, "there boolean").collect()
assert len(rows) == 4 and all(row.there for row in rows), rows
spark.stop()
"""


def test_workers_begin_with_ftlayer_imported() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2_000:]
