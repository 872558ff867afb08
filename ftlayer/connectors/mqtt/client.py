"""MQTT: one session, whose acknowledgements are held back until they are released."""

from __future__ import annotations

import logging
import ssl
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any
from urllib.parse import unquote

from ftlayer.common.printable import secrets_of, url_parts
from ftlayer.connectors.connections import client_library
from ftlayer.errors import ConfigError, SourceError, install

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0
"""A server that says nothing for this long while it is connected to is taken for away."""

KEEP_ALIVE_S = 30
PORTS = {"mqtt": 1883, "mqtts": 8883}
VERSIONS = ("3.1.1", "5")

_MOST_EXPIRY_S = 0xFFFFFFFF
MOST_PACKETS = 65_535

# Of CONNACK, in both versions' numbers as paho maps them: what may be otherwise soon.
_SOON = frozenset(
    {"Server unavailable", "Server busy", "Use another server", "Quota exceeded", "Connection rate exceeded"}
)


def mqtt_library() -> Any:
    client = client_library("MQTT", "paho-mqtt 2", "mqtt", "paho.mqtt.client")
    if not hasattr(client, "CallbackAPIVersion"):
        raise ConfigError(f"MQTT needs paho-mqtt 2: {install('mqtt')}")
    return client


@dataclass(frozen=True, slots=True)
class BrokerAddress:
    host: str
    port: int
    tls: bool
    user: str | None
    password: str | None = field(repr=False)
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """What errors must not tell."""


def address_of(url: object) -> BrokerAddress:
    expected = "mqtt://user:password@host:1883, or mqtts://… with TLS"
    parts = url_parts(url, "url", expected, tuple(PORTS))
    if not parts.hostname or parts.path.strip("/") or parts.query:
        raise ConfigError(f"url: expected {expected}")
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return BrokerAddress(
        parts.hostname,
        parts.port or PORTS[parts.scheme],
        parts.scheme == "mqtts",
        user,
        password,
        tuple(secrets_of(str(url))),
    )


class ServerAwayError(Exception):
    """The server cannot be reached, or has closed the connection."""


class MqttSession:
    """A session of a server's, and the connection to it: a thread of paho's receives and keeps it alive.

    Messages wait in ``received``. Nothing is acknowledged but by `release`: neither PUBACK, nor PUBREC, behind which
    the server would forget a message of QoS 2.
    """

    def __init__(
        self,
        address: BrokerAddress,
        client_id: str,
        version: str,
        expiry_s: int,
        receive_maximum: int,
        *,
        clean: bool = False,
    ) -> None:
        """Connect; wait for the answer. ``clean``: with 3.1.1, forget the session.

        Raises `ServerAwayError`, and `SourceError` if the server refuses.
        """
        mqtt = mqtt_library()
        self.client_id = client_id
        self.received: deque[Any] = deque()
        self.published: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        """Numbers of packets that the server has answered, with its reason; (0, None): the connection is lost."""
        self.most_unanswered = MOST_PACKETS
        """So many packets that were published may wait for their answers."""
        self.was_there = False
        """Whether the server had the session already."""
        self._is_5 = version == "5"
        self._changed = threading.Condition()
        self._refused: Any = None
        self._connected = self._lost = False
        self._answers: dict[int, list[Any]] = {}
        self._subscribing = (0, "")
        self._client = self._made(mqtt, clean)
        if address.user is not None:
            self._client.username_pw_set(address.user, address.password)
        if address.tls:
            self._client.tls_set_context(ssl.create_default_context())
        properties = None
        if self._is_5:
            properties = _properties("CONNECT")
            properties.SessionExpiryInterval = min(expiry_s, _MOST_EXPIRY_S)
            properties.ReceiveMaximum = receive_maximum
        begin = {"clean_start": False, "properties": properties} if self._is_5 else {}
        try:
            self._client.connect(address.host, address.port, KEEP_ALIVE_S, **begin)
        except (OSError, ValueError) as error:
            raise ServerAwayError(str(error)) from error
        self._client.loop_start()
        try:
            self._wait(lambda: self._connected, "CONNACK")
        except (ServerAwayError, SourceError):
            self.close()
            raise

    def _made(self, mqtt: Any, clean: bool) -> Any:
        protocol = mqtt.MQTTv5 if self._is_5 else mqtt.MQTTv311
        session = {} if self._is_5 else {"clean_session": clean}
        client = _holding(mqtt)(
            mqtt.CallbackAPIVersion.VERSION2,
            client_id=self.client_id,
            protocol=protocol,
            reconnect_on_failure=False,
            **session,
        )
        client.connect_timeout = TIMEOUT_S
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.max_inflight_messages_set(MOST_PACKETS)
        client.on_subscribe = client.on_unsubscribe = self._on_answer
        return client

    # ------------------------------------------------------------ paho's thread

    def _on_connect(self, _: Any, __: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self._changed:
            self.most_unanswered = getattr(properties, "ReceiveMaximum", MOST_PACKETS)
            if reason.is_failure:
                self._refused = reason
            else:
                self._connected, self.was_there = True, bool(flags.session_present)
            self._changed.notify_all()

    def _on_disconnect(self, *_: Any) -> None:
        with self._changed:
            self._lost = True
            self._changed.notify_all()
        self.published.put((0, None))

    def _on_publish(self, _: Any, __: Any, mid: int, reason: Any, ___: Any) -> None:
        self.published.put((mid, reason))

    def _on_message(self, _: Any, __: Any, message: Any) -> None:
        self.received.append(message)
        # Who waits does so for the first one.
        if len(self.received) == 1:
            with self._changed:
                self._changed.notify_all()

    def _on_answer(self, _: Any, __: Any, mid: int, reasons: Any, ___: Any) -> None:
        with self._changed:
            self._answers[mid] = reasons if isinstance(reasons, list) else [reasons]
            self._changed.notify_all()

    # ------------------------------------------------------------ the reader's thread

    def subscribe(self, topic: str, qos: int) -> None:
        """Wait until it is done, or messages come: a server may have many for the session, and sends them first.

        Raises `ServerAwayError`, and `SourceError` if the server refuses; where messages came first, `wait` does.
        """
        mqtt = mqtt_library()
        if self._is_5:
            # Retained messages come when the subscription is new, and not with each connection.
            options = mqtt.SubscribeOptions(qos=qos, retainHandling=1)
            _, mid = self._client.subscribe(topic, options=options)
        else:
            _, mid = self._client.subscribe(topic, qos)
        self._subscribing = (self._sent(mid), topic)
        self._wait(lambda: mid in self._answers or self.received, "SUBACK")
        self._check_subscription()

    def unsubscribe(self, topic: str) -> None:
        """Wait until it is done: what was sent before has been received. Raises `ServerAwayError`."""
        _, mid = self._client.unsubscribe(topic)
        sent = self._sent(mid)
        self._wait(lambda: sent in self._answers, "UNSUBACK")
        del self._answers[sent]

    def wait(self, wait_s: float) -> None:
        """Wait until a message is there. Raises `ServerAwayError`, and `SourceError` for a subscription."""
        self._check_subscription()
        with self._changed:
            self._changed.wait_for(lambda: self.received or self._lost, wait_s)
            if self._lost and not self.received:
                raise ServerAwayError("the connection was closed")

    def wake_up(self) -> None:
        with self._changed:
            self._changed.notify_all()

    @property
    def is_lost(self) -> bool:
        with self._changed:
            return self._lost

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> int:
        """Send a message with QoS 1; return its packet's number, which will be among those `published`.

        Raises `ServerAwayError`, and `ValueError` for a topic or a payload that MQTT cannot carry.
        """
        sent = self._client.publish(topic, payload, 1, retain)
        if self.is_lost:
            raise ServerAwayError("the connection was closed")
        number: int = sent.mid
        return number

    def release(self, mid: int, qos: int) -> None:
        self._client.release(mid, qos)

    def is_between(self, mid: int) -> bool:
        """Whether a message of QoS 2 was released, and the server has not said yet that it knows."""
        return mid in self._client.between

    def take_over(self, earlier: MqttSession) -> None:
        if self.was_there:
            self._client.between |= earlier._client.between

    def end(self) -> None:
        if self._is_5:
            properties = _properties("DISCONNECT")
            properties.SessionExpiryInterval = 0
            self._client.disconnect(properties=properties)
        self.close()

    def close(self) -> None:
        """Disconnect; the session stays."""
        self._client.disconnect()
        self._client.loop_stop()

    def _sent(self, mid: int | None) -> int:
        if mid is None:
            raise ServerAwayError("the connection was closed")
        return mid

    def _check_subscription(self) -> None:
        mid, topic = self._subscribing
        for reason in self._answers.pop(mid, ()):
            if reason.is_failure:
                raise SourceError(f"the server refuses the subscription of {topic!r}: {reason}")

    def _wait(self, condition: Callable[[], Any], name: str) -> None:
        with self._changed:
            came = -1
            while came < len(self.received) and not self._is_over(condition):
                came = len(self.received)
                self._changed.wait_for(lambda: self._is_over(condition), TIMEOUT_S)
            if condition():
                return
            refused, lost = self._refused, self._lost
        if refused is not None:
            if str(refused) in _SOON:
                raise ServerAwayError(str(refused))
            raise SourceError(f"the server refuses the connection: {refused}")
        raise ServerAwayError("the connection was closed" if lost else f"no {name} within {TIMEOUT_S:.0f} s")

    def _is_over(self, condition: Callable[[], Any]) -> bool:
        return bool(condition() or self._lost or self._refused is not None)


def _properties(packet: str) -> Any:
    from paho.mqtt.packettypes import PacketTypes
    from paho.mqtt.properties import Properties

    made: Any = Properties
    return made(getattr(PacketTypes, packet))


def _holding(mqtt: Any) -> Any:
    """Return paho's client with acknowledgements that wait.

    Its own ``manual_ack`` sends PUBREC at once, and hands a message of QoS 2 over behind PUBREL.
    """

    class Holding(mqtt.Client):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.between: set[int] = set()
            self._held: int | None = None

        def release(self, mid: int, qos: int) -> None:
            if qos == 1:
                super()._send_puback(mid)
            elif qos == 2:
                self.between.add(mid)
                super()._send_pubrec(mid)

        def _send_puback(self, mid: int) -> Any:
            return mqtt.MQTTErrorCode.MQTT_ERR_SUCCESS

        def _send_pubrec(self, mid: int) -> Any:
            self._held = mid
            return mqtt.MQTTErrorCode.MQTT_ERR_SUCCESS

        def _handle_publish(self) -> Any:
            outcome = super()._handle_publish()
            if self._held is not None:
                with self._in_message_mutex:
                    message = self._in_messages.pop(self._held)
                self._held = None
                self._handle_on_message(message)
            return outcome

        def _send_pubcomp(self, mid: int) -> Any:
            self.between.discard(mid)
            return super()._send_pubcomp(mid)

    return Holding
