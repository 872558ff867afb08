"""NATS: connections, and which of nats-py's errors mean that the server is away."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ftlayer.common.checks import check_path, check_text
from ftlayer.common.printable import hidden, secrets_of, url_parts
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""A server that says nothing for this long is taken for away."""

_SCHEMES = ("nats", "tls")
_INVALID_IN_NAMES = set(".*>/\\ \t\r\n")
_INVALID_IN_SUBJECTS = set(" \t\r\n")

Result = TypeVar("Result")


def nats_library() -> Any:
    return client_library("NATS", "nats-py", "nats", "nats", "nats.js.errors")


def check_nats_url(url: object) -> None:
    nats_library()
    check_text(url, "url", "a URL like nats://host:4222")
    expected = "nats://user:password@host:4222, or tls://…, with commas between"
    for each in str(url).split(","):
        parts = url_parts(each.strip(), "url", expected, _SCHEMES, str(url))
        if parts.path.strip("/") or parts.query:
            raise ConfigError(f"url: expected {expected}")


def check_credentials(credentials: object) -> None:
    check_path(credentials, "credentials")
    if credentials is not None:
        client_library("NATS with credentials", "nkeys", "nats", "nkeys")


def check_name(name: object, option: str, expected: str) -> None:
    check_text(name, option, expected)
    if _INVALID_IN_NAMES & set(str(name)):
        raise ConfigError(
            f"{option}: expected a name without '.', '*', '>', slashes and spaces, got {name!r}"
        )


def check_subject(subject: object, option: str, *, wildcards: bool) -> None:
    check_text(subject, option, "a subject")
    tokens = str(subject).split(".")
    if not all(tokens) or _INVALID_IN_SUBJECTS & set(str(subject)):
        raise ConfigError(f"{option}: expected a subject like orders.new, got {subject!r}")
    if not wildcards and {"*", ">"} & set(tokens):
        raise ConfigError(f"{option}: expected a subject without wildcards, got {subject!r}")


class NatsAwayError(Exception):
    """The server cannot be reached, is not ready, or has closed the connection."""


def is_away(error: BaseException) -> bool:
    errors = nats_library().errors
    away = (
        errors.ConnectionClosedError,
        errors.ConnectionDrainingError,
        errors.ConnectionReconnectingError,
        errors.OutboundBufferLimitError,
        errors.NoServersError,
        errors.NoRespondersError,
        errors.StaleConnectionError,
        errors.UnexpectedEOF,
        errors.TimeoutError,
        nats_library().js.errors.ServiceUnavailableError,
    )
    return isinstance(error, (*away, OSError, TimeoutError))


class NatsConnection:
    """A connection, and a thread with the event loop that it needs: pings are answered between fetches.

    It is not made again when it is lost: who has it does that, and knows what was not answered.
    """

    def __init__(self, url: str, credentials: str | None, on_lost: Callable[[], None] = lambda: None) -> None:
        """Connect. ``credentials``: path of a ``.creds`` file. ``on_lost`` is called by the loop's thread.

        Raises `NatsAwayError`, and nats-py's errors if the server refuses.
        """
        self._on_lost, self._secrets = on_lost, secrets_of(url)
        self._last_error: Exception | None = None
        self._loop = asyncio.new_event_loop()
        self._lost: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._loop.run_forever, name="ftlayer-nats", daemon=True)
        self._thread.start()
        self.client: Any = nats_library().NATS()
        try:
            self.run(self._connect(url, credentials))
        except BaseException:
            self._end()
            raise

    def run(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = TIMEOUT_S) -> Result:
        """Run this in the loop, for so long at most. Raises `NatsAwayError`, and what else it raises."""
        future = asyncio.run_coroutine_threadsafe(self._unless_lost(work), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            future.cancel()
            raise NatsAwayError(f"no answer within {TIMEOUT_S:.0f} s") from error
        except Exception as error:
            if is_away(error):
                said = hidden(self._last_error or error, self._secrets)
                raise NatsAwayError(f"{type(error).__name__}: {said}") from error
            raise

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, call: Callable[[], None]) -> None:
        """Call this in the loop's thread, which calls this, behind what has arrived already."""
        self._loop.call_soon(call)

    @property
    def is_lost(self) -> bool:
        return bool(self.client.is_closed)

    def close(self) -> None:
        self._on_lost = _nothing
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(TIMEOUT_S)
        except (nats_library().errors.Error, OSError) as error:
            logger.info("a connection of NATS did not close in order: %s", error)
        self._end()

    async def _connect(self, url: str, credentials: str | None) -> None:
        await self.client.connect(
            [each.strip() for each in url.split(",")],
            user_credentials=credentials,
            error_cb=self._on_error,
            closed_cb=self._on_closed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=TIMEOUT_S / 2,
            ping_interval=TIMEOUT_S,
        )

    async def _close(self) -> None:
        if not self.is_lost:
            await self.client.flush()
        await self.client.close()

    async def _unless_lost(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await this; an answer that was lost with the connection is not waited for."""
        task = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {task, self._lost}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        raise NatsAwayError("the connection was closed")

    async def _on_error(self, error: Exception) -> None:
        self._last_error = error

    async def _on_closed(self) -> None:
        if not self._lost.done():
            self._lost.set_result(None)
        self._on_lost()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel_all)
        self._thread.join()
        self._loop.close()

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)


def _nothing() -> None:
    return None
