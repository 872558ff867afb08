"""A chain takes a record whole or not at all: against a model that copies all state before each record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from chain_programs import (
    KEYS,
    PLACES,
    SCHEMA,
    TIMER_PLACES,
    Model,
    Record,
    operators_of,
    rows_of,
    state_of,
    tuples,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ftlayer.functions.chains import record_segment
from ftlayer.functions.chains.firing import DueTimers, FiredTimers, TimerKind
from ftlayer.functions.chains.segments import AggregateSegment
from ftlayer.functions.chains.topology import MAIN, TopologyChain, TopologyResult
from ftlayer.functions.undo import LateFailure, UndoLog, in_pieces
from ftlayer.records.failures import RowFailure
from ftlayer.state.heap import HeapBackend

# ---------------------------------------------------------------- the chain


@dataclass
class Run:
    """`ftlayer.functions.undo.PieceOfWork`."""

    size: int
    result: TopologyResult

    @property
    def has_failures(self) -> bool:
        return bool(self.result.failures)


@dataclass
class FiredRun:
    """`ftlayer.functions.undo.PieceOfWork`."""

    fired: FiredTimers

    @property
    def size(self) -> int:
        return len(self.fired.timers)

    @property
    def has_failures(self) -> bool:
        return bool(self.fired.failures)


def fired_in_pieces(log: UndoLog, due: DueTimers, at_once: int) -> Iterator[FiredTimers]:
    def run(start: int, most: int) -> FiredRun | None:
        try:
            fired = due.fire(most)
        except LateFailure as late:
            raise LateFailure(start + late.row) from None
        return None if fired is None else FiredRun(fired)

    for _, piece in in_pieces(log, at_once, run):
        yield piece.fired


Hits = frozenset[tuple[str, int, str]]
"""A `Script`."""

RECORDS = st.lists(st.tuples(st.sampled_from(KEYS), st.integers(0, 9)), min_size=1, max_size=40)
CHAINS = st.lists(st.sampled_from(sorted(PLACES)), min_size=1, max_size=4)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[str], list[Record], Hits]:
    kinds = draw(CHAINS)
    if kinds.count("process") > 1:
        first = kinds.index("process")
        kinds = [kind for place, kind in enumerate(kinds) if kind != "process" or place == first]
    records = [(k, v, i) for i, (k, v) in enumerate(draw(RECORDS))]
    spots = [(f"{kind}{place}", where) for place, kind in enumerate(kinds) for where in PLACES[kind]]
    hits = draw(st.lists(st.tuples(st.sampled_from(spots), st.integers(0, len(records) - 1)), max_size=10))
    return kinds, records, frozenset((uid, i, where) for (uid, where), i in hits)


@st.composite
def ticking(draw: st.DrawFn) -> tuple[list[str], list[Record], Hits]:
    """Programs with timers, which fail too."""
    others = st.lists(st.sampled_from(sorted(PLACES.keys() - {"process"})), max_size=2)
    kinds = [*draw(others), "process", *draw(others)]
    records = [(k, v, i) for i, (k, v) in enumerate(draw(RECORDS))]
    spots = [(f"{kind}{place}", where) for place, kind in enumerate(kinds) for where in PLACES[kind]]
    spots += [(f"process{kinds.index('process')}", where) for where in TIMER_PLACES] * 3
    hits = draw(st.lists(st.tuples(st.sampled_from(spots), st.integers(0, 12)), max_size=10))
    return kinds, records, frozenset((uid, i, where) for (uid, where), i in hits)


@settings(max_examples=150, deadline=None)
@given(ticking(), st.integers(1, 50), st.integers(-1, 12), st.booleans())
def test_a_timer_fires_whole_or_not_at_all(
    program: tuple[list[str], list[Record], Hits], at_once: int, until: int, again: bool
) -> None:
    kinds, records, planned = program
    script = set(planned)
    log, backend, model = UndoLog(), HeapBackend(), Model()
    operators = [
        operator
        for place, kind in enumerate(kinds)
        for operator in operators_of(kind, f"{kind}{place}", script)
    ]
    chain = TopologyChain(operators, [SCHEMA], backend, log)
    chain.open()
    for record in records:
        log.alone = True
        if chain.run(rows_of([record]), None, 0, 0).failures:
            log.undo()
        log.forget()
        model.run(kinds, script, record)

    failed: list[tuple[str, tuple[str, int]]] = []
    uid = f"process{kinds.index('process')}"

    def goes_as_in_the_model(kind: str, due: DueTimers, *, is_again: bool = False) -> None:
        for fired in fired_in_pieces(log, due, at_once):
            assert (fired.operator, fired.kind) == (uid, kind)
            model.side = []
            expected = []
            for timer in fired.timers:
                if not is_again:
                    # It is gone, also if it fails.
                    model.table(uid, kind, set).remove(timer)
                expected.append(model.fire(kinds, script, uid, timer))
            assert [f.row for f in fired.failures] == [i for i, came in enumerate(expected) if came is None]
            failed.extend((kind, fired.timers[failure.row]) for failure in fired.failures)
            outputs = {output.tag: output for output in fired.outputs}
            main: list[list[Any]] = [[] for _ in fired.timers]
            for row, parent in zip(tuples(outputs[MAIN].batch), outputs[MAIN].parents.tolist(), strict=True):
                main[parent].append(row)
            assert main == [came or [] for came in expected]
            side = [row[0] for row in tuples(outputs["side"].batch)] if "side" in outputs else []
            assert side == model.side
            times = [time_ms for _, time_ms in fired.timers]
            assert times == sorted(times) or is_again
        assert not log.entries
        for name, held in model.tables.items():
            if name[1] not in ("event", "processing"):
                assert state_of(backend, *name, held) == held

    goes_as_in_the_model("event", chain.due_event_timers(until, 0))
    assert not [time_ms for _, time_ms in model.table(uid, "event", set) if time_ms <= until]
    goes_as_in_the_model("processing", chain.due_processing_timers(until))
    assert not [time_ms for _, time_ms in model.table(uid, "processing", set) if time_ms <= until]
    if again:
        found, failed = failed, []
        script.clear()
        kinds_of_time: list[TimerKind] = ["event", "processing"]
        for kind in kinds_of_time:
            timers = [timer for k, timer in found if k == kind]
            goes_as_in_the_model(kind, chain.timers_again(uid, kind, timers, until, until), is_again=True)
        assert not failed
    for name in ("event", "processing"):
        assert state_of(backend, uid, name, None) == model.table(uid, name, set)


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(1, 50), st.integers(1, 50))
@example(
    (
        ["reduce", "batches", "map"],
        [("a", 1, 0), ("a", 2, 1), ("a", 3, 2)],
        frozenset({("map2", 1, "early")}),
    ),
    9,
    9,
)
@example((["process", "map"], [("a", 1, 0), ("a", 2, 1)], frozenset({("map1", 1, "early")})), 9, 9)
@example(
    (["flat", "batches", "reduce"], [("a", 0, 0), ("b", 0, 1)], frozenset({("reduce2", 0, "early")})), 2, 1
)
def test_a_record_is_taken_whole_or_not_at_all(
    program: tuple[list[str], list[Record], Hits], batch_rows: int, chunk_rows: int
) -> None:
    kinds, records, script = program
    log, backend = UndoLog(), HeapBackend()
    operators = [
        operator
        for place, kind in enumerate(kinds)
        for operator in operators_of(kind, f"{kind}{place}", script)
    ]
    chain = TopologyChain(operators, [SCHEMA], backend, log)
    chain.open()
    main: list[list[tuple[Any, ...]]] = [[] for _ in records]
    side: list[Any] = []
    failed: set[int] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_segment, "CHUNK_ROWS", chunk_rows)
        for begin in range(0, len(records), batch_rows):
            batch = records[begin : begin + batch_rows]

            def run(start: int, most: int, batch: list[Record] = batch) -> Run | None:
                records = batch[start : start + most]
                if not records:
                    return None
                try:
                    return Run(len(records), chain.run(rows_of(records), None, 0, 0))
                except LateFailure as late:
                    raise LateFailure(start + late.row) from None

            for start, piece in in_pieces(log, len(batch), run):
                outputs = piece.result.outputs
                rows = outputs[MAIN]
                for row, parent in zip(tuples(rows.batch), rows.parents.tolist(), strict=True):
                    main[begin + start + parent].append(row)
                if "side" in outputs:
                    side += [row[0] for row in tuples(outputs["side"].batch)]
                failed |= {begin + start + failure.row for failure in piece.result.failures}
            assert not log.entries

    model = Model()
    expected = [model.run(kinds, script, record) for record in records]
    assert failed == {place for place, results in enumerate(expected) if results is None}
    assert main == [results or [] for results in expected]
    assert side == model.side
    assert {
        (uid, name): state_of(backend, uid, name, held) for (uid, name), held in model.tables.items()
    } == model.tables


@pytest.mark.parametrize(
    ("parents", "before", "alone", "late"),
    [
        ([0, 1, 2], False, False, None),
        ([0, 1, 1], False, False, 1),
        ([1, 0, 1], False, False, None),
        ([0, 0, 1], False, False, 0),
        ([0, 1, 2], True, False, 1),
        ([0, 1, 1], True, True, None),
    ],
)
def test_what_an_aggregate_refuses_goes_with_what_was_made_of_its_record(
    parents: list[int], before: bool, alone: bool, late: int | None
) -> None:
    """The middle one of three is refused, with others of the same input row, or behind functions that changed state."""
    v = pa.schema([("v", pa.int64())])
    failure = RowFailure(0, "sum", "too large", "")
    table = SimpleNamespace(
        compact=lambda: None,
        add=lambda rows, undo: ([rows.column(0)], [(1, 0)], "kept"),
        restore=lambda key, old: None,
    )
    step = SimpleNamespace(
        table=table, schema=v, uid="sum", plan=SimpleNamespace(key_results=lambda rows: [])
    )
    log = UndoLog()
    log.alone = alone
    if before:
        log.add((table.restore, None, None))
    segment = AggregateSegment(step, log)  # type: ignore[arg-type]
    segment._failure = lambda row, number: replace(failure, row=row)  # type: ignore[method-assign]
    rows = pa.record_batch([[1, 2, 3]], schema=v)
    if late is None:
        assert [each.row for each in segment.run(rows, np.array(parents)).failures] == [parents[1]]
    else:
        with pytest.raises(LateFailure) as raised:
            segment.run(rows, np.array(parents))
        assert raised.value.row == late
