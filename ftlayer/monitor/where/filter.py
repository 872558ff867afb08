"""A filter: read from its text, done in part by a vertex, checked against records."""

from __future__ import annotations

from dataclasses import dataclass

from ftlayer.errors import ConfigError
from ftlayer.monitor.names import JobNames
from ftlayer.monitor.where.conditions import Condition, Every
from ftlayer.monitor.where.matching import Subject, holds
from ftlayer.monitor.where.parsing import parse_condition
from ftlayer.monitor.where.pushing import Pushed, pushed
from ftlayer.vertex.calls import RecordInfo

LONGEST = 10_000
"""Characters that a filter may have."""


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
                return pushed(parts, now_ms)
            case condition:
                return pushed((condition,), now_ms)

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
