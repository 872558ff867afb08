"""Files with a token or a key: read only where no other user can."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ftlayer.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def read_secret(path: Path, option: str) -> bytes:
    """Return what is in ``path``; `ConfigError` naming ``option`` where it cannot be read, or others could.

    As ssh does with its keys: a file of another owner, put there by the machine's administrator, is taken as it is.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            secret = file.read()
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and mode & _OTHERS:
        raise ConfigError(f"{option}: others than you can use {path} (mode {mode:04o}): chmod 600 {path}")
    return secret
