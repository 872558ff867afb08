"""The key that everything is signed with: the user's, or a random one that is kept beside the checkpoints.

A kept key protects from damage: cut off files, flipped bits, files that were mixed up. It does not protect from
a writer of the checkpoints' directory, who can read it there (mode 0600 keeps other users of a machine out, object
stores know no modes). `CheckpointConfig.key` protects from that too; then kept keys are not looked at.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from hashlib import blake2b
from typing import Protocol

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.layout import KEY, job_directory, join, parent
from ftlayer.checkpoint.storage.remote_files import open_files
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError
from ftlayer.printable import shown_url

# Keyed checksums over everything that is read back (BLAKE2b, RFC 7693, in its keyed mode).
#
# They tell damage in every case. They tell a forger only if he cannot get at the key, i.e. with
# `CheckpointConfig.key`: a key that is kept beside the checkpoints is known to all who can read there.


DIGEST_BYTES = 32
_MOST_KEY_BYTES = hashlib.blake2b.MAX_KEY_SIZE


class Hasher(Protocol):
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
        return hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer piece")

    def digest(self, data: bytes) -> bytes:
        """Return the checksum of a piece that is here as a whole."""
        hasher = self.hasher()
        hasher.update(data)
        return hasher.digest()

    def metadata(self, data: bytes) -> bytes:
        hasher = hashlib.blake2b(data, key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer metadata")
        return hasher.digest()

    def letters(self, name: str, data: bytes) -> bytes:
        """Return the checksum of a file with dead letters, which goes by its name."""
        hasher = hashlib.blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer letters")
        hasher.update(len(name.encode()).to_bytes(4, "big") + name.encode())
        hasher.update(data)
        return hasher.digest()


def is_same(left: bytes, right: bytes) -> bool:
    return hmac.compare_digest(left, right)


KEY_BYTES = 32
_CHECKSUM_BYTES = 16
_COPY_BYTES = KEY_BYTES + _CHECKSUM_BYTES


def storage_key(config: CheckpointConfig, job: str) -> bytes:
    """Return the key of a job; called in the driver, which hands it to the slots.

    It is ``config.key``, or the random one in the job's directory, which is made with the first run, or a new one for
    driver memory. Two first runs that start in the same moment on an object store may get different ones, of which one
    is kept: the owner of the directory asks again.
    """
    if config.key is not None:
        return config.key
    if config.directory is None:
        return secrets.token_bytes(KEY_BYTES)
    files = open_files(job_directory(config.directory, job))
    files.put_new(KEY, packed_key(secrets.token_bytes(KEY_BYTES)))
    return _read(files.url)


def packed_key(key: bytes) -> bytes:
    """Return what is kept of a key: twice the key and its checksum, as without it no checkpoint can be read."""
    return 2 * (key + _checksum(key))


def key_of(location: str, key: bytes | None = None) -> bytes:
    """Return the key of what lies in ``location``: ``key`` if it is given, else the one that is kept there.

    ``location``: as `pieces_directory` has it. Raises `CheckpointStorageError` if there is none.
    """
    if key is not None:
        return key
    for directory in (location, parent(location)):
        if open_files(directory).size(KEY) is not None:
            return _read(directory)
    raise CheckpointStorageError(
        f"{shown_url(location)}: no key is kept with it; if the job was run with CheckpointConfig(key=…) give the "
        f"same key, and if it was copied, copy the file {KEY} of its job's directory too"
    )


def _read(directory: str) -> bytes:
    kept = open_files(directory).read(KEY)
    if len(kept) == KEY_BYTES:
        # As earlier versions have kept it.
        return kept
    for first in (0, _COPY_BYTES):
        key, checksum = kept[first : first + KEY_BYTES], kept[first + KEY_BYTES : first + _COPY_BYTES]
        if len(key) == KEY_BYTES and checksum == _checksum(key):
            return key
    raise CheckpointDamagedError(
        f"{shown_url(join(directory, KEY))} is damaged: neither copy of the key in it is whole"
    )


def _checksum(key: bytes) -> bytes:
    return blake2b(key, digest_size=_CHECKSUM_BYTES).digest()
