"""The ledger: what became of every line, held against a recount of the input without Spark.

Rules only: what is expected, what was found in the sink and what among the dead letters are given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftlayer.demo.functions import class_of, kind_of, parse, reason_of, split_record

EXAMPLES = 5

Row = tuple[int, str, str]
"""(place, word, kind): a row of the sink without its line and batch."""


@dataclass
class Expected:
    """What must come of the input: the rows of each good line, the reason of each that cannot be parsed.

    ``file_of`` names the input file of a line: the lines of one file are read in one batch.
    """

    rows: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.file_of)


@dataclass(frozen=True)
class DeadLetter:
    """A dead letter of the run: the line it was, why, and how many attempts it had."""

    line: str
    reason: str
    attempts: int


@dataclass
class Ledger:
    """What became of ``records_in`` lines. Each is in exactly one of the counts up to ``lost``.

    ``duplicated`` lines are in the sink or among the dead letters more than once, ``altered`` ones hold other
    rows than they should, ``misplaced`` ones are in the wrong one of the two (or in both), ``unknown`` ones were
    never in the input.
    """

    records_in: int = 0
    first_try: int = 0
    after_replay: int = 0
    dead_by_reason: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    misplaced: int = 0
    unknown: int = 0
    rows_out: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        """Lines among the dead letters."""
        return sum(self.dead_by_reason.values())

    @property
    def balanced(self) -> bool:
        """Whether every line is where it must be, once."""
        accounted = self.first_try + self.after_replay + self.dead == self.records_in
        return accounted and not any((self.lost, self.duplicated, self.altered, self.misplaced, self.unknown))

    def note(self, what: str, line: str) -> None:
        """Count ``line`` under ``what``, one of the faults, and keep the first ones as examples."""
        setattr(self, what, getattr(self, what) + 1)
        examples = self.examples.setdefault(what, [])
        if len(examples) < EXAMPLES:
            examples.append(line)


def recount(files: Iterable[tuple[str, list[str]]]) -> Expected:
    """Work out what must come of the input, one line after the other, in plain Python."""
    expected = Expected()
    for name, records in files:
        for record in records:
            line, _ = split_record(record)
            expected.file_of[line] = name
            try:
                words = [(row["place"], row["word"]) for row in parse({"value": record})]
            except ValueError as error:
                expected.reasons[line] = reason_of(error)
            else:
                expected.rows[line] = tuple((place, word, kind_of(word)) for place, word in words)
    return expected


def settle(
    expected: Expected,
    sink: Iterable[tuple[int, Mapping[str, list[Any]]]],
    dead_letters: Iterable[DeadLetter],
    *,
    max_attempts: int,
) -> Ledger:
    """Hold what was found against what is expected.

    ``sink`` gives the columns line, place, word and kind of each batch. A line was done at its first try if
    it is in the batch that read its file, the earliest one with a line of that file in it.
    """
    ledger = Ledger(records_in=len(expected))
    found: dict[str, dict[int, list[Row]]] = {}
    for batch, columns in sink:
        for line, *row in zip(
            columns["line"], columns["place"], columns["word"], columns["kind"], strict=True
        ):
            found.setdefault(line, {}).setdefault(batch, []).append((row[0], row[1], row[2]))
            ledger.rows_out += 1
    dead: dict[str, list[DeadLetter]] = {}
    for letter in dead_letters:
        dead.setdefault(letter.line, []).append(letter)
    read_in: dict[str, int] = {}
    for line, batches in found.items():
        name = expected.file_of.get(line, "")
        read_in[name] = min(read_in.get(name, 1 << 62), *batches)
    for line in expected.file_of:
        _settle_line(ledger, expected, line, found.get(line, {}), dead.get(line, []), read_in, max_attempts)
    for line in (found.keys() | dead.keys()) - expected.file_of.keys():
        ledger.note("unknown", line)
    return ledger


def _settle_line(
    ledger: Ledger,
    expected: Expected,
    line: str,
    batches: dict[int, list[Row]],
    letters: list[DeadLetter],
    read_in: dict[str, int],
    max_attempts: int,
) -> None:
    """Enter one line. What is in the wrong place counts as a fault only, so that the sum shows it too."""
    should_die = line in expected.reasons
    if not batches and not letters:
        ledger.note("lost", line)
    elif bool(batches) == should_die or bool(letters) != should_die:
        ledger.note("misplaced", line)
    elif should_die:
        if len(letters) > 1:
            ledger.note("duplicated", line)
        elif letters[0].reason != expected.reasons[line] or letters[0].attempts != max_attempts:
            ledger.note("altered", line)
        else:
            ledger.dead_by_reason[class_of(letters[0].reason)] += 1
    else:
        rows = sorted(row for part in batches.values() for row in part)
        if len(batches) > 1 or len(rows) > len(set(rows)):
            ledger.note("duplicated", line)
        elif tuple(rows) != expected.rows[line]:
            ledger.note("altered", line)
        elif min(batches) == read_in[expected.file_of[line]]:
            ledger.first_try += 1
        else:
            ledger.after_replay += 1
