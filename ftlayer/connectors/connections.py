"""Client libraries that come with extras; a connection that is lost: when it is tried again, and given up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ftlayer.common.printable import hidden, raise_from
from ftlayer.errors import ConfigError, FTLayerError, SourceError, install

logger = logging.getLogger(__name__)


def client_library(system: str, library: str, extra: str, *modules: str) -> Any:
    """Return the first of these modules; the others are imported too. Raises `ConfigError`, which names the extra.

    ``system`` is what needs them, ``library`` their name for people: ``"Redis"``, ``"redis-py"``.
    """
    try:
        first, *_ = map(import_module, modules)
    except ImportError as error:
        raise ConfigError(
            f"{system} needs {library} where driver and slots run: {install(extra)} ({error})"
        ) from error
    return first


FIRST_S, MOST_S = 0.1, 5.0
"""The pause after the first failure, which doubles up to the other one."""


class Reconnecting:
    """Pauses of one connection. The first failure of an outage is logged, and its end."""

    def __init__(
        self,
        place: str,
        patience_ms: int,
        secrets: Sequence[str] = (),
        *,
        error: type[FTLayerError] = SourceError,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``place`` names what is connected to; after ``patience_ms`` without it `failed` raises an ``error``.

        ``secrets``: neither the log nor that error tells them.
        """
        self._place = place
        self._patience_s = patience_ms / 1_000
        self._secrets = secrets
        self._error = error
        self._clock = clock
        self._sleep = sleep
        self._since: float | None = None
        self._pause_s = FIRST_S
        self._again = 0.0

    @property
    def is_away(self) -> bool:
        return self._since is not None

    @property
    def is_early(self) -> bool:
        return self._since is not None and self._clock() < self._again

    def wait(self, most_s: float) -> float:
        """Sleep until it is to be tried, for ``most_s`` seconds at most; return how long that was."""
        if not self.is_early:
            return 0.0
        pause_s = min(most_s, self._again - self._clock())
        self._sleep(pause_s)
        return pause_s

    def failed(self, error: Exception) -> None:
        """It could not be reached. Raises if that has been so for too long."""
        now = self._clock()
        shown = hidden(error, self._secrets)
        if self._since is None:
            logger.warning("%s is away, and is tried again: %s", self._place, shown)
            self._since, self._pause_s = now, FIRST_S
        elif now - self._since >= self._patience_s:
            away = f"{self._place} has been away for {now - self._since:.0f} s, longer than reconnect_timeout: {shown}"
            raise_from(self._error(away), error, self._secrets)
        self._again = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, MOST_S)

    def works(self) -> None:
        if self._since is not None:
            logger.warning("%s is back after %.1f s", self._place, self._clock() - self._since)
            self._since = None
