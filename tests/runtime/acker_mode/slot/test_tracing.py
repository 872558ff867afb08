"""Spans of what a slot does with records that are followed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ftlayer.common.telemetry import EndedSpan
from ftlayer.records.traced import Sampler, attempt_span, record_span, trace_of
from ftlayer.runtime.acker_mode.slot import rules as tracing
from ftlayer.runtime.acker_mode.slot.rules import AckerTracer, FailCall, PersistCall
from ftlayer.runtime.handler import RecordIds
from ftlayer.runtime.protocol.messages import Batch
from ftlayer.runtime.slot.rules.events import RunTask
from ftlayer.runtime.task.actions import ElementCame, Replayed, RowsPersisted, SourceOver, TimeCame
from ftlayer.topology.job_graph import Channel
from ftlayer.vertex.calls import Failure, Persist, Records

KEY = "parse", 1
SOURCE = "orders", 0


def u64(*values: int) -> Any:
    return np.array(values, np.uint64)


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch([list(range(count))], ["n"])


def run_of(lineage: RecordIds) -> RunTask:
    batch = Batch(rows(len(lineage)), lineage)
    return RunTask(KEY, ElementCame(Channel(0, 0, 1), batch), (lineage.roots,), lineage)


@pytest.fixture
def spans() -> list[EndedSpan]:
    return []


@pytest.fixture
def tracer(spans: list[EndedSpan]) -> AckerTracer:
    return AckerTracer(Sampler(1.0), "shop", 2, spans.append)


def test_each_record_of_a_batch_has_the_span_of_its_run(tracer: AckerTracer, spans: list[EndedSpan]) -> None:
    lineage = RecordIds(u64(5, 9), u64(50, 90), None, u64(5, 3))
    failure = Failure(9, "no", "parse", "Traceback")
    tracer.ran(run_of(lineage), [FailCall((failure,))], 100, 250)
    first, second = spans
    assert (first.trace, first.parent, first.name) == (trace_of(5), attempt_span(5), "parse")
    assert (first.start_ns, first.end_ns, first.error) == (100, 250, None)
    assert first.attributes == {
        "ftlayer.topology": "shop",
        "ftlayer.operator": "parse",
        "ftlayer.subtask": 1,
        "ftlayer.slot": 2,
        "ftlayer.root": "0000000000000005",
        "ftlayer.batch.records": 2,
    }
    assert (second.trace, second.parent) == (trace_of(3), attempt_span(9))
    assert second.error is not None
    assert (second.error.message, second.error.operator) == ("no", "parse")
    assert first.span != second.span


def test_a_joined_record_is_in_the_traces_of_all_its_roots(
    tracer: AckerTracer, spans: list[EndedSpan]
) -> None:
    lineage = RecordIds(u64(5, 6, 5), u64(1, 2, 3), np.array([0, 2, 3], np.int32))
    tracer.ran(run_of(lineage), [], 1, 2)
    assert [span.trace for span in spans] == [trace_of(5), trace_of(6)]


def test_a_source_s_span_begins_with_the_read_and_ends_when_the_rows_leave(
    tracer: AckerTracer, spans: list[EndedSpan]
) -> None:
    call = Persist("shop/orders", rows(2), u64(5, 6), u64(1, 2))
    tracer.ran(RunTask(SOURCE, SourceOver()), [PersistCall(SOURCE, 4, call)], 100, 110)
    assert spans == []
    tracer.ran(RunTask(SOURCE, RowsPersisted(3)), [], 120, 130)
    assert spans == []
    tracer.ran(RunTask(SOURCE, RowsPersisted(4)), [], 900, 910)
    assert [(span.trace, span.span, span.parent) for span in spans] == [
        (trace_of(root), record_span(root), 0) for root in (5, 6)
    ]
    assert {(span.name, span.start_ns, span.end_ns) for span in spans} == {("orders", 100, 910)}
    tracer.ran(RunTask(SOURCE, RowsPersisted(4)), [], 920, 930)
    assert len(spans) == 2


def test_replays_go_on_in_the_trace_of_their_origin(tracer: AckerTracer, spans: list[EndedSpan]) -> None:
    records = Records(rows(1), u64(77), u64(5), np.array([3], np.int32))
    tracer.ran(RunTask(("orders/replay", 0), Replayed((records,))), [], 1, 2)
    (span,) = spans
    assert (span.trace, span.parent, span.name) == (trace_of(5), attempt_span(77), "replay orders/replay")
    assert span.attributes["ftlayer.attempt"] == 3


def test_what_is_not_picked_has_none_and_there_is_a_bound(
    spans: list[EndedSpan], monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = np.arange(1, 1_001, dtype=np.uint64)
    sampler = Sampler(0.05)
    tracer = AckerTracer(sampler, "shop", 0, spans.append)
    tracer.ran(run_of(RecordIds(roots, roots)), [], 1, 2)
    assert [span.trace for span in spans] == [trace_of(root) for root in roots[sampler.mask(roots)].tolist()]
    monkeypatch.setattr(tracing, "MAX_A_RUN", 7)
    spans.clear()
    AckerTracer(Sampler(1.0), "shop", 0, spans.append).ran(run_of(RecordIds(roots, roots)), [], 1, 2)
    assert len(spans) == 7


def test_runs_without_records_are_nothing(tracer: AckerTracer, spans: list[EndedSpan]) -> None:
    tracer.ran(RunTask(KEY, TimeCame()), [FailCall((Failure(5, "no", "parse"),))], 1, 2)
    assert spans == []
