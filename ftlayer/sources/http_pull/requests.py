"""What sources that ask an HTTP server have in common: their options, and what its answers mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

from ftlayer.errors import ConfigError, SourceError
from ftlayer.printable import secrets_of, url_parts, without_secrets
from ftlayer.sinks.http import retry_after_s

AWAY = (408, 425, 429)
"""Answers of 400 to 499 that another try may change."""

_SAID = 200


class AnsweredError(Exception):
    """An answer that another try may change. ``pause_s``: when the server wants to be asked again."""

    def __init__(self, status: int, pause_s: float) -> None:
        super().__init__(f"it has answered {status}")
        self.pause_s = pause_s


def check_request(url: object, headers: object) -> tuple[dict[str, str], list[str]]:
    """Return headers, and what must not be shown of both.

    Raises `ConfigError` if httpx is missing, and for options that will not do.
    """
    if find_spec("httpx") is None:
        raise ConfigError("an HTTP source needs httpx where slots run: pip install 'ftlayer[http]'")
    url_parts(url, "url", "one that begins with http:// or https://", ("http", "https"))
    given = {} if headers is None else headers
    if not isinstance(given, Mapping) or not all(
        isinstance(part, str) for pair in given.items() for part in pair
    ):
        raise ConfigError("headers: expected a dict from name to text")
    return dict(given), secrets_of(str(url), given.values())


def check_answer(
    place: str, status: int, headers: Mapping[str, str], said: str, secrets: Sequence[str] = ()
) -> None:
    """Raise `AnsweredError`, or `SourceError` for an answer that will stay as it is, unless it is 200."""
    if status == 200:
        return
    if status in AWAY or status >= 500:
        raise AnsweredError(status, retry_after_s(headers.get("retry-after")) or 0.0)
    raise SourceError(f"{place}: it has answered {status}: {without_secrets(said, secrets)[:_SAID]}")
