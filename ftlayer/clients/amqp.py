"""AMQP 0.9.1: connections, and which of pika's errors mean that the server is away."""

from __future__ import annotations

from typing import Any

from ftlayer.checks import check_text
from ftlayer.clients.libraries import client_library
from ftlayer.errors import ConfigError

TIMEOUT_S = 10.0
"""A server that says nothing for this long while it is connected to is taken for away."""

_FORCED = 320  # The server was told to end connections, or is shutting down.
_REFUSED = 406  # Of a channel: among others that acknowledgements took longer than consumer_timeout.


def amqp_library() -> Any:
    """Return pika. Raises `ConfigError` if it is missing."""
    return client_library("pika", "AMQP", "pika", "amqp")


def check_amqp_url(url: object) -> None:
    """Raise `ConfigError` unless pika can read it."""
    check_text(url, "url", "a URL like amqp://user:password@host:5672/%2F")
    assert isinstance(url, str)
    if not url.startswith(("amqp://", "amqps://")):
        raise ConfigError("url: expected amqp://… or amqps://…")
    try:
        amqp_library().URLParameters(url)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"url: {error}") from error


def connect(url: str) -> Any:
    """Return a `BlockingConnection`, which is connected.

    It sends no heartbeats: under back-pressure nobody calls it for longer than a heartbeat may take. TCP tells when the
    server is gone.
    """
    pika = amqp_library()
    parameters = pika.URLParameters(url)
    parameters.heartbeat = 0
    parameters.socket_timeout = parameters.stack_timeout = TIMEOUT_S
    parameters.blocked_connection_timeout = None
    parameters.tcp_options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    return pika.BlockingConnection(parameters)


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


def place_of(url: str) -> str:
    """Return how errors name a server: without its password."""
    parameters = amqp_library().URLParameters(url)
    return f"AMQP at {parameters.host}:{parameters.port}{parameters.virtual_host}"
