"""What the vertex checks of announcements and orders beyond their types.

An announcement is kept, listed and drawn: its texts and lists are bounded, and its numbers are finite.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from typing import Any

from ftlayer.errors import MalformedRequestError
from ftlayer.vertex.calls import (
    AnnounceJob,
    AskJob,
    GetHour,
    GetJob,
    JobDetails,
    JobOrder,
    OrderAction,
    OrderState,
)
from ftlayer.vertex.wire.bounds import MAX_RUN_BYTES, check_least, check_name

MAX_TEXT = 65_536
"""Characters of a stack, of a failure with its traceback, of any other text."""

MAX_KEY = 512
"""Characters of a key of a map: a metric's name with an operator's."""

# Lists by the name of their field. A job has so many subtasks and edges at most; of the rest it says the latest.
_MOST = {
    "answers": 200,
    "nodes": 2_000,
    "names": 2_000,
    "slots": 2_000,
    "subtasks": 20_000,
    "edges": 20_000,
    "counters": 5_000,
    "rates": 5_000,
    "histograms": 5_000,
    "bounds": 64,
    "counts": 65,
    "exemplars": 65,
    "incidents": 200,
    "checkpoints": 100,
    "retained": 1_000,
    "circuits": 1_000,
    "batches": 200,
    "phases_ms": 20,
    "links": 20,
}


def check_job_call(call: AnnounceJob | AskJob | GetJob | GetHour) -> None:
    """Raise `MalformedRequestError` naming the field, if ``call`` cannot be meant."""
    match call:
        case AnnounceJob():
            _check_plain(call, "AnnounceJob")
            _check_job(call.job, "AnnounceJob.job")
            for index, answer in enumerate(call.answers):
                where = f"AnnounceJob.answers[{index}]"
                check_name(answer.id, f"{where}.id")
                if answer.state is OrderState.WAITING:
                    raise MalformedRequestError(
                        f"{where}.state: an answer to an order is never {answer.state}"
                    )
        case AskJob():
            _check_plain(call, "AskJob")
            _check_order(call.order, "AskJob.order")
        case GetJob():
            check_name(call.owner, "GetJob.owner")
            check_least(call.checkpoints_since_ms, 0, "GetJob.checkpoints_since_ms")
        case GetHour():
            if call.owner:
                check_name(call.owner, "GetHour.owner")


def _check_job(job: JobDetails, where: str) -> None:
    check_name(job.owner, f"{where}.owner")
    check_name(job.name, f"{where}.name")
    check_name(job.run, f"{where}.run", MAX_RUN_BYTES)
    for index, checkpoint in enumerate(job.checkpoints):
        check_least(checkpoint.number, 1, f"{where}.checkpoints[{index}].number")
        check_least(checkpoint.ended_ms, 0, f"{where}.checkpoints[{index}].ended_ms")


def _check_order(order: JobOrder, where: str) -> None:
    check_name(order.id, f"{where}.id")
    check_name(order.owner, f"{where}.owner")
    check_name(order.run, f"{where}.run", MAX_RUN_BYTES)
    check_name(order.by, f"{where}.by")
    check_least(order.asked_ms, 0, f"{where}.asked_ms")
    check_least(order.timeout_ms, 0, f"{where}.timeout_ms")
    check_least(order.slot, 0 if order.action is OrderAction.STACK else -1, f"{where}.slot")


def _check_plain(call: AnnounceJob | AskJob, where: str) -> None:
    fault = _fault_in(call)
    if fault is not None:
        raise MalformedRequestError(where + fault)


def _fault_in(value: Any) -> str | None:
    """Look at each text, number and list in ``value``, however deep; return the first fault behind its path."""
    kind = type(value)
    if kind is int or kind is bool or value is None:
        return None
    if kind is float:
        return None if math.isfinite(value) else f": expected a finite number, got {value}"
    if isinstance(value, str):
        return (
            None if len(value) <= MAX_TEXT else f": expected {MAX_TEXT} characters at most, got {len(value)}"
        )
    if kind is tuple:
        parts: Iterable[tuple[Any, Any]] = enumerate(value)
    elif kind is dict:
        too_long = next((key for key in value if len(key) > MAX_KEY), None)
        if too_long is not None:
            return f": expected keys of {MAX_KEY} characters at most, got {len(too_long)}"
        parts = value.items()
    else:
        return _fault_in_fields(value)
    for at, part in parts:
        fault = _fault_in(part)
        if fault is not None:
            return f"[{at!r}]{fault}"
    return None


def _fault_in_fields(value: Any) -> str | None:
    kind: type = type(value)
    for name in _fields(kind):
        part = getattr(value, name)
        if name in _MOST and len(part) > _MOST[name]:
            return f".{name}: expected {_MOST[name]} items at most, got {len(part)}"
        fault = _fault_in(part)
        if fault is not None:
            return f".{name}{fault}"
    return None


@functools.cache
def _fields(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))
