"""What a process writes down when it ends itself.

No other process can tell. Spark's daemon forks the Python workers and has the kernel reap them (it ignores SIGCHLD), so
no exit code is ever read; a worker's parent alone could have it. So a worker writes while it ends:

- SIGSEGV, SIGABRT, SIGBUS, SIGILL and SIGFPE: `faulthandler` writes what came, and where the functions were. It is
  C, needs neither the interpreter nor its lock, and has a stack of its own for the thread that turned it on.
- ``os._exit`` is a function that writes the code first; ``exit`` of a C library sets a byte.

What leaves nothing in writing: SIGKILL, a lost host, other signals, and ``_exit`` of a C library. A function that turns
`faulthandler` on for itself takes it away from here.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from mmap import mmap
from typing import NoReturn

from ftlayer import _native

_STDERR = 2

_open: LastWords | None = None


class LastWords:
    """Are written by this process from the moment it is made until `close`. One at a time in a process."""

    def __init__(self, file: int, exits: Callable[[int], None], page: mmap, place: int) -> None:
        """Begin.

        Args:
            file: a descriptor that signals are written to.
            exits: called with the code of an ``os._exit``.
            page, place: the byte that is set at another exit.
        """
        global _open
        assert _open is None, "the last words of this process are written elsewhere"
        self._process = os.getpid()
        self._exits = exits
        self._was_enabled = faulthandler.is_enabled()
        self._exit = os._exit
        faulthandler.enable(file, all_threads=False)
        os._exit = self._written_exit
        _native.mark_exit(page, place)
        _open = self

    def close(self) -> None:
        """Write no more. Where `faulthandler` was on before, it is again, and writes to stderr."""
        global _open
        _open = None
        os._exit = self._exit
        _native.mark_exit(None, 0)
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
