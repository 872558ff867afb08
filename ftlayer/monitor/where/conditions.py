"""What a filter says, as values; as texts they are parsed to the same."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

_PLAIN_PART = re.compile(r'[^\s"()=<>!~.]+')


@dataclass(frozen=True, slots=True)
class Value:
    """What something is compared with: ``text``, in quotes text and nothing else."""

    text: str
    quoted: bool = False

    def __str__(self) -> str:
        return json.dumps(self.text, ensure_ascii=False) if self.quoted else self.text

    @property
    def number(self) -> Decimal | None:
        """The number that it stands for; None in quotes, and where it is none."""
        return None if self.quoted else number_of(self.text)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison. ``path`` is the word, and behind ``record`` the names of column and fields."""

    path: tuple[str, ...]
    operator: str
    value: Value

    def __str__(self) -> str:
        return f"{'.'.join(map(_part_text, self.path))} {self.operator} {self.value}"


@dataclass(frozen=True, slots=True)
class Every:
    """All of ``parts`` hold, of which there are two at least."""

    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return " and ".join(
            f"({part})" if isinstance(part, Some | Every) else str(part) for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class Some:
    """At least one of ``parts`` holds, of which there are two at least."""

    parts: tuple[Condition, ...]

    def __str__(self) -> str:
        return " or ".join(f"({part})" if isinstance(part, Some) else str(part) for part in self.parts)


@dataclass(frozen=True, slots=True)
class Negation:
    """``part`` does not hold."""

    part: Condition

    def __str__(self) -> str:
        return f"not {f'({self.part})' if isinstance(self.part, Some | Every) else self.part}"


Condition = Comparison | Every | Some | Negation


def number_of(value: object) -> Decimal | None:
    """Return the number that a value or a text is, None where it is none."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        number = Decimal(str(value))
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def _part_text(part: str) -> str:
    return part if _PLAIN_PART.fullmatch(part) else json.dumps(part, ensure_ascii=False)
