"""Tracebacks are made where a failure may be a record's, or a timer's, last."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure
from ftlayer.functions.chains.topology import TopologyChain
from ftlayer.functions.process import ProcessFunction
from ftlayer.functions.steps import Process
from ftlayer.functions.undo import UndoLog
from ftlayer.state.heap import HeapBackend

KT = pa.schema([("k", pa.string()), ("t", pa.int64())])


class Failing(ProcessFunction):
    """Fails for all that is not 0, and for all timers."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def process(self, record: Any, ctx: Any) -> None:
        if record[1]:
            raise self.error
        ctx.timers.event(1)

    def on_timer(self, time_ms: int, ctx: Any) -> None:
        raise self.error


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), PermanentFailure("never")])
def test_what_is_tried_again_has_no_traceback(error: Exception, traced: bool) -> None:
    log = UndoLog()
    chain = TopologyChain([Process("p", Failing(error), KT, ("k",))], [KT], HeapBackend(), log)
    log.traced = traced
    rows = pa.RecordBatch.from_pylist([{"k": "a", "t": 0}, {"k": "a", "t": 1}], KT)
    (failure,) = chain.run(rows, None, 0, 0).failures
    log.forget()
    fired = chain.due_event_timers(1, 0).fire(10)
    assert fired is not None
    for found in (failure, *fired.failures):
        assert str(error) in found.reason
        assert ("in process" in found.traceback or "in on_timer" in found.traceback) == (
            traced or found.fatal
        )
    assert failure.fatal == isinstance(error, PermanentFailure)
