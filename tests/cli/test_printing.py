"""What commands print, on terminals of some width and in pipes."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from rich.console import Console

from ftlayer.cli.printing import new_table, print_differences, print_line, print_table, time_text
from ftlayer.cli.records import FoundRecords, listed, print_listing, print_record, table_of_groups
from ftlayer.monitor.rules.names import JobNames, VertexView
from ftlayer.monitor.rules.plans import LetterGroup, Search, Selection
from ftlayer.monitor.rules.row_json import differences
from ftlayer.vertex.calls import Attempt, RecordInfo, RecordPage

NOW_MS = 1_800_000_000_000
LONG = "UnicodeEncodeError: … codec can't encode character … in position …: ordinal not in range(…)"


def printed(print_it: Any, *, width: int = 80, terminal: bool = True) -> list[str]:
    """Return the lines that are printed to a terminal of this width, or to a pipe."""
    out = io.StringIO()
    print_it(Console(file=out, width=width, force_terminal=terminal, color_system=None))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    yield monkeypatch
    monkeypatch.undo()
    time.tzset()


def test_times_are_this_machine_s_with_their_offset(zone: pytest.MonkeyPatch) -> None:
    for name, text in (("UTC", "2027-01-15 08:00:00Z"), ("Asia/Kolkata", "2027-01-15 13:30:00+05:30")):
        zone.setenv("TZ", name)
        time.tzset()
        assert time_text(NOW_MS) == text


def test_a_terminal_breaks_long_reasons_of_groups_and_a_pipe_and_wide_do_not() -> None:
    group = LetterGroup("local", "demo/lines", "parse", LONG, 1_234, NOW_MS - 9_000, NOW_MS - 3_000)

    def table(console: Console, *, wide: bool = False) -> None:
        print_table(console, table_of_groups([group], JobNames([]), NOW_MS), wide=wide)

    assert printed(table) == [
        "count  stream      operator  last     reason",
        "1,234  demo/lines  parse     3 s ago  UnicodeEncodeError: … codec can't encode",
        *(" " * 38 + part for part in ("character … in position …: ordinal not in", "range(…)")),
    ]
    reason = (line[38:] for line in printed(table, width=60)[1:])
    assert " ".join(reason).replace(" ", "") == LONG.replace(" ", "")
    assert printed(table, width=40) == [
        "count     1,234",
        "stream    demo/lines",
        "operator  parse",
        "last      3 s ago",
        "reason    UnicodeEncodeError: … codec",
        "          can't encode character … in",
        "          position …: ordinal not in",
        "          range(…)",
    ]
    whole = f"1,234  demo/lines  parse     3 s ago  {LONG}"
    assert printed(table, terminal=False)[1] == whole
    assert printed(lambda console: table(console, wide=True))[1] == whole


def test_a_table_that_is_far_too_wide_has_a_line_a_cell() -> None:
    def table(console: Console) -> None:
        made = new_table("job", "state", "in/s", "restarts", numbers=("in/s", "restarts"))
        made.add_row("enrich-customer-orders", "running", "123,456", "0")
        made.add_row("clean", "ended", "", "2")
        print_table(console, made)

    assert printed(table, width=80)[1].split() == ["enrich-customer-orders", "running", "123,456", "0"]
    assert printed(table, width=45)[1:3] == ["enrich-customer-o  running  123,456         0", "rders"]
    assert printed(table, width=30) == [
        *("job       enrich-customer-orde", "          rs", "state     running", "in/s      123,456"),
        *("restarts  0", "", "job       clean", "state     ended", "restarts  2"),
    ]


def test_a_terminal_cuts_a_line_that_is_too_long_and_says_that_there_is_more() -> None:
    def line(console: Console, *, wide: bool = False) -> None:
        print_line(console, "first line of a reason\nsecond", wide=wide)

    assert printed(line) == ["first line of a reason …"]
    assert printed(line, width=10) == ["first lin…"]
    assert printed(line, terminal=False) == ["first line of a reason", "second"]
    assert printed(lambda console: line(console, wide=True)) == ["first line of a reason", "second"]


def letter(at_ms: int) -> RecordInfo:
    attempt = Attempt(1, at_ms, f"ValueError: {'x' * 200}", "parse", "", "")
    return RecordInfo(
        key=at_ms.to_bytes(8, "big"),
        stream="demo/lines",
        state="dead",
        root=1,
        origin=1,
        attempt=1,
        not_before_ms=0,
        history=(attempt,),
        payload=pa.record_batch({"text": ["y" * 300]}),
    )


class Vertices:
    """Two vertices, whose letters died by turns; each gives its latest first."""

    def __init__(self) -> None:
        self.died = {"a": [NOW_MS - 10, NOW_MS - 30], "b": [NOW_MS - 20, NOW_MS - 40]}

    def client(self, vertex: str) -> Any:
        vertices = self

        class Client:
            def call(self, call: Any) -> RecordPage:
                found = tuple(letter(at_ms) for at_ms in vertices.died[vertex])[: call.limit]
                return RecordPage(found, tuple(each.key for each in found), len(found), b"")

        return Client()


def test_the_newest_of_several_vertices_are_the_newest_of_all() -> None:
    names = JobNames([])
    searches = {name: Search(Selection(name, newest=True), names, NOW_MS) for name in ("a", "b")}
    gatherer: Any = Vertices()
    listing = listed(gatherer, searches, 3, 4, newest=True)
    assert [NOW_MS - each.info.history[-1].at_ms for each in listing.records] == [10, 20, 30]
    assert (listing.count, listing.is_all) == (4, True)


def test_records_in_lists_are_cut_to_a_terminal_s_width() -> None:
    names = JobNames([])
    gatherer: Any = Vertices()
    listing = listed(gatherer, {"a": Search(Selection("a"), names, NOW_MS)}, 1, 2)
    views = [VertexView("a", "grpc://w1:1", "/first/ft"), VertexView("b", "grpc://w1:2", "/second/ft")]
    two = listed(gatherer, {each.vertex: Search(Selection(each.vertex), names, NOW_MS) for each in views}, 4)

    def listing_of(console: Console, *, wide: bool = False) -> None:
        print_listing(console, listing, names, NOW_MS, 2, wide=wide)

    head, reason, record, count = printed(listing_of)
    assert head == f"{(NOW_MS - 10):016x}  demo/lines  attempt 1  10 ms ago"
    assert reason.startswith("  (in parse) ValueError: xxx")
    assert (len(reason), reason[-1], len(record), record[-1]) == (80, "…", 80, "…")
    assert count == "1 listed of 2; --limit shows more"
    assert printed(lambda console: print_listing(console, two, JobNames(views), NOW_MS, 2))[-3:-1] == [
        "  a (/first/ft)",
        "  b (/second/ft)",
    ]
    wide = printed(lambda console: listing_of(console, wide=True))
    assert "x" * 200 in wide[1]
    assert "y" * 300 in wide[2]


def test_between_two_attempts_is_when_the_record_was_requeued_or_edited() -> None:
    def shown(*attempts: Attempt) -> list[str]:
        info = replace(letter(NOW_MS), history=attempts, edited_ms=NOW_MS - 5_000)
        record = FoundRecords("a", info)
        lines = printed(lambda console: print_record(console, record, JobNames([]), several=False), width=200)
        return [line for line in lines if line.startswith(("  failed", "  requeued", "  edited  "))]

    first = Attempt(1, NOW_MS - 9_000, "no", requeued_ms=NOW_MS - 8_000, requeued_by="anna")
    second = Attempt(2, NOW_MS - 6_000, "no", requeued_ms=NOW_MS - 5_000, requeued_by="bert")
    third = Attempt(3, NOW_MS - 4_000, "no")
    failed, back, again, changed, last = shown(first, second, third)[-5:]
    assert [line.split()[:2] for line in (failed, again, last)] == [["failed", str(n)] for n in (1, 2, 3)]
    assert back == f"  requeued     {time_text(NOW_MS - 8_000)}  by anna"
    assert changed == f"  edited       {time_text(NOW_MS - 5_000)}  by bert"
    assert shown(replace(third, number=1), replace(third, number=1))[-2:][0] == "  requeued"


def test_differences_are_coloured_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = differences({"text": "a 12,5 \x1b[2J"}, {"text": "a 12.5 \x1b[2J"})
    plain = ["  text", '  - "a 12,5 \\u001b[2J"', '  + "a 12.5 \\u001b[2J"']
    out = io.StringIO()
    print_differences(Console(file=out, width=80), found)
    assert out.getvalue().splitlines() == plain
    monkeypatch.setenv("NO_COLOR", "1")
    print_differences(Console(file=(out := io.StringIO()), width=80, force_terminal=True), found)
    assert out.getvalue().splitlines() == plain
    monkeypatch.delenv("NO_COLOR")
    coloured = Console(file=(out := io.StringIO()), width=80, force_terminal=True, color_system="standard")
    print_differences(coloured, found)
    assert '\x1b[31m  - "a 12\x1b[0m\x1b[7;31m,\x1b[0m' in out.getvalue()
