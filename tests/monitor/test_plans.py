from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.plans import KEYS_A_CALL, Carrying, Change, Counting, Letters, PlanScope
from ftlayer.monitor.rules.where import parse_where
from ftlayer.vertex.calls import MAX_KEYS, Changed, Purge, RecordPage, Requeue, SelectRecords

NOW_MS = 1_800_000_000_000


def keys(*numbers: int) -> tuple[bytes, ...]:
    return tuple(number.to_bytes(4, "big") for number in numbers)


def test_keys_alone_are_asked_for_where_the_vertex_can_do_all_of_a_filter() -> None:
    scopes = [PlanScope("a", SelectRecords("dead", operator="parse")), PlanScope("b", SelectRecords("dead"))]
    counting = Counting(scopes, parse_where("operator = parse"), JobNames([]), NOW_MS)
    asked = counting.next_call()
    assert asked is not None
    vertex, call = asked
    assert (vertex, call.operator, call.keys_only, call.limit) == ("a", "parse", True, MAX_KEYS)
    assert call.until_ms == NOW_MS + 1
    counting.take(RecordPage((), keys(1, 2), 2_000, b"on"))
    asked = counting.next_call()
    assert asked is not None
    assert asked[1].after == b"on"
    counting.take(RecordPage((), keys(2, 3), 5, b""))
    asked = counting.next_call()
    assert asked is not None
    assert (asked[0], asked[1].after) == ("b", b"")
    counting.take(RecordPage((), keys(1), 1, b""))
    assert counting.next_call() is None
    found = [("a", key) for key in keys(1, 2, 3)] + [("b", key) for key in keys(1)]
    assert counting.letters == Letters(tuple(found), 2_006, NOW_MS)


def test_records_are_asked_for_where_the_filter_looks_into_them(made: Any) -> None:
    counting = Counting(
        [PlanScope("a", SelectRecords("dead"))], parse_where("record.price > 1"), JobNames([]), NOW_MS
    )
    asked = counting.next_call()
    assert asked is not None
    assert not asked[1].keys_only
    infos = tuple(made.letter(price) for price in (1, 2, 3))
    counting.take(RecordPage(infos, tuple(info.key for info in infos), 3, b""))
    assert counting.letters.keys == (("a", infos[1].key), ("a", infos[2].key))


@given(
    st.dictionaries(st.sampled_from(["a", "b"]), st.integers(1, 2 * KEYS_A_CALL + 1)),
    st.sampled_from([Change.REQUEUE, Change.PURGE]),
    st.integers(0, 3),
)
def test_every_letter_is_changed_once_by_bounded_calls(
    counts: dict[str, int], change: Change, gone: int
) -> None:
    letters = tuple((vertex, key) for vertex, count in counts.items() for key in keys(*range(count)))
    carrying = Carrying(change, Letters(letters, 0, NOW_MS), "me")
    done: list[tuple[str, bytes]] = []
    changed = 0
    while (asked := carrying.next_call()) is not None:
        vertex, call = asked
        assert isinstance(call, Requeue if change is Change.REQUEUE else Purge)
        assert 1 <= len(call.keys) <= KEYS_A_CALL
        assert call.by == "me"
        done += [(vertex, key) for key in call.keys]
        still_there = max(len(call.keys) - gone, 0)
        changed += still_there
        carrying.take(Changed(still_there))
    assert sorted(done) == sorted(letters)
    assert (carrying.asked, carrying.total, carrying.changed) == (len(letters), len(letters), changed)
