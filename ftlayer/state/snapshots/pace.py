"""How fast a snapshot is written beside the task whose state it holds."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ftlayer.errors import SnapshotCancelledError

HEAD_START_S = 0.03
"""Small snapshots are written without a pause."""

PAUSE_S = 0.0001
"""Long enough for the task's thread to take the interpreter, which it then keeps for `sys.getswitchinterval()`."""

GIVING_WAY = 4
"""Added to the nice value: two fifths of the processor's time that a task gets which has just as much to do."""

_Result = TypeVar("_Result")


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


def giving_way(work: Callable[[], _Result]) -> _Result:
    """Do work that hardly needs the interpreter in a thread that tasks go before, where the system has such threads.

    The thread that holds the interpreter is not to give way: tasks would wait for it. The process does not wait for the
    thread when it ends: a storage may never answer.
    """
    outcome: Future[_Result] = Future()

    def run() -> None:
        _give_way()
        try:
            outcome.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            outcome.set_exception(error)

    threading.Thread(target=run, name="ftlayer-copy", daemon=True).start()
    return outcome.result()


def _give_way() -> None:
    if sys.platform == "linux":
        # A nice value belongs to a thread there. Without the right to it the thread is one as others are.
        with contextlib.suppress(OSError):
            thread = threading.get_native_id()
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, nice + GIVING_WAY)
