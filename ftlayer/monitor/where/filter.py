"""A filter: read from its text, done in part by a vertex, checked against records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftlayer.checks import duration_ms
from ftlayer.errors import ConfigError
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.where.conditions import Comparison, Condition, Every
from ftlayer.monitor.where.matching import Subject, holds
from ftlayer.monitor.where.parsing import parse_condition
from ftlayer.vertex.calls import RecordInfo

LONGEST = 10_000
"""Characters that a filter may have."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """The part of a filter that a vertex can do (`ftlayer.vertex.calls.records.SelectRecords`).

    ``stream`` is as people say it, "" for all. ``is_all``: nothing is left to be checked of what the vertex gives.
    """

    stream: str = ""
    operator: str = ""
    text: str = ""
    root: int = 0
    keys: tuple[bytes, ...] = ()
    since_ms: int = 0
    until_ms: int = 0
    is_all: bool = True


@dataclass(frozen=True, slots=True)
class Where:
    """A filter of records; ``condition`` None takes all. As a text it is parsed to the same."""

    condition: Condition | None = None

    def __str__(self) -> str:
        return "" if self.condition is None else str(self.condition)

    def pushed(self, now_ms: int) -> Pushed:
        """Return what a vertex can do of it for dead letters; the rest of it is for `matches`."""
        match self.condition:
            case None:
                return Pushed()
            case Every(parts):
                return _all_pushed(parts, now_ms)
            case condition:
                return _all_pushed((condition,), now_ms)

    def matches(self, vertex: str, info: RecordInfo, names: JobNames, now_ms: int) -> bool:
        """Whether it holds for a record of a vertex."""
        return self.condition is None or holds(self.condition, Subject(vertex, info, names, now_ms))


def parse_where(text: str) -> Where:
    """Read a filter; "" takes all. Raises `ConfigError` that says where what is wrong.

    Blanks alone are none: they come from a variable that was not set, and would mean everything.
    """
    if text and not text.strip():
        raise ConfigError("where: expected a filter, got blanks")
    if len(text) > LONGEST:
        raise ConfigError(f"where: expected {LONGEST:,} characters at most, got {len(text):,}")
    return Where(parse_condition(text)) if text else Where()


# ---------------------------------------------------------------- what a vertex can do


def _all_pushed(parts: Sequence[Condition], now_ms: int) -> Pushed:
    """Return what a vertex can do for dead letters of conditions that all have to hold."""
    found: dict[str, Any] = {}
    is_all = True
    for part in parts:
        done = _pushed(part, now_ms)
        if done is None or set(done[0]) & set(found):
            is_all = False
            continue
        found |= done[0]
        is_all = is_all and done[1]
    return Pushed(**found, is_all=is_all)


def _pushed(part: Condition, now_ms: int) -> tuple[dict[str, Any], bool] | None:
    """Return fields of `Pushed` for a condition, and whether they say all of it; None for what a vertex cannot do."""
    if not isinstance(part, Comparison):
        return None
    text = part.value.text
    if part.path == ("age",):
        return _pushed_age(part.operator, now_ms - duration_ms(text, "age", least=0))
    if part.path == ("reason",) and part.operator == "~" and text:
        return {"text": text}, False
    if part.operator != "=" or not text:
        return None
    match part.path[0]:
        case "operator" if part.value.number is None:  # a vertex compares its text alone
            return {"operator": text}, True
        case "stream":
            return {"stream": text}, True
        case "key":
            return {"keys": (bytes.fromhex(text),)}, True
        case "root" | "origin" if int(text, 16):
            return {"root": int(text, 16)}, False
    return None


def _pushed_age(operator: str, then_ms: int) -> tuple[dict[str, Any], bool] | None:
    """Return a bound of the last failure, which was at ``then_ms`` for what has the age that is named."""
    match operator:
        case ">" if then_ms > 0:
            return {"until_ms": then_ms}, True
        case ">=" if then_ms >= 0:
            return {"until_ms": then_ms + 1}, True
        case "<" if then_ms >= 0:
            return {"since_ms": then_ms + 1}, True
        case "<=" if then_ms > 0:
            return {"since_ms": then_ms}, True
    return None
