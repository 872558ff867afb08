"""The functions of the demo: a parser that cannot take every line, a service that is not always there.

They know nothing of ftlayer, nor of what a record looks like: they take a line or a word, return words or a kind, or
raise.
"""

from __future__ import annotations

import builtins
import hashlib
import keyword
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        if not _is_number(number):
            raise LineError(f"not a number: {number!r}")
    for place, word in enumerate(_WORD.findall(text) or [text.strip()]):
        yield name, place, word


def _is_number(text: str) -> bool:
    try:
        int(text, 16 if text[:2] in ("0x", "0X") else 10)
    except ValueError:
        return False
    return True


def kind_of(word: str) -> str:
    """Say what a word is: what the service would answer."""
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
        """Return what `kind_of` does; raises `ConnectionError` when there is no answer."""
        if random.random() < CHANCE_OF_NO_ANSWER and self._may_fail(line):
            raise ConnectionError("the enrichment service did not answer")
        return kind_of(word)

    def has_failed(self, line: str) -> bool:
        """Whether there was no answer for a word of this line, ever."""
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
    """Return what ftlayer writes down as the reason of a failure."""
    return f"{type(error).__name__}: {error}"


def class_of(reason: str) -> str:
    """Return a reason without what is particular to the line, to count by."""
    if reason.startswith("UnicodeEncodeError"):
        return "UnicodeEncodeError: a character beyond ASCII"
    return ": ".join(reason.split(": ")[:2])
