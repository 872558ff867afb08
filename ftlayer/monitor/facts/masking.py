"""Hiding what records say where only how they fare may be shown.

Values become their type and length. Reasons and tracebacks quote values: of a reason the exception's class is left, of
a traceback the places that it went through. What was free text is gone; keys, operators, times and counts stay.
"""

from __future__ import annotations

import re

_CLASS = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Failure|Interrupt|Rejected|Later|Warning)(?=\W|$)")
_PLACE = re.compile(r"  File \".*\", line \d+(?:, in \S+)?")
_TITLE = "Traceback (most recent call last):"
HIDDEN = "…"


def masked_reason(reason: str) -> str:
    """Return the exception's class that a record's reason begins with, and nothing that follows."""
    found = _CLASS.match(reason)
    return f"{found[0]}: {HIDDEN}" if found else HIDDEN if reason else ""


def masked_failure(text: str) -> str:
    """Return the text about a job up to the class of an exception in it, since its words may quote a record."""
    found = _CLASS.search(text)
    return f"{text[: found.end()]}: {HIDDEN}" if found else text


def masked_traceback(traceback: str) -> str:
    """Return the places of a traceback, without lines of programs and without words of exceptions.

    Words begin with the first line that is not indented, and go on to the next title: they may look like places.
    """
    shown: list[str] = []
    within = False
    for line in traceback.splitlines():
        within = line == _TITLE or (within and line.startswith("  "))
        if within and (line == _TITLE or _PLACE.fullmatch(line)):
            shown.append(line)
    return "\n".join(shown)


def masked_value(value: object, kind: str) -> str | None:
    """Return a value's type, and its length if it has one; null stays null."""
    if value is None:
        return None
    if isinstance(value, str | bytes | list | tuple | dict):
        what = "characters" if isinstance(value, str) else "bytes" if isinstance(value, bytes) else "items"
        return f"{kind}, {len(value):,} {what}"
    return kind
