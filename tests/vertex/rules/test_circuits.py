"""Circuit breakers of topologies' streams: any events against a plain model, and what a vertex does with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.rules.circuit import FIRST_PAUSE_MS, LONGEST_PAUSE_MS, CircuitState, CircuitStatus, Limit
from ftlayer.errors import ConfigError
from ftlayer.vertex import calls
from ftlayer.vertex.calls import Failure, StreamCircuit, StreamOptions
from ftlayer.vertex.rules.state import OTHERS_AFTER_MS, TRIAL_MS, TRIAL_ROWS, Circuits
from ftlayer.vertex.rules.streams import Stream

CLOSED, OPEN, HALF_OPEN = CircuitState.CLOSED, CircuitState.OPEN, CircuitState.HALF_OPEN
BROKEN = Failure(1, "down", "op")
COUNT = 3


class Model:
    """One breaker for more than `COUNT` failures, with one stream, as plainly as can be said."""

    def __init__(self) -> None:
        self.state, self.opened, self.failed = CLOSED, 0, 0
        self.pause = self.until = self.half_open = self.trials = 0
        self.trial: dict[int, bool | None] = {}
        self.out = 0

    def asks(self, now: int) -> bool:
        """Whether something may be let out."""
        if self.state is OPEN and now >= self.until:
            self.state, self.half_open = HALF_OPEN, now
        if self.state is HALF_OPEN and self.trial and now - self.out >= TRIAL_MS:
            if any(passed is not None for passed in self.trial.values()):
                self.decide(now)
            else:
                return True
        return self.state is CLOSED or (self.state is HALF_OPEN and not self.trial)

    def takes_turns(self, replays: bool, has_replays: bool, now: int) -> bool:
        late = now - self.half_open >= OTHERS_AFTER_MS
        return self.state is CLOSED or late or replays == (has_replays and self.trials % 2 == 0)

    def let_out(self, roots: list[int], now: int) -> None:
        if self.state is HALF_OPEN and roots:
            self.trial |= dict.fromkeys(roots)
            self.out = now

    def ended(self, roots: list[int], passed: bool, now: int) -> None:
        if self.state is CLOSED:
            self.failed += 0 if passed else len(roots)
            if not passed and roots and self.failed > COUNT:
                self.open(FIRST_PAUSE_MS, now)
        elif self.trial:
            self.trial |= {root: passed for root in roots if root in self.trial and self.trial[root] is None}
            failed = list(self.trial.values()).count(False)
            if None not in self.trial.values() or failed > COUNT or 2 * failed > len(self.trial):
                self.decide(now)

    def recalled(self, roots: list[int], now: int) -> None:
        was_out = bool(self.trial)
        self.trial = {
            root: passed for root, passed in self.trial.items() if passed is not None or root not in roots
        }
        if was_out and None not in self.trial.values():
            self.decide(now)

    def decide(self, now: int) -> None:
        came = [passed for passed in self.trial.values() if passed is not None]
        self.trial = {}
        if not came:
            return
        self.trials += 1
        failed = came.count(False)
        if failed > COUNT or 2 * failed > len(came):
            self.open(min(2 * self.pause, LONGEST_PAUSE_MS), now)
        else:
            self.state = CLOSED

    def open(self, pause: int, now: int) -> None:
        self.state, self.pause, self.until, self.failed = OPEN, pause, now + pause, 0
        self.opened += 1


def stream_with(*circuits: StreamCircuit, name: str = "job/s") -> Stream:
    return Stream(name, 1, StreamOptions(circuits=circuits))


events = st.one_of(
    st.tuples(st.just("wait"), st.integers(1, 900)),
    st.tuples(st.just("replays"), st.integers(1, 40)),
    st.tuples(st.just("new"), st.integers(1, 40)),
    st.tuples(st.sampled_from(["done", "failed", "recalled"]), st.integers(1, 30)),
)


@given(st.lists(events, max_size=60))
def test_any_events_against_a_plain_model(given: list[tuple[str, int]]) -> None:
    # It all takes less than a minute: the model knows no window.
    circuits, model = Circuits(), Model()
    stream = stream_with(StreamCircuit("op", Limit(count=COUNT)))
    circuits.declare(stream)
    now, number = 0, 0
    out: list[int] = []
    for what, many in given:
        now += many if what == "wait" else 0
        if what == "replays":
            wants = min(many, stream.waiting)
            allowed = circuits.may_take(stream, many, now)
            may = model.asks(now) and model.takes_turns(True, stream.waiting > 0, now)
            assert allowed == (0 if not may else many if model.state is CLOSED else min(many, TRIAL_ROWS))
            taken = list(range(number, number + min(allowed, wants)))
            stream.waiting -= len(taken)
        elif what == "new":
            may = model.asks(now) and model.takes_turns(False, stream.waiting > 0, now)
            assert (circuits.hold_of(stream, now) is None) == may
            taken = list(range(number, number + many)) if may else []
        else:
            taken = []
        number += len(taken)
        out += taken
        circuits.let_out(stream, np.array(taken, np.uint64), now)
        model.let_out(taken, now)
        these, rest = out[:many], out[many:]
        if what in ("done", "failed", "recalled"):
            out = rest
        if what == "done":
            circuits.done(stream, np.array(these, np.uint64), now)
            model.ended(these, True, now)
        elif what == "failed" and these:
            held = circuits.ended(stream, these, [BROKEN] * len(these), now)
            model.ended(these, False, now)
            assert held == (model.state is not CLOSED)
            stream.waiting += len(these)
        elif what == "recalled":
            circuits.recalled(np.array(these, np.uint64), now)
            model.recalled(these, now)
        status = circuits.statuses(["job/s"], now)["op"]
        assert (status.state, status.opened) == (model.state, model.opened)


def test_failures_count_for_the_operator_that_has_a_limit_and_else_for_the_source() -> None:
    circuits = Circuits()
    left = stream_with(
        StreamCircuit("left", Limit(count=5)), StreamCircuit("op", Limit(count=1)), name="job/left"
    )
    right = stream_with(
        StreamCircuit("", Limit(count=5)), StreamCircuit("op", Limit(count=1)), name="job/right"
    )
    timed = stream_with(StreamCircuit("op", Limit(count=1), counts=False), name="job/timed")
    for stream in (left, right, timed):
        circuits.declare(stream)
    names = ["job/left", "job/right", "job/timed"]

    def opened() -> dict[str, int]:
        return {name: status.opened for name, status in circuits.statuses(names, 0).items()}

    fatal = Failure(1, "no good", "op", fatal=True)
    assert not circuits.ended(left, [1, 2], [BROKEN, fatal], 0)
    assert not circuits.ended(timed, [3], [BROKEN], 0)
    assert opened() == {"left": 0, "op": 0, "": 0}
    # The operator's breaker is of both sources, and holds what it does not count too.
    assert circuits.ended(right, [4], [BROKEN], 0)
    assert opened() == {"left": 0, "op": 1, "": 0}
    for stream in (left, right, timed):
        assert circuits.may_take(stream, 10, 500) == 0
        assert "'op' is open" in str(circuits.hold_of(stream, 500))
    other = Failure(1, "elsewhere", "other")
    circuits.ended(left, list(range(6)), [other] * 6, 500)
    assert opened() == {"left": 1, "op": 1, "": 0}
    # What is paused for alone gives no trial.
    assert circuits.may_take(timed, 10, 2_000) == 0


def test_streams_that_are_opened_again_keep_their_breakers_unless_the_limit_is_another() -> None:
    circuits = Circuits()
    stream = stream_with(StreamCircuit("op", Limit(count=0)))
    circuits.declare(stream)
    assert circuits.ended(stream, [1], [BROKEN], 0)
    circuits.declare(stream)
    assert circuits.statuses(["job/s"], 0)["op"].state is OPEN
    stream.options = StreamOptions(circuits=(StreamCircuit("op", Limit(count=1)),))
    circuits.declare(stream)
    assert circuits.statuses(["job/s"], 0)["op"].state is CLOSED
    stream.options = StreamOptions()
    circuits.declare(stream)
    assert circuits.all_statuses(0) == {}


# ---------------------------------------------------------------- a vertex


OPTIONS = {"max_attempts": 2, "circuits": (StreamCircuit("op", Limit(count=1)),)}


def test_while_it_is_open_nothing_goes_out_and_no_attempt_is_used_up(vertex: Any, kit: Any) -> None:
    vertex.open("job/s", **OPTIONS)
    vertex.persist([1, 2, 3, 4, 5], stream="job/s")
    vertex.fail(1)
    assert [one.attempt for one in vertex.list("waiting")] == [2]
    vertex.fail(2, 3)
    # 1 has used one up, 2 and 3 opened it, and it holds them.
    assert sorted(one.attempt for one in vertex.list("waiting")) == [1, 1, 2]
    vertex.advance(900)
    assert vertex.take(stream="job/s") == []
    assert vertex.call(calls.TakeReplays("job/s", 10)).held
    more = kit.persist_call([6], stream="job/s")
    assert "'op' is open" in vertex.layer.intake_blocked(more, vertex.now)
    status = vertex.call(calls.StreamStatusCall(("job/s",)))
    assert (status.due, status.waiting, status.next_due_in_ms) == (0, 3, 100)
    assert status.circuits == {"op": CircuitStatus(OPEN, 1, 3, 3, 100)}
    # What times out meanwhile waits as well, as the attempt that it was.
    vertex.advance(1_000, ticks=10)
    assert vertex.counts() == {"pending": 0, "waiting": 5, "delivery": 0, "dead": 0}
    assert vertex.call(calls.Stats()).circuits["job"]["op"].state is OPEN


def test_a_trial_of_replays_closes_it(vertex: Any, kit: Any) -> None:
    vertex.open("job/s", **OPTIONS)
    vertex.persist(list(range(1, 41)), stream="job/s")
    vertex.fail(*range(1, 41))
    assert vertex.counts()["dead"] == 0
    vertex.advance(FIRST_PAUSE_MS - 500)
    vertex.advance(500)
    assert vertex.layer.intake_blocked(kit.persist_call([99], stream="job/s"), vertex.now)
    trial = vertex.take(stream="job/s")
    assert len(trial) == TRIAL_ROWS
    assert vertex.take(stream="job/s") == []
    vertex.xor(*[(root, root) for root, *_ in trial])
    assert vertex.call(calls.StreamStatusCall(("job/s",))).circuits["op"].state is CLOSED
    assert vertex.layer.intake_blocked(kit.persist_call([99], stream="job/s"), vertex.now) is None
    assert len(vertex.take(stream="job/s")) == 20


def test_records_that_are_let_out_alone_can_be_the_ones_that_never_pass(vertex: Any, kit: Any) -> None:
    """So replays and new records take turns as trials."""
    vertex.open("job/s", **OPTIONS)
    vertex.persist(list(range(1, 41)), stream="job/s")
    vertex.fail(*range(1, 41))
    vertex.advance(FIRST_PAUSE_MS)
    vertex.fail(*[root for root, *_ in vertex.take(stream="job/s")])
    vertex.advance(2 * FIRST_PAUSE_MS)
    assert vertex.take(stream="job/s") == []
    assert vertex.layer.intake_blocked(kit.persist_call([99], stream="job/s"), vertex.now) is None
    vertex.persist([99], stream="job/s")
    assert vertex.layer.intake_blocked(kit.persist_call([100], stream="job/s"), vertex.now)
    vertex.xor((99, 99))
    assert vertex.call(calls.StreamStatusCall(("job/s",))).circuits["op"].state is CLOSED
    assert vertex.counts()["dead"] == 0


def test_a_vertex_that_is_started_again_begins_closed(vertex: Any) -> None:
    vertex.open("job/s", **OPTIONS)
    vertex.persist([1, 2, 3], stream="job/s")
    vertex.fail(1, 2, 3)
    assert vertex.take(stream="job/s") == []
    vertex.restart()
    assert len(vertex.take(stream="job/s")) == 3
    vertex.open("job/s", **OPTIONS)
    assert vertex.call(calls.StreamStatusCall(("job/s",))).circuits["op"].state is CLOSED


def test_queries_report_theirs(vertex: Any) -> None:
    status = CircuitStatus(OPEN, 3, 100, 50, 700)
    vertex.call(calls.ReportCircuits("q", {"": status}))
    assert vertex.call(calls.Stats()).circuits == {"q": {"": status}}


@pytest.mark.parametrize(
    "given", [{}, {"share": 0.0}, {"share": 1.5}, {"share": 0.5, "count": 1}, {"count": -1}]
)
def test_a_limit_that_is_none_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="limit"):
        Limit(**given)
