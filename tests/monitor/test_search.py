from __future__ import annotations

from typing import Any

import pyarrow as pa

from ftlayer.monitor.rules.names import JobNames
from ftlayer.monitor.rules.plans import (
    LetterGroup,
    LetterGroups,
    Search,
    Selection,
    first_pages,
    whole_groups,
)
from ftlayer.monitor.rules.where import parse_where
from ftlayer.vertex.calls import MAX_KEYS, Attempt, RecordInfo, RecordPage, SelectRecords

NOW_MS = 1_800_000_000_000


def letter(number: int, operator: str = "parse", reason: str = "ValueError: no number: '12,5'") -> RecordInfo:
    return RecordInfo(
        key=number.to_bytes(2, "big"),
        stream="3f2a/lines",
        state="dead",
        root=number,
        origin=number,
        attempt=1,
        not_before_ms=0,
        history=(Attempt(1, NOW_MS - 1_000 * number, reason, operator),),
        payload=pa.record_batch({"price": [number]}),
    )


def page(*numbers: int, more: bytes = b"", examined: int = 0) -> RecordPage:
    letters = tuple(letter(number) for number in numbers)
    return RecordPage(letters, tuple(info.key for info in letters), examined or len(letters), more)


def names(made: Any) -> JobNames:
    streams = (
        made.stream("3f2a/lines", "clean"),
        made.stream("3f2a/codes", "clean"),
        made.stream("other/in"),
    )
    return JobNames([made.view(streams=streams), made.view("second", streams=(made.stream("clean/x"),))])


def asked(made: Any, where: str = "", **fields: Any) -> tuple[SelectRecords, ...]:
    return first_pages(Selection("local", where=parse_where(where), **fields), names(made), NOW_MS)


def test_a_name_is_asked_for_as_the_streams_that_it_means(made: Any) -> None:
    assert asked(made) == (SelectRecords("dead"),)
    assert [call.stream for call in asked(made, "stream = clean")] == ["3f2a/codes", "3f2a/lines"]
    assert [call.stream for call in asked(made, stream="clean/lines")] == ["3f2a/lines"]
    assert asked(made, "stream = clean/lines", stream="other") == ()
    assert asked(made, "stream = nothing") == ()
    (group,) = asked(made, stream_id="3f2a/lines", group=3)
    assert (group.stream, group.group) == ("3f2a/lines", 3)


def test_what_the_vertex_can_do_is_asked_of_it(made: Any) -> None:
    (call,) = asked(made, "operator = parse and age > 1s and reason ~ number and record.price > 3")
    assert call == SelectRecords("dead", operator="parse", text="number", until_ms=NOW_MS - 1_000)
    (call,) = asked(made, "age > 1s", state="waiting", newest=True)
    assert call == SelectRecords("waiting")


def test_keys_are_asked_for_in_bounded_parts(made: Any) -> None:
    keys = tuple(number.to_bytes(3, "big") for number in range(MAX_KEYS + 1))
    calls = asked(made, keys=keys)
    assert [len(call.keys) for call in calls] == [MAX_KEYS, 1]
    (call,) = asked(made, "key = 000001", keys=keys)
    assert call.keys == (keys[1],)
    assert asked(made, "key = ffffff", keys=keys) == ()


def test_a_search_goes_on_where_pages_end_and_checks_the_rest_here(made: Any) -> None:
    selection = Selection("local", where=parse_where("record.price > 2 and stream = clean"))
    search = Search(selection, names(made), NOW_MS)
    call = search.next_call(10)
    assert call is not None
    assert (call.stream, call.limit, call.after) == ("3f2a/codes", 10, b"")
    assert search.take(page(more=b"on", examined=2_000)) == ()
    call = search.next_call()
    assert call is not None
    assert (call.stream, call.after) == ("3f2a/codes", b"on")
    assert [info.root for info in search.take(page(1, 2, 3))] == [3]
    call = search.next_call()
    assert call is not None
    assert (call.stream, call.after, search.is_over) == ("3f2a/lines", b"", False)
    assert search.take(page(1, 2)) == ()
    assert (search.next_call(), search.is_over, search.examined) == (None, True, 2_005)


def test_letters_are_counted_by_what_they_have_in_common() -> None:
    counted = LetterGroups()
    for number, operator in ((1, "parse"), (2, "parse"), (3, "trim")):
        counted.add("local", letter(number, operator, f"ValueError: no number: '{number}'"))
    first, second = counted.groups()
    assert (first.operator, first.count) == ("parse", 2)
    assert (first.first_seen_ms, first.last_seen_ms) == (NOW_MS - 2_000, NOW_MS - 1_000)
    assert (second.operator, second.count) == ("trim", 1)
    assert "ValueError: no number" in first.kind


def test_groups_of_the_vertex_will_do_where_all_or_nothing_of_each_is_meant(made: Any) -> None:
    groups = (made.group("3f2a/lines", "parse", number=1), made.group("other/in", "trim", number=2, count=20))

    def taken(where: str = "", **fields: Any) -> list[LetterGroup] | None:
        selection = Selection("local", where=parse_where(where), **fields)
        return whole_groups(selection, names(made), NOW_MS, groups)

    def operators(found: list[LetterGroup] | None) -> list[str]:
        assert found is not None
        return [group.operator for group in found]

    assert operators(taken()) == ["trim", "parse"]
    assert operators(taken("operator = parse")) == ["parse"]
    assert operators(taken("stream = clean")) == ["parse"]
    assert operators(taken("operator = parse and stream = other")) == []
    assert operators(taken(stream_id="other/in", group=2)) == ["trim"]
    for where in ("age > 5m", "record.price > 1", "operator = parse or age > 5m", "key = 00", "reason ~ x"):
        assert taken(where) is None
    assert taken(keys=(b"k",)) is None
    assert taken(text="x") is None
