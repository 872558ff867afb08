"""Circuit breakers of a wrapped query: a batch in which too many records fail is held, and run again, not sealed.

Nothing of a batch that is held has happened: no attempt is used up, no record is taken over by the vertex, the sink has
not been called, and Spark reads nothing new. Its next run is the trial. Where it is the sink that rejects too many,
what it has rejected does not fail, and its next call is the trial.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ftlayer.common.rules.circuit import CircuitBreaker, CircuitState, CircuitStatus, Limit
from ftlayer.errors import QueryError
from ftlayer.vertex.calls import Failure

WHOLE_QUERY = ""
"""The name of the breaker that looks at all failures."""

SINK = "(sink)"
"""The name of the breaker that looks at what the sink rejects."""

POLL_S = 0.2

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FailureTally:
    """The result of a run of a batch: rows in, and failures that are worth a retry, by operator."""

    rows_in: int
    failed: Mapping[str, int]


class QueryCircuits:
    """The breakers of one query: of the whole, of its sink, and of operators with limits of their own. Thread-safe."""

    def __init__(
        self,
        query: str,
        limits: Mapping[str, Limit],
        clock: Callable[[], int] = lambda: time.monotonic_ns() // 1_000_000,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """``limits`` are by operator, `WHOLE_QUERY` for all others, `SINK` for a sink's; ``clock`` gives ms."""
        self._query = query
        self._breakers = {name: CircuitBreaker(limit) for name, limit in limits.items()}
        self._clock = clock
        self._pause = pause
        self._lock = threading.Lock()

    def passes(self, tally: FailureTally) -> bool:
        """Take what a run came to; False: too many failed, it is to be run again after `wait`."""
        with self._lock:
            now, names = self._clock(), [name for name in self._breakers if name != SINK]
            failed = {name: tally.failed.get(name, 0) for name in names}
            if WHOLE_QUERY in failed:
                others = tally.failed.keys() - self._breakers.keys()
                failed[WHOLE_QUERY] = sum(tally.failed[operator] for operator in others)
            # Each is asked, whatever the one before has said.
            passed = [self._one(name, tally.rows_in, failed[name], now) for name in names]
            return all(passed)

    def sink_passes(self, records: int, rejected: tuple[Failure, ...]) -> bool:
        """Take what a call of the sink rejects; False: too many, it is to be called again after `wait`.

        ``records`` is 0 where they have been counted in an earlier call.
        """
        failed = sum(not failure.fatal for failure in rejected)
        with self._lock:
            return SINK not in self._breakers or self._one(SINK, records, failed, self._clock())

    def wait(self, interrupted: Callable[[], bool]) -> None:
        """Wait until a batch may be run; raises `QueryError` if the query is told to stop meanwhile."""
        while not self._may_try():
            if interrupted():
                raise QueryError("stopped")
            self._pause(POLL_S)

    def status(self) -> dict[str, CircuitStatus]:
        """Return what each breaker says of itself, by operator; "" is the whole query's."""
        with self._lock:
            now = self._clock()
            return {name: breaker.status(now) for name, breaker in self._breakers.items()}

    def _may_try(self) -> bool:
        with self._lock:
            now = self._clock()
            # Each is asked: those whose pause is over take the next run as their trial.
            may_try = [breaker.may_try(now) for breaker in self._breakers.values()]
            return all(may_try)

    def _one(self, name: str, records: int, failed: int, now: int) -> bool:
        breaker = self._breakers[name]
        before = breaker.state
        state = breaker.outcome(records, failed, now)
        where = f"query {self._query!r}" + (f", {name!r}" if name else "")
        if state is CircuitState.OPEN:
            logger.warning(
                "%s: %d of %d records failed, and max_failing is %s: the batch is held and tried again in %d ms; no "
                "attempt is used up",
                where,
                failed,
                records,
                breaker.limit,
                breaker.status(now).next_trial_in_ms,
            )
        elif before is CircuitState.HALF_OPEN and state is CircuitState.CLOSED:
            logger.warning("%s: the trial went well, the query goes on", where)
        return state is not CircuitState.OPEN


@dataclass(frozen=True)
class QueryGate:
    """`ftlayer.spark.protocol.BatchGate` of one run of a query: it waits no longer than the run may go on.

    ``report`` tells the vertex where the breakers are, for its metrics; what it raises fails the batch, as any call of
    the vertex does.
    """

    circuits: QueryCircuits
    interrupted: Callable[[], bool]
    report: Callable[[dict[str, CircuitStatus]], None]

    def wait(self) -> None:
        self.circuits.wait(self.interrupted)
        # For each batch: a vertex that has been started anew does not know.
        self.report(self.circuits.status())

    def passes(self, tally: FailureTally) -> bool:
        return self._reported(self.circuits.passes(tally))

    def sink_passes(self, records: int, rejected: tuple[Failure, ...]) -> bool:
        return self._reported(self.circuits.sink_passes(records, rejected))

    def _reported(self, passed: bool) -> bool:
        self.report(self.circuits.status())
        return passed
