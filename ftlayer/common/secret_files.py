"""Files of one user: secrets are read only where no other can, and what others put beside them does no harm."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftlayer.errors import ConfigError

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def is_private(path: Path) -> bool:
    """Whether it is a directory of this user that no other can enter, and no link to one.

    In a directory for temporary files others may put anything under any name: of theirs nothing is looked at.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & _OTHERS


@contextmanager
def unused(path: Path, flags: int = os.O_RDONLY) -> Iterator[os.stat_result]:
    """Lock what a killed process of this user may have left; OSError where it is another's, a link, or in use."""
    # Not to wait: a pipe would take for ever to open.
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(file)
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "another user's", str(path))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield status
    finally:
        os.close(file)


def read_secret(path: Path, option: str) -> bytes:
    """Return what is in ``path``; `ConfigError` naming ``option`` where it cannot be read, or others could.

    As ssh does with its keys: others may read a file of another owner, put there by the machine's administrator. What
    others may write is refused: they could put a token of their own in its place.
    """
    secret, status = _read(path, option)
    if stat.S_ISREG(status.st_mode):
        if status.st_uid == os.geteuid():
            _check_mode(path, status, option)
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(f"{option}: others than its owner can write {path}: chmod go-w {path}")
    return secret


def read_own_secret(path: Path, option: str) -> bytes:
    """Return what is in ``path``, which this user has to have written: a stranger's could lead to a server of theirs.

    Raises `ConfigError` as `read_secret` does, and where the file is another user's, or no file.
    """
    secret, status = _read(path, option, os.O_NONBLOCK)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        raise ConfigError(
            f"{option}: {path} is not a file of yours (user {os.geteuid()}) but of user {status.st_uid}"
        )
    _check_mode(path, status, option)
    return secret


def read_file(path: Path, option: str) -> bytes:
    """Return what is in a file that an option names; `ConfigError` where it cannot be read."""
    return _read(path, option)[0]


def _read(path: Path, option: str, flags: int = 0) -> tuple[bytes, os.stat_result]:
    try:
        with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
            # Of what was opened, and not of what has the name a moment later.
            return file.read(), os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"{option}: {path} cannot be read: {error.strerror}") from error


def _check_mode(path: Path, status: os.stat_result, option: str) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & _OTHERS:
        raise ConfigError(f"{option}: others than you can use {path} (mode {mode:04o}): chmod 600 {path}")
