"""What Spark runs at the moment, asked of a session's JVM."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa

from ftlayer.errors import (
    ConfigError,
    InvalidTopologyError,
    JobStartError,
    SessionLostError,
    UnsupportedError,
)
from ftlayer.functions.pickling import WAY_OUT, pickling_fault, said
from ftlayer.runtime.driver.rules.events import TaskCounts
from ftlayer.runtime.protocol.messages import SlotOrder
from ftlayer.runtime.worker import Worker
from ftlayer.spark.sessions import how_it_ended, is_connect, is_local
from ftlayer.topology.job_graph import display_name
from ftlayer.transport.address import is_loopback

logger = logging.getLogger(__name__)


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


# Executors of a cluster that was just asked for come one by one.
EXECUTORS_WAIT_S = 30.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Place:
    """Where the driver can be reached by slots. ``listen`` and ``advertised`` are hosts.

    ``own_executors``: Spark's executors are this process or its children, so that they can use its files.
    """

    listen: str
    advertised: str
    own_executors: bool = False

    @property
    def is_local(self) -> bool:
        return is_loopback(self.advertised)


def check_session(spark: Any) -> None:
    """Raise for a session that slots cannot live in.

    `ConfigError`: speculation is on, or Spark kills idle Python workers. `JobStartError`: it has ended.
    """
    end = how_it_ended(spark)
    if end is not None:
        raise JobStartError(str(end)) from end
    if _is_true(spark, "spark.speculation"):
        raise ConfigError(
            "spark.speculation is on: Spark would start a second copy of every slot, since a slot never ends. "
            "Set it to false for the session that runs topologies"
        )
    for option in (
        "spark.python.worker.killOnIdleTimeout",
        "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
    ):
        if _is_true(spark, option):
            raise ConfigError(
                f"{option} is on: to Spark a slot looks idle for as long as it runs, and would be killed again "
                "and again. Set it to false for the session that runs topologies"
            )


def check_task_slots(spark: Any, wanted: int, name: str) -> None:
    """Raise `JobStartError` if the session has fewer task slots than the job's slots, for as long as it runs.

    Those of other topologies of this driver are taken; those of ordinary jobs are not, since they end. Under Spark
    Connect nothing can be counted, and a job that lacks task slots ends by its start timeout.
    """
    if is_connect(spark):
        return
    taken = _TAKEN.by_others(name)
    held = sum(taken.values())
    dynamic = _is_true(spark, "spark.dynamicAllocation.enabled")
    # With dynamic allocation executors come only when tasks wait for them.
    deadline = time.monotonic() + (0 if dynamic or is_local(spark) else EXECUTORS_WAIT_S)
    while (there := task_slots(spark)) - held < wanted:
        if time.monotonic() >= deadline:
            if dynamic:
                logger.warning(
                    "%d task slots are there and %d are needed; dynamic allocation may bring more",
                    there,
                    wanted,
                )
                return
            raise JobStartError(_too_few(spark, wanted, there, taken))
        time.sleep(_POLL_S)


def pickled_order(order: SlotOrder[Any]) -> bytes:
    """Return the order as it goes to the slots; `InvalidTopologyError` names the operator that cannot."""
    from pyspark import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(order)  # type: ignore[no-untyped-call]
    except Exception as error:
        for vertex in order.graph.vertices:
            for operator in vertex.operators:
                fault = pickling_fault(operator)
                if fault is not None:
                    raise InvalidTopologyError(
                        f"{operator.uid!r} ({display_name(operator)}) cannot be sent to the slots: {fault}. "
                        f"{WAY_OUT}, or in open() of a ProcessFunction"
                    ) from error
        raise InvalidTopologyError(f"the topology cannot be sent to the slots: {said(error)}") from error
    return pickled


def place_of(spark: Any) -> Place:
    """Return where the coordinator listens: loopback if all is on this machine, else where executors know it."""
    if is_connect(spark):
        host = _connect_host(spark)
        if host is None or is_loopback(host):
            return Place("127.0.0.1", "127.0.0.1")
        address = _address_towards(host)
        return Place(address, address)
    if is_local(spark):
        return Place("127.0.0.1", "127.0.0.1", own_executors=True)
    advertised = str(spark.conf.get("spark.driver.host"))
    if is_loopback(advertised):
        return Place("127.0.0.1", "127.0.0.1")
    return Place(str(spark.conf.get("spark.driver.bindAddress", advertised)), advertised)


class TaskSlotsTaken:
    """How many task slots each topology of this driver holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}

    def take(self, name: str, slots: int) -> None:
        """A topology begins; `ConfigError` if one of this name runs already: they would share their records."""
        with self._lock:
            if name in self._held:
                raise ConfigError(
                    f"topology {name!r} runs already in this driver; its records are filed under the name, so give "
                    "another one to this, or cancel the other first"
                )
            self._held[name] = slots

    def give_back(self, name: str) -> None:
        with self._lock:
            self._held.pop(name, None)

    def by_others(self, name: str) -> dict[str, int]:
        with self._lock:
            return {other: slots for other, slots in self._held.items() if other != name}


_TAKEN = TaskSlotsTaken()


def taken_task_slots() -> TaskSlotsTaken:
    return _TAKEN


def _too_few(spark: Any, wanted: int, there: int, taken: dict[str, int]) -> str:
    others = ", ".join(f"{name!r} holds {slots}" for name, slots in taken.items())
    way_out = (
        f"start Spark with master local[{wanted + sum(taken.values())}] or more"
        if is_local(spark)
        else "give the application more executors or cores (spark.executor.cores, spark.cores.max)"
    )
    return (
        f"the topology needs {wanted} task slots for as long as it runs (its highest parallelism), and Spark has "
        f"{there}{f', of which {others}' if others else ''}: {way_out}, or lower the parallelism"
    )


def _is_true(spark: Any, option: str) -> bool:
    return str(spark.conf.get(option, "false")).lower() == "true"


def _connect_host(spark: Any) -> str | None:
    return urlsplit(
        str(getattr(spark.client, "_builder", None) and spark.client._builder.url.geturl())
    ).hostname


def _address_towards(host: str) -> str:
    """Return this machine's address on the way to ``host``; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UnsupportedError(
            f"no address of this machine leads to the Spark Connect server {host}: {error}"
        ) from error


OnEnded = Callable[[int, int, str | None], None]

# Of Spark's account of a failure; a Python traceback fits.
MAX_ERROR_CHARS = 4_000


class SlotSubmitter:
    """Starts slots in a Spark session and ends them: each a job of one task, submitted from a thread of its own.

    A job each, so that a lost slot is submitted again alone: the tasks of one job share its budget of failures.
    Through ``mapInArrow``, which classic sessions and Spark Connect both have.

    ``on_ended(slot, attempt, error)`` is called once for each `submit`, by the thread of that Spark job; ``error`` is
    None when it ended well. ``on_session_over(error)`` is called when the session is found to have ended; before
    ``on_ended``, where a Spark job has failed by that. No method waits for Spark.
    """

    def __init__(
        self,
        spark: Any,
        job: str,
        name: str,
        runner: SlotRunner,
        on_ended: OnEnded,
        on_session_over: Callable[[SessionLostError], None],
    ) -> None:
        """``job`` is unique to this execution; ``name`` is for people."""
        self._spark = spark
        self._job, self._name = job, name
        self._runner = runner
        self._on_ended = on_ended
        self._on_session_over = on_session_over
        # A session that is gone may let its client wait for minutes.
        self._canceller = Worker("cancel-slots", _unexpected)
        self._asker = Worker("ask-session", _unexpected)
        self._lock = threading.Lock()
        self._unwanted: set[tuple[int, int]] = set()
        self._attempts: dict[int, int] = {}

    def submit(self, slot: int, attempt: int) -> None:
        self._attempts[slot] = attempt
        threading.Thread(
            target=self._run, args=(slot, attempt), name=f"ftlayer-slot-{slot}-{attempt}", daemon=True
        ).start()

    def cancel(self, slot: int, attempt: int) -> None:
        """Have Spark end a slot's job. It does not find one that is about to start: ask until `on_ended`."""
        with self._lock:
            self._unwanted.add((slot, attempt))
        self._canceller.do(lambda: self._cancel(slot, attempt))

    def ask_session(self) -> None:
        self._asker.do(self._tell_of_session)

    def count_tasks(self, done: Callable[[TaskCounts | None], None]) -> None:
        """``done`` is called by another thread."""
        groups = {slot: self._tag(slot, attempt) for slot, attempt in self._attempts.items()}
        self._asker.do(lambda: done(count_tasks(self._spark, groups)))

    def close(self) -> None:
        self._canceller.stop()
        self._asker.stop()

    def _tell_of_session(self, failure: BaseException | None = None) -> None:
        end = how_it_ended(self._spark, failure)
        if end is not None:
            self._on_session_over(end)

    def _cancel(self, slot: int, attempt: int) -> None:
        tag = self._tag(slot, attempt)
        try:
            if is_connect(self._spark):
                self._spark.interruptTag(tag)
            else:
                self._spark.sparkContext.cancelJobsWithTag(tag)
        except Exception:
            # Spark may be gone, and the slot with it; it is asked again if not.
            logger.warning("slot %d: Spark could not be asked to end its job", slot, exc_info=True)

    def _tag(self, slot: int, attempt: int) -> str:
        return f"ftlayer-{self._job}-{slot}-{attempt}"

    def _run(self, slot: int, attempt: int) -> None:
        error: str | None = None
        try:
            with self._lock:
                unwanted = (slot, attempt) in self._unwanted
            if not unwanted:
                self._mark(slot, attempt)
                one_task = self._spark.range(0, 1, 1, 1)
                one_task.mapInArrow(self._runner.of(slot), "ok boolean").collect()
        except Exception as failure:  # noqa: BLE001 - whatever Spark says becomes the reason of the loss
            error = spark_error_text(failure)
            self._tell_of_session(failure)
        self._on_ended(slot, attempt, error)

    def _mark(self, slot: int, attempt: int) -> None:
        """Tag what this thread starts, to cancel it by, and describe it in Spark's UI."""
        tag = self._tag(slot, attempt)
        if is_connect(self._spark):
            self._spark.addTag(tag)
            return
        context = self._spark.sparkContext
        context.addJobTag(tag)
        # The group is what Spark finds jobs by. Without the interrupt the task of a cancelled job would go on to hold
        # its task slot.
        context.setJobGroup(tag, f"{self._name}: slot {slot}", interruptOnCancel=True)


class SlotRunner:
    """The function that Spark runs in a slot's task: ``run(order)``, of a cloudpickled `SlotOrder` of slot 0."""

    def __init__(self, order: bytes, run: Callable[[Any], None]) -> None:
        self._order, self._run = order, run

    def of(self, slot: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        order, run = self._order, self._run

        def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            import pickle
            from dataclasses import replace

            import pyarrow

            from ftlayer.runtime.pandas_later import leave_pandas_to_others

            # Before the plan, whose modules may make arrays.
            leave_pandas_to_others()
            for _ in batches:
                pass  # the one row, which is there so that there is a task
            run(replace(pickle.loads(order), slot=slot))
            yield pyarrow.record_batch({"ok": [True]})

        return task


def _unexpected(error: BaseException) -> None:
    logger.error("a question to Spark failed in a way it never should", exc_info=error)


def spark_error_text(error: BaseException) -> str:
    """Return what a failed Spark job says of its cause, without the JVM's stack."""
    text = str(error)
    begin = text.find("Traceback (most recent call last)")
    if begin >= 0:
        kept = text[begin:]
        end = kept.find("\n\tat ")
        kept = kept if end < 0 else kept[:end]
    else:
        kept = next((line for line in text.splitlines() if "Exception:" in line or "] " in line), text)
        kept = kept.rpartition("SparkException: ")[2] or kept
    kept = kept.strip()
    # The end of a traceback says what happened.
    return kept if len(kept) <= MAX_ERROR_CHARS else "…" + kept[-MAX_ERROR_CHARS:]
