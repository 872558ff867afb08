"""What the vertex refuses of announcements and orders that could be read."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import (
    AnnounceJob,
    AskJob,
    BatchDetails,
    Call,
    CheckpointDetails,
    GetJob,
    HistogramDetails,
    Incident,
    JobDetails,
    JobKind,
    JobOrder,
    OrderAction,
    OrderAnswer,
    OrderState,
    SlotDetails,
    SubtaskDetails,
)
from ftlayer.vertex.wire.frames import decode_call, encode_call

JOB = JobDetails("orders", "orders", JobKind.TOPOLOGY, "run-1", "acker", "running", False, 5, 6)
ORDER = JobOrder("o-1", "orders", "run-1", OrderAction.STACK, "me", 7, slot=0)


def announce(**changes: Any) -> AnnounceJob:
    return AnnounceJob(replace(JOB, **changes))


def arrive(call: Call) -> Call:
    return decode_call(encode_call(call, None))[0]


WHOLE = announce(
    slots=(SlotDetails(0, "up"),),
    subtasks=(SubtaskDetails("parse", 0, busy=0.5, watermark_ms=-1),),
    histograms={"latency|parse": HistogramDetails((0.1, 1.0), (1, 2, 3), 4.5)},
    checkpoints=(CheckpointDetails(1, "checkpoint", "running", False, 5, 0, 0, 2),),
    batches=(BatchDetails(0, 5, 10, 9, 1, 0, 12.5, {"run": 7.5}),),
    incidents=(Incident(5, "restart", "again"),),
    rates={"in": 1.0},
)


@pytest.mark.parametrize(
    "call", [WHOLE, AskJob(ORDER), GetJob("orders")], ids=lambda call: type(call).__name__
)
def test_what_makes_sense_comes_through(call: Call) -> None:
    assert arrive(call) == call


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (announce(owner=""), r"AnnounceJob\.job\.owner"),
        (announce(owner="a\0b"), r"AnnounceJob\.job\.owner"),
        (announce(name="n" * 201), r"AnnounceJob\.job\.name"),
        (announce(run=""), r"AnnounceJob\.job\.run"),
        (announce(last_failure="x" * 65_537), r"AnnounceJob\.job\.last_failure: expected 65536 characters"),
        (
            announce(rates={"in": math.nan}),
            r"AnnounceJob\.job\.rates\['in'\]: expected a finite number, got nan",
        ),
        (announce(rates={"x" * 513: 1.0}), r"AnnounceJob\.job\.rates: expected keys of 512 characters"),
        (
            announce(subtasks=(SubtaskDetails("parse", 0), SubtaskDetails("parse", 0, busy=math.inf))),
            r"AnnounceJob\.job\.subtasks\[1\]\.busy: expected a finite number, got inf",
        ),
        (announce(slots=(SlotDetails(0, "up"),) * 2_001), r"AnnounceJob\.job\.slots: expected 2000 items"),
        (announce(incidents=(Incident(1, "state", ""),) * 201), r"AnnounceJob\.job\.incidents: expected 200"),
        (
            announce(checkpoints=(CheckpointDetails(0, "checkpoint", "", False, 1, 0, 0, 1),)),
            r"AnnounceJob\.job\.checkpoints\[0\]\.number: expected 1",
        ),
        (
            announce(checkpoints=(CheckpointDetails(1, "checkpoint", "", False, 1, -5, 0, 1),)),
            r"AnnounceJob\.job\.checkpoints\[0\]\.ended_ms: expected 0",
        ),
        (
            AnnounceJob(JOB, (OrderAnswer("o", OrderState.WAITING, "", 1),)),
            r"AnnounceJob\.answers\[0\]\.state: an answer to an order is never waiting",
        ),
        (AnnounceJob(JOB, (OrderAnswer("", OrderState.DONE, "", 1),)), r"AnnounceJob\.answers\[0\]\.id"),
        (AskJob(replace(ORDER, id="")), r"AskJob\.order\.id"),
        (AskJob(replace(ORDER, by="")), r"AskJob\.order\.by"),
        (AskJob(replace(ORDER, slot=-1)), r"AskJob\.order\.slot: expected 0"),
        (AskJob(replace(ORDER, timeout_ms=-1)), r"AskJob\.order\.timeout_ms: expected 0"),
        (GetJob(""), r"GetJob\.owner"),
        (GetJob("orders", -1), r"GetJob\.checkpoints_since_ms: expected 0 to"),
        (GetJob("orders", 1 << 63), r"GetJob\.checkpoints_since_ms: expected 0 to"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_field(call: Call, named: str) -> None:
    with pytest.raises(MalformedRequestError, match=named):
        arrive(call)
