"""Options that will not do are named."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.sources import RedisSource

pytest.importorskip("redis")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": 7}, "url: expected a URL like redis://"),
        ({"url": "host:6379"}, "url: "),
        ({"stream": ""}, "stream: expected the key of a stream"),
        ({"group": None}, "group: expected the name of a consumer group"),
        ({"fields": "user"}, "fields: expected a list of names"),
        ({"fields": ["user", 1]}, "fields: expected the name of a field, got 1"),
        ({"fields": ["user", "user"]}, "fields: .* twice"),
        ({"fields": ["id"]}, "fields: .* one of 'id' and 'time'"),
        ({"fields": ["fields"]}, "fields: a single column"),
        ({"start": "now"}, "start: expected 'earliest' or 'latest', got 'now'"),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {"url": "redis://localhost", "stream": "s", "group": "g", **given}
    with pytest.raises(ConfigError, match=said):
        RedisSource(**options)


def test_a_password_is_in_no_error() -> None:
    assert "secret" not in RedisSource("redis://:secret@localhost", "s", "g").place
