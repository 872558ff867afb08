"""Keyed state that lives for a time: what is stored beside a value, and when it is over.

A value with a time to live is stored as a *stamped* one: a tuple of the time at which it is over (processing time,
milliseconds since 1970) and the value. Each item of a list or a mapping has its own. Tables of stamped values have
names of their own, so that a program that takes the time to live off, or puts it on, never reads one as the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftlayer.common.checks import Duration, check_bool, duration_ms, known_options
from ftlayer.errors import ConfigError

SUFFIX = " (ttl)"
"""Of the names of tables with stamped values."""

Stamped = tuple[int, Any]
"""When it is over, and the value."""


@known_options
@dataclass(frozen=True)
class StateTtl:
    """How long a value is there after it was written: `StateTtlConfig` in Flink.

    By processing time. What is over is never returned; it is removed when its key is used the next time, and is left
    out of snapshots, save where they are copies of what a backend has on its disk. ``time`` may be changed between two
    runs: what is stored keeps the time that it was written with.

    Attributes:
        time: a duration.
        refresh_on_read: reading begins the time anew, as writing does.
    """

    time: Duration
    refresh_on_read: bool = False

    def __post_init__(self) -> None:
        duration_ms(self.time, "StateTtl: time")
        check_bool(self.refresh_on_read, "StateTtl: refresh_on_read")


def lifetime_ms(ttl: StateTtl) -> int:
    """Return for how long a value is there, in milliseconds."""
    return duration_ms(ttl.time, "StateTtl: time")


def is_expired(stamped: Stamped, now_ms: int) -> bool:
    """Whether a stamped value is over, and may be removed by any reader."""
    return stamped[0] <= now_ms


def table_name(name: str, ttl: StateTtl | None) -> str:
    """Return the table of a state of this name; ConfigError for one that is kept for others."""
    if name.endswith(SUFFIX):
        raise ConfigError(
            f"a state cannot be named {name!r}: names that end so are those of states with a time to live"
        )
    return name if ttl is None else name + SUFFIX


def plain_name(table: str) -> str:
    return table.removesuffix(SUFFIX)


def holds_stamped(table: str) -> bool:
    """Whether the values of a table of this name (or its lists' and mappings' items) are stamped."""
    return table.endswith(SUFFIX)
