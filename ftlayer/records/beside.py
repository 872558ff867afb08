"""What another system says of a record beside its payload: times, ids, names, headers.

It can never stop a source. What does not fit its column is null there, or has U+FFFD where it is no Unicode; it is
counted, and logged once for each place and kind.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

logger = logging.getLogger(__name__)

STAMP = pa.timestamp("us", "UTC")

FIRST_US, LAST_US = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999: what Python and Spark have as a time."""

_US = {"s": 1_000_000, "ms": 1_000, "us": 1}

_lock = threading.Lock()
_counted: Counter[tuple[str, str]] = Counter()

MISFITS = "misfits"
"""The counter of slots."""


def misfits() -> int:
    with _lock:
        return _counted.total()


def note(place: str, what: str, count: int, example: object) -> None:
    """Count what did not fit, and log the first of its place and kind. ``what`` ends with what became of it."""
    with _lock:
        is_first = not _counted[place, what]
        _counted[place, what] += count
    if is_first:
        logger.warning("%s: %s: %.200r; more of these are counted, and not logged", place, what, example)


def valid(text: str) -> str:
    """Return a text with U+FFFD for what is no Unicode: bytes of names that are not UTF-8, lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def times(given: Sequence[Any] | npt.NDArray[np.int64], unit: str, place: str, what: str) -> pa.Array:
    """Return numbers since 1970 (None: there is no time) as `STAMP`; null for what is none of the years 1 to 9999."""
    scale = _US[unit]
    least, most = -(-FIRST_US // scale), LAST_US // scale
    # Where one is no number, or too large a one, they are looked at one by one.
    with contextlib.suppress(pa.ArrowException, OverflowError, TypeError, ValueError):
        values = pa.array(given, pa.int64())
        numbers = np.asarray(values.fill_null(0))
        odd = (numbers < least) | (numbers > most)
        if not odd.any():
            return pa.array(
                numbers * scale, STAMP, mask=np.asarray(values.is_null()) if values.null_count else None
            )
    found = [_in_us(each, scale, least, most) for each in given]
    bad = [each for each, us in zip(given, found, strict=True) if us is None and each is not None]
    if bad:
        note(place, f"{what} is none of the years 1 to 9999, and null", len(bad), bad[0])
    return pa.array(found, pa.int64()).cast(STAMP)


def _in_us(value: Any, scale: int, least: int, most: int) -> int | None:
    try:
        number = None if value is None else int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number * scale if number is not None and least <= number <= most else None


def texts(given: Iterable[str | bytes | None], place: str, what: str) -> pa.Array:
    """Return texts, with U+FFFD for what is no Unicode in them."""
    values = given if isinstance(given, list) else list(given)
    # Where one has what is no Unicode, or is no text, they are looked at one by one.
    with contextlib.suppress(pa.ArrowException, UnicodeEncodeError, TypeError):
        return pa.array(values, pa.string())
    found = [_text(each) for each in values]
    bad = [each for each, text in zip(values, found, strict=True) if _is_changed(each, text)]
    if bad:
        note(place, f"{what} is no Unicode, and has U+FFFD", len(bad), bad[0])
    return pa.array(found, pa.string())


def text(value: Any, place: str, what: str) -> str | None:
    """Return a text, or another value as one, with U+FFFD for what is no Unicode in it."""
    found = _text(value)
    if _is_changed(value, found):
        note(place, f"{what} is no Unicode, and has U+FFFD", 1, value)
    return found


def _text(value: Any) -> str | None:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    return None if value is None else valid(str(value))


def _is_changed(value: Any, text: str | None) -> bool:
    if isinstance(value, bytes | bytearray | memoryview):
        return text is not None and text.encode() != bytes(value)
    return isinstance(value, str) and text != value
