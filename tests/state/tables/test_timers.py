"""Timers against a model: a list of (time, key) in the order they were set."""

from __future__ import annotations

import pickle

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ftlayer.state.tables.declarations import TimerService

keys = st.sampled_from(["a", "b", None, 1, (1, "x")])
times = st.integers(-3, 12) | st.sampled_from([-(2**63), 2**63 - 1])
kinds = st.sampled_from(["event", "processing"])


class TimersMachine(RuleBasedStateMachine):
    """Both kinds side by side, so that neither may touch the other's timers."""

    def __init__(self) -> None:
        super().__init__()
        self.service = TimerService()
        self.model: dict[str, list[tuple[int, object]]] = {"event": [], "processing": []}

    @rule(kind=kinds, key=keys, time=times)
    def add(self, kind: str, key: object, time: int) -> None:
        getattr(self.service, kind).add(key, time)
        if (time, key) not in self.model[kind]:
            self.model[kind].append((time, key))

    @rule(kind=kinds, key=keys, time=times)
    def delete(self, kind: str, key: object, time: int) -> None:
        getattr(self.service, kind).delete(key, time)
        if (time, key) in self.model[kind]:
            self.model[kind].remove((time, key))

    @rule(kind=kinds, until=times)
    def take(self, kind: str, until: int) -> None:
        due = [timer for timer in self.model[kind] if timer[0] <= until]
        taken = getattr(self.service, kind).take(until)
        if not due:
            assert taken is None
            return
        first = min(time for time, _ in due)
        assert taken == (first, [key for time, key in due if time == first])
        self.model[kind] = [timer for timer in self.model[kind] if timer[0] != first]

    @invariant()
    def counts_and_next_times(self) -> None:
        for kind, found in self.model.items():
            assert getattr(self.service, kind).count == len(found)
            earliest = min((time for time, _ in found), default=None)
            assert getattr(self.service, kind).next_ms() == earliest


TestTimers = TimersMachine.TestCase
TestTimers.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_timer_that_is_moved_on_again_and_again_leaves_no_trace() -> None:
    service = TimerService()
    service.event.add("other", 10**9)
    for time in range(10_000):
        service.event.add("key", time)
        service.event.delete("key", time)
    assert len(pickle.dumps(service)) < 1_000
    assert service.event.next_ms() == 10**9
