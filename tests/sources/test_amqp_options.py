"""Options of the source of AMQP."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.errors import ConfigError
from ftlayer.sources import AmqpSource

pytest.importorskip("pika")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": 7}, "url: expected a URL like amqp://"),
        ({"url": "redis://localhost"}, "url: expected amqp://"),
        ({"url": "amqp://localhost:port"}, "url: "),
        ({"queue": ""}, "queue: expected the name of a queue"),
        ({"max_pending": 0}, "max_pending: expected an integer from 1 to 65535"),
        ({"max_pending": 65_536}, "max_pending: "),
        ({"unique_ids": "no"}, "unique_ids: expected True or False"),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "amqp://localhost", "queue": "q", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        AmqpSource(**options)


def test_errors_name_the_server_without_its_password() -> None:
    assert "secret" not in AmqpSource("amqp://user:secret@localhost", "q").place
