"""Which messages of a stream come a second time, and what may be acknowledged of them."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.connectors.nats import source as window_module
from ftlayer.connectors.nats.source import Sequences, SequenceWindow, StreamDelivery

DELIVERIES = count(1)


def delivered(sequence: int, again: int = 1, *, time_ns: int | None = None) -> StreamDelivery:
    reply = f"ack {sequence}"
    return StreamDelivery(sequence, next(DELIVERIES), sequence if time_ns is None else time_ns, again, reply)


def opened(earlier: SequenceWindow | None = None, *, stored: bool = True) -> SequenceWindow:
    if earlier is None:
        return SequenceWindow(Sequences(), 0, stored=stored)
    known = Sequences.unpacked(earlier.known.packed())
    return SequenceWindow(known, earlier.until_ns, stored=stored)


def test_what_was_stored_is_known_and_acknowledged_at_once() -> None:
    first = opened()
    assert first.take([delivered(1), delivered(2)]) == [True, True]
    second = opened(first)
    assert second.settled(1, 9) == [1, 2]
    assert second.take([delivered(1, 2), delivered(2, 2), delivered(3)]) == [False, False, True]
    assert second.to_acknowledge() == ["ack 1", "ack 2"]
    assert second.replies() == ["ack 3"]


def test_what_was_taken_over_is_acknowledged_with_the_next_that_is_durable() -> None:
    first = opened()
    first.take([delivered(1)])
    second = opened(first, stored=False)
    assert second.settled(1, 9) == []
    assert second.take([delivered(1, 2), delivered(2)]) == [False, True]
    assert second.to_acknowledge() == []
    second.durable([second.turn])
    assert second.to_acknowledge() == ["ack 1", "ack 2"]


def test_one_that_is_held_still_is_left_out_and_acknowledged_once() -> None:
    window = opened()
    window.take([delivered(1), delivered(2)])
    assert window.take([delivered(1, 2)]) == [False]
    assert window.to_acknowledge() == []
    window.durable([1])
    assert window.to_acknowledge() == ["ack 1", "ack 2"]
    assert window.unacknowledged == 0


def test_numbers_that_the_consumer_passes_over_are_no_gaps() -> None:
    window = opened()
    window.take([delivered(10), delivered(20), delivered(30)])
    window.take([delivered(40)])
    assert list(window.known) == [(10, 40)]


def test_numbers_that_another_may_have_are_gaps() -> None:
    window = opened()
    window.take([delivered(10)])
    next(DELIVERIES)  # To another subtask.
    window.take([delivered(20), delivered(5, 2), delivered(30)])
    assert list(window.known) == [(5, 5), (10, 10), (20, 20), (30, 30)]


def test_a_stream_that_was_made_anew_gives_the_same_numbers_to_others() -> None:
    window = opened()
    window.take([delivered(sequence) for sequence in range(1, 101)])
    again = opened(window)
    later = [
        delivered(sequence, again, time_ns=1_000 + sequence) for sequence, again in ((1, 1), (3, 2), (2, 2))
    ]
    assert again.take(later) == [True, True, True]
    assert again.beginnings == 1
    assert again.unacknowledged == 3


def test_ranges_that_are_durable_are_forgotten_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window = opened()
    monkeypatch.setattr(window_module, "MOST_RANGES", 3)
    for sequence in range(2, 22, 2):
        next(DELIVERIES)
        window.take([delivered(sequence)])
    assert len(window.known) == 10, "none is durable"
    window.durable([8])
    window.to_acknowledge()
    window.take([delivered(22, 2)])
    assert next(iter(window.known)) == (18, 18)


def test_what_a_consumer_of_other_subjects_passed_over_is_new() -> None:
    window = opened()
    window.reads("a")
    window.take([delivered(1), delivered(3)])
    window.reads("a")
    window.take([delivered(5)])
    assert list(window.known) == [(1, 3), (5, 5)], "another consumer may have begun at 5, and others had 4"
    window.reads("b")
    assert window.take([delivered(2)]) == [True]
    assert window.replies() == ["ack 2"]


STEPS = st.lists(
    st.tuples(st.sampled_from(["fetch", "store", "die", "again", "acknowledge"]), st.integers(1, 6)),
    max_size=40,
)


@settings(deadline=None)
@given(STEPS)
def test_each_message_enters_once_and_none_is_acknowledged_before_it_is_stored(
    steps: list[tuple[str, int]],
) -> None:
    """A server that delivers what is not acknowledged; a reader that dies and goes on at what was stored."""
    waiting = list(range(1, 200))
    pending: set[int] = set()
    entered: list[int] = []
    stored: tuple[list[int], SequenceWindow] = ([], opened())
    window = opened()
    for step, size in steps:
        if step == "fetch":
            some, waiting = waiting[:size], waiting[size:]
            pending |= set(some)
            are_new = window.take([delivered(sequence) for sequence in some])
            entered += [sequence for sequence, new in zip(some, are_new, strict=True) if new]
        elif step == "again":
            some = sorted(pending)[:size]
            are_new = window.take([delivered(sequence, 2) for sequence in some])
            entered += [sequence for sequence, new in zip(some, are_new, strict=True) if new]
        elif step == "store":
            stored = (list(entered), opened(window))
            window.durable([window.turn])
        elif step == "die":
            entered, window = list(stored[0]), opened(stored[1])
        else:
            for reply in window.to_acknowledge():
                number = int(reply.split()[1])
                assert number in stored[0]
                pending.discard(number)
        assert len(set(entered)) == len(entered)
    are_new = window.take([delivered(sequence, 2) for sequence in sorted(pending)])
    entered += [sequence for sequence, new in zip(sorted(pending), are_new, strict=True) if new]
    assert sorted(entered) == list(range(1, 200 - len(waiting)))
