"""The kinds of Spark sessions."""

from __future__ import annotations

import re
from typing import Any

_LOCAL = re.compile(r"local(\[.*\])?")


def is_connect(spark: Any) -> bool:
    """Whether this is a session of Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: Any) -> bool:
    """Whether the session's executors are threads of its own JVM, or processes beside it."""
    master = str(spark.conf.get("spark.master", "local"))
    return _LOCAL.fullmatch(master) is not None or master.startswith("local-cluster")
