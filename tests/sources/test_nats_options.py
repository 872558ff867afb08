"""Options of the source of NATS, and what replies say."""

from __future__ import annotations

from typing import Any

import pytest

from ftlayer.connectors.nats.source import delivery_of, reply_to
from ftlayer.errors import ConfigError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.sinks import NatsSink
from ftlayer.sources import NatsDataSource, NatsSource

pytest.importorskip("nats")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"url": 7}, "url: expected a URL like nats://"),
        ({"url": "localhost:4222"}, "url: expected nats://"),
        ({"url": "nats://localhost:port"}, "url: "),
        ({"url": "nats://a:1,redis://b:1"}, "url: expected nats://"),
        ({"stream": ""}, "stream: expected the name of a stream"),
        ({"stream": "a.b"}, "stream: expected a name without"),
        ({"consumer": "a b"}, "consumer: expected a name without"),
        ({"subject": "a..b"}, "subject: expected a subject like"),
        ({"start": "now"}, "start: expected "),
        ({"max_pending": 0}, "max_pending: expected an integer from 1"),
        ({"ack_wait": "10ms"}, "ack_wait: "),
        ({"reconnect_timeout": "soon"}, "reconnect_timeout: "),
    ],
)
def test_an_option_that_will_not_do_is_named(given: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"url": "nats://localhost", "stream": "s", "consumer": "c", **given}
    with pytest.raises(ConfigError, match=f"^{message}"):
        NatsSource(**options)


def test_errors_name_the_server_without_its_password() -> None:
    place = NatsSource("nats://user:secret@localhost,nats://other:1", "s", "c").place
    assert "secret" not in place
    assert "nats://localhost,nats://other:1" in place


@pytest.mark.parametrize(
    "reply", ["$JS.ACK.s.c.2.11.12.1700.5", "$JS.ACK.domain.account.s.c.2.11.12.1700.5.random"]
)
def test_what_a_reply_says(reply: str) -> None:
    found = delivery_of(reply)
    assert (found.delivered, found.sequence, found.consumer_sequence, found.time_ns) == (2, 11, 12, 1_700)
    assert delivery_of(reply_to(reply, 77, 78))[:2] == (77, 78)


def test_a_data_source_reads_and_writes_by_its_options() -> None:
    queue = {"url": "nats://localhost", "stream": "s", "subject": "s.in"}
    reading = NatsDataSource({**queue, "consumer": "c", "maxPending": "7", "spool": "/s"})
    assert reading.source(DataSourceOptions(reading.options, "nats")).max_pending == 7
    schema = reading.schema()
    assert isinstance(NatsDataSource(queue).streamWriter(schema, overwrite=False), NatsSink)
    with pytest.raises(
        ConfigError, match="option 'consumer' is unknown to ftlayer-nats; it knows url, stream, "
    ):
        NatsDataSource({**queue, "consumer": "c"}).streamWriter(schema, overwrite=False)
