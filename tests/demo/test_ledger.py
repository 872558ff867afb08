from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.cli.demo.ledger import (
    FAULTS,
    DeadLine,
    Expected,
    HandChanges,
    Ledger,
    recount,
    settle_checkpointed,
    settle_query,
    settle_tracked,
)

GOOD = {f"a.py:{n}": f"first = second_{n}" for n in range(1, 5)}
BAD = {"a.py:5": "an 8bit number", "b.py:1": "naïve"}
OTHER = {"b.py:2": "import this"}
FILES = [
    ("part-0", [f"{line}\t{text}" for line, text in {**GOOD, "a.py:5": BAD["a.py:5"]}.items()]),
    ("part-1", [f"b.py:1\t{BAD['b.py:1']}", f"b.py:2\t{OTHER['b.py:2']}"]),
]


@pytest.fixture
def expected() -> Expected:
    return recount(FILES)


class Run:
    """What a run left: the sink's rows by batch, and the dead letters."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self.sink: dict[int, list[tuple[Any, ...]]] = {0: [], 1: []}
        for line, rows in expected.rows.items():
            batch = int(expected.file_of[line][-1])
            self.sink[batch] += [(line, *row) for row in rows]
        self.changes = HandChanges()
        self.dead = [DeadLine(line, reason, 3) for line, reason in expected.reasons.items()]

    def settle(self) -> Ledger:
        batches = [
            (
                batch,
                {name: [row[i] for row in rows] for i, name in enumerate(("line", "place", "word", "kind"))},
            )
            for batch, rows in self.sink.items()
        ]
        return settle_query(self.expected, batches, self.dead, max_attempts=3, changes=self.changes)

    def rows_of(self, line: str) -> list[tuple[Any, ...]]:
        return [row for rows in self.sink.values() for row in rows if row[0] == line]

    def remove(self, line: str) -> None:
        self.sink = {batch: [row for row in rows if row[0] != line] for batch, rows in self.sink.items()}

    def move(self, line: str, batch: int) -> None:
        rows = self.rows_of(line)
        self.remove(line)
        self.sink.setdefault(batch, []).extend(rows)


@pytest.fixture
def run(expected: Expected) -> Run:
    return Run(expected)


def test_recount_says_what_must_come_of_every_line(expected: Expected) -> None:
    assert len(expected) == 7
    assert expected.rows["a.py:1"] == ((0, "first", "name"), (1, "second_1", "name"))
    assert expected.rows["b.py:2"] == ((0, "import", "keyword"), (1, "this", "name"))
    assert expected.reasons["a.py:5"] == "LineError: not a number: '8bit'"
    assert expected.reasons["b.py:1"].startswith("UnicodeEncodeError")


def test_a_run_without_faults_balances(run: Run) -> None:
    ledger = run.settle()
    assert ledger.balanced
    assert (ledger.records_in, ledger.first_try, ledger.after_replay, ledger.dead) == (7, 5, 0, 2)
    assert ledger.dead_by_reason == {
        "LineError: not a number": 1,
        "UnicodeEncodeError: a character beyond ASCII": 1,
    }


def test_a_line_in_a_later_batch_than_its_file_was_replayed(run: Run) -> None:
    run.move("a.py:2", 4)
    ledger = run.settle()
    assert ledger.balanced
    assert (ledger.first_try, ledger.after_replay) == (4, 1)


def double(run: Run) -> None:
    run.sink[5] = run.rows_of("a.py:1")


def split_over_batches(run: Run) -> None:
    rows = run.rows_of("a.py:1")
    run.remove("a.py:1")
    run.sink[0].append(rows[0])
    run.sink[5] = rows[1:]


def double_in_one_batch(run: Run) -> None:
    run.sink[0] += run.rows_of("a.py:1")


def lose_a_good_line(run: Run) -> None:
    run.remove("a.py:3")


def lose_a_dead_letter(run: Run) -> None:
    run.dead.pop()


def lose_a_row_of_a_line(run: Run) -> None:
    run.sink[0].remove(run.rows_of("a.py:1")[0])


def change_a_row(run: Run) -> None:
    line, place, word, _ = run.sink[0][0]
    run.sink[0][0] = (line, place, word, "builtin")


def die_twice(run: Run) -> None:
    run.dead.append(run.dead[0])


def die_for_another_reason(run: Run) -> None:
    run.dead[0] = DeadLine(run.dead[0].line, "ConnectionError: no answer", 3)


def die_too_early(run: Run) -> None:
    run.dead[0] = DeadLine(run.dead[0].line, run.dead[0].reason, 2)


def write_a_bad_line(run: Run) -> None:
    run.sink[1].append((run.dead.pop().line, 0, "word", "name"))


def write_a_dead_letter(run: Run) -> None:
    run.sink[1].append((run.dead[0].line, 0, "word", "name"))


def let_a_good_line_die(run: Run) -> None:
    run.remove("a.py:4")
    run.dead.append(DeadLine("a.py:4", "ConnectionError: no answer", 3))


def invent_a_line(run: Run) -> None:
    run.sink[1].append(("c.py:1", 0, "word", "name"))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (double, "duplicated"),
        (double_in_one_batch, "duplicated"),
        (split_over_batches, "duplicated"),
        (die_twice, "duplicated"),
        (lose_a_good_line, "lost"),
        (lose_a_dead_letter, "lost"),
        (lose_a_row_of_a_line, "altered"),
        (change_a_row, "altered"),
        (die_for_another_reason, "altered"),
        (die_too_early, "altered"),
        (write_a_bad_line, "misplaced"),
        (write_a_dead_letter, "misplaced"),
        (let_a_good_line_die, "misplaced"),
        (invent_a_line, "unknown"),
    ],
)
def test_each_fault_is_named_and_does_not_balance(run: Run, fault: Callable[[Run], None], where: str) -> None:
    fault(run)
    ledger = run.settle()
    assert not ledger.balanced
    assert {name for name in FAULTS if getattr(ledger, name)} == {where}
    assert getattr(ledger, where) == 1
    assert len(ledger.examples[where]) == 1


def purge(run: Run) -> None:
    run.dead.pop()


def edit(run: Run) -> None:
    run.sink[1].append((run.dead.pop().line, 0, "word", "name"))


def requeue(run: Run) -> None:
    run.dead[0] = DeadLine(run.dead[0].line, run.dead[0].reason, 6)


def edit_in_vain(run: Run) -> None:
    run.dead[0] = DeadLine(run.dead[0].line, "LineError: not a number: '9bit'", 6, edited=True)


@pytest.mark.parametrize(
    ("change", "audited", "counts"),
    [
        (purge, HandChanges(purged=1), (0, 1, 1)),
        (edit, HandChanges(edited=1), (1, 0, 1)),
        (requeue, HandChanges(requeued=1), (0, 0, 2)),
        (edit_in_vain, HandChanges(edited=1), (0, 0, 2)),
    ],
)
def test_what_people_do_is_an_account_of_its_own(
    run: Run, change: Callable[[Run], None], audited: HandChanges, counts: tuple[int, int, int]
) -> None:
    """As far as the audit log has it: without that line the same is a fault."""
    change(run)
    assert not run.settle().balanced
    run.changes = audited
    ledger = run.settle()
    assert ledger.balanced
    assert (ledger.mended, ledger.purged, ledger.dead) == counts


def test_one_purge_excuses_one_line(run: Run) -> None:
    run.dead = []
    run.changes = HandChanges(requeued=5, edited=5, purged=1)
    ledger = run.settle()
    assert (ledger.purged, ledger.lost, ledger.balanced) == (1, 1, False)


def test_a_purge_excuses_no_good_line(run: Run) -> None:
    run.remove("a.py:1")
    run.changes = HandChanges(purged=1)
    assert run.settle().lost == 1


@given(st.lists(st.sampled_from(sorted({**GOOD, **BAD, **OTHER})), unique=True))
def test_whatever_is_lost_every_line_is_in_one_count(lost: list[str]) -> None:
    run = Run(recount(FILES))
    for line in lost:
        run.remove(line)
    run.dead = [letter for letter in run.dead if letter.line not in lost]
    ledger = run.settle()
    assert ledger.lost == len(lost)
    assert ledger.balanced == (not lost)
    assert ledger.first_try + ledger.after_replay + ledger.dead + ledger.lost == ledger.records_in


# ---------------------------------------------------------------- topologies


class TopologyRun(Run):
    """What a topology left; its sink knows no batches."""

    def rows(self) -> list[tuple[Any, ...]]:
        return [row for rows in self.sink.values() for row in rows]

    def columns(self) -> dict[str, list[Any]]:
        counts: Counter[str] = Counter()
        columns: dict[str, list[Any]] = {name: [] for name in ("line", "place", "word", "kind", "count")}
        for row in self.rows():
            counts[row[2]] += 1
            for values, value in zip(columns.values(), (*row, counts[row[2]]), strict=True):
                values.append(value)
        return columns

    def settle_tracked(self, *, failed: str = "", killed: bool = False) -> Ledger:
        return settle_tracked(
            self.expected,
            [self.columns()],
            self.dead,
            max_attempts=3,
            changes=self.changes,
            has_failed=lambda line: line == failed,
            killed=killed,
        )

    def settle_checkpointed(self, columns: dict[str, list[Any]] | None = None, *, failed: str = "") -> Ledger:
        return settle_checkpointed(
            self.expected,
            [columns or self.columns()],
            self.dead,
            max_attempts=3,
            has_failed=lambda line: line == failed,
        )


@pytest.fixture
def topology(expected: Expected) -> TopologyRun:
    return TopologyRun(expected)


def test_topologies_without_faults_balance(topology: TopologyRun) -> None:
    tracked, checkpointed = topology.settle_tracked(), topology.settle_checkpointed()
    assert tracked.balanced
    assert checkpointed.balanced
    assert (tracked.first_try, tracked.dead) == (checkpointed.first_try, checkpointed.dead) == (5, 2)
    # first, second_1 … second_4, import, this
    assert checkpointed.words == 7


@pytest.mark.parametrize(
    ("failed", "killed", "where"),
    [
        ("a.py:1", False, "after_replay"),
        ("", True, "repeated"),
        ("a.py:1", True, "after_replay"),
        ("", False, "duplicated"),
        ("a.py:2", False, "duplicated"),
    ],
)
def test_rows_are_there_again_where_a_replay_may_have_brought_them(
    topology: TopologyRun, failed: str, killed: bool, where: str
) -> None:
    topology.sink[1].append(topology.rows_of("a.py:1")[0])
    ledger = topology.settle_tracked(failed=failed, killed=killed)
    assert getattr(ledger, where) == 1
    assert ledger.balanced == (where != "duplicated")
    assert topology.settle_checkpointed().duplicated == 1


def test_a_replay_excuses_no_missing_row(topology: TopologyRun) -> None:
    first, _ = topology.rows_of("a.py:1")
    topology.sink[0].remove(first)
    topology.sink[1] += topology.rows_of("a.py:1")
    ledger = topology.settle_tracked(failed="a.py:1", killed=True)
    assert (ledger.altered, ledger.balanced) == (1, False)


def test_in_barrier_mode_a_retry_is_no_excuse_for_a_second_row(topology: TopologyRun) -> None:
    ledger = topology.settle_checkpointed(failed="a.py:1")
    assert (ledger.first_try, ledger.after_replay, ledger.balanced) == (4, 1, True)
    topology.sink[1].append(topology.rows_of("a.py:1")[0])
    ledger = topology.settle_checkpointed(failed="a.py:1")
    assert (ledger.duplicated, ledger.balanced) == (1, False)


@pytest.mark.parametrize("count", [0, 1, 3, 5])
def test_a_count_that_went_wrong_is_named(topology: TopologyRun, count: int) -> None:
    columns = topology.columns()
    columns["count"][columns["word"].index("first") + 2] = count
    ledger = topology.settle_checkpointed(columns)
    assert not ledger.balanced
    assert ledger.examples == {"miscounted": ["first"]}
