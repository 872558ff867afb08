"""The key that everything is signed with: the user's, or a random one that is kept beside the checkpoints.

A kept key protects from damage: cut off files, flipped bits, files that were mixed up. It does not protect from
a writer of the checkpoints' directory, who can read it there (mode 0600 keeps other users of a machine out, object
stores know no modes). `CheckpointConfig.key` protects from that too; then kept keys are not looked at.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from hashlib import blake2b
from typing import Any

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.files import Files, open_files
from ftlayer.checkpoint.storage.layout import KEY, OWNERS, job_directory, join, parent
from ftlayer.common.printable import shown_url
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, StaleOwnerError

# Which driver a job's directory belongs to: the one that has claimed it last. Earlier ones are fenced.
#
# Each start of a job claims the next *epoch*, a small file of that number in ``_owners``, and looks for claims that
# came meanwhile: a higher one, and it has lost; lower ones, and it removes them. It looks for checkpoints only then.
# An owner checks before and after it publishes a checkpoint, before it commits one, and before it removes anything,
# that its own claim stands and there is no next one. Nothing has to time out: a new driver takes over at once,
# whatever has become of the driver before.
#
# This rests on storage that shows later readers and listings what was written, as object stores do; no exclusive
# creation is needed, and a listing may take its time. Where two claim one epoch in the same moment, one of the files
# is left, and the owner of the other finds out.

MOST_TRIES = 100
"""So often a driver claims: others may claim in the same moment, and a listing may take its time."""


class Ownership:
    """The claim of one execution of a job; ``epoch`` grows with each start. For several threads at once."""

    def __init__(self, files: Files, job: str, run: str) -> None:
        """Take the directory over. Raises `CheckpointStorageError`, and `StaleOwnerError` if another one just has."""
        self._files = files
        self._job = job
        who = {"run": run, "host": socket.gethostname(), "pid": os.getpid()}
        self._claim = json.dumps({**who, "at_ms": int(time.time() * 1_000)}).encode()
        self.epoch = self._take()

    def check(self) -> None:
        """Raise `StaleOwnerError` if another driver has taken over; `CheckpointStorageError` if that is unknown.

        It is unknown where there is no claim at all, as in a directory that was removed, or is not mounted: what is
        there in its place has to say nothing of this job, and may not be written to.
        """
        own = None
        if self._files.size(_path(self.epoch + 1)) is None:
            own = self._read(self.epoch)
            if own == self._claim:
                return
        # Who takes over claims first, and removes older claims then: one that is gone has followers.
        if own is None and not self._epochs():
            raise CheckpointStorageError(
                f"{shown_url(self._files.url)}: the claim of topology {self._job!r}, {_path(self.epoch)}, is not "
                "there, nor one of another driver: the directory was removed, or is not mounted. No checkpoint is "
                "completed until it is there again; if it is lost, start the topology again"
            )
        raise self._stale()

    def _stale(self) -> StaleOwnerError:
        return StaleOwnerError(
            f"topology {self._job!r} was started by another driver{self._by_whom()}, which goes on with its "
            f"checkpoints in {shown_url(self._files.url)}: this one ends, and commits nothing any more. Run one of "
            "them, or give each a name or a directory of its own"
        )

    def _take(self) -> int:
        epoch = 0
        for _ in range(MOST_TRIES):
            epoch = 1 + max(self._epochs(), default=0)
            self._files.put_new(_path(epoch), self._claim)
            # Of two that do not wait for each other one at least sees the other's claim behind its own: then it is
            # refused, or removes that one.
            there = self._epochs()
            if max(there, default=0) > epoch:
                raise self._stale()
            if self._read(epoch) == self._claim:
                # In their order: an owner whose claim is left has to find the next one.
                for old in sorted(set(there) - {epoch}):
                    self._files.delete(_path(old))
                return epoch
        raise CheckpointStorageError(
            f"{shown_url(self._files.url)}: topology {self._job!r} cannot be claimed: its claims, {_path(epoch)} "
            f"is the last of {MOST_TRIES}, are not listed, or not read as they were written. Two drivers could have "
            "one job on such a storage; see what ftlayer.checkpoint.storage.conformance says of it"
        )

    def _epochs(self) -> list[int]:
        names = (entry.path.rpartition("/")[2] for entry in self._files.walk(OWNERS))
        return [int(name) for name in names if name.isdecimal()]

    def _read(self, epoch: int) -> bytes | None:
        try:
            return self._files.read(_path(epoch))
        except CheckpointDamagedError:
            # It is not there.
            return None

    def _by_whom(self) -> str:
        try:
            data = self._read(max(self._epochs(), default=0))
            claim: dict[str, Any] = json.loads(data or b"{}")
        except (CheckpointStorageError, ValueError):
            return ""
        return f" (run {claim['run']} on {claim['host']}, process {claim['pid']})" if claim.get("run") else ""


def take_over(directory: str | None, job: str, run: str) -> Ownership | None:
    """Claim a job's directory; None for driver memory, which no other driver reaches."""
    return None if directory is None else Ownership(open_files(job_directory(directory, job)), job, run)


def _path(epoch: int) -> str:
    return join(OWNERS, str(epoch))


DIGEST_BYTES = 32
_MOST_KEY_BYTES = blake2b.MAX_KEY_SIZE


class Signer:
    """Checksums by one key (BLAKE2b, RFC 7693, in its keyed mode) over everything that is read back.

    Pieces, metadata and dead letters have different ones, so that none passes for another.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key if len(key) <= _MOST_KEY_BYTES else blake2b(key).digest()

    def is_like(self, other: Signer) -> bool:
        return hmac.compare_digest(self._key, other._key)

    def hasher(self, data: bytes = b"", kind: bytes = b"piece") -> blake2b:
        """Return what makes the checksum of a piece; of other things behind ``data`` with their own ``kind``."""
        return blake2b(data, key=self._key, digest_size=DIGEST_BYTES, person=b"ftlayer " + kind)

    def digest(self, data: bytes) -> bytes:
        return self.hasher(data).digest()

    def metadata(self, data: bytes) -> bytes:
        return self.hasher(data, b"metadata").digest()

    def letters(self, name: str, data: bytes) -> bytes:
        hasher = self.hasher(len(name.encode()).to_bytes(4, "big") + name.encode(), b"letters")
        hasher.update(data)
        return hasher.digest()


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
    for first in (0, _COPY_BYTES):
        key, checksum = kept[first : first + KEY_BYTES], kept[first + KEY_BYTES : first + _COPY_BYTES]
        if len(key) == KEY_BYTES and checksum == _checksum(key):
            return key
    raise CheckpointDamagedError(
        f"{shown_url(join(directory, KEY))} is damaged: neither copy of the key in it is whole"
    )


def _checksum(key: bytes) -> bytes:
    return blake2b(key, digest_size=_CHECKSUM_BYTES).digest()
