"""Recall: what is pending becomes due at once, since the slots that worked on it may be gone."""

from __future__ import annotations

import numpy as np

from ftlayer.clock import Now
from ftlayer.vertex.calls import Recall, Recalled
from ftlayer.vertex.rules.live import by_segment
from ftlayer.vertex.rules.state import ShardState


def recall(state: ShardState, call: Recall, now: Now) -> Recalled:
    """Make the pending rows of streams due, in memory only: after a restart they are due anyway.

    They are before what is due already, the oldest first.
    Roots that timed out stay in the tracker for their late events; their rows have left the segment.
    """
    state.check_incarnation(call.incarnation)
    state.owners.check(call.streams, call.owner)
    numbers = {state.stream(name).number for name in call.streams}
    roots, locations = state.tracker.pending()
    recalled = np.zeros(len(roots), np.bool_)
    for segment, rows, positions in reversed(list(by_segment(locations))):
        live = state.live.get(segment)
        if live is None or live.stream.number not in numbers:
            continue
        pending = ~live.done[rows]
        recalled[positions[pending]] = True
        due = np.zeros(len(live.done), np.bool_)
        due[rows[pending]] = True
        live.stream.add_recalled(segment, np.flatnonzero(due))
        live.stream.in_flight -= int(np.count_nonzero(due))
    # In the order they were found in: that of the tracker's memory, several times as fast as any other.
    taken = roots[recalled]
    state.tracker.forget(taken)
    state.circuits.recalled(taken, now.mono_ms)
    state.counters.recalled += len(taken)
    return Recalled(len(taken))
