"""What Spark runs at the moment, asked of a session's JVM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftlayer.runtime.driver.events import TaskCounts
from ftlayer.spark.sessions import is_connect


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
