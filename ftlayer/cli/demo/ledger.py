"""The ledger: what became of every line, held against a recount of the input without Spark.

Rules only: what is expected, what was found in the sink and what among the dead letters are given.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The functions of the demo: a parser that cannot take every line, a service that is not always there. They know nothing
# of ftlayer, nor of what a record looks like.

WORDS_SCHEMA = "line string, place int, word string"
ENRICHED_SCHEMA = WORDS_SCHEMA + ", kind string"

LONGEST_LINE = 250

CHANCE_OF_NO_ANSWER = 0.001
"""How often the service does not answer: about one line in 250, at four words a line."""

MOST_FAILURES = 2
"""How often it may do that to one line: one less than the demo's attempts, so that no good line dies."""

_WORD = re.compile(r"\b[A-Za-z_]\w*")
_NUMBER = re.compile(r"(?<![\w.])\d\w*")
_BUILTINS = frozenset(dir(builtins))

Word = tuple[str, int, str]
"""(line, place in it, word): a record of `WORDS_SCHEMA`."""


class LineError(ValueError):
    """A line that this parser cannot take."""


def split_record(value: str) -> tuple[str, str]:
    """Split a record ``"file:number<tab>text"`` into its name and its text."""
    name, _, text = value.partition("\t")
    return name, text


def words_of(value: str) -> Iterator[Word]:
    """Yield the words of a line (the line itself, if there is none in it).

    Raises `UnicodeEncodeError` for characters beyond ASCII, `LineError` for a line that is too long and for
    a number that is none ("8bit"): the parser of somebody who had not seen all of the input.
    """
    name, text = split_record(value)
    text.encode("ascii")
    if len(text) > LONGEST_LINE:
        raise LineError(f"longer than {LONGEST_LINE} characters: {len(text)}")
    for number in _NUMBER.findall(text):
        try:
            int(number, 16 if number[:2] in ("0x", "0X") else 10)
        except ValueError:
            raise LineError(f"not a number: {number!r}") from None
    for place, word in enumerate(_WORD.findall(text) or [text.strip()]):
        yield name, place, word


def kind_of(word: str) -> str:
    if keyword.iskeyword(word):
        return "keyword"
    if word in _BUILTINS:
        return "builtin"
    return "name" if word.isidentifier() else "other"


@dataclass(frozen=True)
class Service:
    """A service (a pretended one) that knows the kind of each word; now and then it does not answer.

    When that happens is drawn afresh at every call, so what is run again fails elsewhere. A file in
    ``directory`` counts the failures of a line: `MOST_FAILURES` at most.
    """

    directory: str

    def kind(self, line: str, word: str) -> str:
        if random.random() < CHANCE_OF_NO_ANSWER and self._may_fail(line):
            raise ConnectionError("the enrichment service did not answer")
        return kind_of(word)

    def has_failed(self, line: str) -> bool:
        return self._mark(line, 0).exists()

    def _may_fail(self, line: str) -> bool:
        for number in range(MOST_FAILURES):
            try:
                os.close(os.open(self._mark(line, number), os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            return True
        return False

    def _mark(self, line: str, number: int) -> Path:
        name = hashlib.blake2b(line.encode(), digest_size=12).hexdigest()
        return Path(self.directory) / f"{name}-{number}"


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def class_of(reason: str) -> str:
    """Return a reason without what is particular to the line, to count by."""
    if reason.startswith("UnicodeEncodeError"):
        return "UnicodeEncodeError: a character beyond ASCII"
    return ": ".join(reason.split(": ")[:2])


EXAMPLES = 5

FAULTS = ("lost", "duplicated", "altered", "misplaced", "unknown", "miscounted")

Row = tuple[int, str, str]
"""(place, word, kind): a row of the sink without its line and batch."""

Columns = Mapping[str, list[Any]]
"""Rows of the sink as columns line, place, word and kind."""


@dataclass
class Expected:
    """The expected results of the input: the rows of each good line, the reason of each that cannot be parsed.

    ``file_of`` names the input file of a line: the query reads the lines of one file in one batch.
    """

    rows: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.file_of)


@dataclass(frozen=True)
class DeadLine:
    """A dead letter of the run: the line it was, why, how many attempts it had, and whether somebody edited it."""

    line: str
    reason: str
    attempts: int
    edited: bool = False


@dataclass(frozen=True)
class HandChanges:
    """How many dead letters people have changed during the run, as the vertex's audit log says."""

    requeued: int = 0
    edited: int = 0
    purged: int = 0


@dataclass
class Ledger:
    """The results of ``records_in`` lines. Each is in exactly one of the counts up to ``lost``.

    ``repeated`` lines are done, and have rows in the sink more than once, as a replay may leave them. ``mended`` ones
    could not be parsed, and are done since somebody edited their dead letters; of ``purged`` ones somebody deleted
    these. Neither is more than the audit log has of such changes.

    ``duplicated`` lines are in the sink or among the dead letters more than once without a reason, ``altered`` ones
    hold other rows than they should, ``misplaced`` ones are in the wrong one of the two (or in both), ``unknown`` ones
    were never in the input. ``miscounted`` are words whose occurrences are not numbered from 1 on, each number once.
    """

    records_in: int = 0
    first_try: int = 0
    after_replay: int = 0
    repeated: int = 0
    mended: int = 0
    purged: int = 0
    dead_by_reason: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    misplaced: int = 0
    unknown: int = 0
    miscounted: int = 0
    rows_out: int = 0
    words: int = 0
    examples: dict[str, list[str]] = field(default_factory=dict)

    @property
    def dead(self) -> int:
        return sum(self.dead_by_reason.values())

    @property
    def balanced(self) -> bool:
        done = self.first_try + self.after_replay + self.repeated + self.mended
        return done + self.purged + self.dead == self.records_in and not any(
            getattr(self, fault) for fault in FAULTS
        )

    def note(self, what: str, line: str) -> None:
        """Count ``line`` under ``what``; of the faults the first ones are kept as examples."""
        setattr(self, what, getattr(self, what) + 1)
        if what in FAULTS:
            examples = self.examples.setdefault(what, [])
            if len(examples) < EXAMPLES:
                examples.append(line)


def recount(files: Iterable[tuple[str, list[str]]]) -> Expected:
    expected = Expected()
    for name, records in files:
        for record in records:
            line, _ = split_record(record)
            expected.file_of[line] = name
            try:
                words = words_of(record)
                expected.rows[line] = tuple((place, word, kind_of(word)) for _, place, word in words)
            except ValueError as error:
                expected.reasons[line] = reason_of(error)
    return expected


def settle_query(
    expected: Expected,
    sink: Iterable[tuple[int, Columns]],
    dead_letters: Iterable[DeadLine],
    *,
    max_attempts: int,
    changes: HandChanges,
) -> Ledger:
    """Hold the batches that a query has written against what is expected: each line once, in one batch.

    A line was done at its first try if it is in the batch that read its file, the earliest one with a line of that
    file in it.
    """
    rows: list[Columns] = []
    batches: dict[str, set[int]] = {}
    for batch, columns in sink:
        rows.append(columns)
        for line in columns["line"]:
            batches.setdefault(line, set()).add(batch)
    read_in: dict[str, int] = {}
    for line, numbers in batches.items():
        name = expected.file_of.get(line, "")
        read_in[name] = min(read_in.get(name, 1 << 62), *numbers)

    def sort(line: str, repeated: bool) -> str:
        if repeated or len(batches[line]) > 1:
            return "duplicated"
        return "first_try" if read_in[expected.file_of[line]] in batches[line] else "after_replay"

    return _settle(expected, rows, dead_letters, max_attempts, changes, sort)


def settle_tracked(
    expected: Expected,
    sink: Iterable[Columns],
    dead_letters: Iterable[DeadLine],
    *,
    max_attempts: int,
    changes: HandChanges,
    has_failed: Callable[[str], bool],
    killed: bool,
) -> Ledger:
    """Hold what a topology in acker mode has written against what is expected: each line at least once.

    A line may be there again if it was replayed: because one of its words had failed (``has_failed``), or because
    something was killed and it may have been on its way.
    """

    def sort(line: str, repeated: bool) -> str:
        if has_failed(line):
            return "after_replay"
        return ("repeated" if killed else "duplicated") if repeated else "first_try"

    return _settle(expected, sink, dead_letters, max_attempts, changes, sort)


def settle_checkpointed(
    expected: Expected,
    sink: Iterable[Columns],
    dead_letters: Iterable[DeadLine],
    *,
    max_attempts: int,
    has_failed: Callable[[str], bool],
) -> Ledger:
    """Hold what a topology in barrier mode has written against what is expected: each line once, and exact counts.

    The sink has a column ``count`` too: which occurrence of its word a row is. A line of which one of its words had
    failed (``has_failed``) was tried again, and is there once all the same.
    """
    rows = list(sink)

    def sort(line: str, repeated: bool) -> str:
        if repeated:
            return "duplicated"
        return "after_replay" if has_failed(line) else "first_try"

    ledger = _settle(expected, rows, dead_letters, max_attempts, HandChanges(), sort)
    counts: dict[str, list[int]] = {}
    for columns in rows:
        for word, count in zip(columns["word"], columns["count"], strict=True):
            counts.setdefault(word, []).append(count)
    ledger.words = len(counts)
    for word, numbers in counts.items():
        if sorted(numbers) != list(range(1, len(numbers) + 1)):
            ledger.note("miscounted", word)
    return ledger


Sort = Callable[[str, bool], str]
"""(line, whether rows of it are there more than once) → the count it belongs to."""


def _settle(
    expected: Expected,
    sink: Iterable[Columns],
    dead_letters: Iterable[DeadLine],
    max_attempts: int,
    changes: HandChanges,
    sort: Sort,
) -> Ledger:
    ledger = Ledger(records_in=len(expected))
    found: dict[str, list[Row]] = {}
    for columns in sink:
        rows_of = (columns[name] for name in ("line", "place", "word", "kind"))
        for line, place, word, kind in zip(*rows_of, strict=True):
            found.setdefault(line, []).append((place, word, kind))
            ledger.rows_out += 1
    dead: dict[str, list[DeadLine]] = {}
    for letter in dead_letters:
        dead.setdefault(letter.line, []).append(letter)
    for line in expected.file_of:
        rows, letters = found.get(line, []), dead.get(line, [])
        if line in expected.reasons:
            _settle_bad_line(ledger, line, expected.reasons[line], rows, letters, max_attempts, changes)
        else:
            _settle_good_line(ledger, line, expected.rows[line], rows, letters, sort)
    for line in (found.keys() | dead.keys()) - expected.file_of.keys():
        ledger.note("unknown", line)
    return ledger


def _settle_bad_line(
    ledger: Ledger,
    line: str,
    reason: str,
    rows: list[Row],
    letters: list[DeadLine],
    max_attempts: int,
    changes: HandChanges,
) -> None:
    """Enter a line that cannot be parsed: a dead letter it is, unless somebody has edited or purged that."""
    if not rows and not letters:
        ledger.note("purged" if ledger.purged < changes.purged else "lost", line)
    elif not letters and ledger.mended < changes.edited:
        ledger.note("mended", line)
    elif rows:
        ledger.note("misplaced", line)
    elif len(letters) > 1:
        ledger.note("duplicated", line)
    elif _died_as_it_should(letters[0], reason, max_attempts, changes):
        ledger.dead_by_reason[class_of(letters[0].reason)] += 1
    else:
        ledger.note("altered", line)


def _died_as_it_should(letter: DeadLine, reason: str, max_attempts: int, changes: HandChanges) -> bool:
    """Whether it has the reason that its text leads to, and its attempts: more of them only where it was requeued."""
    again = bool(changes.requeued or changes.edited) and letter.attempts > max_attempts
    return (letter.edited or letter.reason == reason) and (letter.attempts == max_attempts or again)


def _settle_good_line(
    ledger: Ledger, line: str, expected: tuple[Row, ...], rows: list[Row], letters: list[DeadLine], sort: Sort
) -> None:
    """Enter a line that has words. What is in the wrong place counts as a fault only, so that the sum shows it too."""
    if not rows and not letters:
        ledger.note("lost", line)
    elif letters:
        ledger.note("misplaced", line)
    else:
        distinct = set(rows)
        what = sort(line, len(rows) > len(distinct))
        # A fault of the one kind is not looked at for the other.
        right = what == "duplicated" or tuple(sorted(distinct)) == expected
        ledger.note(what if right else "altered", line)
