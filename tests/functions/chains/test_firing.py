"""Timers of process functions: when they fire, in which order, and where their results go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.common.rules.restart import lasting
from ftlayer.errors import ResultRowError, TimerFailedError
from ftlayer.functions.chains import firing
from ftlayer.functions.chains.topology import MAIN, TimerOutput, TopologyChain
from ftlayer.functions.process import LAST_WATERMARK_MS, CoProcessFunction, ProcessFunction, uses_timers
from ftlayer.functions.steps import CoProcess, Filter, Map, MapBatches, Process, Reduce
from ftlayer.functions.undo import UndoLog
from ftlayer.state.heap import HeapBackend

KT = pa.schema([("k", pa.string()), ("t", pa.int64())])

Record = tuple[str, int]


def rows(records: list[Record]) -> pa.RecordBatch:
    return pa.record_batch(
        {
            "k": pa.array([k for k, _ in records], pa.string()),
            "t": pa.array([t for _, t in records], pa.int64()),
        },
        schema=KT,
    )


def chain_of(*operators: Any, log: UndoLog | None = None) -> TopologyChain:
    return TopologyChain(operators, [KT], HeapBackend(), log)


def records_of(output: TimerOutput) -> list[Record]:
    return [(row["k"], row["t"]) for row in output.batch.to_pylist()]


def times_of(output: TimerOutput) -> list[int]:
    assert output.times is not None
    assert output.times.dtype == np.int64
    return output.times.tolist()


class Alarm(ProcessFunction):
    """Sets a timer for each record's ``t``, and emits (key, time) when it fires."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event(record[1])
        ctx.timers.processing(record[1])

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return [(ctx.key, time_ms)]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30)), max_size=6), st.integers(0, 30)
        ),
        max_size=6,
    ),
    st.integers(1, 3),
)
def test_each_timer_fires_once_in_order_when_its_time_has_come(
    rounds: list[tuple[list[Record], int]], at_once: int
) -> None:
    chain = chain_of(Process("p", Alarm(), KT, ("k",)))
    event: list[Record] = []
    processing: list[Record] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(firing, "FIRED_AT_ONCE", at_once)
        for records, now in rounds:
            assert chain.run(rows(records), None, 0, 0).outputs[MAIN].batch.num_rows == 0
            event = list(dict.fromkeys(event + records))
            processing = list(dict.fromkeys(processing + records))
            for waiting, outputs, is_event in (
                (event, chain.fire_event_timers(now, 0), True),
                (processing, chain.fire_processing_timers(now), False),
            ):
                due = sorted((r for r in waiting if r[1] <= now), key=lambda r: r[1])
                waiting[:] = [record for record in waiting if record not in due]
                assert set(outputs) == ({MAIN} if due else set())
                if due:
                    assert records_of(outputs[MAIN]) == due
                    assert (outputs[MAIN].times is not None) == is_event
                    if is_event:
                        assert times_of(outputs[MAIN]) == [time for _, time in due]
            assert chain.next_event_ms == min((time for _, time in event), default=None)
            assert chain.next_processing_ms == min((time for _, time in processing), default=None)


def test_results_of_a_timer_go_through_the_rest_of_the_chain() -> None:
    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [batch.column(0), pa.array([2 * t for t in batch[1].to_pylist()])], schema=KT
        )

    for rest in (
        [Map("m", lambda r: (r[0], 2 * r[1]), KT), Filter("f", lambda r: r[0] != "b", KT)],
        [MapBatches("m", double, KT, "arrow", False), Filter("f", lambda r: r[0] != "b", KT)],
        [Filter("f", lambda r: r[0] != "b", KT), MapBatches("m", double, KT, "arrow", False)],
    ):
        chain = chain_of(
            Process("p", Alarm(), KT, ("k",)),
            *rest,
            Reduce("r", lambda a, b: (a[0], a[1] + b[1]), KT, ("k",)),
        )
        chain.run(rows([("a", 3), ("b", 1), ("a", 1), ("c", 9)]), None, 0, 0)
        output = chain.fire_event_timers(5, 0)[MAIN]
        assert records_of(output) == [("a", 2), ("a", 8)]
        assert times_of(output) == [1, 3]
        assert records_of(chain.fire_event_timers(9, 0)[MAIN]) == [("c", 18)]


class Relay(ProcessFunction):
    """Emits what it gets and sets a timer at its time, which puts out (key, watermark seen)."""

    def process(self, record: Any, ctx: Any) -> Any:
        ctx.timers.event(record[1])
        ctx.output("seen", (record[0], ctx.watermark))
        return ()

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        assert ctx.timestamp == time_ms
        ctx.output("fired", (ctx.key, ctx.now_ms))
        yield (ctx.key, time_ms)


def test_one_operators_timers_come_before_the_next_ones_watermark() -> None:
    chain = chain_of(
        Process("first", Alarm(), KT, ("k",)),
        Process("second", Relay(), KT, ("k",), (("seen", KT), ("fired", KT))),
    )
    chain.run(rows([("a", 5), ("b", 3)]), None, 2, 0)
    outputs = chain.fire_event_timers(4, 77)
    assert records_of(outputs["seen"]) == [("b", 2)]
    assert records_of(outputs["fired"]) == [("b", 77)]
    assert records_of(outputs[MAIN]) == [("b", 3)]
    assert [times_of(outputs[tag]) for tag in ("seen", "fired", MAIN)] == [[3], [3], [3]]


class Lazy(ProcessFunction):
    """A session's end: a timer finds out when the last record came, and sets the next one."""

    def process(self, record: Any, ctx: Any) -> None:
        ctx.value("last").set(record[1])
        if ctx.value("due").get() is None:
            ctx.value("due").set(record[1] + 10)
            ctx.timers.event(record[1] + 10)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        end = ctx.value("last").get() + 10
        if time_ms >= end:
            return [(ctx.key, end)]
        ctx.timers.event(end)
        return None


def test_a_timer_that_is_set_while_others_fire_has_its_turn() -> None:
    chain = chain_of(Process("p", Lazy(), KT, ("k",)))
    chain.run(rows([("a", 0), ("b", 1), ("a", 8), ("c", 3)]), None, 0, 0)
    output = chain.fire_event_timers(17, 0)[MAIN]
    assert records_of(output) == [("b", 11), ("c", 13)]
    assert chain.next_event_ms == 18
    assert records_of(chain.fire_event_timers(LAST_WATERMARK_MS, 0)[MAIN]) == [("a", 18)]


def test_a_timer_can_be_taken_back_before_its_turn() -> None:
    class Cancelling(Alarm):
        def on_timer(self, time_ms: int, ctx: Any) -> Any:
            ctx.timers.delete_event(time_ms + 1)
            ctx.timers.delete_processing(time_ms + 1)
            return [(ctx.key, time_ms)]

    chain = chain_of(Process("p", Cancelling(), KT, ("k",)))
    chain.run(rows([("a", 1), ("a", 2), ("b", 2), ("a", 3)]), None, 0, 0)
    expected = [("a", 1), ("b", 2), ("a", 3)]
    assert records_of(chain.fire_event_timers(9, 0)[MAIN]) == expected


class Endless(ProcessFunction):
    def process(self, record: Any, ctx: Any) -> None:
        ctx.timers.event(0)
        ctx.timers.processing(0)

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        if ctx.timestamp is None:
            ctx.timers.processing(time_ms)
        else:
            ctx.timers.event(time_ms + 1)
        return [(ctx.key, time_ms)]


def test_timers_that_are_set_without_end() -> None:
    chain = chain_of(Process("p", Endless(), KT, ("k",)))
    chain.run(rows([("a", 0), ("b", 0)]), None, 0, 0)
    assert len(records_of(chain.fire_processing_timers(0)[MAIN])) == 2
    assert chain.next_processing_ms == 0
    assert records_of(chain.fire_event_timers(1, 0)[MAIN]) == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    with pytest.raises(TimerFailedError, match="LAST_WATERMARK_MS") as caught:
        chain.fire_event_timers(LAST_WATERMARK_MS, 0)
    assert caught.value.operator == "p"


@pytest.mark.parametrize(
    ("on_timer", "says"),
    [
        (lambda self, time, ctx: 1 // 0, "ZeroDivisionError"),
        (lambda self, time, ctx: [(ctx.key, "text")], "does not fit its schema"),
        (lambda self, time, ctx: ctx.output("side", "text"), "put out to 'side'"),
        (lambda self, time, ctx: "text", "wrap it in a list"),
    ],
)
@pytest.mark.parametrize("log", [None, UndoLog()])
def test_a_failure_of_a_timer_names_the_operator(on_timer: Any, says: str, log: UndoLog | None) -> None:
    function = type("Failing", (Alarm,), {"on_timer": on_timer})()
    chain = chain_of(Process("p", function, KT, ("k",), (("side", KT),)), log=log)
    chain.run(rows([("a", 1)]), None, 0, 0)
    with pytest.raises(TimerFailedError, match="no record can be blamed") as caught:
        chain.fire_event_timers(1, 0)
    assert caught.value.operator == "p"
    assert says in str(caught.value)
    assert caught.value.traceback
    # A result that does not fit would not fit again; any other failure may have been of the moment.
    misfit = "fit its schema" in says or "put out" in says
    assert isinstance(lasting(caught.value), ResultRowError) == misfit


def test_a_failure_behind_a_timer_names_the_operator_behind() -> None:
    def refuse(record: Record) -> Record:
        raise ValueError(record)

    chain = chain_of(Process("p", Alarm(), KT, ("k",)), Map("m", refuse, KT))
    chain.run(rows([("a", 1)]), None, 0, 0)
    with pytest.raises(TimerFailedError, match="'m' failed for a timer") as caught:
        chain.fire_processing_timers(1)
    assert caught.value.operator == "m"


def test_out_of_memory_in_a_timer_fails_it_as_all_else() -> None:
    def on_timer(self: Any, time_ms: int, ctx: Any) -> Any:
        raise MemoryError

    function = type("Failing", (Alarm,), {"on_timer": on_timer})()
    chain = chain_of(Process("p", function, KT, ("k",)))
    chain.run(rows([("a", 1)]), None, 0, 0)
    with pytest.raises(TimerFailedError, match="MemoryError"):
        chain.fire_event_timers(1, 0)


@pytest.mark.parametrize("time", [1.5, "1", None, 2**63])
def test_a_timers_time_is_a_whole_number_of_milliseconds(time: Any) -> None:
    class Setting(Alarm):
        def process(self, record: Any, ctx: Any) -> None:
            ctx.timers.event(time)

    result = chain_of(Process("p", Setting(), KT, ("k",))).run(rows([("a", 1)]), None, 0, 0)
    assert "a timer's time is" in result.failures[0].reason


class Meeting(CoProcessFunction):
    def process_left(self, record: Any, ctx: Any) -> None:
        ctx.timers.event(record[1])

    process_right = process_left

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        return [(ctx.key, time_ms)]


def test_both_inputs_set_the_same_timers() -> None:
    chain = TopologyChain(
        [CoProcess("c", Meeting(), KT, (("k",), ("k",)), (KT, KT)), Map("m", lambda r: r, KT)],
        [KT, KT],
        HeapBackend(),
    )
    chain.run(rows([("a", 1), ("b", 2)]), None, 0, 0, input=0)
    chain.run(rows([("a", 1), ("a", 2)]), None, 0, 0, input=1)
    assert records_of(chain.fire_event_timers(5, 0)[MAIN]) == [("a", 1), ("b", 2), ("a", 2)]
    assert chain.progress == 4 + 3 + 3


def test_timers_count_as_progress_and_who_uses_them_is_known() -> None:
    chain = chain_of(Process("p", Alarm(), KT, ("k",)))
    chain.run(rows([("a", 1), ("b", 1)]), None, 0, 0)
    before = chain.progress
    chain.fire_event_timers(1, 0)
    assert chain.progress > before
    assert uses_timers(Alarm())
    assert uses_timers(Meeting())
    assert not uses_timers(ProcessFunction())
    assert not uses_timers(CoProcessFunction())


class Dated(Alarm):
    """Gives its results another time than the timer's."""

    def on_timer(self, time_ms: int, ctx: Any) -> Any:
        ctx.timestamp = time_ms - 100
        return [(ctx.key, time_ms)] * 2


def test_on_timer_may_say_the_time_of_what_it_returns() -> None:
    chain = chain_of(Process("p", Dated(), KT, ("k",)))
    chain.run(rows([("a", 5), ("b", 7)]), None, 0, 0)
    assert times_of(chain.fire_event_timers(10, 0)[MAIN]) == [-95, -95, -93, -93]
    assert chain.fire_processing_timers(10)[MAIN].times is None
