"""What is kept of the ranges of a source until all of their rows are done."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.vertex.store import MemoryStore
from ftlayer.vertex.store.key_value import all_planned, put_planned


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 300), st.integers(0, 300)), max_size=40))
def test_ranges_are_kept_from_the_first_that_is_needed_on(notes: list[tuple[int, int, int]]) -> None:
    store = MemoryStore()
    expected: dict[int, dict[int, bytes]] = {0: {}, 1: {}, 2: {}}
    for stream, number, below in notes:
        first = min(number, below)
        with store.write(intake=False) as txn:
            put_planned(txn, stream, number, b"range %d" % number, first=first)
        kept = {each: planned for each, planned in expected[stream].items() if each >= first}
        expected[stream] = {**kept, number: b"range %d" % number}
    with store.read() as txn:
        for stream, planned in expected.items():
            assert all_planned(txn, stream) == tuple(planned[number] for number in sorted(planned))
