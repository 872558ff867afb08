"""Positions of a table's changes: how they are packed, and whose they are."""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

from ftlayer.sources.postgres.transactions import LogPlace
from ftlayer.sources.queue_positions import pack_position, unpack_position

_KIND = "postgres-changes"


@dataclass(frozen=True, slots=True)
class CopyPlace:
    """So many rows of an initial copy were read; ``is_over``: all of them. Each copy has a ``token`` of its own.

    ``lsn``: what comes behind the copy is behind this place of the log.
    """

    token: bytes
    rows: int
    lsn: int
    is_over: bool


ChangePlace = LogPlace | CopyPlace


def pack_place(slot: str, system: str, place: ChangePlace) -> bytes:
    """Return the position for a place in the log of a server, ``system``."""
    if isinstance(place, LogPlace):
        state: list[object] = [system, *place]
    else:
        state = [system, place.token, place.rows, place.lsn, place.is_over]
    return pack_position((_KIND, slot), msgpack.packb(state))


def unpack_place(slot: str, position: bytes, of: str) -> tuple[str, ChangePlace]:
    """Return what `pack_place` was given; `ConfigError` for the position of another source. ``of`` names this one."""
    (packed,) = unpack_position(position, (_KIND, slot), of)
    system, *state = msgpack.unpackb(packed)
    return system, LogPlace(*state) if len(state) == len(LogPlace._fields) else CopyPlace(*state)
