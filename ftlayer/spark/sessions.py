"""The kinds of Spark sessions, and whether one lives, asked of its JVM or of its Connect server.

What the Python side remembers of its session says nothing of that: a JVM that was killed leaves it as it was.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import sys
import sysconfig
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ftlayer.common.checks import shown
from ftlayer.common.java import ensure_java
from ftlayer.errors import ConfigError, FTLayerError, SessionLostError
from ftlayer.functions.data_sources import HAS_LIMITS

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

logger = logging.getLogger(__name__)


# A machine that is there refuses or accepts in milliseconds (s).
CONNECT_TIMEOUT_S = 5.0
DELIVERIES = "ftlayer_deliveries"
"""The name that the source of deliveries has beside a query's own."""

TAKES_END = "spark.sql.streaming.triggerAvailableNowWrapper.enabled"
LONGEST_START_MS = 600_000
_STARTS = threading.Lock()

SOURCE_EVOLUTION = "spark.sql.streaming.queryEvolution.enableSourceEvolution"
# What Spark says to a client whose session the server does not know any more.
_LOST_HANDLES = "INVALID_HANDLE.SESSION_"


_STOPPED = "the Spark session was stopped; make another one and a new environment for it"
_LOCAL = re.compile(r"local(\[.*\])?")


def check_is_session(spark: object) -> None:
    """Raise `ConfigError` for what is no session; `JavaMissingError` where none could be made. Asks no session."""
    if spark is None:
        ensure_java()
    if isinstance(spark, type) or not hasattr(spark, "conf"):
        raise ConfigError(
            f"spark: expected a SparkSession, got {shown(spark)}; make one with SparkSession.builder.getOrCreate()"
        )


def is_connect(spark: Any) -> bool:
    return type(spark).__module__.startswith("pyspark.sql.connect")


def is_local(spark: Any) -> bool:
    """Whether the session's executors are threads of its own JVM, or processes beside it."""
    master = str(spark.conf.get("spark.master", "local"))
    return _LOCAL.fullmatch(master) is not None or master.startswith("local-cluster")


def stream_reader(spark: Any, name: str) -> Any:
    """Return a reader of one of our streams: with its name where Spark wants all to be named, and refuses none."""
    reader = spark.readStream
    return reader.name(name) if str(spark.conf.get(SOURCE_EVOLUTION, "false")).lower() == "true" else reader


def reads_in_python(frame: Any) -> bool:
    """Whether a streaming DataFrame has Python Data Sources, and none that may have been told to pass over losses."""
    tables = _tables_of(frame)
    return "PythonTable" in tables and "KafkaTable" not in tables


def start_query(writer: Any, frame: Any, *, bounded: bool) -> StreamingQuery:
    """Start a query of ``frame`` and the vertex's deliveries; ``bounded``: ``availableNow``.

    Where a source does not know that trigger, as none in Python does before Spark 4.2, Spark reads all of them in one
    batch. It can take down that source's end beforehand instead. It asks too early for that where ``frame`` reads in
    Python: a source that starts again is not told yet where it is.
    """
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    if HAS_LIMITS or not bounded or "PythonTable" in _tables_of(frame):
        query: StreamingQuery = writer.start()
        return query
    conf = frame.sparkSession.conf
    with _STARTS:
        before = conf.get(TAKES_END)
        conf.set(TAKES_END, "true")
        try:
            query = writer.start()
            with suppress(Py4JError, PySparkException):  # What ends the query its own handle tells.
                query._jsq.streamingQuery().awaitInitialization(LONGEST_START_MS)
        finally:
            conf.set(TAKES_END, before)
    return query


def _tables_of(frame: Any) -> list[str]:
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    streams = [leaf for leaf in map(leaves.apply, range(leaves.length())) if leaf.isStreaming()]
    named = "StreamingRelationV2"
    tables = [leaf.table() for leaf in streams if leaf.getClass().getSimpleName() == named]
    return [str(table.getClass().getSimpleName()) for table in tables]


def links_of(spark: Any) -> dict[str, str]:
    """Return where a person can look at a session, by name: Spark's UI, where it has one and says where."""
    url = None if is_connect(spark) else spark.sparkContext.uiWebUrl
    return {"Spark UI": url} if url else {}


def how_it_ended(spark: Any, failure: BaseException | None = None) -> SessionLostError | None:
    """Return how a session has ended; None if it lives, or that is unknown. May wait for seconds.

    ``failure``: what a Spark job has failed with, if one has; it may say so.
    """
    return _connect_end(spark, failure) if is_connect(spark) else _classic_end(spark.sparkContext)


@contextmanager
def tells_of_its_end(spark: Any) -> Iterator[None]:
    """Raise `SessionLostError` in place of what is raised inside because the session has ended.

    Py4J's own error is a refused connection behind pages of its frames.
    """
    try:
        yield
    except FTLayerError:
        raise
    except Exception as error:
        end = how_it_ended(spark, error)
        if end is None:
            raise
        raise end from None


def _classic_end(context: Any) -> SessionLostError | None:
    from py4j.protocol import Py4JNetworkError

    jvm_context = context._jsc
    if jvm_context is None:
        return SessionLostError(_STOPPED)
    try:
        stopped = bool(jvm_context.sc().isStopped())
    except (Py4JNetworkError, OSError) as error:
        logger.info("the JVM of the Spark session does not answer", exc_info=error)
        return SessionLostError(
            "the JVM of the Spark session is gone, and what ran in it, though this Python process lives on. "
            "It was killed or has crashed: its own log, hs_err_pid*.log, and the kernel's (out of memory?) say why. "
            "PySpark starts no second JVM in a process: start the program again"
        )
    said = "the Spark session was stopped in its JVM; start the program again with a new one"
    return SessionLostError(said) if stopped else None


def _connect_end(spark: Any, failure: BaseException | None) -> SessionLostError | None:
    if spark.is_stopped:
        return SessionLostError(_STOPPED)
    condition = getattr(failure, "getCondition", lambda: None)()
    if str(condition or "").startswith(_LOST_HANDLES):
        return SessionLostError(
            f"the Spark Connect server does not know the session any more ({condition}): it was started again, or has "
            "ended the session. Make another session and a new environment for it"
        )
    endpoint = str(spark.client._builder.endpoint)
    place = urlsplit(f"//{endpoint}")
    try:
        socket.create_connection((place.hostname or "", place.port or 0), CONNECT_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return SessionLostError(
            f"the Spark Connect server {endpoint} is gone: nothing listens there any more. Sessions end with their "
            "server: start it again, then make another session and a new environment for it"
        )
    except OSError as error:
        # A network that is down for a while ends no session.
        logger.warning("the Spark Connect server %s cannot be reached: %s", endpoint, error)
    return None


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
