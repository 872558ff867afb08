"""The key that everything is signed with: the user's, or a random one that is kept beside the checkpoints.

A kept key protects from damage: cut off files, flipped bits, files that were mixed up. It does not protect from
somebody who can write where the checkpoints are, since he reads it there (mode 0600 keeps other users of a machine
out, object stores know no modes). Who does not trust everybody who can write there gives `CheckpointConfig.key`;
then kept keys are not looked at.
"""

from __future__ import annotations

import secrets

from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage.files import open_files
from ftlayer.checkpoint.storage.layout import KEY, job_directory, join, parent
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError

KEY_BYTES = 32


def storage_key(config: CheckpointConfig, job: str) -> bytes:
    """Return the key of a job; called in the driver, which hands it to the slots.

    It is ``config.key``, or the random one in the job's directory, which is made with the first run (two first runs
    that start in the same moment on an object store may get different ones), or a new one for driver memory.
    """
    if config.key is not None:
        return config.key
    if config.directory is None:
        return secrets.token_bytes(KEY_BYTES)
    files = open_files(job_directory(config.directory, job))
    files.put_new(KEY, secrets.token_bytes(KEY_BYTES))
    return _read(files.url)


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
        f"{location}: no key is kept with it; if the job was run with CheckpointConfig(key=…) give the same key, "
        f"and if it was copied, copy {join(parent(location), KEY)} too"
    )


def _read(directory: str) -> bytes:
    key = open_files(directory).read(KEY)
    if len(key) != KEY_BYTES:
        raise CheckpointDamagedError(f"{join(directory, KEY)} has {len(key)} bytes, {KEY_BYTES} were written")
    return key
