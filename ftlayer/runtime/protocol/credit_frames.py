"""What goes back to senders as bytes: credit, and how much a receiver wants in flight."""

from __future__ import annotations

import struct

from ftlayer.errors import CodecError
from ftlayer.topology.job_graph import Channel

# edge, sender, receiver, bytes; in front of all of them one byte that says what they are.
_GRANT = struct.Struct("<IIIq")
_GRANTS, _LIMITS = b"\x00", b"\x01"


def encode_grants(grants: dict[Channel, int]) -> bytes:
    """Return the bytes of credit that go back to the senders of channels, as bytes."""
    return _encode_numbers(_GRANTS, grants)


def encode_limits(limits: dict[Channel, int]) -> bytes:
    """Return how many bytes may be in flight on channels from now on, as bytes."""
    return _encode_numbers(_LIMITS, limits)


def is_limits(data: bytes) -> bool:
    """Whether bytes that come back to a sender are those of `encode_limits`."""
    return data[:1] == _LIMITS


def decode_grants(data: bytes) -> list[tuple[Channel, int]]:
    """Read what `encode_grants` or `encode_limits` wrote; `CodecError` for anything else."""
    if len(data) % _GRANT.size != 1 or data[:1] not in (_GRANTS, _LIMITS):
        raise CodecError(f"credits come in {_GRANT.size} bytes each behind one byte, not in {len(data)}")
    numbers = [(Channel(e, s, r), size) for e, s, r, size in _GRANT.iter_unpack(data[1:])]
    if any(size < 0 for _, size in numbers):
        raise CodecError("a credit is negative")
    return numbers


def _encode_numbers(kind: bytes, numbers: dict[Channel, int]) -> bytes:
    return kind + b"".join(
        _GRANT.pack(channel.edge, channel.sender, channel.receiver, number)
        for channel, number in numbers.items()
    )
