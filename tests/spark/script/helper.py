"""A module beside a script, as users have them."""

from __future__ import annotations

from typing import Any


def double(record: dict[str, Any]) -> dict[str, int]:
    """For a wrapped query."""
    return {"n": 2 * int(record["value"])}


def negative(n: int) -> int:
    """For a topology."""
    return -n
