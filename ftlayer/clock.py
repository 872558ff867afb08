"""The time that rules are told: they read no clock of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Now:
    """The time an event happens at: ``mono_ms`` drives timeouts, ``wall_ms`` (Unix) what survives a restart."""

    mono_ms: int
    wall_ms: int
