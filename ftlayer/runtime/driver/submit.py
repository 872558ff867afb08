"""Slots as Spark jobs: each a job of one task that runs until its slot ends, submitted from a thread of its own.

A job each, so that a lost slot is submitted again alone: the tasks of one job share its budget of failures. Through
``mapInArrow``, which classic sessions and Spark Connect both have.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa

from ftlayer.errors import SessionLostError
from ftlayer.runtime.driver.events import TaskCounts
from ftlayer.runtime.driver.session import count_tasks
from ftlayer.runtime.worker import Worker
from ftlayer.spark.sessions import how_it_ended, is_connect

OnEnded = Callable[[int, int, str | None], None]

# Of Spark's account of a failure; a Python traceback fits.
MAX_ERROR_CHARS = 4_000

logger = logging.getLogger(__name__)


class SlotSubmitter:
    """Starts slots in a Spark session and ends them.

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
        """Start the Spark job of a slot; returns at once."""
        self._attempts[slot] = attempt
        threading.Thread(
            target=self._run, args=(slot, attempt), name=f"ftlayer-slot-{slot}-{attempt}", daemon=True
        ).start()

    def cancel(self, slot: int, attempt: int) -> None:
        """Have Spark end the job of a slot; `on_ended` follows.

        Spark does not find a job that it is about to start: ask again until `on_ended` has come.
        """
        with self._lock:
            self._unwanted.add((slot, attempt))
        self._canceller.do(lambda: self._cancel(slot, attempt))

    def ask_session(self) -> None:
        """Find out whether the session lives; ``on_session_over`` follows if not."""
        self._asker.do(self._tell_of_session)

    def count_tasks(self, done: Callable[[TaskCounts | None], None]) -> None:
        """Ask which slots' tasks Spark has started; then ``done`` is called by another thread."""
        groups = {slot: self._tag(slot, attempt) for slot, attempt in self._attempts.items()}
        self._asker.do(lambda: done(count_tasks(self._spark, groups)))

    def close(self) -> None:
        """End the threads behind what they do."""
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
    """The function that Spark runs in a slot's task: ``run(order)``, with the order pickled once for all slots.

    ``order`` is a cloudpickled `SlotOrder` of slot 0.
    """

    def __init__(self, order: bytes, run: Callable[[Any], None]) -> None:
        self._order, self._run = order, run

    def of(self, slot: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        """Return the function for ``mapInArrow``."""
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


def _unexpected(error: Exception) -> None:
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
