"""Async and generator functions where a plain one is called: a call runs nothing of them, so none is taken for done."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.datasource import DataSourceStreamReader, DataSourceStreamWriter, WriterCommitMessage

from ftlayer.checkpoint.dead_letters.announcer import StreamTeller
from ftlayer.common.checks import check_function
from ftlayer.common.rules.restart import check_strategy
from ftlayer.errors import ConfigError, JobError, SourceError
from ftlayer.functions.chains.segments import Chain
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.process import CoProcessFunction, ProcessFunction
from ftlayer.functions.retry_rules import rules_of
from ftlayer.functions.steps import Filter, Map, Process
from ftlayer.functions.writing import call_commit
from ftlayer.runtime.connectors.lane import BatchLimits
from ftlayer.runtime.connectors.readers import PushReader
from ftlayer.runtime.connectors.sinks import FunctionSinkBody
from ftlayer.spark.batch.sinks import BatchFunctionSink, EmitSink
from ftlayer.spark.facade import FTLayer
from ftlayer.spark.plan.stream_plan import StreamPlan
from ftlayer.spark.tracked import TrackedStream
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.builder import GraphBuilder
from ftlayer.topology.connectors import partitions
from ftlayer.topology.operators import PushSource, Source
from ftlayer.topology.streams.windowed_stream import tumbling
from ftlayer.vertex import calls

V = pa.schema([("v", pa.int64())])


class Message(WriterCommitMessage):
    """Of a writer."""


ENV = GraphBuilder("shop", parallelism=1)
STREAM = ENV.source(range(3), "v bigint, ts timestamp", uid="in")
KEYED = STREAM.key_by("v")
TIMED = STREAM.assign_watermarks("ts").key_by("v")
WINDOWS = TIMED.window(tumbling("1s"))
NOTHING_READ: Any = SimpleNamespace(rules=None)
NO_COLUMNS: Any = SimpleNamespace(names=[])
LAYER: Any = SimpleNamespace(enabled=True)
WRAPPED = TrackedStream(StreamPlan(LAYER, NOTHING_READ, NO_COLUMNS))


def makers(takes: int) -> list[Callable[..., Any]]:
    """A function of so many arguments, of each kind that runs nothing when it is called."""
    names = ", ".join("abc"[:takes])
    made: dict[str, Any] = {}
    for text in (
        f"async def waits({names}): pass",
        f"def yields({names}): yield 1",
        f"async def both({names}): yield 1",
    ):
        exec(text, made)
    return [made["waits"], made["yields"], made["both"]]


def batch(rows: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(range(rows), pa.int64())], schema=V)


# ---------------------------------------------------------------- where they are given

GIVEN: list[tuple[str, int, bool, Callable[[Any], Any]]] = [
    ("map", 1, False, lambda f: STREAM.map(f)),
    ("flat_map", 1, True, lambda f: STREAM.flat_map(f)),
    ("filter", 1, False, lambda f: STREAM.filter(f)),
    ("map_batches", 1, False, lambda f: STREAM.map_batches(f)),
    ("partition_custom", 2, False, lambda f: STREAM.partition_custom(f, "v")),
    ("sink", 1, False, lambda f: STREAM.sink(f)),
    ("source", 0, True, lambda f: ENV.source(f, "v bigint")),
    ("partition 0", 0, True, lambda f: partitions(f)),
    ("PushSource: start", 1, False, lambda f: PushSource(f)),
    ("reduce", 2, False, lambda f: KEYED.reduce(f)),
    ("aggregate: create", 0, False, lambda f: KEYED.aggregate(f, max, "v bigint")),
    ("aggregate: add", 2, False, lambda f: KEYED.aggregate(int, f, "v bigint")),
    (
        "join: function",
        2,
        False,
        lambda f: TIMED.join(TIMED, lower=0, upper=1, function=f, schema="v bigint"),
    ),
    ("reduce: function", 2, False, lambda f: WINDOWS.reduce(f)),
    ("reduce: result", 3, False, lambda f: WINDOWS.reduce(max, "v bigint", result=f)),
    ("aggregate: create", 0, False, lambda f: WINDOWS.aggregate(f, max, "v bigint")),
    ("aggregate: add", 2, False, lambda f: WINDOWS.aggregate(int, f, "v bigint")),
    ("aggregate: result", 3, False, lambda f: WINDOWS.aggregate(int, max, "v bigint", result=f)),
    ("aggregate: merge", 2, False, lambda f: WINDOWS.aggregate(int, max, "v bigint", merge=f)),
    ("process: function", 3, True, lambda f: WINDOWS.process(f, "v bigint")),
    ("map: retry_on", 1, False, lambda f: STREAM.map(abs, retry_on=f)),
    ("FTLayer.embedded: dead_on", 1, False, lambda f: FTLayer.embedded("x", dead_on=f)),
    ("on_dead", 1, False, lambda f: FTLayer.embedded("x", on_dead=f)),
    ("map", 1, False, lambda f: WRAPPED.map(f, "v bigint")),
    ("flat_map", 1, True, lambda f: WRAPPED.flat_map(f, "v bigint")),
    ("filter", 1, False, lambda f: WRAPPED.filter(f)),
    ("map_batches", 1, False, lambda f: WRAPPED.map_batches(f, "v bigint")),
    ("transform", 1, False, lambda f: WRAPPED.transform(f)),
    ("sink", 2, False, lambda f: WRAPPED.sink(f, checkpoint="c", name="n")),
    ("emit", 2, False, lambda f: WRAPPED.emit(f, checkpoint="c", name="n")),
    (
        "restart: SimpleNamespace.on_failure",
        1,
        False,
        lambda f: check_strategy(SimpleNamespace(on_failure=f), "restart"),
    ),
]


@pytest.mark.parametrize(
    ("option", "takes", "may_yield", "give"), GIVEN, ids=[f"{i}-{g[0]}" for i, g in enumerate(GIVEN)]
)
def test_they_are_refused_where_they_are_given(
    option: str, takes: int, may_yield: bool, give: Callable[[Any], Any]
) -> None:
    waits, yields, both = makers(takes)
    for function, said in ((waits, "async function"), (both, "async generator function")):
        with pytest.raises(ConfigError, match=f"{option}.*{said}.*asyncio.run"):
            give(function)
    if not may_yield:
        with pytest.raises(ConfigError, match=rf"{option}.*got the generator function yields.*runs nothing"):
            give(yields)


class AsyncCall:
    async def __call__(self, record: Any) -> Any:
        return record

    async def method(self, record: Any) -> Any:
        return record

    @staticmethod
    def plain(record: Any) -> Any:
        return record


class AsyncStatic:
    @staticmethod
    async def __call__(record: Any) -> Any:
        return record


async def of_two(first: Any, record: Any) -> Any:
    return record


@pytest.mark.parametrize(
    "hidden",
    [
        AsyncCall(),
        AsyncStatic(),
        AsyncCall().method,
        functools.partial(of_two, 1),
        functools.partial(functools.partial(AsyncCall().method)),
        functools.partial(AsyncCall()),
    ],
)
def test_they_are_found_behind_objects_methods_and_partials(hidden: Any) -> None:
    with pytest.raises(ConfigError, match=r"it: .*async function"):
        check_function(hidden, "it", takes=1)
    STREAM.map_async(hidden)


def test_what_runs_when_it_is_called_is_taken() -> None:
    _, yields, _ = makers(1)
    for plain in (abs, str, AsyncCall, AsyncCall().plain, functools.partial(max, 1), [].append, lambda v: v):
        check_function(plain, "it")
    STREAM.flat_map(yields)
    ENV.source(makers(0)[1], "v bigint")
    WINDOWS.process(makers(3)[1], "v bigint")


@pytest.mark.parametrize("name", ["open", "process", "on_timer", "close"])
def test_methods_of_process_functions(name: str) -> None:
    waits, yields, both = (staticmethod(made) for made in makers({"open": 1, "close": 0}.get(name, 2)))
    for made in (waits, both) if name in ("process", "on_timer") else (waits, yields, both):
        function = type("Own", (ProcessFunction,), {name: made})()
        with pytest.raises(ConfigError, match=rf"process: Own\.{name}"):
            KEYED.process(function)
    if name in ("process", "on_timer"):
        KEYED.process(type("Own", (ProcessFunction,), {name: yields})())


@pytest.mark.parametrize("name", ["process_left", "process_right", "on_timer", "open"])
def test_methods_of_functions_of_two_streams(name: str) -> None:
    function = type("Own", (CoProcessFunction,), {name: staticmethod(makers(2)[0])})()
    with pytest.raises(ConfigError, match=rf"connect.*process: Own\.{name}"):
        KEYED.connect(KEYED).process(function, "v bigint")


@pytest.mark.parametrize("name", ["write", "commit", "abort"])
def test_methods_of_writers(name: str) -> None:
    for made in makers(2):
        plain = {"write": staticmethod(lambda rows: Message())}
        writer = type("Own", (DataSourceStreamWriter,), {**plain, name: staticmethod(made)})()
        with pytest.raises(ConfigError, match=rf"sink: Own\.{name}"):
            STREAM.sink(writer)


def test_methods_of_readers() -> None:
    for name, made in (("read", makers(1)[0]), ("latestOffset", makers(0)[1]), ("commit", makers(1)[0])):
        plain = {"read": staticmethod(lambda part: [])}
        reader = type("Own", (DataSourceStreamReader,), {**plain, name: staticmethod(made)})()
        with pytest.raises(ConfigError, match=rf"source: Own\.{name}"):
            ENV.source(reader, "v bigint")


# ---------------------------------------------------------------- what a call returns


async def waiting(*given: Any) -> bool:
    return False


def yielding(*given: Any) -> Iterator[bool]:
    yield False


async def awaitable_generator(*given: Any) -> AsyncIterator[bool]:
    yield False


def future(*given: Any) -> Any:
    return asyncio.Future(loop=asyncio.new_event_loop())


UNRUN = [waiting, yielding, awaitable_generator, future]
"""Behind a plain function, as a decorator puts one there: what is given does not show it."""


def hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: function(*given)


@pytest.mark.parametrize("function", UNRUN)
def test_a_filter_that_has_not_run_fails_its_records(function: Callable[..., Any]) -> None:
    result = Chain([Filter("keep", hidden(function), V)]).run(batch(2))
    assert [failure.operator for failure in result.failures] == ["keep", "keep"]
    assert "it has not run" in result.failures[0].reason
    chain = TopologyChain([Filter("keep", hidden(function), V)], [V], HeapBackend())
    assert len(chain.run(batch(2), None, 0, 0).failures) == 2


@pytest.mark.parametrize("truth", [np.bool_(True), 3, "x", [1]])
def test_what_is_true_without_being_true_keeps_a_record(truth: Any) -> None:
    result = Chain([Filter("keep", lambda record: truth if record["v"] else None, V)]).run(batch(2))
    rows = [row for batch, _ in result.batches for row in batch.to_pylist()]
    assert (rows, result.failures) == ([{"v": 1}], [])


@pytest.mark.parametrize("function", UNRUN)
def test_a_sink_that_has_not_run_fails_its_records(function: Callable[..., Any]) -> None:
    settled = FunctionSinkBody("out", hidden(function)).write(batch(2), 0)
    assert [failure.row for failure in settled.failures] == [0, 1]
    assert "'out' returned" in settled.failures[0].reason
    result: Any = SimpleNamespace(
        good_rows=lambda: None, tagged_rows=lambda: None, emitted_rows=lambda column, incarnation: None
    )
    for sink in (BatchFunctionSink(hidden(function)), BatchFunctionSink(hidden(function), tagged=True)):
        with pytest.raises(TypeError, match="'sink' returned"):
            sink.write(1, result, 1)
    with pytest.raises(TypeError, match="emit: the function returned"):
        EmitSink(hidden(function), "ft").write(1, result, 1)


@pytest.mark.parametrize("function", UNRUN)
def test_a_rule_that_has_not_run_says_nothing(function: Callable[..., Any]) -> None:
    for rules in (rules_of(hidden(function), None, "it"), rules_of(None, hidden(function), "it")):
        decision = rules.decide(ValueError("x"))
        assert not decision.fatal
        assert "has not run" in decision.note


def test_a_letter_whose_callback_has_not_run_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        def call(self, call: Any) -> Any:
            assert not isinstance(call, calls.PutCursor)
            return calls.Cursor(b"")

    monkeypatch.setattr(
        "ftlayer.checkpoint.dead_letters.announcer.letters_behind", lambda *given: [SimpleNamespace(key=b"1")]
    )
    monkeypatch.setattr("ftlayer.checkpoint.dead_letters.announcer.letter_of", lambda info: info)
    client: Any = Client()
    teller = StreamTeller(client, "in", hidden(waiting))
    assert not teller.step()
    assert "has not run" in teller.last_failure


def test_a_listener_that_has_not_run_is_a_failed_source() -> None:
    source = Source("in", PushSource(hidden(waiting)), V)
    failed = threading.Event()
    reader = PushReader(source, 0, BatchLimits(1, 0), failed.set)
    reader.start()
    assert failed.wait(600)
    with pytest.raises(SourceError, match="has not run"):
        reader.take(0)


def test_an_open_that_has_not_run_ends_the_task() -> None:
    class Opens(ProcessFunction):
        open = staticmethod(hidden(waiting))

        def process(self, record: Any, ctx: Any) -> Any:
            return [record]

    chain = TopologyChain([Process("op", Opens(), V, ())], [V], HeapBackend())
    with pytest.raises(JobError, match=r"open\(\) of 'op'.*has not run"):
        chain.open()


def test_a_map_that_has_not_run_fails_its_records() -> None:
    for function in UNRUN:
        result = Chain([Map("m", hidden(function), V)]).run(batch(2))
        assert [failure.operator for failure in result.failures] == ["m", "m"]


@pytest.mark.parametrize("function", UNRUN)
def test_a_commit_that_has_not_run_is_a_failed_one(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"SimpleNamespace.commit returned.*has not run"):
        call_commit(SimpleNamespace(commit=hidden(function)), [Message()], 1)


def test_functions_of_aggregating_state() -> None:
    class Opens(ProcessFunction):
        def __init__(self, ask: Callable[[Any], Any]) -> None:
            self.ask = ask

        def open(self, ctx: Any) -> None:
            self.ask(ctx)

    for ask in (
        lambda ctx: ctx.reducing("sum", waiting),
        lambda ctx: ctx.aggregating("sum", waiting, max),
        lambda ctx: ctx.aggregating("sum", int, yielding),
        lambda ctx: ctx.aggregating("sum", int, max, waiting),
    ):
        chain = TopologyChain([Process("op", Opens(ask), V, ("v",))], [V], HeapBackend())
        with pytest.raises(ConfigError, match=r"state 'sum': .* function"):
            chain.open()
