"""Circuit breakers of one subtask of a chain: where too many records fail, it takes nothing for a while."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ftlayer.circuit import CircuitBreaker, CircuitState, CircuitStatus, Limit, together
from ftlayer.functions.failures import RowFailure


class Breakers:
    """A breaker for each operator with a ``max_failing`` of its own, and the policy's for all others."""

    def __init__(self, chain: str, policy: Limit | None, own: Mapping[str, Limit]) -> None:
        """``chain`` is its uid; ``own`` are by operator uid."""
        self._chain = chain
        self._own = {operator: CircuitBreaker(limit) for operator, limit in own.items()}
        self._rest = None if policy is None else CircuitBreaker(policy)

    def __bool__(self) -> bool:
        return bool(self._own) or self._rest is not None

    def outcome(self, records: int, failures: Sequence[RowFailure], now_ms: int) -> None:
        """So many records were tried. Failures that no attempt follows count for nothing, as in acker mode."""
        failed: dict[str, int] = {}
        for failure in failures:
            if not failure.fatal:
                operator = failure.operator if failure.operator in self._own else ""
                failed[operator] = failed.get(operator, 0) + 1
        for operator, breaker in self._own.items():
            breaker.outcome(records, failed.get(operator, 0), now_ms)
        if self._rest is not None:
            self._rest.outcome(records, failed.get("", 0), now_ms)

    def held(self, failure: RowFailure) -> RowFailure:
        """Return a failure as it counts: while its breaker is open the failure uses up no attempt."""
        breaker = self._own.get(failure.operator, self._rest)
        if failure.fatal or breaker is None or breaker.state is not CircuitState.OPEN:
            return failure
        return replace(failure, uses_attempt=False, after_ms=failure.after_ms or 0)

    @property
    def is_open(self) -> bool:
        """Whether one of them is not closed. Any thread may look."""
        every = [*self._own.values(), *([] if self._rest is None else [self._rest])]
        return any(breaker.state is not CircuitState.CLOSED for breaker in every)

    def circuits(self, now_ms: int) -> dict[str, CircuitStatus]:
        """Return where they are, by operator; the policy's is the chain's. Any thread may look."""
        found = {operator: breaker.status(now_ms) for operator, breaker in self._own.items()}
        if self._rest is not None:
            of_chain = self._rest.status(now_ms)
            head = found.get(self._chain)
            found[self._chain] = of_chain if head is None else together([of_chain, head])
        return found

    def pause_ms(self, now_ms: int) -> int:
        """Return for how long the chain takes nothing; 0: it goes on, if only for a trial."""
        every = [*self._own.values(), *([] if self._rest is None else [self._rest])]
        return max(
            (breaker.status(now_ms).next_trial_in_ms for breaker in every if not breaker.may_try(now_ms)),
            default=0,
        )
