"""Positions of queues: what they are of stands in them, so that another source's are refused."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack

from ftlayer.errors import ConfigError


def pack_position(source: Sequence[str], *state: bytes) -> bytes:
    """Return a position of a source, which a few texts name: the system's name, and what is read of it."""
    packed: bytes = msgpack.packb([*source, *state])
    return packed


def unpack_position(position: bytes, source: Sequence[str], place: str, parts: int = 1) -> list[bytes]:
    """Return the state in a position, of so many parts. ``place`` is how errors name the source.

    Raises `ConfigError` for a position of something else.
    """
    try:
        found = msgpack.unpackb(position)
    except (ValueError, msgpack.UnpackException):
        found = None
    if isinstance(found, list) and found[: len(source)] == list(source):
        state: list[bytes] = found[len(source) :]
        if len(state) == parts and all(isinstance(part, bytes) for part in state):
            return state
    raise ConfigError(
        f"{place}: the positions stored under this uid are of another source; give the new one a uid of its own"
    )
