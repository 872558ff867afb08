"""Functions that see one record at a time together with a `Context`: state and timers of its key, side outputs.

A record is the bare value of a stream of one column, and a tuple in the columns' order of one of several.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ftlayer.functions.context import Context

LAST_WATERMARK_MS = 2**63 - 1
"""`Context.watermark` once all inputs have ended: every timer of event time is due."""


class _OfContext:
    def open(self, ctx: Context) -> None:
        """Get ready; called once in the slot, before the first record. There is no key yet."""

    def on_timer(self, time_ms: int, ctx: Context) -> Iterable[Any] | None:
        """Take the timer that was set for ``time_ms`` and ``ctx.key``; return any number of records, or None.

        An exception here ends the slot, since there is no record to blame; with a `FailurePolicy` in barrier mode the
        timer is tried again, as a record is. A function that sets a timer of
        event time in every call has to stop once ``ctx.watermark`` is `LAST_WATERMARK_MS`.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method on_timer(time_ms, ctx)")

    def close(self) -> None:
        """Give resources up; called when the slot ends in an orderly way, not when it is lost."""


class ProcessFunction(_OfContext):
    """Takes records of one input.

    A record whose `process` raises fails, with all it has put out. In barrier mode with a `FailurePolicy` what it
    changed of the state, and the timers it set, are as if it had never come; else they stay, and a replay meets them.
    """

    def process(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record; return (or yield) any number of records, or None."""
        raise NotImplementedError(f"{type(self).__name__} has no method process(record, ctx)")


class CoProcessFunction(_OfContext):
    """Takes records of two inputs that share state and timers of a key. See `ProcessFunction`."""

    def process_left(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record of the first input."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_left(record, ctx)")

    def process_right(self, record: Any, ctx: Context) -> Iterable[Any] | None:
        """Take a record of the second input."""
        raise NotImplementedError(f"{type(self).__name__} has no method process_right(record, ctx)")


def uses_timers(function: Any) -> bool:
    """Whether ``function`` has an ``on_timer`` of its own: without one it cannot set timers."""
    return getattr(type(function), "on_timer", None) not in (_OfContext.on_timer, None)
