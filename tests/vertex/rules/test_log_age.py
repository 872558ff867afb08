"""Since when the first row of a log that is not committed has been there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftlayer.vertex.rules.streams import MARK_MS, MAX_MARKS, LogAge

EVENTS = st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 3), st.integers(0, 3)), max_size=60)


@given(EVENTS)
def test_the_oldest_row_is_never_younger_than_it_is_and_hardly_older(
    events: list[tuple[int, int, int]],
) -> None:
    age, now_ms = LogAge(), 1
    came: list[int] = []  # by offset
    committed = 0
    for passed_ms, rows, done in events:
        now_ms += passed_ms
        if rows:
            came += [now_ms] * rows
            age.add(len(came), now_ms)
        committed = min(committed + done, len(came))
        age.committed(committed)
        if committed == len(came):
            assert age.since_ms == 0
        else:
            assert came[committed] - MARK_MS < age.since_ms <= came[committed]


def test_a_log_that_nobody_reads_takes_no_more_memory_and_its_first_row_keeps_its_time() -> None:
    age = LogAge()
    rows = 10 * MAX_MARKS
    for row in range(rows):
        age.add(row + 1, 1 + row * MARK_MS)
        assert len(age) <= MAX_MARKS
    assert age.since_ms == 1
    age.committed(rows - 1)
    assert 0 < age.since_ms <= 1 + (rows - 1) * MARK_MS
    age.committed(rows)
    assert age.since_ms == 0
