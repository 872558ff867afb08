"""Which operator a failure is about: by uid, and by what it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure
from ftlayer.common.rules.restart import lasting
from ftlayer.errors import FTLayerError, FunctionLoadError
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.pickling import missing_in
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Map, Process
from ftlayer.state.heap import HeapBackend
from ftlayer.topology.job_graph import JobGraph, JobVertex, operators_needing, placed
from ftlayer.topology.operators import FunctionSink, IterableSource, Sink, Source

ID = pa.schema([("id", pa.int64())])


@pytest.fixture
def helper() -> Iterator[ModuleType]:
    module = ModuleType("helper")
    exec("def same(record):\n    return record\nclass Given:\n    pass\n", vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def graph(*operators: Any) -> JobGraph:
    source = Source("numbers", IterableSource((iter,)), ID)
    vertex = JobVertex("numbers", (source, *operators, Sink("out", FunctionSink(print), ID)), 1)
    return JobGraph("job", (vertex,), (), tracked=False)


def test_what_needs_a_module_that_is_missing_is_found_in_its_pickle(helper: Any) -> None:
    def by_value(record: Any) -> Any:
        return helper.same(record)

    job = graph(Map("plain", lambda it: it, ID), Map("a", helper.same, ID), Map("b", by_value, ID))
    assert operators_needing("helper", job) == "'a' (map(same)), 'b' (map(by_value))"
    assert operators_needing("", job) == ""
    assert operators_needing("nobody_needs_it", job) == ""


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("ModuleNotFoundError: No module named 'helper.part'", "helper.part"),
        ("ImportError: cannot import name 'same' from 'helper' (helper.py)", "same"),
        ("AttributeError: Can't get attribute 'same' on <module 'helper' from 'helper.py'>", "same"),
        ("ModuleNotFoundError: No module named 'x'\nModuleNotFoundError: No module named 'y'", "y"),
        ("MemoryError", ""),
    ],
)
def test_what_is_missing_is_taken_from_pythons_words(said: str, missing: str) -> None:
    assert missing_in(said) == missing


def test_a_reason_is_given_its_operator_once() -> None:
    job = graph(Map("parse", abs, ID))
    assert placed("no such host", "parse", job) == "'parse' (map(abs)): no such host"
    assert placed("'parse' uses the state 'n' twice", "parse", job) == "'parse' uses the state 'n' twice"
    assert placed("no such host", "", job) == "no such host"
    assert placed("no such host", "gone", job) == "'gone': no such host"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModuleNotFoundError("No module named 'helper'"), FunctionLoadError),
        (PermanentFailure("no such host"), PermanentFailure),
    ],
)
def test_what_open_raises_is_known_by_its_operator(error: Exception, kind: type[FTLayerError]) -> None:
    class Opens(ProcessFunction):
        def open(self, ctx: Any) -> None:
            raise error

    chain = TopologyChain([Process("count", Opens(), ID, ())], [ID], HeapBackend())
    with pytest.raises(FTLayerError) as raised:
        chain.open()
    found = lasting(raised.value)
    assert type(found) is kind
    assert found.operator == "count"
