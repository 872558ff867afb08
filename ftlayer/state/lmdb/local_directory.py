"""Directories for local files of a process, which do not stay when it is killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "ftlayer-state-"
_LOCK = "lock"


class LocalDirectory:
    """A directory of its own, removed by `close`; what killed processes have left beside it is removed before."""

    def __init__(self, parent: str | None) -> None:
        """``parent`` None: the system's directory for temporary files. OSError if it cannot be written."""
        base = Path(parent or tempfile.gettempdir())
        base.mkdir(parents=True, exist_ok=True)
        _sweep(base)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        # Locked before it has its name, so that it is never there and not locked.
        new = self.path / "new"
        self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def close(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _sweep(base: Path) -> None:
    for lock in base.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # Another user's, or gone meanwhile.
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(handle)
