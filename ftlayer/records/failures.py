"""A failure: of an input row, of a root, of a page's row; and many of them as columns over a table of distinct texts.

A batch that fails mostly fails in one place: 100,000 failures then share one traceback, and are 3 MB, where
every text written out is 200 MB. A traceback is two texts, its last line apart: that one quotes the record and
differs where the rest does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from ftlayer.errors import MalformedRequestError

COLUMNS = ("roots", "texts", "reasons", "operators", "frames", "last_lines", "fatal")
WISHES = ("after_ms", "uses_attempt")
"""Columns that are there where a failure says something of its next attempt, both or none."""

PLACES = "places"
"""A column that is there where a failure says where it happened."""

NO_PAUSE = -1
"""In ``after_ms``: the failure asks for no pause of its own."""

READ_AS = "; read as "
"""In a place, before where the record was in its source."""


@dataclass(frozen=True, slots=True)
class RowFailure:
    """Input row ``row`` failed in ``operator``, whatever its root is.

    ``fatal``, ``after_ms`` and ``uses_attempt`` as in `ftlayer.functions.retry_rules.Decision`.
    """

    row: int
    operator: str
    reason: str
    traceback: str
    fatal: bool = False
    after_ms: int | None = None
    uses_attempt: bool = True


@dataclass(frozen=True, slots=True)
class Failure:
    """Why one root failed. ``traceback`` is cut to a bound by the layer. ``fatal`` skips further attempts.

    ``after_ms`` is the pause before the next attempt, exactly; None: as the stream's options say. A failure that does
    not use up an attempt (``uses_attempt``) is followed by the attempt of the same number. ``place`` says in words in
    which process it happened; "" where that is not known.
    """

    root: int
    reason: str
    operator: str = ""
    traceback: str = ""
    fatal: bool = False
    after_ms: int | None = None
    uses_attempt: bool = True
    place: str = ""

    @classmethod
    def of(cls, root: int, why: RowFailure, place: str = "") -> Self:
        wish = (why.fatal, why.after_ms, why.uses_attempt)
        return cls(root, why.reason, why.operator, why.traceback, *wish, place)


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A root that failed in a page, which lists each traceback once.

    ``row`` is the root's place among the page's failed rows, or -1; ``traceback`` one in its list. ``read_as`` says in
    words where it was in its source, "" where that is not known here.
    """

    root: int
    row: int
    operator: str
    reason: str
    traceback: int
    fatal: bool
    after_ms: int | None = None
    uses_attempt: bool = True
    read_as: str = ""

    @classmethod
    def of(cls, root: int, row: int, why: RowFailure, traceback: int, read_as: str) -> Self:
        wish = (why.fatal, why.after_ms, why.uses_attempt)
        return cls(root, row, why.operator, why.reason, traceback, *wish, read_as)

    def failure(self, traceback: str, place: str) -> Failure:
        place = f"{place}{READ_AS}{self.read_as}" if self.read_as else place
        wish = (self.fatal, self.after_ms, self.uses_attempt)
        return Failure(self.root, self.reason, self.operator, traceback, *wish, place)


def to_columns(failures: Iterable[Failure]) -> dict[str, Any]:
    """Return failures as plain values for msgpack, under the names in `COLUMNS` and, where needed, `WISHES`, `PLACES`.

    ``roots`` is a list of numbers, ``texts`` one of texts; ``reasons``, ``operators``, ``frames``, ``last_lines`` and
    ``places`` are little-endian int32 positions in ``texts``, ``fatal`` and ``uses_attempt`` a byte 0 or 1 for
    each, ``after_ms`` little-endian int64, `NO_PAUSE` for none. Lone surrogates, which UTF-8 does not have (file
    names from the system may), are written as their escapes.

    Raises `MalformedRequestError` for a negative pause: `NO_PAUSE` is one.
    """
    texts: dict[str, int] = {}
    halves: dict[str, tuple[int, int]] = {}

    def number(text: str) -> int:
        return texts.setdefault(text, len(texts))

    roots: list[int] = []
    numbers: list[int] = []
    fatal, uses_attempt = bytearray(), bytearray()
    pauses: list[int] = []
    places: list[int] = []
    for failure in failures:
        traceback = failure.traceback
        half = halves.get(traceback)
        if half is None:
            frames, last_line = split_traceback(traceback)
            half = halves[traceback] = number(frames), number(last_line)
        roots.append(failure.root)
        numbers += (number(failure.reason), number(failure.operator), *half)
        fatal.append(failure.fatal)
        uses_attempt.append(failure.uses_attempt)
        pauses.append(_pause(failure.after_ms))
        if failure.place or places:
            # Those before the first that says a place say none.
            places += [number("")] * (len(roots) - 1 - len(places))
            places.append(number(failure.place))
    positions = np.array(numbers, "<i4").reshape(-1, 4)
    columns = [np.ascontiguousarray(column).tobytes() for column in positions.T]
    written = [well_formed(text) for text in texts]
    found = dict(zip(COLUMNS, (roots, written, *columns, bytes(fatal)), strict=True))
    if not all(uses_attempt) or any(pause != NO_PAUSE for pause in pauses):
        found |= zip(WISHES, (np.array(pauses, "<i8").tobytes(), bytes(uses_attempt)), strict=True)
    if places:
        found[PLACES] = np.array(places, "<i4").tobytes()
    return found


def from_columns(columns: Any) -> list[Failure]:
    """Return the failures `to_columns` was given; equal texts are one object.

    Raises ValueError that says what is wrong with ``columns``, whatever they are.
    """
    if type(columns) is not dict or columns.keys() - {PLACES} not in (set(COLUMNS), {*COLUMNS, *WISHES}):
        raise ValueError(
            f"expected a map with {', '.join(COLUMNS)}, and maybe {' and '.join(WISHES)}, and maybe {PLACES}"
        )
    roots, texts, fatal = columns["roots"], columns["texts"], columns["fatal"]
    if type(roots) is not list or any(type(root) is not int for root in roots):
        raise ValueError("roots: expected an array of integers")
    if type(texts) is not list or any(type(text) is not str for text in texts):
        raise ValueError("texts: expected an array of texts")
    _check_flags(fatal, "fatal", len(roots))
    pauses, uses_attempt = _wishes(columns, len(roots))
    reasons, operators, frames, last_lines = (
        _positions(columns[name], name, len(roots), len(texts)).tolist() for name in COLUMNS[2:6]
    )
    places = [""] * len(roots)
    if PLACES in columns:
        numbers = _positions(columns[PLACES], PLACES, len(roots), len(texts)).tolist()
        places = [texts[number] for number in numbers]
    joined: dict[tuple[int, int], str] = {}
    rows = []
    halves = zip(frames, last_lines, strict=True)
    lists = (roots, reasons, operators, halves, fatal, pauses, uses_attempt, places)
    for root, reason, operator, half, is_fatal, pause, uses, place in zip(*lists, strict=True):
        traceback = joined.get(half)
        if traceback is None:
            traceback = joined[half] = texts[half[0]] + texts[half[1]]
        wish = (is_fatal == 1, None if pause == NO_PAUSE else pause, uses == 1)
        rows.append(Failure(root, texts[reason], texts[operator], traceback, *wish, place))
    return rows


def _pause(after_ms: int | None) -> int:
    if after_ms is None:
        return NO_PAUSE
    if after_ms < 0:
        raise MalformedRequestError(
            f"after_ms: expected a pause of 0 ms or more, or None for that of the options, got {after_ms}"
        )
    return after_ms


def _wishes(columns: dict[str, Any], rows: int) -> tuple[list[int], bytes]:
    """Return the pauses that were asked for and whether each failure uses up an attempt."""
    if WISHES[0] not in columns:
        return [NO_PAUSE] * rows, b"\1" * rows
    pauses, uses_attempt = (columns[name] for name in WISHES)
    _check_flags(uses_attempt, WISHES[1], rows)
    if type(pauses) is not bytes or len(pauses) != 8 * rows:
        raise ValueError(f"{WISHES[0]}: expected {rows} little-endian int64")
    return np.frombuffer(pauses, "<i8").tolist(), uses_attempt


def _check_flags(flags: Any, name: str, rows: int) -> None:
    if type(flags) is not bytes or len(flags) != rows or flags.translate(None, b"\0\1"):
        raise ValueError(f"{name}: expected {rows} bytes, each 0 or 1")


def split_traceback(traceback: str) -> tuple[str, str]:
    """Return the part that failures share and the last line, which quotes the record."""
    cut = traceback.rfind("\n", 0, -1) + 1
    return traceback[:cut], traceback[cut:]


def well_formed(text: str) -> str:
    r"""Return ``text`` with lone surrogates written as their escapes (``\udc80``)."""
    return text.encode("utf-8", "backslashreplace").decode()


def _positions(data: Any, name: str, rows: int, texts: int) -> npt.NDArray[np.int32]:
    if type(data) is not bytes or len(data) != 4 * rows:
        raise ValueError(f"{name}: expected {rows} little-endian int32")
    positions = np.frombuffer(data, "<i4")
    if rows and not 0 <= int(positions.min()) <= int(positions.max()) < texts:
        raise ValueError(f"{name}: expected positions in texts, which has {texts}")
    return positions
