"""`SelectRecords` against a filter in Python over everything that `ListRecords` lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.vertex import calls
from ftlayer.vertex.calls import RecordInfo, SelectRecords
from ftlayer.vertex.rules import walk as walking

STREAMS = ["orders/lines", "orders/returns", "shop/lines"]
OWNERS = ["orders", "shop", "q", "ingest/clicks", "nothing"]
REASONS = ["ValueError: '17'", "timeout after 3 s", "größer"]
OPERATORS = ["parse", "enrich", ""]
STATES = ["pending", "waiting", "delivery", "dead"]
TEXTS = ["", "row 1", "row 17", "timeout", "größ", "parse", "nothing of it"]

steps = st.one_of(
    st.tuples(st.just("persist"), st.sampled_from(STREAMS), st.integers(1, 6)),
    st.tuples(st.just("ingest"), st.integers(1, 4)),
    st.tuples(
        st.just("fail"),
        st.integers(0, 10),
        st.sampled_from(REASONS),
        st.sampled_from(OPERATORS),
        st.booleans(),
    ),
    st.tuples(st.just("advance"), st.sampled_from([5, 100, 5_000])),
    st.tuples(st.just("replay"), st.sampled_from(STREAMS)),
    st.tuples(st.just("requeue"), st.integers(0, 3)),
    st.tuples(st.just("restart")),
)


@st.composite
def selections(draw: st.DrawFn) -> dict[str, Any]:
    """Draw what is asked; records are named by their place in the listing."""
    state = draw(st.sampled_from(STATES))
    return {
        "state": state,
        "stream": draw(st.sampled_from(["", "", *STREAMS, *OWNERS])),
        "operator": draw(st.sampled_from(["", "", *OPERATORS])),
        "text": draw(st.sampled_from(["", "", *TEXTS])),
        "root_of": draw(st.none() | st.none() | st.integers(0, 20)),
        "keys_of": draw(st.none() | st.none() | st.lists(st.integers(0, 20), max_size=5)),
        "since_of": draw(st.none() | st.none() | st.integers(0, 20)),
        "until_of": draw(st.none() | st.none() | st.integers(0, 20)),
        "newest": draw(st.booleans()),
        "keys_only": draw(st.booleans()),
        "limit": draw(st.integers(1, 7)),
    }


def time_of(info: RecordInfo) -> int:
    if info.state == "dead":
        return int.from_bytes(info.key[4:12], "big")
    return info.registered_ms if info.state == "pending" else info.not_before_ms


def belongs(info: RecordInfo, name: str) -> bool:
    owner = "q" if info.stream == "ingest/clicks" else info.stream.split("/")[0]
    return name in ("", info.stream, owner)


def says(info: RecordInfo, text: str) -> bool:
    return any(text in part for part in (info.reason, info.operator, info.payload.column(0)[0].as_py()))


def is_wanted(info: RecordInfo, call: SelectRecords) -> bool:
    return (
        belongs(info, call.stream)
        and call.operator in ("", info.operator)
        and says(info, call.text)
        and (not call.root or call.root in (info.root, info.origin))
        and (not call.keys or info.key in call.keys)
        and call.since_ms <= time_of(info)
        and (not call.until_ms or time_of(info) < call.until_ms)
    )


class Shop:
    """A vertex with topologies and a query, some of whose records fail."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.vertex = kit.Vertex()
        for stream in STREAMS:
            self.vertex.open(stream, max_attempts=2, backoff_ms=(1_000,))
        self.vertex.call(calls.OpenQuery("q", "run", ("ingest/clicks",), title="clicks"))
        self.rows = 0

    def do(self, step: tuple[Any, ...]) -> None:
        kind, *arguments = step
        getattr(self, kind)(*arguments)

    def persist(self, stream: str, rows: int) -> None:
        first = self.rows + 1
        self.rows += rows
        self.vertex.persist(list(range(first, first + rows)), stream=stream)

    def ingest(self, rows: int) -> None:
        texts = [f"row {self.rows + row}" for row in range(rows)]
        self.rows += rows
        self.vertex.call(calls.Ingest("ingest/clicks", self.kit.payload(texts)))

    def fail(self, place: int, reason: str, operator: str, fatal: bool) -> None:
        pending = self.vertex.list("pending")
        if pending:
            root = pending[place % len(pending)].root
            failure = calls.Failure(root, reason, operator, fatal=fatal)
            self.vertex.call(calls.Fail((failure,), self.vertex.layer.incarnation))

    def advance(self, ms: int) -> None:
        self.vertex.advance(ms)

    def replay(self, stream: str) -> None:
        self.vertex.take(4, stream)

    def requeue(self, place: int) -> None:
        keys = [letter.key for letter in self.vertex.list("dead")]
        self.vertex.call(calls.Requeue(tuple(keys[place : place + 1])))

    def restart(self) -> None:
        self.vertex.restart()

    def all_of(self, call: SelectRecords) -> tuple[list[RecordInfo], list[bytes]]:
        """Return what all pages have together."""
        records: list[RecordInfo] = []
        keys: list[bytes] = []
        while True:
            page = self.vertex.call(call)
            assert page.examined <= calls.MAX_EXAMINED
            assert len(page.keys) <= call.limit
            assert call.keys_only or [info.key for info in page.records] == list(page.keys)
            records += page.records
            keys += page.keys
            if not page.more:
                return records, keys
            call = replace(call, after=page.more)


def call_of(drawn: dict[str, Any], listed: list[RecordInfo]) -> SelectRecords:
    """Return the call; records that are named by a place are those of the listing."""

    def at(name: str) -> RecordInfo | None:
        place = drawn[name]
        return None if place is None or not listed else listed[place % len(listed)]

    root_of, since_of, until_of = at("root_of"), at("since_of"), at("until_of")
    keys = tuple({listed[place % len(listed)].key for place in drawn["keys_of"] or ()} if listed else ())
    root = 0 if root_of is None else root_of.origin
    return SelectRecords(
        drawn["state"],
        stream=drawn["stream"],
        operator=drawn["operator"],
        text=drawn["text"],
        root=root,
        keys=keys,
        since_ms=0 if since_of is None else time_of(since_of),
        until_ms=0 if until_of is None else time_of(until_of),
        newest=drawn["newest"] and drawn["state"] == "dead" and not root and not keys,
        keys_only=drawn["keys_only"],
        limit=drawn["limit"],
    )


def test_all_pages_together_are_what_a_filter_leaves_of_the_listing(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "MAX_EXAMINED", 5)
    monkeypatch.setattr(walking, "PASSED_AT_ONCE", 2)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(steps, max_size=25), st.lists(selections(), min_size=1, max_size=6))
    def check(history: list[tuple[Any, ...]], drawn: list[dict[str, Any]]) -> None:
        shop = Shop(kit)
        for step in history:
            shop.do(step)
        for each in drawn:
            listed = shop.vertex.list(each["state"])
            call = call_of(each, listed)
            wanted = [info for info in listed if is_wanted(info, call)]
            if call.newest:
                wanted.sort(key=lambda info: info.key[4:], reverse=True)
            records, keys = shop.all_of(call)
            assert keys == [info.key for info in wanted]
            assert call.keys_only or [info.payload for info in records] == [info.payload for info in wanted]
            assert [replace(info, payload=None) for info in records] == (
                [] if call.keys_only else [replace(info, payload=None) for info in wanted]
            )

    check()


def test_records_are_named_as_people_named_their_query(kit: Any) -> None:
    shop = Shop(kit)
    shop.persist("orders/lines", 1)
    shop.ingest(1)
    (pending,) = shop.vertex.call(SelectRecords("pending")).records
    (delivered,) = shop.vertex.call(SelectRecords("delivery")).records
    assert (pending.title, pending.source, pending.registered_ms) == ("orders", "lines", shop.vertex.wall)
    assert (delivered.title, delivered.source) == ("clicks", "ingest/clicks")


def dead(kit: Any, letters: int) -> Any:
    vertex = kit.Vertex()
    vertex.open(max_attempts=1, max_pending=100_000)
    vertex.persist(list(range(1, letters + 1)))
    failures = tuple(
        calls.Failure(root, f"no row {root}", "parse" if root % 2 else "enrich")
        for root in range(1, letters + 1)
    )
    vertex.call(calls.Fail(failures, vertex.layer.incarnation))
    return vertex


def test_letters_of_a_group_come_page_by_page_from_either_end(kit: Any) -> None:
    vertex = dead(kit, 20)
    group = next(group for group in vertex.call(calls.DeadGroups()).groups if group.operator == "parse")
    for newest in (False, True):
        after, roots = b"", []
        while not roots or after:
            page = vertex.call(
                SelectRecords("dead", stream="s", group=group.number, newest=newest, limit=3, after=after)
            )
            assert page.examined <= 3
            roots += [info.root for info in page.records]
            after = page.more
        assert roots == sorted(range(1, 21, 2), reverse=newest)
    assert vertex.call(SelectRecords("dead", stream="s", group=99)).records == ()
    assert vertex.call(SelectRecords("dead", stream="nothing", group=group.number)).records == ()


def test_a_call_examines_so_many_and_goes_on_from_there(kit: Any) -> None:
    vertex = dead(kit, 4_500)
    examined, after = [], b""
    while not examined or after:
        page = vertex.call(SelectRecords("dead", text="no such text", after=after))
        assert page.records == ()
        examined.append(page.examined)
        after = page.more
    assert examined == [2_000, 2_000, 500]


def test_segments_without_a_wanted_record_are_passed_in_bounded_steps(kit: Any) -> None:
    vertex = kit.Vertex()
    vertex.open()
    vertex.open("other")
    segments = calls.MAX_EXAMINED + 2 * walking.PASSED_AT_ONCE
    for root in range(1, segments + 1):
        vertex.persist([root])
    vertex.persist([segments + 1], stream="other")
    page = vertex.call(SelectRecords("pending", stream="other"))
    assert (page.records, page.examined) == ((), 0)
    page = vertex.call(SelectRecords("pending", stream="other", after=page.more))
    assert [info.root for info in page.records] == [segments + 1]
    vertex.restart()
    page = vertex.call(SelectRecords("pending"))
    assert (page.records, page.examined, page.more != b"") == ((), 0, True)


def test_a_letter_is_found_by_its_root_or_key_at_once(kit: Any) -> None:
    vertex = dead(kit, 4_500)
    page = vertex.call(SelectRecords("dead", root=4_321))
    assert ([info.root for info in page.records], page.examined, page.more) == ([4_321], 1, b"")
    page = vertex.call(SelectRecords("dead", keys=page.keys))
    assert ([info.root for info in page.records], page.examined, page.more) == ([4_321], 1, b"")
    assert vertex.call(SelectRecords("dead", root=99_999)) == calls.RecordPage((), (), 0, b"")


def test_a_pending_record_is_found_by_its_root_at_once(kit: Any) -> None:
    vertex = kit.Vertex()
    vertex.open(max_pending=100_000)
    vertex.persist(list(range(1, 5_001)))
    page = vertex.call(SelectRecords("pending", root=4_321))
    assert ([info.root for info in page.records], page.examined, page.more) == ([4_321], 1, b"")


def test_a_page_ends_before_its_payloads_are_too_large(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vertex = dead(kit, 10)
    size = vertex.call(SelectRecords("dead", limit=1)).records[0].payload.nbytes
    monkeypatch.setattr(calls, "MAX_PAGE_BYTES", 2 * size + 1)
    page = vertex.call(SelectRecords("dead"))
    assert len(page.records) == 3
    assert [info.root for info in vertex.call(SelectRecords("dead", after=page.more)).records] == [4, 5, 6]
