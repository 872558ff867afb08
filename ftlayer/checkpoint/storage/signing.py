"""Keyed checksums over everything that is read back (BLAKE2b, RFC 7693, in its keyed mode).

They tell damage in every case. They tell a forger only if he cannot get at the key, i.e. with
`CheckpointConfig.key`: a key that is kept beside the checkpoints is known to all who can read there.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Protocol

DIGEST_BYTES = 32
_MOST_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE


class Hasher(Protocol):
    """A hash object of `hashlib`."""

    def update(self, data: bytes, /) -> None:
        """Go on with ``data``."""

    def digest(self) -> bytes:
        """Return the checksum so far."""


class Signer:
    """Checksums by one key. Pieces, metadata and dead letters have different ones, so that none passes for another."""

    def __init__(self, key: bytes) -> None:
        self._key = key if len(key) <= _MOST_KEY_BYTES else hashlib.blake2b(key).digest()

    def is_like(self, other: Signer) -> bool:
        return hmac.compare_digest(self._key, other._key)

    def hasher(self) -> Hasher:
        """Return the beginning of a piece's checksum."""
        return hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer piece")

    def digest(self, data: bytes) -> bytes:
        """Return the checksum of a piece that is here as a whole."""
        hasher = self.hasher()
        hasher.update(data)
        return hasher.digest()

    def metadata(self, data: bytes) -> bytes:
        """Return the checksum of a metadata file."""
        hasher = hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer metadata")
        return hasher.digest()

    def letters(self, name: str, data: bytes) -> bytes:
        """Return the checksum of a file with dead letters, which goes by its name."""
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer letters")
        hasher.update(len(name.encode()).to_bytes(4, "big") + name.encode())
        hasher.update(data)
        return hasher.digest()


def is_same(left: bytes, right: bytes) -> bool:
    """Compare checksums in constant time."""
    return hmac.compare_digest(left, right)
