"""Whether a Spark session lives, asked of its JVM or of its Connect server.

What the Python side remembers of its session says nothing of that: a JVM that was killed leaves it as it was.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ftlayer.errors import SessionLostError
from ftlayer.runtime.coordinator.events import TaskCounts
from ftlayer.spark.sessions import is_connect

# A machine that is there refuses or accepts in milliseconds (s).
CONNECT_TIMEOUT_S = 5.0
# What Spark says to a client whose session the server does not know any more.
_LOST_HANDLES = "INVALID_HANDLE.SESSION_"

logger = logging.getLogger(__name__)


def how_it_ended(spark: Any, failure: BaseException | None = None) -> SessionLostError | None:
    """Return how a session has ended; None if it lives, or that is unknown. May wait for seconds.

    ``failure``: what a Spark job has failed with, if one has; it may say so.
    """
    return _connect_end(spark, failure) if is_connect(spark) else _classic_end(spark.sparkContext)


def task_slots(spark: Any) -> int:
    """Return how many tasks the executors that are there now can run at once; of a classic session."""
    return sum(int(executor.maxTasks()) for executor in _executors(spark))


def count_tasks(spark: Any, groups: Mapping[int, str]) -> TaskCounts | None:
    """Return what Spark says of task slots, and of the tasks of slots whose Spark jobs have these job groups.

    None: a session of Spark Connect cannot be asked. May wait for seconds; raises what py4j raises.
    """
    if is_connect(spark):
        return None
    executors = _executors(spark)
    tracker = spark.sparkContext.statusTracker()

    def runs(group: str) -> bool:
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return any(stage is not None and stage.numActiveTasks for stage in stages)

    return TaskCounts(
        sum(int(executor.maxTasks()) for executor in executors),
        _running_tasks(spark),
        frozenset(slot for slot, group in groups.items() if runs(group)),
    )


def _running_tasks(spark: Any) -> int:
    """Return how many tasks run, as the scheduler knows; what executors are listed with may be ten seconds old."""
    counts = spark.sparkContext._jsc.sc().taskScheduler().runningTasksByExecutors().valuesIterator()
    running = 0
    while counts.hasNext():
        running += int(counts.next())
    return running


def _executors(spark: Any) -> list[Any]:
    executors = spark.sparkContext._jsc.sc().statusStore().executorList(True)
    return [executors.apply(place) for place in range(executors.length())]


def _classic_end(context: Any) -> SessionLostError | None:
    from py4j.protocol import Py4JNetworkError

    jvm_context = context._jsc
    if jvm_context is None:
        return SessionLostError(
            "the Spark session was stopped; make another one and a new environment for it"
        )
    try:
        stopped = bool(jvm_context.sc().isStopped())
    except (Py4JNetworkError, OSError) as error:
        logger.info("the JVM of the Spark session does not answer", exc_info=error)
        return SessionLostError(
            "the JVM of the Spark session is gone, and the slots with it, though this Python process lives on. "
            "It was killed or has crashed: its own log, hs_err_pid*.log, and the kernel's (out of memory?) say why. "
            "PySpark starts no second JVM in a process: start the program again"
        )
    if not stopped:
        return None
    return SessionLostError(
        "the Spark session was stopped in its JVM; start the program again with a new one"
    )


def _connect_end(spark: Any, failure: BaseException | None) -> SessionLostError | None:
    if spark.is_stopped:
        return SessionLostError(
            "the Spark session was stopped; make another one and a new environment for it"
        )
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
