"""Redis: connections, and which of its errors mean that the server is away."""

from __future__ import annotations

import contextlib
from typing import Any

from ftlayer.common.checks import check_text
from ftlayer.common.printable import shown_url
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError

TIMEOUT_S = 10.0
"""A server that says nothing for this long is taken for away."""


def redis_library() -> Any:
    return client_library("Redis", "redis-py", "redis", "redis")


def check_redis_url(url: object) -> None:
    check_text(url, "url", "a URL like redis://host:6379/0")
    with contextlib.suppress(ValueError):  # What it says quotes what it could not read.
        redis_library().connection.parse_url(url)
        return
    raise ConfigError(
        "url: expected redis://user:password@host:6379/0, rediss://… with TLS, or unix://path, with options that "
        f"redis-py knows, got {shown_url(str(url))}"
    )


def connect(url: str) -> Any:
    """Return a client of a server, which is connected to when it is used. Replies come as bytes, as they are sent.

    It tries nothing again: whether that is safe depends on the command.
    """
    redis = redis_library()
    client = redis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    )
    # redis-py would make tuples and dicts of each entry of a stream.
    for command in ("XREADGROUP", "XPENDING"):
        client.set_response_callback(command, _as_it_came)
    return client


def _as_it_came(reply: Any, **_: Any) -> Any:
    return reply


def is_away(error: Exception) -> bool:
    redis = redis_library()
    away = (redis.ConnectionError, redis.TimeoutError)
    # A password that is refused will be refused again.
    lasting = (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)
    return isinstance(error, away) and not isinstance(error, lasting)
