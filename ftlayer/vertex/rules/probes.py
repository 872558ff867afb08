"""What a vertex answers to probes: whether to restart it (liveness), whether to send clients to it (readiness).

A full store stays ready: what empties it (commits, requeues, purges) comes from the same clients that fill it, and
there is no other vertex that they could go to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ftlayer.store.kv import INTAKE_SHARE

STUCK_AFTER_MS = 30_000
"""A writer turns twenty times a second; one sync of a slow disk, or one page of a tool's, may take some seconds."""

FILLING_SHARE = 0.8
"""From here on a store is noted: intake waits that would not fit below `INTAKE_SHARE`, large calls first."""


class Phase(StrEnum):
    """How far the life of a vertex has come."""

    OPENING = "opening"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class ShardPulse:
    """What a shard shows of itself.

    Attributes:
        turned_ms: when its writer's loop made progress last, on the monotone clock.
        is_recovering: its rules are being made anew from the store.
        is_over: its writer has ended.
        intake_waits_for: why the call of the intake waits that has waited longest; "" while none waits.
        used_share: share of its store that is in use.
    """

    turned_ms: int
    is_recovering: bool
    is_over: bool
    intake_waits_for: str
    used_share: float


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to a probe.

    Attributes:
        phase: of the vertex.
        reasons: what is wrong, a sentence each; the probe passes without any.
        notes: what someone should know, and does not fail the probe.
    """

    phase: Phase
    reasons: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passes(self) -> bool:
        return not self.reasons

    def facts(self) -> dict[str, object]:
        """Return it as plain values, for JSON."""
        return {
            "status": "ok" if self.passes else "failed",
            "phase": self.phase,
            "reasons": self.reasons,
            "notes": self.notes,
        }


def liveness(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> ProbeResult:
    """Say whether only a restart can help.

    Recovery may take as long as it takes: a restart would begin it anew.
    """
    return ProbeResult(phase, _what_is_stuck(phase, shards, now_ms), _notes(shards))


def readiness(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> ProbeResult:
    """Say whether clients are served: stores recovered, listening, no writer stuck, not stopping."""
    reasons = list(_what_is_stuck(phase, shards, now_ms))
    if phase is Phase.OPENING:
        reasons.append("the stores are being opened, and what they hold recovered")
    if phase is Phase.STOPPING:
        reasons.append("the vertex is stopping")
    reasons += [
        f"shard {index}: memory was lost with a transaction; it recovers from its store"
        for index, shard in enumerate(shards)
        if shard.is_recovering
    ]
    return ProbeResult(phase, tuple(reasons), _notes(shards))


def _what_is_stuck(phase: Phase, shards: Sequence[ShardPulse], now_ms: int) -> tuple[str, ...]:
    reasons = []
    for index, shard in enumerate(shards):
        silent_ms = now_ms - shard.turned_ms
        if shard.is_over:
            if phase is not Phase.STOPPING:
                reasons.append(f"shard {index}: its writer has ended; the log tells why")
        elif not shard.is_recovering and silent_ms > STUCK_AFTER_MS:
            reasons.append(
                f"shard {index}: its writer has not come round for {silent_ms / 1_000:.0f} s; "
                "the disk does not answer, or a call hangs"
            )
    return tuple(reasons)


def _notes(shards: Sequence[ShardPulse]) -> tuple[str, ...]:
    notes = []
    for index, shard in enumerate(shards):
        if shard.used_share >= FILLING_SHARE:
            notes.append(
                f"shard {index}: its store is {shard.used_share:.0%} full; at {INTAKE_SHARE:.0%} intake waits, "
                "commits, requeues and purges go on"
            )
        if shard.intake_waits_for:
            notes.append(f"shard {index}: intake waits: {shard.intake_waits_for}")
    return tuple(notes)
