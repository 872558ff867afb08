"""The time that rules are told: they read no clock of their own."""

from __future__ import annotations

import time

from ftlayer.common.checks import fast_dataclass


@fast_dataclass
class Now:
    """The time an event happens at: ``mono_ms`` drives timeouts, ``wall_ms`` (Unix) what survives a restart."""

    mono_ms: int
    wall_ms: int


def mono_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def system_now() -> Now:
    return Now(mono_ms(), time.time_ns() // 1_000_000)
