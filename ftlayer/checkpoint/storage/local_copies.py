"""Second copies of a slot's files on its own disk, for a quick restore (task-local recovery in Flink).

```
<local_recovery>/<job>/<run>/slot-<n>/_lock, chk-<n>/…, shared/…
```

The instances that run a slot one after the other share its directory: what one that was killed has left is what
the next one restores from. A copy that is missing or does not fit is ignored.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ftlayer.checkpoint.storage.layout import SHARED, checkpoint_number, job_directory, part, run_directory
from ftlayer.checkpoint.storage.local_files import LocalFiles

logger = logging.getLogger(__name__)

LOCK = "_lock"


class LocalCopies:
    """The directory of one slot. Raises OSError if it cannot be made."""

    def __init__(self, directory: str, job: str, run: str, slot: int) -> None:
        own_run = Path(run_directory(directory, job, run))
        self._root = own_run / f"slot-{slot}"
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._root)
        self.files = LocalFiles(str(self._root))
        _remove_dead(Path(job_directory(directory, job)), except_run=part(run))

    def completed(self, checkpoint: int, shared: Iterable[str]) -> None:
        """Remove copies for older checkpoints, and of shared files but those of these paths."""
        kept = set(shared)
        for entry in self.files.walk():
            directory, _, _ = entry.path.rpartition("/")
            number = checkpoint_number(directory)
            is_old = number is not None and number < checkpoint
            if is_old or (directory == SHARED and entry.path not in kept):
                self.files.delete(entry.path)
        for path in self._root.iterdir():
            number = checkpoint_number(path.name)
            if number is not None and number < checkpoint:
                self.files.delete_empty(path.name)

    def close(self, *, over: bool) -> None:
        """Let the next instance have them, or, if the job is ``over``, remove them."""
        if over:
            _remove(self._root)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """Hold the directory's lock while this process lives; None: another process (a zombie) still does."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_dead(job: Path, except_run: str) -> None:
    """Remove what slots of earlier runs have left on this machine."""
    for directory in job.glob(f"*/slot-*/{LOCK}"):
        slot = directory.parent
        if slot.parent.name == except_run:
            continue
        descriptor = _lock(slot)
        if descriptor is not None:
            _remove(slot)
            os.close(descriptor)


def _remove(slot: Path) -> None:
    shutil.rmtree(slot, onerror=_report)
    # The run's and the job's directories go with the last slot's.
    for directory in (slot.parent, slot.parent.parent):
        try:
            directory.rmdir()
        except OSError:
            return


def _report(_function: object, path: str, error: tuple[object, BaseException, object]) -> None:
    if not isinstance(error[1], FileNotFoundError):
        logger.warning("a local copy of a part of a checkpoint cannot be removed: %s: %s", path, error[1])
