"""A sink that publishes each row as a message of MQTT."""

from __future__ import annotations

import secrets
from queue import Empty

import pyarrow as pa

from ftlayer.common.checks import Duration, check_bool, check_text, duration_ms
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.printable import hides_secrets
from ftlayer.connectors.at_least_once import Publishing, PublishingSink, bodies_of, check_columns, texts_of
from ftlayer.connectors.mqtt.client import (
    MOST_PACKETS,
    VERSIONS,
    MqttSession,
    ServerAwayError,
    address_of,
    mqtt_library,
)
from ftlayer.errors import ConfigError, SinkError, SourceError

WINDOW = 1_000
"""So many messages are on their way without being acknowledged, or fewer if the server says so."""

_Message = tuple[str | None, bytes]
"""Topic and payload."""

_NEVER = frozenset({"Topic name invalid", "Payload format invalid", "Packet too large"})
"""Reasons of 5 that another try will not change."""


@hides_secrets(lambda sink: sink._address.secrets)
class MqttSink(PublishingSink[_Message]):
    """Publishes each row with QoS 1: the sink of a topology, in both modes.

    A row is done when the server has acknowledged its message (PUBACK). With version 5 one that the server refuses
    fails, and no other does; with 3.1.1 a server has no way to say so. While the server is away the sink waits,
    connects again, and publishes what was not acknowledged.

    Each row is published at least once. A server acknowledges what no one has subscribed to, and drops it.
    """

    def __init__(
        self,
        url: str,
        *,
        topic: str = "",
        topic_column: str | None = None,
        body: str | None = None,
        retain: bool = False,
        version: str = "5",
        reconnect_timeout: Duration = "1m",
    ) -> None:
        """Nothing is connected to before the first rows come.

        Args:
            url: ``mqtt://user:password@host:1883``, ``mqtts://…`` with TLS; slots connect.
            topic: of all messages.
            topic_column: column that has each message's topic, in its place.
            body: column that is the payload, a text or bytes. None: a JSON object of all columns, bytes in base64,
                times in ISO 8601.
            retain: whether the server keeps the last message of each topic for those who subscribe later.
            version: of the protocol, ``"5"`` or ``"3.1.1"``.
            reconnect_timeout: rows fail when the server was away for this long, or acknowledged nothing.

        Raises `ConfigError` if paho-mqtt 2 is missing, and for an option that will not do.
        """
        mqtt_library()
        self._address = address_of(url)
        if bool(topic) == (topic_column is not None):
            raise ConfigError("topic: expected either topic or topic_column")
        if topic:
            check_text(topic, "topic", "a topic")
            if set(topic) & set("+#"):
                raise ConfigError(f"topic: expected one without '+' and '#', got {topic!r}")
        check_columns(topic_column=topic_column, body=body)
        check_bool(retain, "retain")
        if version not in VERSIONS:
            raise ConfigError(f"version: expected '3.1.1' or '5', got {version!r}")
        self._patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self._topic, self._topic_column, self._body = topic, topic_column, body
        self._retain, self._version = retain, version
        self._secrets = self._address.secrets
        self.place = f"MQTT at {self._address.host}:{self._address.port}"

    def _published(self, batch: pa.RecordBatch) -> dict[int, Exception]:
        topics = texts_of(batch, self._topic_column, "topic_column", self._topic)
        attempt = Publishing(dict(enumerate(zip(topics, bodies_of(batch, self._body, "body"), strict=True))))
        try:
            self._publish(attempt)
        except SinkError as error:
            attempt.errors |= dict.fromkeys(attempt.left, error)
        return attempt.errors

    def _is_away(self, error: Exception) -> bool:
        return isinstance(error, ServerAwayError)

    def _publish_once(self, attempt: Publishing[_Message]) -> None:
        """Raises `ServerAwayError`, and `SinkError` if the server refuses the session."""
        session = self._connected()
        window = min(WINDOW, session.most_unanswered)
        rows: dict[int, int] = {}
        for row, (topic, payload) in list(attempt.left.items()):
            try:
                if not topic:
                    raise ValueError("its topic is null, or empty")
                rows[session.publish(topic, payload, retain=self._retain)] = row
            except ValueError as error:
                attempt.errors[row] = PermanentFailure(f"{self.place}: topic {topic!r}: {error}")
                del attempt.left[row]
            while len(rows) >= window:
                self._settle(session, rows, attempt)
        while rows:
            self._settle(session, rows, attempt)

    def _settle(self, session: MqttSession, rows: dict[int, int], attempt: Publishing[_Message]) -> None:
        """Wait for an answer. ``rows``: by the numbers of packets that are on their way."""
        try:
            number, reason = session.published.get(timeout=self._patience_ms / 1_000)
        except Empty:
            raise ServerAwayError(
                f"the server has acknowledged nothing for {self._patience_ms / 1_000:.0f} s"
            ) from None
        if reason is None:
            raise ServerAwayError("the connection was closed")
        row = rows.pop(number)
        topic, _ = attempt.left.pop(row)
        if reason.is_failure:
            kind = PermanentFailure if str(reason) in _NEVER else SinkError
            attempt.errors[row] = kind(f"{self.place}: the server refuses topic {topic!r}: {reason}")

    def _connected(self) -> MqttSession:
        if self._connection is None:
            name = f"ftlayer-{secrets.token_hex(8)}"
            try:
                self._connection = MqttSession(
                    self._address, name, self._version, 0, MOST_PACKETS, clean=True
                )
            except SourceError as error:
                raise SinkError(f"{self.place}: {error}") from error
        session: MqttSession = self._connection
        return session
