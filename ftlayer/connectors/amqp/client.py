"""AMQP 0.9.1: connections, and which of pika's errors mean that the server is away."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ftlayer.common.printable import shown_url, url_parts
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""A server that says nothing for this long while it is asked something is taken for away."""

CLOSE_S = 2.0
"""How long it may take to disconnect in order."""

_FORCED = 320  # The server was told to end connections, or is shutting down.
_MISSING = 404
_REFUSED = 406  # Of a channel: among others that acknowledgements took longer than consumer_timeout.


def amqp_library() -> Any:
    return client_library("AMQP", "pika", "amqp", "pika")


def check_amqp_url(url: object) -> None:
    url_parts(url, "url", "amqp://user:password@host:5672/%2F, or amqps://…", ("amqp", "amqps"))
    with contextlib.suppress(ValueError, TypeError):  # What it says quotes what it could not read.
        amqp_library().URLParameters(url)
        return
    raise ConfigError(f"url: pika cannot read the path or the options of {shown_url(str(url))}")


@dataclass(slots=True)
class _Channel:
    """A channel of pika's, and what has closed it."""

    open: Any
    closed: Exception | None = None


class AmqpConnection:
    """A connection with one channel, used by one thread: nothing is sent or received but while `run` is called.

    This is pika's `SelectConnection`. Its `BlockingConnection` waits for each confirmation before it publishes on, and
    handles each delivery twice.

    There are no heartbeats: under back-pressure `run` is not called for longer than one may take. TCP tells when the
    server is gone.
    """

    def __init__(self, url: str) -> None:
        """Connect, and open the channel. Raises errors of pika's, of which `is_away` tells."""
        pika = amqp_library()
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0
        parameters.connection_attempts = 1
        parameters.socket_timeout = parameters.stack_timeout = TIMEOUT_S
        parameters.blocked_connection_timeout = None
        parameters.tcp_options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
        self._closed: Exception | None = None
        self._connection = pika.SelectConnection(
            parameters, on_open_error_callback=self._on_closed, on_close_callback=self._on_closed
        )
        self._loop = self._connection.ioloop
        self._loop.activate_poller()
        try:
            self._wait(lambda: bool(self._connection.is_open), "the connection")
            self._mine = self._opened()
        except BaseException:
            self.close()
            raise
        self.channel: Any = self._mine.open
        """pika's channel."""

    def run(self, until: Callable[[], Any], wait_s: float) -> bool:
        """Send and receive until a condition holds, for about ``wait_s`` seconds at most; return whether it does.

        Raises what has closed the channel or the connection.
        """
        give_up = time.monotonic() + wait_s
        while not until():
            left = give_up - time.monotonic()
            self.turn(left)
            if left <= 0:
                return bool(until())
        return True

    def turn(self, wait_s: float = 0.0) -> None:
        """Send and receive once what is possible now, or within a time. Raises as `run` does."""
        self._raise_if_closed()
        self._turn(wait_s)
        self._raise_if_closed()

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the channel that the server answers; return the answer. Raises as `run` does."""
        return self._ask(self._mine, method, *arguments, **named)

    def has_queue(self, queue: str) -> bool:
        asking = self._opened()
        try:
            self._ask(asking, "queue_declare", queue, passive=True)
        except amqp_library().exceptions.ChannelClosedByBroker as error:
            if error.reply_code != _MISSING:
                raise
            return False
        asking.open.close()
        return True

    def close(self) -> None:
        """Disconnect, in order if the server takes part in it soon."""
        errors = (amqp_library().exceptions.AMQPError, OSError)
        if self._closed is None:
            try:
                self._connection.close()
                give_up = time.monotonic() + CLOSE_S
                while self._closed is None and (left := give_up - time.monotonic()) > 0:
                    self._turn(left)
            except errors as error:
                logger.info("a connection of AMQP did not close in order: %s", error)
        self._loop.deactivate_poller()
        self._loop.close()

    # ------------------------------------------------------------ pika's loop

    def _opened(self) -> _Channel:
        channel = _Channel(self._connection.channel(on_open_callback=_nothing))

        def on_close(_: Any, reason: Exception) -> None:
            channel.closed = reason

        channel.open.add_on_close_callback(on_close)
        self._wait(lambda: bool(channel.open.is_open), "the channel", channel)
        return channel

    def _ask(self, channel: _Channel, method: str, *arguments: Any, **named: Any) -> Any:
        answers: list[Any] = []
        getattr(channel.open, method)(*arguments, callback=answers.append, **named)
        self._wait(lambda: bool(answers), f"an answer to {method}", channel)
        return answers[0].method

    def _wait(self, until: Callable[[], bool], what: str, channel: _Channel | None = None) -> None:
        give_up = time.monotonic() + TIMEOUT_S
        while not until():
            closed = self._closed if channel is None else channel.closed or self._closed
            if closed is not None:
                raise closed
            if (left := give_up - time.monotonic()) <= 0:
                raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {what}")
            self._turn(left)

    def _turn(self, wait_s: float) -> None:
        # Without a timer it would wait for five seconds.
        timer = self._loop.call_later(max(0.0, wait_s), _nothing)
        self._loop.poll()
        self._loop.remove_timeout(timer)
        self._loop.process_timeouts()

    def _raise_if_closed(self) -> None:
        if (closed := self._mine.closed or self._closed) is not None:
            raise closed

    def _on_closed(self, _: Any, reason: Exception) -> None:
        self._closed = _plain(reason)


def _plain(reason: Exception) -> Exception:
    """Return what came of the last attempt to connect: an error of pika's that says why, or of the system's."""
    errors = amqp_library().exceptions
    last: Any = reason
    while type(last) is errors.AMQPConnectionError or not isinstance(last, errors.AMQPError | OSError):
        within = getattr(last, "exceptions", None) or [getattr(last, "exception", None), *last.args]
        if not isinstance(within[-1], Exception):
            return errors.AMQPConnectionError(repr(last))  # type: ignore[no-any-return]
        last = within[-1]
    found: Exception = last
    return found


def _nothing(*_: Any) -> None:
    """What pika calls where nothing is to be done."""


def is_away(error: Exception) -> bool:
    """Whether an error means that the server cannot be reached now, or closed a connection that may be made again."""
    errors = amqp_library().exceptions
    if isinstance(error, errors.ChannelClosedByBroker):
        return error.reply_code == _REFUSED and "timed out" in error.reply_text
    if isinstance(error, errors.ConnectionClosedByBroker):
        return bool(error.reply_code == _FORCED)
    # A password that is refused will be refused again.
    lasting = (
        errors.AuthenticationError,
        errors.ProbableAuthenticationError,
        errors.ProbableAccessDeniedError,
        errors.IncompatibleProtocolError,
    )
    away = (errors.AMQPConnectionError, errors.ChannelWrongStateError, OSError)
    return isinstance(error, away) and not isinstance(error, lasting)
