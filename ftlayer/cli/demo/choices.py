"""The kinds of demo: two modes on two engines, three kinds in all, and the losses that each can survive."""

from __future__ import annotations

from enum import StrEnum

from ftlayer.errors import ConfigError


class Mode(StrEnum):
    ACKER = "acker"
    BARRIER = "barrier"


class Engine(StrEnum):
    MICROBATCH = "microbatch"
    CONTINUOUS = "continuous"


class Kind(StrEnum):
    """The program that runs: a wrapped query, a tracked topology, or one with checkpoints."""

    QUERY = "query"
    TRACKED = "tracked"
    CHECKPOINTED = "checkpointed"


class Kill(StrEnum):
    NONE = "none"
    SLOT = "slot"
    VERTEX = "vertex"
    DRIVER = "driver"
    ALL = "all"


class Victim(StrEnum):
    SLOT = "slot"
    VERTEX = "vertex"
    DRIVER = "driver"


SHARES = {
    Kind.QUERY: ((Victim.VERTEX, 0.35), (Victim.DRIVER, 0.65)),
    Kind.TRACKED: ((Victim.SLOT, 0.2), (Victim.VERTEX, 0.4), (Victim.DRIVER, 0.65)),
    Kind.CHECKPOINTED: ((Victim.SLOT, 0.25), (Victim.SLOT, 0.45), (Victim.DRIVER, 0.65)),
}
"""The shares of the input behind which `Kill.ALL` kills what."""

_NO_SLOTS = "a micro-batch query has no slots; kill vertex, driver or all, or say --engine continuous"
_NO_VERTEX = "barrier mode has no vertex; kill slot, driver or all, or say --mode acker"
_NOT_THERE = {(Kind.QUERY, Kill.SLOT): _NO_SLOTS, (Kind.CHECKPOINTED, Kill.VERTEX): _NO_VERTEX}


def kind_of(mode: Mode, engine: Engine | None) -> Kind:
    """Return what is to run; ``engine`` None is the mode's own. `ConfigError` for a mode that an engine has not."""
    if mode is Mode.BARRIER:
        if engine is Engine.MICROBATCH:
            raise ConfigError(
                "--engine microbatch, --mode barrier: barriers flow through continuous topologies only (a micro-batch "
                "query has Spark's own checkpoints); leave --engine out, or say --mode acker"
            )
        return Kind.CHECKPOINTED
    return Kind.TRACKED if engine is Engine.CONTINUOUS else Kind.QUERY


def doomed(kind: Kind, kill: Kill) -> tuple[tuple[Victim, float], ...]:
    """Return who is killed behind which share of the input, in order. `ConfigError` for what is not there."""
    if (kind, kill) in _NOT_THERE:
        raise ConfigError(f"--kill {kill}: {_NOT_THERE[kind, kill]}")
    return tuple((victim, share) for victim, share in SHARES[kind] if kill in (Kill.ALL, victim.value))
