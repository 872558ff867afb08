"""How fast a snapshot is written beside the task whose state it holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftlayer.errors import SnapshotCancelledError

HEAD_START_S = 0.03
"""Small snapshots are written without a pause."""

PAUSE_S = 0.0001
"""Long enough for the task's thread to take the interpreter, which it then keeps for `sys.getswitchinterval()`."""


class Pace:
    """Called after every bit of work, a millisecond or less; raises `SnapshotCancelledError` when it is given up."""

    def __init__(self, cancelled: Callable[[], bool]) -> None:
        self._cancelled = cancelled
        self._pauses_from = time.perf_counter() + HEAD_START_S

    def __call__(self) -> None:
        """Look whether to go on, and let the task's thread have its turn."""
        if self._cancelled():
            raise SnapshotCancelledError("the snapshot was given up while it was written")
        if time.perf_counter() > self._pauses_from:
            time.sleep(PAUSE_S)
