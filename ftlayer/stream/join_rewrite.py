"""A join in terms of keyed state and timers, which checkpoints hold."""

from __future__ import annotations

from ftlayer.stream.operators import CoProcess, Join


def as_co_process(join: Join) -> CoProcess:
    """Return an operator that does what `Join` does, under the same uid, with its records in keyed state."""
    from ftlayer.functions.interval_join import IntervalJoin

    function = IntervalJoin(join.function, join.lower_ms, join.upper_ms, join.schema)
    return CoProcess(
        join.uid, function, join.keys, join.inputs, join.schema, volatile_state=join.volatile_state
    )
