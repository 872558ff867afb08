"""Client libraries that come with extras; a connection that is lost: when it is tried again, and given up."""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from ftlayer.common.printable import described, hidden, raise_from
from ftlayer.errors import ConfigError, FTLayerError, SourceError, install
from ftlayer.topology.operators import Fetched, QueueReader

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


Result = TypeVar("Result")


class ServerReader(QueueReader):
    """A `QueueReader` that connects again by itself, and warns when its server gives no more.

    Before anything is asked for, what is durable is acknowledged: also what became so while the server was away. Who
    derives from this decorates the class by `hides_secrets`: errors of clients repeat URLs.
    """

    def __init__(
        self,
        place: str,
        patience_ms: int,
        secrets: Sequence[str],
        errors: tuple[type[Exception], ...],
        is_away: Callable[[Exception], bool],
        most_pending: int | None = None,
    ) -> None:
        """Nothing is connected to.

        Args:
            place: how errors and the log name what is read.
            patience_ms: for how long the server may be away.
            secrets: what they must not tell.
            errors: what the client raises.
            is_away: whether one of these means that another try may help.
            most_pending: how many messages may wait for their acknowledgement, ``max_pending``; None: any number.
        """
        self._where, self._secrets = place, secrets
        self._away = Reconnecting(place, patience_ms, secrets)
        self._errors, self._means_away = errors, is_away
        self._most_pending = most_pending
        self._warned = False

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        wait_s -= self._away.wait(wait_s)
        fetched = self._connected(lambda: self._fetch(max_rows, wait_s))
        if fetched is not None:
            self._warned = False
        elif not self._away.is_away:
            self._warn_of_standstill()
        return fetched

    def acknowledge(self, receipts: Sequence[Any]) -> None:
        self._note_durable(receipts)
        if not self._away.is_away:
            self._tried(self._send_acknowledgements)

    def waiting(self) -> int | None:
        return self._connected(self._count)

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def close(self) -> None:
        self._disconnect()

    @abstractmethod
    def _connect(self) -> None:
        """Connect, unless that is done."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Forget the connection, if there is one: what was not acknowledged is delivered again by the next."""

    @abstractmethod
    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """See `fetch`. Nothing that may fail comes behind what takes messages: they would be known, and not given."""

    def _note_durable(self, receipts: Sequence[Any]) -> None:
        """Remember what may be acknowledged; the connection may be lost."""

    def _send_acknowledgements(self) -> None:
        """Acknowledge what is durable; nothing where there is no connection."""

    def _count(self) -> int | None:
        return None

    @property
    def _unacknowledged(self) -> int:
        return 0

    def _refusal(self, error: Exception) -> SourceError:
        """Return what is raised for an error that another try does not mend."""
        return SourceError(f"{self._where}: {described(error)}")

    def _connected(self, work: Callable[[], Result]) -> Result | None:
        """Return what this returns over a connection; None while the server is away."""

        def connected() -> Result:
            self._connect()
            self._send_acknowledgements()
            done = work()
            self._away.works()
            return done

        return None if self._away.is_early else self._tried(connected)

    def _tried(self, work: Callable[[], Result]) -> Result | None:
        """Do this; None: the client has raised, and this connects again later. Raises if that helps no more."""
        try:
            return work()
        except self._errors as error:
            if not self._means_away(error):
                raise self._refusal(error) from error
            self._disconnect()
            self._away.failed(error)
            return None

    def _warn_of_standstill(self) -> None:
        """Say once that nothing comes as all that may wait does, until something comes again."""
        pending = self._unacknowledged
        if self._warned or self._most_pending is None or pending < self._most_pending:
            return
        self._warned = True
        logger.warning(
            "%s: %d messages wait to be durable, which is max_pending; no others come until then: raise it, or "
            "checkpoint more often",
            self._where,
            pending,
        )
