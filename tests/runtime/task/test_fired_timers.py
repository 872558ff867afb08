"""Timers of a chain with stages behind them: one that is refused there fails, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.common.clock import Now
from ftlayer.functions.chains.topology import MAIN
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Process, Reduce
from ftlayer.functions.undo import LateFailure, UndoLog, in_pieces
from ftlayer.runtime.task.pipeline import Fired, OperatorChain
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.operators import AssignWatermarks

TAKEN = pa.schema([("k", pa.string()), ("at", pa.int64())])
TIMED = pa.schema([("k", pa.string()), ("n", pa.int64()), ("t", pa.int64())])
SIDE = pa.schema([("at", pa.int64())])
NOW = Now(0, 0)


class Bell(ProcessFunction):
    """Counts by key; gives the times of ``nulls`` as null, and fails for ``fails``."""

    def __init__(self, fails: set[int], nulls: set[int]) -> None:
        self.fails, self.nulls = fails, nulls

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event(record[1])

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Any]:
        rung = ctx.value("rung", 0)
        rung.set(rung.get() + 1)
        ctx.output("heard", time_ms)
        yield ctx.key, 1, None if time_ms in self.nulls else time_ms
        if time_ms in self.fails:
            raise SystemExit("out of order")


def failed_of(fired: Fired) -> list[tuple[tuple[Any, int], str]]:
    """Return the timers that failed, each with the operator that refused it first."""
    first: dict[int, str] = {}
    for failure in fired.passed.failures:
        first.setdefault(failure.row, failure.operator)
    return [(fired.timers[place], first[place]) for place in sorted(first)]


def chain_of(backend: HeapBackend, log: UndoLog | None, bell: Bell, above: int) -> OperatorChain:
    def added(old: Any, new: Any) -> Any:
        if new[2] > above:
            raise ValueError("too late")
        return new[0], old[1] + new[1], new[2]

    chain = OperatorChain(
        [
            Process("bell", bell, TIMED, ("k",), side=(("heard", SIDE),)),
            AssignWatermarks("times", "t", 0, None, TIMED),
            Reduce("sum", added, TIMED, ("k",)),
        ],
        [TAKEN],
        backend,
        log,
    )
    chain.open(0)
    return chain


def fired_in_pieces(
    chain: OperatorChain, log: UndoLog, stage: int, at_once: int, refused: Callable[[int], bool]
) -> list[Fired]:
    """Fire what is due, where a partitioner refuses what came of some times."""
    due = chain.due_timers(stage, "event", NOW)

    def run(start: int, most: int) -> Fired | None:
        try:
            fired = chain.fire(stage, due, most, NOW)
            for place, (_, time_ms) in enumerate(() if fired is None else fired.timers):
                if refused(time_ms):
                    log.late(place)
        except LateFailure as late:
            raise LateFailure(start + late.row) from None
        return fired

    return [piece for _, piece in in_pieces(log, at_once, run)]


sets = st.sets(st.integers(0, 11), max_size=3)


@given(sets, sets, sets, st.integers(3, 12), st.integers(1, 20))
def test_a_timer_that_is_refused_behind_it_fails_alone(
    fails: set[int], nulls: set[int], looked_at: set[int], above: int, at_once: int
) -> None:
    """``looked_at``: a late failure there turns the timers round, and then alone there is none."""
    backend, log = HeapBackend(), UndoLog()
    chain = chain_of(backend, log, Bell(fails, nulls), above)
    records = [{"k": "ab"[i % 2], "at": i} for i in range(12)]
    chain.run(pa.RecordBatch.from_pylist(records, TAKEN), None, True, 0, NOW)
    log.forget()
    stage = chain.stage_of_timers("bell")
    assert stage == 0
    assert chain.stage_of_timers("sum") is None
    chain.stages[stage].watermark_ms = 20
    pieces = fired_in_pieces(chain, log, stage, at_once, looked_at.__contains__)

    # The first of a key goes into no function of the reduce.
    left: dict[str, int] = {}
    expected = []
    for i in range(12):
        key = "ab"[i % 2]
        if i in fails or i in nulls or (key in left and i > above):
            expected.append((key, i))
        else:
            left[key] = left.get(key, 0) + 1
    failed = [failed for piece in pieces for failed in failed_of(piece)]
    assert [timer for timer, _ in failed] == expected
    assert {(piece.operator, piece.kind) for piece in pieces} == {("bell", "event")}
    for (_, time_ms), operator in failed:
        assert operator == ("bell" if time_ms in fails else "times" if time_ms in nulls else "sum")
    assert [timer for piece in pieces for timer in piece.timers] == [("ab"[i % 2], i) for i in range(12)]
    assert dict(backend.state("bell").values("rung")) == left
    assert {k: v[1] for k, v in backend.state("sum").values("aggregate").items()} == left
    gone = {i for _, i in expected}
    for piece in pieces:
        went = [time_ms for _, time_ms in piece.timers if time_ms not in gone]
        for tag, name in ((MAIN, "t"), ("heard", "at")):
            rows = piece.passed.outputs[tag] if went else None
            assert (rows.payload[name].to_pylist() if rows else []) == went
            assert [piece.timers[p][1] for p in (rows.parents.tolist() if rows else [])] == went


def test_timers_that_failed_fire_again() -> None:
    backend, log, fails = HeapBackend(), UndoLog(), {1, 2}
    chain = chain_of(backend, log, Bell(fails, set()), 20)
    timers: list[tuple[Any, int]] = [("a", 1), ("b", 2), ("a", 3)]
    for _ in range(2):
        due = chain.timers_again(0, "bell", "event", timers, NOW)
        fired = chain.fire(0, due, 10, NOW)
        assert fired is not None
        assert chain.fire(0, due, 10, NOW) is None
        log.forget()
        failed = [timer for timer, _ in failed_of(fired)]
        assert failed == [timer for timer in timers if timer[1] in fails]
        timers = failed
        fails.discard(2)
    assert dict(backend.state("bell").values("rung")) == {"a": 1, "b": 1}


def test_what_a_timer_of_processing_time_gives_has_no_time() -> None:
    log = UndoLog()
    chain = chain_of(HeapBackend(), log, Bell(set(), set()), 20)
    fired = chain.fire(0, chain.timers_again(0, "bell", "processing", [("a", 1)], NOW), 1, NOW)
    assert fired is not None
    assert fired.passed.outputs["heard"].times is None
