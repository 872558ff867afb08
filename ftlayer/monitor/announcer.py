"""A driver's announcements of its jobs to one board, once a second, and the orders that come back with the replies.

Nothing of it is part of a job: what fails here is counted, told with the next announcement, and ends or slows no job.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from dataclasses import dataclass, replace
from typing import Protocol

from ftlayer.common.printable import described
from ftlayer.errors import ConfigError, FTLayerError, StaleOwnerError, UnsupportedError
from ftlayer.monitor.rules.orders import Orders
from ftlayer.vertex.calls import AnnounceJob, AnsweredBy, JobDetails, JobOrder, OrderState, R

EVERY_S = 1.0
SOON_S = 0.05
"""The pause where there is news of an order: who asked for it waits."""

DEADLINE_MS = 3_000
"""An announcement that has no answer by then has failed; the next one says more."""

END_S = 2.0
"""How long the end of a program waits for orders under way, and for an asker to hear what became of the last one."""

MAX_ANSWER_CHARS = 60_000

logger = logging.getLogger(__name__)


class BoardCalls(Protocol):
    """Takes announcements: a vertex's client, or a board of this program. Any thread."""

    def call(self, call: AnsweredBy[R], *, deadline_ms: int) -> R:
        """Make one call; raises what the board raises."""


class Telling(Protocol):
    """A job as it is told. `details` is the announcer's thread's, `carry_out` is called by a thread for each order."""

    @property
    def run(self) -> str:
        """This execution."""

    def details(self, known_checkpoint: int, *, with_plan: bool) -> JobDetails:
        """Return how the job fares, with checkpoints that ended behind number ``known_checkpoint``."""

    def carry_out(self, order: JobOrder) -> str:
        """Do what an order asks, and return what to answer.

        Raises `ConfigError` or `UnsupportedError` for what cannot be asked of this job, anything else where it fails.
        """


@dataclass(slots=True)
class _Announced:
    """A job, and what the board said last. ``failures``: announcements that were not taken."""

    telling: Telling
    orders: Orders
    name: str  # its run's, until it is announced
    known_checkpoint: int = 0
    with_plan: bool = True
    failures: int = 0
    is_failing: bool = False
    is_final: bool = False
    is_over: bool = False


class JobAnnouncer:
    """Announces jobs to one board by one thread, from the first `add` to `close`, or to the program's end.

    A forked process announces nothing of what its parent added.
    """

    def __init__(self, board: BoardCalls, *, every_s: float = EVERY_S, end_s: float = END_S) -> None:
        """``every_s``: the pause between two announcements of a job; ``end_s`` as `END_S`. Starts nothing."""
        self._board = board
        self._every_s, self._end_s = every_s, end_s
        self._lock = threading.Lock()  # guards what follows, and the orders of all jobs
        self._jobs: list[_Announced] = []
        self._answered_s: float | None = None  # when an answer was told last; its job may be over by the end
        self._wake = threading.Event()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def add(self, telling: Telling) -> None:
        """Announce a job from now on, until it is over and the board knows it. After `close`: does nothing."""
        with self._lock:
            if self._closing or self._pid != os.getpid():
                return
            self._jobs.append(_Announced(telling, Orders(telling.run), telling.run))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ftlayer-announcer", daemon=True)
                self._thread.start()
                atexit.register(self.close)
        self._wake.set()

    def close(self) -> None:
        """Announce all jobs once more, and end. A second call does nothing."""
        if self._pid != os.getpid():
            return
        with self._lock:
            self._closing, thread = True, self._thread
        atexit.unregister(self.close)
        self._wake.set()
        if thread is not None and thread is not threading.current_thread():
            # Two calls without an answer, and what the thread waits for.
            thread.join(2 * self._end_s + 3 * DEADLINE_MS / 1_000)

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while True:
            # Before anything is looked at, so that no news behind that look is slept through.
            self._wake.clear()
            if self._closing:
                return self._finish()
            self._wake.wait(min(SOON_S, self._every_s) if self._announce_all() else self._every_s)

    def _announce_all(self) -> bool:
        with self._lock:
            jobs = list(self._jobs)
        news = [self._announce(job) for job in jobs]
        with self._lock:
            self._jobs = [job for job in self._jobs if not job.is_over]
        return any(news)

    def _finish(self) -> None:
        """Say the last word of each job, and stay until those who asked for its end can have heard it."""
        deadline = time.monotonic() + self._end_s
        with self._lock:
            jobs = list(self._jobs)
        while True:
            self._wake.clear()
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not any(job.orders.under_way for job in jobs):
                break
            self._wake.wait(left_s)
        for job in jobs:
            # What was ordered in the meantime is not carried out: it expires.
            self._announce(job, carry_out=False)
        if self._answered_s is not None:
            threading.Event().wait(max(0.0, self._answered_s + self._end_s - time.monotonic()))

    def _announce(self, job: _Announced, *, carry_out: bool = True) -> bool:
        """Announce one job; return whether it has news for the board at once. Failures are counted."""
        with self._lock:
            answers = job.orders.answers()
        try:
            details = job.telling.details(job.known_checkpoint, with_plan=job.with_plan)
            job.is_final, job.name = details.final, details.name
            if job.failures:
                counters = details.counters | {"announcements_failed": job.failures}
                details = replace(details, counters=counters)
            call = AnnounceJob(details, answers)
            reply = self._board.call(call, deadline_ms=DEADLINE_MS)
        except StaleOwnerError as error:
            logger.info("job %r is announced no more: %s", job.name, error)
            job.is_over = True
            return False
        except Exception as error:  # noqa: BLE001 - it is counted, told, and logged
            self._failed(job, error)
            return False
        job.is_failing = False
        job.known_checkpoint, job.with_plan = reply.known_checkpoint, reply.wants_plan
        with self._lock:
            begin = job.orders.heard(reply.orders, answers, time.time_ns() // 1_000_000) if carry_out else ()
            if any(answer.state is not OrderState.TAKEN for answer in answers):
                self._answered_s = time.monotonic()
            job.is_over = job.is_final and job.orders.is_idle
            news = job.orders.has_news
        for order in begin:
            # A thread each: a savepoint takes minutes, and may be what a cancel is to end.
            name = f"ftlayer-order-{order.action}"
            threading.Thread(target=self._carry_out, args=(job, order), name=name, daemon=True).start()
        return news

    def _failed(self, job: _Announced, error: Exception) -> None:
        job.failures += 1
        if not job.is_failing:
            job.is_failing = True
            if isinstance(error, FTLayerError):
                logger.warning("job %r cannot be announced now: %s", job.name, error)
            else:
                logger.exception("job %r cannot be announced now", job.name)

    # ------------------------------------------------------------ orders

    def _carry_out(self, job: _Announced, order: JobOrder) -> None:
        logger.info("job %r is asked by %s to %s", job.name, order.by, order.action)
        try:
            state, text = OrderState.DONE, job.telling.carry_out(order)
        except (ConfigError, UnsupportedError) as error:
            state, text = OrderState.REFUSED, str(error)
        except Exception as error:
            state, text = OrderState.FAILED, described(error)
            logger.warning("job %r: %s failed", job.name, order.action, exc_info=True)
        with self._lock:
            job.orders.ended(order.id, state, text[:MAX_ANSWER_CHARS], time.time_ns() // 1_000_000)
        self._wake.set()
