from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.runtime.acker_mode.slot.rules import CALL_ROOTS, MAX_WAIT_MS, AckBuffer
from ftlayer.runtime.task.actions import Acknowledge
from ftlayer.vertex.calls import EventIds

# An event: its root, and the ids it was folded from, each with the operator that owes it ("" for its own).
Events = list[tuple[int, list[tuple[int, str]]]]


def acknowledge(events: Events) -> Acknowledge:
    names = sorted({name for _, ids in events for _, name in ids if name})
    roots = np.array([root for root, _ in events], np.uint64)
    values = np.array([reduce(xor, (i for i, _ in ids), 0) for _, ids in events], np.uint64)
    flat = [pair for _, ids in events for pair in ids]
    offsets = np.cumsum([0, *(len(ids) for _, ids in events)], dtype=np.int32)
    owners = np.array([names.index(name) if name else -1 for _, name in flat], np.int32)
    ids = EventIds(np.array([i for i, _ in flat], np.uint64), offsets, owners, tuple(names))
    return Acknowledge(roots, values, ids)


def spelled(event: Acknowledge) -> Events:
    ids = event.ids
    assert ids is not None
    names = [*ids.operators, ""]
    return [
        (
            int(root),
            [
                (int(ids.ids[at]), names[ids.owners[at]])
                for at in range(ids.offsets[place], ids.offsets[place + 1])
            ],
        )
        for place, root in enumerate(event.roots)
    ]


an_id = st.tuples(st.integers(1, 2**64 - 1), st.sampled_from(["", "map", "sink", "count"]))
an_event = st.tuples(st.integers(1, 2**64 - 1), st.lists(an_id, max_size=3))


@settings(deadline=None)
@given(st.lists(st.lists(an_event, min_size=1, max_size=4), min_size=1, max_size=4))
def test_many_events_in_one_say_the_same(parts: list[Events]) -> None:
    buffer = AckBuffer()
    for part in parts:
        buffer.add(acknowledge(part), 0)
    together = buffer.take()
    assert spelled(together) == [event for part in parts for event in part]
    assert together.values.tolist() == [v for part in parts for v in acknowledge(part).values.tolist()]
    assert not buffer


def test_when_they_go() -> None:
    buffer = AckBuffer()
    buffer.add(acknowledge([]), 0)
    assert not buffer
    assert buffer.due_ms is None
    buffer.add(acknowledge([(1, [])]), 100)
    assert not buffer.is_due(100)
    assert buffer.is_due(100 + MAX_WAIT_MS)
    assert buffer.due_ms == 100 + MAX_WAIT_MS
    many = np.ones(CALL_ROOTS - 1, np.uint64)
    buffer.add(Acknowledge(many, many), 101)
    assert buffer.is_due(101)
    assert buffer.take().ids is None, "only if all of them have ids"
