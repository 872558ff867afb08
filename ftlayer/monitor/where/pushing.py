"""What of a filter a vertex can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ftlayer.checks import duration_ms
from ftlayer.monitor.where.conditions import Comparison, Condition


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


def pushed(parts: Sequence[Condition], now_ms: int) -> Pushed:
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
