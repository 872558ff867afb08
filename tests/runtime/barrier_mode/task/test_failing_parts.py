"""Waiting records, and letters, against plain dicts: whatever is done in whatever order."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.letters import ChainLetter, LetterKind
from ftlayer.runtime.barrier_mode.task.failing.attempts import (
    WAITING_TABLE,
    MadeLetters,
    WaitingRecord,
    WaitingRecords,
)
from ftlayer.state.heap import HeapBackend, HeapMap
from ftlayer.vertex.calls import Attempt

EARLIEST = Attempt(1, 5, "no", "op", "here", "trace")
names = st.integers(0, 9)
times = st.integers(0, 20)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), names, times),
        st.tuples(st.just("remove"), names, times),
        st.tuples(st.just("due"), st.integers(1, 3), times),
        st.tuples(st.just("hurry"), names, times),
        st.tuples(st.just("restore"), names, times),
    ),
    max_size=30,
)


def record(name: int, due_ms: int) -> WaitingRecord:
    """Some share a key."""
    key = None if name == 0 else f"k{name % 3}"
    return WaitingRecord(
        bytes([name]), key, LetterKind.RECORD, 0, b"row", 7, 3, 2, due_ms, 1, (EARLIEST,) * (name % 3)
    )


@given(STEPS)
def test_waiting_records_are_a_dict_with_an_order(steps: list[tuple[str, int, int]]) -> None:
    backend = HeapBackend()

    def table_of(enters: str) -> HeapMap:
        return backend.state(enters or "p").maps(WAITING_TABLE)

    found = WaitingRecords(table_of)
    model: dict[int, WaitingRecord] = {}
    due: dict[int, int] = {}
    used: set[int] = set()  # names are drawn, and never come again
    for what, number, time in steps:
        match what:
            case "put" if number not in used:
                used.add(number)
                model[number] = record(number, time)
                due[number] = time
                found.put(model[number])
            case "remove" if number in model:
                found.remove(model.pop(number))
                due.pop(number)
            case "due":
                taken = found.take_due(time, number)
                expected = sorted(when for when in due.values() if when <= time)[:number]
                assert [due[each.name[0]] for each in taken] == expected
                for each in taken:
                    # As if it had failed again.
                    name = each.name[0]
                    model[name], due[name] = record(name, time + 2), time + 2
                    found.put(model[name])
            case "hurry":
                found.no_later_than(time)
                due = {name: min(when, time) for name, when in due.items()}
            case "restore":
                found = WaitingRecords(table_of)
                found.restored(time)
                due = {name: min(each.due_ms, time) for name, each in model.items()}
        assert sorted(each.name for each in found) == [bytes([name]) for name in sorted(model)]
        assert {each.name[0]: each.attempts for each in found} == {
            name: each.attempts for name, each in model.items()
        }
        assert found.bytes == sum(each.size for each in model.values())
        assert found.due_ms == min(due.values(), default=None)


LETTER = ChainLetter(b"", 0, "p", 0, 0, LetterKind.RECORD, "p", b"", b"row", None, (), 1, 1)


@given(
    st.lists(
        st.one_of(
            st.just(("letter", 0)),
            st.just(("snapshot", 0)),
            st.tuples(st.just("completed"), st.integers(1, 8)),
            st.tuples(st.just("readmit"), st.integers(0, 3)),
        ),
        max_size=40,
    )
)
def test_each_letter_is_in_all_snapshots_up_to_the_first_that_is_complete(
    steps: list[tuple[str, int]],
) -> None:
    """A snapshot that is never told of was aborted: a later one has what it had."""
    made = MadeLetters()
    first: dict[bytes, int] = {}
    back: dict[bytes, int] = {}
    checkpoint = 0
    for number, (what, argument) in enumerate(steps):
        match what:
            case "letter":
                first[bytes([number])] = 0
                made.add(replace(LETTER, letter=bytes([number])))
            case "readmit":
                assert made.readmit(bytes([argument])) is (bytes([argument]) not in back)
                back.setdefault(bytes([argument]), 0)
            case "snapshot":
                checkpoint += 1
                first = {name: held or checkpoint for name, held in first.items()}
                back = {name: held or checkpoint for name, held in back.items()}
                letters, names_back = made.snapshot(checkpoint)
                assert {letter.letter: letter.checkpoint for letter in letters} == first
                assert set(names_back) == set(back)
            case "completed":
                complete = min(argument, checkpoint)
                made.completed(complete)
                first = {name: held for name, held in first.items() if not 0 < held <= complete}
                back = {name: held for name, held in back.items() if not 0 < held <= complete}
    assert made.made == sum(what == "letter" for what, _ in steps)
