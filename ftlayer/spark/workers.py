"""The environment of Spark's Python workers on this machine: the interpreter and the modules of this program."""

from __future__ import annotations

import os
import sys
import sysconfig
from itertools import takewhile
from typing import Any

from ftlayer.spark.sessions import is_connect, is_local


def prepare_workers(spark: Any) -> None:
    """Have a local session's Python workers run as this program does, where nothing else is set.

    Spark takes the ``python3`` of the path, which is another interpreter where a virtual environment is not
    activated, and knows nothing of the directory of the script. Where workers run on other machines it stays so: paths
    of this one mean nothing there, and over Spark Connect the server's settings count. Workers that were started
    before, for a plain query of the program, stay as they are.
    """
    if is_connect(spark) or not is_local(spark):
        return
    context = spark.sparkContext
    if "PYSPARK_PYTHON" not in os.environ and spark.conf.get("spark.pyspark.python", None) is None:
        context.pythonExec = sys.executable
    known = context.environment.get("PYTHONPATH", "").split(os.pathsep)
    paths = dict.fromkeys(path for path in [*own_paths(), *known] if path)
    if paths:
        context.environment["PYTHONPATH"] = os.pathsep.join(paths)


def own_paths() -> list[str]:
    """Return where this program imports from before the standard library: the script's directory, ``PYTHONPATH``."""
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    zipped = f"python{sys.version_info.major}{sys.version_info.minor}.zip"

    def is_own(path: str) -> bool:
        return os.path.basename(path) != zipped and os.path.realpath(path) != library

    return [os.path.abspath(path) for path in takewhile(is_own, sys.path)]
