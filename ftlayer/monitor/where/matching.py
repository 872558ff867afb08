"""Whether a condition holds for a record."""

from __future__ import annotations

import json
from typing import Any

from ftlayer.checks import duration_ms
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.row_json import json_of_column, json_of_row
from ftlayer.monitor.where.conditions import Comparison, Condition, Every, Negation, Some, Value, number_of
from ftlayer.vertex.calls import RecordInfo


class Subject:
    """A record that conditions are asked about. Of its payload it reads the columns that they name."""

    def __init__(self, vertex: str, info: RecordInfo, names: JobNames, now_ms: int) -> None:
        self.vertex = vertex
        self.info = info
        self.names = names
        self.now_ms = now_ms

    def value(self, path: tuple[str, ...]) -> Any:
        """Return what the record has under a path of a `Comparison`; None where it has nothing."""
        match path[0]:
            case "operator" | "reason" | "attempt" as word:
                return getattr(self.info, word)
            case "key":
                return self.info.key.hex()
            case "root" | "origin" as word:
                return f"{getattr(self.info, word):016x}"
        if len(path) == 1:
            return json_of_row(self.info.payload)
        found: Any = json_of_column(self.info.payload, path[1])
        for name in path[2:]:
            if not isinstance(found, dict):
                return None
            found = found.get(name)
        return found


def holds(condition: Condition, subject: Subject) -> bool:
    """Whether a condition holds for a record."""
    match condition:
        case Every(parts):
            return all(holds(part, subject) for part in parts)
        case Some(parts):
            return any(holds(part, subject) for part in parts)
        case Negation(part):
            return not holds(part, subject)
        case Comparison(path, operator, value):
            if operator in ("!=", "!~"):
                return not _compared(path, operator[1:], value, subject)
            return _compared(path, operator, value, subject)


def _compared(path: tuple[str, ...], operator: str, value: Value, subject: Subject) -> bool:
    match path[0]:
        case "stream":
            return (subject.vertex, subject.info.stream) in subject.names.streams(value.text)
        case "key" | "root" | "origin":
            return bool(subject.value(path) == value.text.lower())
        case "age":
            if not subject.info.history:
                return False
            age_ms = subject.now_ms - subject.info.history[-1].at_ms
            return _ordered(operator, age_ms, duration_ms(value.text, "age", least=0))
        case "attempt":
            return _ordered(operator, subject.info.attempt, int(value.text))
    found = subject.value(path)
    if operator == "~":
        return value.text in _text(found)
    if operator == "=":
        return _equal(found, value)
    return _in_order(found, operator, value)


def _equal(found: Any, value: Value) -> bool:
    if found is None:
        return not value.quoted and value.text == "null"
    if isinstance(found, bool):
        return not value.quoted and value.text == ("true" if found else "false")
    if _text(found) == value.text:
        return True
    return value.number is not None and value.number == number_of(found)


def _in_order(found: Any, operator: str, value: Value) -> bool:
    number, other = value.number, number_of(found)
    if number is not None and other is not None:
        return _ordered(operator, other, number)
    return isinstance(found, str) and number is None and _ordered(operator, found, value.text)


def _ordered(operator: str, left: Any, right: Any) -> bool:
    match operator:
        case "=":
            return bool(left == right)
        case "<":
            return bool(left < right)
        case "<=":
            return bool(left <= right)
        case ">":
            return bool(left > right)
    return bool(left >= right)


def _text(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
