"""A task's reports to the vertex, as actions."""

from __future__ import annotations

from collections.abc import Iterable

from ftlayer.functions.failures import RowFailure
from ftlayer.handler.xor import XorHandler
from ftlayer.records.ids import U64Array
from ftlayer.runtime.task.actions import Acknowledge, Action, FailRoots
from ftlayer.vertex.calls import Failure


def reports(xor: XorHandler) -> list[Action]:
    """Take what failed and what was settled since the last call; failures first, so that no root of theirs is open."""
    actions: list[Action] = []
    failures = xor.failures()
    if failures:
        actions.append(FailRoots(failures))
    events = xor.events()
    if events is not None:
        actions.append(Acknowledge(events.roots, events.values, events.ids))
    return actions


def failures_of(roots: U64Array, failures: Iterable[RowFailure]) -> tuple[Failure, ...]:
    """Return failures of new roots; ``row`` counts in ``roots``."""
    return tuple(Failure.of(int(roots[failure.row]), failure) for failure in failures)
