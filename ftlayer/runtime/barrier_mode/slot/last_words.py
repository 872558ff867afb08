"""What a process writes down when it ends itself.

Nobody else can tell. Spark's daemon forks the Python workers and has the kernel reap them (it ignores SIGCHLD), so no
exit code is ever read; a worker's parent alone could have it. So a worker writes while it ends:

- SIGSEGV, SIGABRT, SIGBUS, SIGILL and SIGFPE: `faulthandler` writes what came, and where the functions were. It is
  C, needs neither the interpreter nor its lock, and has a stack of its own for the thread that turned it on.
- ``os._exit`` is a function that writes the code first.

What leaves nothing in writing: SIGKILL, a lost host, other signals, and an exit by C (``_exit``, ``exit``). A function
that turns `faulthandler` on for itself takes it away from here.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from typing import NoReturn

_STDERR = 2

_open: LastWords | None = None


class LastWords:
    """Are written by this process from the moment it is made until `close`. One at a time in a process."""

    def __init__(self, file: int, exits: Callable[[int], None]) -> None:
        """``file`` is a descriptor that signals are written to; ``exits`` is called with the code of an exit."""
        global _open
        assert _open is None, "the last words of this process are written elsewhere"
        self._process = os.getpid()
        self._exits = exits
        self._was_enabled = faulthandler.is_enabled()
        self._exit = os._exit
        faulthandler.enable(file, all_threads=False)
        os._exit = self._written_exit
        _open = self

    def close(self) -> None:
        """Write no more. Where `faulthandler` was on before, it is again, and writes to stderr."""
        global _open
        _open = None
        os._exit = self._exit
        faulthandler.disable()
        if self._was_enabled:
            faulthandler.enable(_STDERR)

    def _written_exit(self, status: int) -> NoReturn:
        # A child that was forked ends in this way, and is not meant.
        if os.getpid() == self._process:
            self._exits(status)
        self._exit(status)


def _leave_child_alone() -> None:
    """A forked child has the descriptor, too: how it ends is of no account."""
    if _open is not None:
        faulthandler.disable()


os.register_at_fork(after_in_child=_leave_child_alone)
