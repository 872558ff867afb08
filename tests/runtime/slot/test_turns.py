"""Whose turn it is: no task starves, and a task has as many turns in a round as channels that wait."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.runtime.slot.rules.core import IN_HASTE, Turns


@dataclass
class FakeInbox:
    """``ready`` channels wait."""

    ready: int
    has_barriers: bool = False

    @property
    def turns(self) -> range:
        return range(self.ready)


@dataclass(eq=False)
class FakeSeat:
    name: str
    inbox: FakeInbox = field(default_factory=lambda: FakeInbox(1))
    has_room: bool = True

    @property
    def can_run(self) -> bool:
        return bool(self.inbox.turns) and self.has_room


def turns_of(*seats: FakeSeat) -> Any:
    return Turns(seats)  # type: ignore[arg-type]


def names(turns: Any, count: int) -> str:
    return "".join(turns.next().name for _ in range(count))


def test_a_turn_for_each_channel() -> None:
    turns = turns_of(FakeSeat("a"), FakeSeat("b", FakeInbox(3)), FakeSeat("c"))
    assert names(turns, 10) == "abbbcabbbc"


def test_who_has_no_room_or_nothing_to_do_is_passed_over() -> None:
    a, b = FakeSeat("a", FakeInbox(3)), FakeSeat("b", FakeInbox(2))
    turns = turns_of(a, b)
    assert names(turns, 2) == "aa"
    a.has_room = False
    assert names(turns, 3) == "bbb"
    a.has_room, b.inbox.ready = True, 0
    assert names(turns, 4) == "aaaa"
    a.inbox.ready = 0
    assert turns.next() is None


def test_barriers_come_first_from_the_source_on() -> None:
    a, b, c = FakeSeat("a", FakeInbox(2)), FakeSeat("b"), FakeSeat("c")
    turns = turns_of(a, b, c)
    a.inbox.has_barriers = True
    assert names(turns, 3) == "aaa"
    b.inbox.has_barriers = True
    assert names(turns, 2) == "bb"
    b.has_room = False
    assert names(turns, 2) == "aa"
    a.inbox.has_barriers = False
    assert names(turns, 3) == "aac"


def test_barriers_do_not_keep_others_from_working_for_ever() -> None:
    """What a barrier waits behind may be another task's to take."""
    seats = [FakeSeat("a", FakeInbox(1, has_barriers=True)), FakeSeat("b"), FakeSeat("c")]
    turns = turns_of(*seats)
    given = names(turns, 5 * (IN_HASTE + 1))
    assert given.count("b") >= 1
    assert given.count("c") >= 1
    assert given.count("a") >= 5 * IN_HASTE


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 3)), max_size=60),
)
def test_no_task_starves(ready: list[int], changes: list[tuple[int, bool, int]]) -> None:
    """Between two turns of a task that can go on, each other one has at most as many as it had channels."""
    seats = [FakeSeat(str(number), FakeInbox(channels)) for number, channels in enumerate(ready)]
    turns = turns_of(*seats)
    most = Counter({seat.name: seat.inbox.ready for seat in seats})
    since: dict[str, Counter[str]] = {seat.name: Counter() for seat in seats}
    for place, has_room, channels in changes:
        seat = seats[place % len(seats)]
        seat.has_room, seat.inbox.ready = has_room, channels
        most[seat.name] = max(most[seat.name], channels)
        taken = turns.next()
        able = [seat for seat in seats if seat.has_room and seat.inbox.turns]
        assert (taken in able) if able else taken is None
        for other in seats:
            if other not in able or other is taken:
                since[other.name].clear()
            elif taken is not None:
                since[other.name][taken.name] += 1
                # Twice: one may be in the middle of its turns when another begins to wait, and come round again.
                assert since[other.name][taken.name] <= 2 * most[taken.name]
