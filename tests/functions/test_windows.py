"""Windows of event time against models that know all records."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftlayer.functions.chains.topology import MAIN, TopologyChain
from ftlayer.functions.process import LAST_WATERMARK_MS
from ftlayer.functions.steps import Process
from ftlayer.functions.windows import (
    TABLE,
    Aggregated,
    Collected,
    Content,
    Fixed,
    Reduced,
    Session,
    Window,
    WindowKind,
    window_function,
)
from ftlayer.state.heap import HeapBackend

RECORD = pa.schema([("k", pa.string()), ("t", pa.int64()), ("n", pa.int64())])
RESULT = pa.schema(
    [("k", pa.string()), ("start", pa.int64()), ("end", pa.int64()), ("value", pa.list_(pa.int64()))]
)
MIN_MS = -(2**63)

Row = tuple[str, int, int]
"""Key, time, number."""

Emitted = tuple[str, int, int, list[int]]


def result(key: str, window: Window, content: list[int]) -> Emitted:
    return key, window.start_ms, window.end_ms, sorted(content)


CONTENTS: dict[str, Content] = {
    "reduced": Reduced(
        lambda one, other: (one[0], one[1], one[2] + other[2]),
        lambda key, window, row: result(key, window, [row[2]]),
    ),
    "aggregated": Aggregated(
        list, lambda numbers, row: [*numbers, row[2]], lambda one, other: one + other, result
    ),
    "collected": Collected(lambda key, window, rows: [result(key, window, [row[2] for row in rows])]),
}


def value_of(kind: str, numbers: list[int]) -> list[int]:
    return [sum(numbers)] if kind == "reduced" else sorted(numbers)


class Stage:
    """A chain of one window operator, and its state."""

    def __init__(
        self, windows: WindowKind, content: Content, lateness_ms: int, late_tag: str | None = "late"
    ) -> None:
        function = window_function(windows, content, lateness_ms, late_tag)
        self.backend = HeapBackend()
        step = Process("w", function, RESULT, ("k",), () if late_tag is None else ((late_tag, RECORD),))
        self.chain = TopologyChain([step], [RECORD], self.backend)
        self.chain.open()
        self.watermark_ms = MIN_MS

    def batch(self, rows: list[Row]) -> tuple[list[Row], list[Emitted]]:
        """Run rows; return the late ones, and what is emitted again."""
        columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
        batch = pa.record_batch(
            [pa.array(values, f.type) for values, f in zip(columns, RECORD, strict=True)], schema=RECORD
        )
        times = np.array(columns[1], dtype=np.int64)
        ran = self.chain.run(batch, times, self.watermark_ms, 0)
        assert not ran.failures
        assert not ran.outputs[MAIN].batch.num_rows
        late = (
            [tuple(row.values()) for row in ran.outputs["late"].batch.to_pylist()]
            if "late" in ran.outputs
            else []
        )
        return late, self.fire()

    def advance(self, watermark_ms: int) -> list[Emitted]:
        self.watermark_ms = watermark_ms
        return self.fire()

    def fire(self) -> list[Emitted]:
        fired = self.chain.fire_event_timers(self.watermark_ms, 0)
        if MAIN not in fired:
            return []
        rows = [tuple(row.values()) for row in fired[MAIN].batch.to_pylist()]
        assert fired[MAIN].times.tolist() == [min(end, LAST_WATERMARK_MS) - 1 for _, _, end, _ in rows]
        ends = [end for _, _, end, _ in rows]
        assert ends == sorted(ends)
        return rows

    def held(self) -> dict[str, int]:
        """Return how many windows of each key there are."""
        table = self.backend.state("w").maps(TABLE)
        return {key: len(table.items(key)) for key in "ab" if table.items(key)}


@dataclass
class FixedModel:
    """Keeps all records, and looks at each possible window."""

    windows: Fixed
    lateness_ms: int
    watermark_ms: int = MIN_MS
    rows: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))

    def starts(self, time_ms: int) -> list[int]:
        size, every, offset = self.windows.size_ms, self.windows.every_ms, self.windows.offset_ms
        return [s for s in range(time_ms - size + 1, time_ms + 1) if (s - offset) % every == 0]

    def batch(self, rows: list[Row]) -> tuple[list[Row], set[tuple[str, int]]]:
        late, again = [], set()
        for key, time_ms, number in rows:
            starts = self.starts(time_ms)
            taken = [s for s in starts if s + self.windows.size_ms + self.lateness_ms > self.watermark_ms]
            if starts and not taken:
                late.append((key, time_ms, number))
            for start in taken:
                self.rows[key, start].append(number)
                if start + self.windows.size_ms <= self.watermark_ms:
                    again.add((key, start))
        return late, again

    def advance(self, watermark_ms: int) -> set[tuple[str, int]]:
        size, before = self.windows.size_ms, self.watermark_ms
        self.watermark_ms = watermark_ms
        return {(key, s) for key, s in self.rows if before < s + size <= watermark_ms}

    def timers(self) -> int:
        """Each window has one timer: for its end, and then for when it is over."""
        size = self.windows.size_ms
        due = {
            (key, s + size + (self.lateness_ms if s + size <= self.watermark_ms else 0))
            for key, s in self.rows
        }
        return sum(time > self.watermark_ms for _, time in due)

    def held(self) -> dict[str, int]:
        over = self.windows.size_ms + self.lateness_ms
        live = [key for key, start in self.rows if start + over > self.watermark_ms]
        return {key: live.count(key) for key in set(live)}

    def emitted(self, kind: str, windows: set[tuple[str, int]]) -> list[Emitted]:
        size = self.windows.size_ms
        return sorted((key, s, s + size, value_of(kind, self.rows[key, s])) for key, s in windows)


times = st.integers(-40, 60)
rounds = st.lists(
    st.tuples(st.lists(st.tuples(st.sampled_from("ab"), times), max_size=6), st.integers(0, 25)), max_size=8
)


def numbered(records: list[tuple[str, int]], first: int) -> list[Row]:
    return [(key, time_ms, first + place) for place, (key, time_ms) in enumerate(records)]


def told(
    story: list[tuple[list[tuple[str, int]], int]], stage: Stage, model: FixedModel | SessionModel, kind: str
) -> Iterator[int]:
    """Compare both after each batch and its watermark; yields how many records came so far, and ends the stream."""
    watermark_ms, count = -45, 0
    for records, step in story:
        rows = numbered(records, count)
        count += len(rows)
        late, again = stage.batch(rows)
        model_late, model_again = model.batch(rows)
        assert late == model_late
        assert sorted(again) == model.emitted(kind, model_again)
        watermark_ms += step
        assert sorted(stage.advance(watermark_ms)) == model.emitted(kind, model.advance(watermark_ms))
        assert stage.held() == model.held()
        yield count
    assert sorted(stage.advance(LAST_WATERMARK_MS)) == model.emitted(kind, model.advance(LAST_WATERMARK_MS))
    assert stage.held() == {}


@settings(max_examples=150, deadline=None)
@given(
    rounds,
    st.integers(1, 20),
    st.integers(1, 25),
    st.integers(-30, 30),
    st.integers(0, 15),
    st.sampled_from(sorted(CONTENTS)),
)
def test_fixed_windows_against_all_records(
    story: list[tuple[list[tuple[str, int]], int]],
    size: int,
    every: int,
    offset: int,
    lateness: int,
    kind: str,
) -> None:
    windows = Fixed(size, every, offset)
    stage, model = Stage(windows, CONTENTS[kind], lateness), FixedModel(windows, lateness)
    for _ in told(story, stage, model, kind):
        assert stage.backend.timers("w").event.count == model.timers()
    assert stage.backend.timers("w").event.count == 0
    assert stage.chain.late == 0, "all of them had somewhere to go"


@settings(max_examples=50, deadline=None)
@given(rounds, st.integers(1, 20), st.integers(1, 25), st.integers(0, 15))
def test_records_without_a_window_or_a_side_output_are_counted(
    story: list[tuple[list[tuple[str, int]], int]], size: int, every: int, lateness: int
) -> None:
    windows = Fixed(size, every, 0)
    stage = Stage(windows, CONTENTS["collected"], lateness, None)
    model = FixedModel(windows, lateness)
    dropped = 0
    for records, step in story:
        rows = numbered(records, 0)
        assert stage.batch(rows)[0] == []
        dropped += len(model.batch(rows)[0])
        stage.advance(stage.watermark_ms + step if stage.watermark_ms > MIN_MS else -45)
        model.advance(stage.watermark_ms)
        assert stage.chain.late == dropped


@dataclass
class SessionModel:
    """Keeps the records of sessions that are not over, and cuts them anew each time."""

    gap_ms: int
    lateness_ms: int
    watermark_ms: int = MIN_MS
    rows: list[Row] = field(default_factory=list)

    def sessions(self) -> list[list[Row]]:
        found: list[list[Row]] = []
        for row in sorted(self.rows):
            last = found[-1][-1] if found else None
            if last is not None and last[0] == row[0] and row[1] - last[1] <= self.gap_ms:
                found[-1].append(row)
            else:
                found.append([row])
        return found

    def end(self, rows: list[Row]) -> int:
        return rows[-1][1] + self.gap_ms

    def batch(self, rows: list[Row]) -> tuple[list[Row], list[list[Row]]]:
        late = []
        for row in rows:
            self.rows.append(row)
            whole = next(session for session in self.sessions() if row in session)
            if self.end(whole) + self.lateness_ms <= self.watermark_ms:
                assert whole == [row]
                late.append(row)
                self.rows.remove(row)
        ended = [session for session in self.sessions() if self.end(session) <= self.watermark_ms]
        return late, [session for session in ended if set(session) & set(rows)]

    def advance(self, watermark_ms: int) -> list[list[Row]]:
        before, self.watermark_ms = self.watermark_ms, watermark_ms
        fired = [session for session in self.sessions() if before < self.end(session) <= watermark_ms]
        for session in self.sessions():
            if self.end(session) + self.lateness_ms <= watermark_ms:
                self.rows = [row for row in self.rows if row not in session]
        return fired

    def held(self) -> dict[str, int]:
        keys = [session[0][0] for session in self.sessions()]
        return {key: keys.count(key) for key in set(keys)}

    def emitted(self, kind: str, sessions: list[list[Row]]) -> list[Emitted]:
        return sorted(
            (s[0][0], s[0][1], self.end(s), value_of(kind, [number for _, _, number in s])) for s in sessions
        )


@settings(max_examples=200, deadline=None)
@given(rounds, st.integers(1, 20), st.integers(0, 25), st.sampled_from(sorted(CONTENTS)))
def test_sessions_against_all_records(
    story: list[tuple[list[tuple[str, int]], int]], gap: int, lateness: int, kind: str
) -> None:
    stage, model = Stage(Session(gap), CONTENTS[kind], lateness), SessionModel(gap, lateness)
    for count in told(story, stage, model, kind):
        assert stage.backend.timers("w").event.count <= count
    assert stage.backend.timers("w").event.count == 0


def test_windows_of_a_time() -> None:
    assert Fixed(10, 10).starts(-1) == [-10]
    assert Fixed(10, 10, 3).starts(2) == [-7]
    assert Fixed(60, 20).starts(65) == [20, 40, 60]
    assert Fixed(5, 20).starts(7) == []


def test_a_record_at_the_watermark_is_in_time() -> None:
    """The watermark says that nothing older comes, so a record of the window's last time may."""
    stage = Stage(Fixed(10, 10), CONTENTS["collected"], 0)
    stage.batch([("a", 3, 0)])
    assert stage.advance(9) == []
    assert stage.batch([("a", 9, 1)]) == ([], [])
    assert stage.advance(10) == [("a", 0, 10, [0, 1])]
    assert stage.batch([("a", 9, 2)]) == ([("a", 9, 2)], [])


def test_what_falls_between_two_windows_is_not_late() -> None:
    stage = Stage(Fixed(5, 20), CONTENTS["collected"], 0)
    stage.advance(100)
    assert stage.batch([("a", 7, 0), ("a", 21, 1)]) == ([("a", 21, 1)], [])


@pytest.mark.parametrize("windows", [Fixed(10, 10), Fixed(10, 5), Session(10)], ids=repr)
@pytest.mark.parametrize("lateness", [0, 5, 100])
def test_windows_at_the_end_of_all_times(windows: WindowKind, lateness: int) -> None:
    stage = Stage(windows, CONTENTS["collected"], lateness)
    last = LAST_WATERMARK_MS
    stage.batch([("a", last - 1, 0), ("a", last - 12, 1), ("b", last - 200, 2)])
    near = stage.advance(last - 150)
    assert {key for key, _, _, _ in near} == {"b"}
    emitted = stage.advance(last)
    assert {number for _, _, _, numbers in emitted for number in numbers} == {0, 1}
    assert stage.held() == {}
    assert stage.backend.timers("w").event.count == 0


def test_a_record_without_time_fails_and_says_what_to_do() -> None:
    stage = Stage(Fixed(10, 10), CONTENTS["collected"], 0)
    batch = pa.record_batch([["a"], [1], [2]], schema=RECORD)
    failures = stage.chain.run(batch, None, MIN_MS, 0).failures
    assert "use assign_watermarks" in failures[0].reason


def test_a_result_may_be_any_number_of_records() -> None:
    stage = Stage(Fixed(10, 10), Collected(lambda key, window, rows: None), 0)
    stage.batch([("a", 3, 0)])
    assert stage.advance(LAST_WATERMARK_MS) == []
    stage = Stage(Fixed(10, 10), Collected(lambda key, window, rows: [result(key, window, [])] * 2), 0)
    stage.batch([("a", 3, 0)])
    assert len(stage.advance(LAST_WATERMARK_MS)) == 2


def test_windows_that_are_kept_for_late_records_do_not_slow_others_down() -> None:
    stage = Stage(Fixed(10, 10), CONTENTS["reduced"], 1_000_000)
    stage.batch([("a", time_ms, 1) for time_ms in range(0, 20_000, 10)])
    assert len(stage.advance(20_000)) == 2_000
    assert stage.held() == {"a": 2_000}
    assert stage.advance(1_010_000) == []
    assert stage.held() == {"a": 1_000}


@pytest.mark.parametrize("windows", [Fixed(10, 10), Session(10)], ids=repr)
def test_a_late_record_is_emitted_though_a_restore_has_forgotten_the_watermark(windows: WindowKind) -> None:
    """State and timers come back with a checkpoint, and the watermark begins anew: below windows it had passed."""
    stage = Stage(windows, CONTENTS["collected"], 100)
    stage.batch([("a", 0, 0)])
    assert stage.advance(12) == [("a", 0, 10, [0])]
    stage.watermark_ms = MIN_MS
    assert stage.batch([("a", 0, 1)]) == ([], [])
    assert stage.advance(12) == [("a", 0, 10, [0, 1])]
    assert stage.advance(200) == []
    assert stage.held() == {}
    assert stage.backend.timers("w").event.count == 0


@settings(max_examples=150, deadline=None)
@given(rounds, rounds, st.sampled_from([Fixed(10, 10), Fixed(12, 5, 3), Session(7)]), st.integers(0, 25))
def test_behind_a_restore_every_record_that_is_not_late_is_emitted(
    before: list[tuple[list[tuple[str, int]], int]],
    after: list[tuple[list[tuple[str, int]], int]],
    windows: WindowKind,
    lateness: int,
) -> None:
    stage = Stage(windows, CONTENTS["collected"], lateness)
    count = 0
    emitted: set[int] = set()
    late: set[int] = set()
    for story in (before, after):
        stage.watermark_ms = MIN_MS
        watermark_ms = -45
        for records, step in story:
            rows = numbered(records, count)
            count += len(rows)
            too_late, again = stage.batch(rows)
            watermark_ms += step
            results = [*again, *stage.advance(watermark_ms)]
            late |= {number for _, _, number in too_late}
            emitted |= {number for _, _, _, numbers in results for number in numbers}
    emitted |= {number for _, _, _, numbers in stage.advance(LAST_WATERMARK_MS) for number in numbers}
    assert emitted == set(range(count)) - late
    assert stage.held() == {}
    assert stage.backend.timers("w").event.count == 0
