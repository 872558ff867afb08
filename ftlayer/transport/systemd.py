"""What a service tells the service manager that started it (``sd_notify(3)``): ready, alive, stopping."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)


class Notifier:
    """Tells systemd how this process is; says nothing where no one listens. For one thread.

    A process that is told to show life (``WatchdogSec=``) does so twice in the time that it is given.
    """

    def __init__(
        self, path: str, watchdog_s: float | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``path`` is the socket's ("" for none, "@…" for an abstract one), ``watchdog_s`` the time it is given."""
        self._path = f"\0{path[1:]}" if path.startswith("@") else path
        self._every_s = None if watchdog_s is None else watchdog_s / 2
        self._clock = clock
        self._told_s = -float("inf")

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Notifier:
        """Return what the variables ``NOTIFY_SOCKET``, ``WATCHDOG_USEC`` and ``WATCHDOG_PID`` ask for."""
        path = environ.get("NOTIFY_SOCKET", "")
        watchdog_us = environ.get("WATCHDOG_USEC", "")
        is_meant = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
        return cls(path, int(watchdog_us) / 1e6 if watchdog_us.isdigit() and is_meant else None)

    def ready(self, status: str) -> None:
        """Tell that the service serves; ``status`` is what ``systemctl status`` shows."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Tell that the service ends by itself."""
        self._send("STOPPING=1\nSTATUS=stopping")

    def alive(self, is_live: Callable[[], bool]) -> None:
        """Show life if it is time to, and if ``is_live`` says so."""
        now_s = self._clock()
        if self._every_s is None or now_s - self._told_s < self._every_s:
            return
        self._told_s = now_s
        if is_live():
            self._send("WATCHDOG=1")

    def _send(self, text: str) -> None:
        if not self._path:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to_manager:
                to_manager.sendto(text.encode(), self._path)
        except OSError as error:
            # The service serves all the same; a manager that waits for READY=1 says itself that it got none.
            logger.warning("the service manager cannot be told (NOTIFY_SOCKET): %s", error)
