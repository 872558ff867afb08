from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.demo.ledger import DeadLetter, Expected, Ledger, recount, settle

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
        self.dead = [DeadLetter(line, reason, 3) for line, reason in expected.reasons.items()]

    def settle(self) -> Ledger:
        batches = [
            (
                batch,
                {name: [row[i] for row in rows] for i, name in enumerate(("line", "place", "word", "kind"))},
            )
            for batch, rows in self.sink.items()
        ]
        return settle(self.expected, batches, self.dead, max_attempts=3)

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
    run.dead[0] = DeadLetter(run.dead[0].line, "ConnectionError: no answer", 3)


def die_too_early(run: Run) -> None:
    run.dead[0] = DeadLetter(run.dead[0].line, run.dead[0].reason, 2)


def write_a_bad_line(run: Run) -> None:
    run.sink[1].append((run.dead.pop().line, 0, "word", "name"))


def write_a_dead_letter(run: Run) -> None:
    run.sink[1].append((run.dead[0].line, 0, "word", "name"))


def let_a_good_line_die(run: Run) -> None:
    run.remove("a.py:4")
    run.dead.append(DeadLetter("a.py:4", "ConnectionError: no answer", 3))


def invent_a_line(run: Run) -> None:
    run.sink[1].append(("c.py:1", 0, "word", "name"))


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        (double, "duplicated"),
        (double_in_one_batch, "duplicated"),
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
    faults = ("lost", "duplicated", "altered", "misplaced", "unknown")
    assert {name for name in faults if getattr(ledger, name)} == {where}
    assert getattr(ledger, where) == 1
    assert len(ledger.examples[where]) == 1


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
