"""A chain in which records and timers fail comes to what it comes to without them: two inputs, TTL, windows, backends.

The chain that nothing fails in has no undo log, a heap of dicts, and one record at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from contextlib import ExitStack
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftlayer as ft
from ftlayer.checkpoint.barrier import Barrier
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.functions.aggregates import AggregatePlan
from ftlayer.functions.chains.firing import DueTimers, FiredTimers
from ftlayer.functions.chains.topology import TopologyChain, TopologyResult
from ftlayer.functions.keyed import StateTtl
from ftlayer.functions.process import LAST_WATERMARK_MS, CoProcessFunction
from ftlayer.functions.steps import CoProcess, Map, Process
from ftlayer.functions.undo import LateFailure, UndoLog, in_pieces
from ftlayer.functions.windows import (
    Aggregated,
    BuiltIn,
    Collected,
    Content,
    Fixed,
    Session,
    Window,
    window_function,
)
from ftlayer.state import opening as layered
from ftlayer.state import opening as merging
from ftlayer.state.contract import BackendSpec
from ftlayer.state.heap import HeapBackend
from ftlayer.state.opening import open_backend
from ftlayer.state.tables import layers as memory

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.int64()), ("id", pa.int64())])
SIDE = (("late", SCHEMA),)
KEY = pa.schema([("k", pa.string())])
TIMES = [pa.field(name, pa.timestamp("us", tz="UTC")) for name in ("window_start", "window_end")]
PLAN = AggregatePlan.of([ft.count(), ft.sum("id")], ("k",), SCHEMA, between=TIMES)
TTL = StateTtl("5ms")
LAST_ID = 1_000

Record = tuple[str, int, int]
Script = Set[tuple[str, int]]
"""What goes wrong: where, and the id of the record, or the time of the timer."""


class Both(CoProcessFunction):
    """Changes all kinds of values with a time to live, from both inputs, and fails between any two changes."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def at(self, where: str, number: int) -> None:
        if (where, number) in self.script:
            raise ValueError(where)

    def process_left(self, record: Record, ctx: Any) -> Iterator[Record]:
        key, time_ms, number = record
        seen, items = ctx.value("seen", ttl=TTL), ctx.list("items", ttl=TTL)
        self.at("early", number)
        held = seen.get() or []
        held.append(number)
        self.at("in place", number)
        seen.set(held)
        items.extend([number, number + 1])
        ctx.timers.event(time_ms)
        self.at("middle", number)
        yield key, len(held), number
        if number % 3 == 0:
            items.clear()
        self.at("late", number)
        yield key, sum(items.get()), number

    def process_right(self, record: Record, ctx: Any) -> Iterator[Record]:
        key, time_ms, number = record
        fields, marks, last = ctx.map("fields", ttl=TTL), ctx.map("marks"), ctx.value("last", 0)
        self.at("early", number)
        field = time_ms % 3
        fields[field] = [*(fields.get(field) or []), number]
        self.at("middle", number)
        # Numbers are not copied when they are read.
        if number % 2 == 0 and (field + 1) % 3 in marks:
            del marks[(field + 1) % 3]
        marks[field] = number
        last.set(last.get() + number)
        ctx.timers.delete_event(time_ms + 1)
        yield key, sum(len(fields.get(name) or []) for name in range(3)), number
        self.at("late", number)
        yield key, last.get() + sum(marks.values()), number

    def on_timer(self, time_ms: int, ctx: Any) -> Iterator[Record]:
        last = ctx.value("last", 0)
        last.set(last.get() + 1)
        self.at("timer", time_ms)
        yield ctx.key, last.get(), -1


def emitted(script: Script) -> Any:
    def function(key: str, window: Window, numbers: list[int]) -> Record:
        numbers.append(-1)
        if ("timer", window.start_ms) in script:
            raise ValueError("timer")
        return key, window.start_ms, sum(numbers)

    return function


def appended(numbers: list[int], record: Record) -> list[int]:
    numbers.append(record[2])
    return numbers


def operators_of(kind: str, script: Script) -> tuple[list[Any], int]:
    """Return a chain, and how many inputs it has."""

    def passing(record: Record) -> Record:
        if ("behind", record[2]) in script:
            raise ValueError("behind")
        return (record[0], "no number", record[2]) if ("misfit", record[2]) in script else record  # type: ignore[return-value]

    if kind == "both":
        both = CoProcess("own", Both(script), SCHEMA, (("k",), ("k",)), (SCHEMA, SCHEMA))
        return [both, Map("map", passing, SCHEMA)], 2
    if kind == "built-in":
        return aggregating(script, passing), 1
    content: Content = Aggregated(list, appended, lambda one, other: one + other, emitted(script))
    if kind == "collected":
        of = emitted(script)
        content = Collected(lambda key, window, rows: [of(key, window, [row[2] for row in rows])])
    windows = Session(3) if kind == "sessions" else Fixed(4, 2)
    function = window_function(windows, content, 3, "late")
    return [Map("map", passing, SCHEMA), Process("own", function, SCHEMA, ("k",), side=SIDE)], 1


def aggregating(script: Script, passing: Any) -> list[Any]:
    """Windows of built-in aggregates, whole batches at a time; a record at a time where nothing goes wrong."""

    def numbered(result: tuple[Any, ...]) -> Record:
        key, start, _, rows, total = result
        start_ms = round(start.timestamp() * 1_000)
        if ("timer", start_ms) in script:
            raise ValueError("timer")
        return key, start_ms, rows * LAST_ID + total

    function: Any = window_function(Fixed(4, 2), BuiltIn(PLAN), 3, "late")
    if not script and isinstance(script, frozenset):
        function.vectorized = lambda maps, timers: None
    window = Process("own", function, PLAN.output, ("k",), side=SIDE)
    return [Map("map", passing, SCHEMA), window, Map("numbered", numbered, SCHEMA)]


PLACES = {"both": ["early", "in place", "middle", "late", "behind", "misfit"]}


def rows_of(records: list[Record]) -> tuple[pa.RecordBatch, Any]:
    columns = list(zip(*records, strict=True))
    batch = pa.record_batch(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )
    return batch, np.array([time_ms for _, time_ms, _ in records], np.int64)


class Taken:
    """`ftlayer.functions.undo.PieceOfWork`: what came of rows, or of timers; a partitioner refuses some."""

    def __init__(self, size: int, came: TopologyResult | FiredTimers, refused: dict[int, None]) -> None:
        self.size = size
        self.failed = sorted({failure.row for failure in came.failures} | refused.keys())
        self.rows: list[Any] = []
        outputs = (
            came.outputs.items() if isinstance(came, TopologyResult) else [(o.tag, o) for o in came.outputs]
        )
        for tag, output in outputs:
            found = zip(output.batch.to_pylist(), output.parents.tolist(), strict=True)
            self.rows += [(tag, *row.values()) for row, parent in found if parent not in refused]

    @property
    def has_failures(self) -> bool:
        return bool(self.failed)


class Failing:
    """The chain with an undo log."""

    def __init__(self, kind: str, script: Script, log: UndoLog, backend: Any) -> None:
        self.script, self.log = script, log
        operators, inputs = operators_of(kind, script)
        self.chain = TopologyChain(operators, [SCHEMA] * inputs, backend, log)
        self.chain.open()

    def take(
        self, records: list[Record], input: int, watermark_ms: int, now_ms: int
    ) -> tuple[set[int], list[Any]]:
        """Return the places of records that failed, and what came of the others."""

        def run(start: int, most: int) -> Taken | None:
            part = records[start : start + most]
            if not part:
                return None
            try:
                result = self.chain.run(*rows_of(part), watermark_ms, now_ms, input=input)
                gone = {failure.row for failure in result.failures}
                refused = {
                    p: None for p, (*_, i) in enumerate(part) if ("route", i) in self.script and p not in gone
                }
                if refused:
                    self.log.late(min(refused))
                return Taken(len(part), result, refused)
            except LateFailure as late:
                raise LateFailure(start + late.row) from None

        pieces = list(in_pieces(self.log, len(records), run))
        failed = {start + place for start, piece in pieces for place in piece.failed}
        return failed, [row for _, piece in pieces for row in piece.rows]

    def fire(self, due: DueTimers, at_once: int) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the timers that were fired, those that failed, and what came of the others."""
        timers: list[tuple[Any, int]] = []

        def run(start: int, most: int) -> Taken | None:
            try:
                fired = due.fire(most)
            except LateFailure as late:
                raise LateFailure(start + late.row) from None
            timers[start:] = [] if fired is None else fired.timers
            return None if fired is None else Taken(len(fired.timers), fired, {})

        pieces = list(in_pieces(self.log, at_once, run))
        failed = [timers[start + place] for start, piece in pieces for place in piece.failed]
        return timers, failed, [row for _, piece in pieces for row in piece.rows]


def opened(kind: str, folder: str) -> Any:
    if kind == "dicts":
        return HeapBackend()
    config = CheckpointConfig(backend=kind, directory=folder)  # type: ignore[arg-type]
    storage: Any = None  # nothing is written
    return open_backend(config, BackendSpec(0, 16, 16, {"own": KEY}, folder), None, storage, "")


records = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 14)), min_size=1, max_size=12)
batches = st.lists(st.tuples(records, st.integers(0, 1), st.integers(-1, 14)), min_size=1, max_size=5)


@settings(max_examples=180, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["both", "both", "windows", "collected", "sessions", "built-in"]),
    st.sampled_from(["dicts", "heap", "lmdb"]),
    batches,
    st.integers(1, 20),
    st.data(),
)
def test_all_others_are_as_if_those_that_fail_had_never_come(
    tmp_path_factory: Any,
    kind: str,
    name: str,
    batches: list[tuple[list[tuple[str, int]], int, int]],
    at_once: int,
    data: Any,
) -> None:
    places = ["route", *PLACES.get(kind, ["behind"])]
    numbers = st.integers(0, sum(len(batch) for batch, _, _ in batches) - 1)
    wrong = st.tuples(st.sampled_from(places), numbers) | st.tuples(st.just("timer"), st.integers(-2, 14))
    script = data.draw(st.sets(wrong, max_size=8))
    own, others = opened(name, str(tmp_path_factory.mktemp("state"))), HeapBackend()
    failing = Failing(kind, script, UndoLog(), own)
    operators, inputs = operators_of(kind, frozenset())
    plain = TopologyChain(operators, [SCHEMA] * inputs, others)
    plain.open()
    begun, watermark_ms, now_ms = 0, -1, 0
    lost: list[tuple[Any, int]] = []

    def fire_as_plain(due: DueTimers, until_ms: int, *, are_set: bool = True) -> None:
        """Fire the same timers in the chain that nothing fails in, without those that fail."""
        timers, failed, rows = failing.fire(due, at_once)
        lost.extend(failed)
        expected: list[Any] = []
        for timer in timers:
            if are_set:
                # Also one that was set by another one of them.
                assert others.timers("own").event.delete(*timer)
            if timer not in failed:
                fired = plain.timers_again("own", "event", [timer], until_ms, now_ms).fire(1)
                assert fired is not None
                expected += Taken(1, fired, {}).rows
        assert sorted(rows) == sorted(expected)
        next_ms = plain.next_event_ms
        assert not are_set or next_ms is None or next_ms > until_ms

    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        for where, limit, value in (
            (layered, "MAX_FRONT", 4),
            (memory, "KEPT_BYTES", {"heap": 3_000, "lmdb": 6_000}),
            (memory, "MAX_BYTES", 300),
            (merging, "MAX_LAYERS", 1),
        ):
            patch.setattr(where, limit, value)
        for number, (batch, input, ahead) in enumerate(batches):
            given = [(k, t, begun + place) for place, (k, t) in enumerate(batch)]
            begun += len(given)
            input = min(input, inputs - 1)
            now_ms += 2
            failed, rows = failing.take(given, input, watermark_ms, now_ms)
            left = [record for place, record in enumerate(given) if place not in failed]
            expected = []
            for record in left:
                result = plain.run(*rows_of([record]), watermark_ms, now_ms, input=input)
                assert not result.failures
                expected += Taken(1, result, {}).rows
            assert sorted(rows) == sorted(expected)
            hit = {i for where, i in script if where != "timer" and not (input and where == "in place")}
            assert {given[place][2] for place in failed} == {i for *_, i in given if i in hit}
            if name != "dicts":
                # The layers of each snapshot are kept until the end, or not at all.
                frozen = own.freeze(Barrier(number + 1, 0))
                stack.callback(frozen.release) if number % 2 else frozen.release()
                own.tend(now_ms)
            watermark_ms = max(watermark_ms, ahead)
            fire_as_plain(failing.chain.due_event_timers(watermark_ms, now_ms), watermark_ms)
        script.clear()
        again, lost = lost, []
        due = failing.chain.timers_again("own", "event", again, watermark_ms, now_ms)
        fire_as_plain(due, watermark_ms, are_set=False)
        for input in range(inputs):
            # What is in state, once more: everything is read.
            given = [(key, 5, LAST_ID + place) for place, key in enumerate("abc")]
            failed, rows = failing.take(given, input, watermark_ms, now_ms)
            result = plain.run(*rows_of(given), watermark_ms, now_ms, input=input)
            assert (failed, sorted(rows)) == (set(), sorted(Taken(3, result, {}).rows))
        fire_as_plain(failing.chain.due_event_timers(LAST_WATERMARK_MS, now_ms), LAST_WATERMARK_MS)
    if name != "dicts":
        own.close()
