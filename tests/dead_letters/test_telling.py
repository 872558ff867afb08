"""Every dead letter is told at least once, in order, whatever becomes of callback, driver, vertex and clock."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.checkpoint.dead_letters import announcer
from ftlayer.checkpoint.dead_letters.announcer import LONGEST_PAUSE_S, Announcer, StreamTeller
from ftlayer.checkpoint.dead_letters.letter import DeadLetter
from ftlayer.checkpoint.dead_letters.reader import DeadLetterReader
from ftlayer.functions.data_sources import ReadAllAvailable, ReadMaxRows
from ftlayer.vertex import calls

unhurried = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EVENTS = [
    "die",
    "die",
    "die",
    "step",
    "step",
    "restart vertex",
    "restart driver",
    "clock back",
    "away",
    "purge last",
]


@unhurried
@given(
    st.lists(st.sampled_from(EVENTS), max_size=40), st.integers(1, 3), st.sets(st.integers(0, 40), max_size=4)
)
def test_each_letter_is_told_in_order_and_again_only_after_a_failure(
    kit: SimpleNamespace, events: list[str], page: int, refused: set[int]
) -> None:
    vertex = kit.Vertex()
    told: list[str] = []
    calls_left = dict.fromkeys(refused, 1)
    announcer.logger.disabled = True  # hundreds of failures that are meant

    def tell(letter: DeadLetter) -> None:
        number = int(letter.record["text"])
        if calls_left.get(number, 0):
            calls_left[number] -= 1
            raise RuntimeError("no")
        told.append(letter.record["text"])

    old_page, announcer.PAGE = announcer.PAGE, page
    try:
        teller = StreamTeller(vertex, kit.STREAM, tell)
        died: list[str] = []
        lost_driver = 0
        for event in [*events, "settle"]:
            match event:
                case "die" if not vertex.away:
                    died.append(str(len(died)))
                    vertex.die(died[-1])
                case "step":
                    teller.step()
                case "restart vertex" if not vertex.away:
                    vertex.restart()
                case "restart driver":
                    lost_driver += 1
                    teller = StreamTeller(vertex, kit.STREAM, tell)
                case "clock back":
                    vertex.wall -= 3_600_000
                case "away":
                    vertex.away = 2
                case "purge last" if not vertex.away and told and told[-1] == died[-1]:
                    # The last key is gone: the next one still comes behind it.
                    vertex.call(calls.Purge((*vertex.keys()[-1:],)))
        for _ in range(3 * len(died) + 20):
            teller.step()
        assert not teller.failures
    finally:
        announcer.PAGE = old_page
        announcer.logger.disabled = False
    # In the order of death, and what is told again is a part of a page that was not noted.
    first = list(dict.fromkeys(told))
    assert first == died
    for before, after in pairwise(told):
        assert int(before) - page < int(after) <= int(before) + 1
    if "away" not in events:
        assert told == died


def test_pauses_grow_and_what_is_wrong_can_be_seen(kit: SimpleNamespace, caplog: Any) -> None:
    vertex = kit.Vertex()
    vertex.die("0")

    def tell(letter: DeadLetter) -> None:
        raise RuntimeError(f"cannot tell {letter.key}")

    teller = StreamTeller(vertex, kit.STREAM, tell)
    pauses = []
    for _ in range(9):
        assert not teller.step()
        pauses.append(teller.pause_s)
    assert pauses[:3] == [2.0, 4.0, 8.0]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert teller.last_failure.startswith("RuntimeError: cannot tell")
    assert "it is called again with it" in caplog.text
    assert len(vertex.keys()) == 1


def test_closing_tells_what_is_there(kit: SimpleNamespace) -> None:
    vertex = kit.Vertex()
    told: list[str] = []
    it = Announcer(vertex, lambda letter: told.append(letter.record["text"]))
    it.watch(kit.STREAM)
    it.watch(kit.STREAM)
    for number in range(3):
        vertex.die(str(number))
    it.close()
    assert told == ["0", "1", "2"]
    assert it.failures() == {}


@unhurried
@given(
    st.lists(st.sampled_from(["die", "die", "read", "restart", "clock back", "lost"]), max_size=30),
    st.integers(1, 3),
)
def test_a_stream_of_letters_has_each_once_between_its_offsets(
    kit: SimpleNamespace, events: list[str], rows: int
) -> None:
    vertex = kit.Vertex()
    reader = DeadLetterReader(vertex, [kit.STREAM])
    offset = reader.initialOffset()
    died = 0
    read: list[str] = []
    for event in [*events, "all"]:
        match event:
            case "die":
                vertex.die(str(died))
                died += 1
            case "restart":
                vertex.restart()
            case "clock back":
                vertex.wall -= 1_000
            case "lost":
                reader = DeadLetterReader(vertex, [kit.STREAM])
            case _:
                limit = ReadAllAvailable() if event == "all" else ReadMaxRows(rows)
                end = reader.latestOffset(offset, limit)
                latest = reader.reportLatestOffset()[kit.STREAM]
                assert (latest > end[kit.STREAM]) == (len(read) + rows < died and event != "all")
                ranges = [list(reader.read(part)) for part in reader.partitions(offset, end)]
                # A range that is read again is the same, whatever has died since.
                vertex.die(str(died))
                died += 1
                again = [list(reader.read(part)) for part in reader.partitions(offset, end)]
                assert again == ranges
                letters = [row for batches in ranges for batch in batches for row in batch.to_pylist()]
                assert event == "all" or len(letters) <= rows
                read += [letter["record"] for letter in letters]
                offset = end
    assert read == [f'{{"text": "{number}"}}' for number in range(died - 1)]


def test_the_latest_letter_is_that_which_was_told_of_where_it_is_gone(kit: SimpleNamespace) -> None:
    vertex = kit.Vertex()
    reader = DeadLetterReader(vertex, [kit.STREAM])
    assert reader.reportLatestOffset() == {kit.STREAM: ""}
    vertex.die("0")
    vertex.die("1")
    told = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert reader.reportLatestOffset() == told
    (first, last) = (info.key for info in vertex.call(calls.ListRecords("dead")).records)
    vertex.call(calls.Purge((last,)))
    assert reader.reportLatestOffset() == told
    assert told[kit.STREAM] > first.hex()


def test_a_position_that_is_noted_again_has_its_effect_once_over_restarts(kit: SimpleNamespace) -> None:
    vertex = kit.Vertex()
    one, two = calls.Envelope("driver", 1), calls.Envelope("driver", 2)
    first, second = (calls.PutCursor(kit.STREAM, "it", position) for position in (b"1", b"2"))
    assert vertex.call(first, one) == calls.Cursor(b"1")
    assert vertex.call(second, two) == calls.Cursor(b"2")
    for _ in range(2):
        assert vertex.call(first, one) == calls.Cursor(b"1")  # the reply of the first time
        assert vertex.call(calls.GetCursor(kit.STREAM, "it")) == calls.Cursor(b"2")
        assert vertex.call(calls.GetCursor(kit.STREAM, "another")) == calls.Cursor(b"")
        vertex.restart()
