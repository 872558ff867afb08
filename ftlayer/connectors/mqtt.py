"""MQTT: sessions whose acknowledgements are held back, a sink that publishes each row, topics as a source."""

from __future__ import annotations

import logging
import secrets
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from ftlayer.common.checks import Duration, check_bool, check_int, check_text, duration_ms, known_options
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.printable import hides_secrets, secrets_of, url_parts
from ftlayer.connectors import at_least_once
from ftlayer.connectors.connections import ServerReader, client_library
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import ConfigError, SinkError, SourceError, install
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records.beside import STAMP, text, texts
from ftlayer.topology.operators import Fetched, Member, Queue

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


WINDOW = 1_000
"""So many messages are on their way without being acknowledged, or fewer if the server says so."""

_Message = tuple[str | None, bytes]
"""Topic and payload."""

_NEVER = frozenset({"Topic name invalid", "Payload format invalid", "Packet too large"})
"""Reasons of 5 that another try will not change."""


@known_options
@hides_secrets(lambda sink: sink._address.secrets)
class MqttSink(at_least_once.PublishingSink[_Message]):
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
        at_least_once.check_columns(topic_column=topic_column, body=body)
        check_bool(retain, "retain")
        if version not in VERSIONS:
            raise ConfigError(f"version: expected '3.1.1' or '5', got {version!r}")
        self._patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self._topic, self._topic_column, self._body = topic, topic_column, body
        self._retain, self._version = retain, version
        self._secrets = self._address.secrets
        self.place = f"MQTT at {self._address.host}:{self._address.port}"

    def _published(self, batch: pa.RecordBatch) -> dict[int, Exception]:
        topics = at_least_once.texts_of(batch, self._topic_column, "topic_column", self._topic)
        attempt = at_least_once.Publishing(
            dict(enumerate(zip(topics, at_least_once.bodies_of(batch, self._body, "body"), strict=True)))
        )
        try:
            self._publish(attempt)
        except SinkError as error:
            attempt.errors |= dict.fromkeys(attempt.left, error)
        return attempt.errors

    def _is_away(self, error: Exception) -> bool:
        return isinstance(error, ServerAwayError)

    def _publish_once(self, attempt: at_least_once.Publishing[_Message]) -> None:
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

    def _settle(
        self, session: MqttSession, rows: dict[int, int], attempt: at_least_once.Publishing[_Message]
    ) -> None:
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


_TEXTS = pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())]))

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("qos", pa.int8()),
        pa.field("retained", pa.bool_()),
        pa.field("redelivered", pa.bool_()),
        pa.field("received", STAMP),
        pa.field("headers", _TEXTS),
    ]
)
"""``headers``: the user properties of MQTT 5, in which a name may come twice."""


def to_rows(messages: Sequence[Any]) -> pa.RecordBatch:
    now = pa.scalar(time.time_ns() // 1_000, pa.int64()).cast(STAMP)
    columns = [
        pa.array(list(map(attrgetter("payload"), messages)), pa.binary()),
        texts(list(map(attrgetter("topic"), messages)), "MQTT", "a topic"),
        pa.array(list(map(attrgetter("qos"), messages)), pa.int8()),
        pa.array(list(map(attrgetter("retain"), messages)), pa.bool_()),
        pa.array(list(map(attrgetter("dup"), messages)), pa.bool_()),
        pa.repeat(now, len(messages)),
        pa.array([_headers(message.properties) for message in messages], _TEXTS),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(properties: Any) -> list[dict[str, str | None]]:
    pairs = getattr(properties, "UserProperty", ())
    return [
        {"name": text(name, "MQTT", "a property"), "value": text(value, "MQTT", "a property")}
        for name, value in pairs
    ]


MAX_PENDING = 10_000
MOST_PENDING = 65_535
"""A packet's number has 16 bits."""


@known_options
@hides_secrets(lambda source: source.address.secrets)
class MqttSource(Queue):
    """Reads a topic filter of an MQTT server, 3.1.1 or 5, with QoS 1 or 2.

    Each subtask has a session of its own, by the same client id over restarts, and with ``group`` they share the
    messages. A message is acknowledged once it is durable: stored in the vertex, in a completed checkpoint, or in the
    spool; with QoS 2 PUBREC waits as well. Until then the server keeps it, and delivers it again after a failure.

    MQTT's messages have no names. What is delivered again while a subtask lives is known by its packet's number, which
    the server may not use again before it is acknowledged; what is delivered to the next process is not.
    """

    schema: pa.Schema = SCHEMA

    def __init__(
        self,
        url: str,
        topic: str,
        *,
        group: str | None = None,
        qos: int = 1,
        version: str = "5",
        session_expiry: Duration = "24h",
        max_pending: int = MAX_PENDING,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``mqtt://user:password@host:1883``, ``mqtts://…`` with TLS; slots connect.
            topic: a topic filter, ``sensors/+/temperature``.
            group: name of a shared subscription (``$share/<group>/<topic>``): needed for more than one subtask.
            qos: 1 or 2.
            version: of the protocol, ``"5"`` or ``"3.1.1"``.
            session_expiry: for how long the server keeps messages for a subtask that is away; with 3.1.1 the server
                says.
            max_pending: how many messages a subtask may have that are not acknowledged (5's receive maximum; the
                server may have a smaller one of its own).
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if paho-mqtt 2 is missing, and for an option that will not do.
        """
        mqtt_library()
        self.address = address_of(url)
        check_text(topic, "topic", "a topic filter")
        _check_filter(topic)
        if group is not None:
            check_text(group, "group", "the name of a shared subscription")
            if set(group) & set("/+#"):
                raise ConfigError(f"group: expected a name without '/', '+' and '#', got {group!r}")
        check_int(qos, "qos", least=1, most=2)
        if version not in VERSIONS:
            raise ConfigError(f"version: expected '3.1.1' or '5', got {version!r}")
        check_int(max_pending, "max_pending", least=1, most=MOST_PENDING)
        self.expiry_s = max(1, duration_ms(session_expiry, "session_expiry") // 1_000)
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.topic, self.group, self.qos = topic, group, qos
        self.version, self.max_pending = version, max_pending

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> MqttReader:
        if member.parallelism > 1 and self.group is None:
            raise ConfigError(
                f"group: {self.place} needs one with {member.parallelism} subtasks: each would read all"
            )
        for position in positions.values():
            unpack_position(position, ("mqtt", self.filter), self.place)
        return MqttReader(self, member)

    @property
    def place(self) -> str:
        return f"topic {self.topic!r} of MQTT at {self.address.host}:{self.address.port}"

    @property
    def filter(self) -> str:
        return self.topic if self.group is None else f"$share/{self.group}/{self.topic}"

    def position(self) -> bytes:
        """Return a position like no other; which messages are acknowledged is known to the server alone."""
        return pack_position(("mqtt", self.filter), secrets.token_bytes(8))


@dataclass(slots=True)
class _Share:
    """The session of a subtask, and the packets of it that were fetched and not acknowledged.

    Attributes:
        session: None while there is no connection.
        pending: the fetch that each packet came with, by its number, and its QoS.
        here: those that this connection has delivered.
    """

    subtask: int
    client_id: str
    session: MqttSession | None = None
    earlier: MqttSession | None = None
    pending: dict[int, tuple[int, int]] = field(default_factory=dict)
    here: set[int] = field(default_factory=set)
    is_fenced: bool = False


@dataclass(frozen=True, slots=True)
class _Receipt:
    subtask: int
    turn: int


@hides_secrets(lambda reader: reader._secrets)
class MqttReader(ServerReader):
    def __init__(self, source: MqttSource, member: Member) -> None:
        hidden = source.address.secrets
        # With 3.1.1 the server says how many may wait.
        most = source.max_pending if source.version == "5" else None
        super().__init__(source.place, source.patience_ms, hidden, (ServerAwayError,), lambda _: True, most)
        self._source = source
        self._member = member
        self._mine = self._share(member.subtask)
        self._gone: list[_Share] = []
        """Of subtasks that are there no more, in the order of their numbers."""
        self._has_looked = source.group is None
        self._turn = 0
        self._durable: dict[int, int] = {}

    def wake_up(self) -> None:
        if (session := self._mine.session) is not None:
            session.wake_up()

    def _disconnect(self) -> None:
        for share in (self._mine, *self._gone):
            if share.session is not None:
                share.session.close()
                share.earlier, share.session = share.session, None
            share.here.clear()

    def _share(self, subtask: int) -> _Share:
        return _Share(subtask, f"{self._member.owner}-{subtask}")

    def _opened(self, share: _Share) -> MqttSession:
        source = self._source
        session = MqttSession(
            source.address, share.client_id, source.version, source.expiry_s, source.max_pending
        )
        if not session.was_there:
            # The server has forgotten it: numbers begin anew.
            share.pending.clear()
        elif share.earlier is not None:
            session.take_over(share.earlier)
        share.session = session
        return session

    def _connect(self) -> None:
        if self._mine.session is None:
            # Also where the session was there: mosquitto 2.0 forgets shared subscriptions when it is restarted.
            self._opened(self._mine).subscribe(self._source.filter, self._source.qos)
        if not self._has_looked:
            self._look_for_gone()
            self._has_looked = True
        for share in self._gone:
            if share.session is None:
                self._opened(share).unsubscribe(self._source.filter)

    def _look_for_gone(self) -> None:
        """Find sessions of a larger parallelism: they have their share of the messages still.

        A server does not list its sessions. They are ended from the highest on, so the first one that is not there is
        behind the last.
        """
        subtask = self._member.subtask + self._member.parallelism
        while all(share.subtask != subtask for share in self._gone):
            share = self._share(subtask)
            session = self._opened(share)
            if not session.was_there:
                session.end()
                if self._source.version != "5":
                    self._forget(share)
                return
            session.unsubscribe(self._source.filter)
            logger.info(
                "%s: session %r of an earlier subtask is read to its end", self._source.place, share.client_id
            )
            self._gone.append(share)
            subtask += self._member.parallelism

    def _forget(self, share: _Share) -> None:
        """End a session of 3.1.1: by one that is clean."""
        source = self._source
        MqttSession(
            source.address, share.client_id, source.version, 0, source.max_pending, clean=True
        ).close()

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        for share in self._gone:
            if (fetched := self._take(share, max_rows)) is not None:
                return fetched
        self._end_drained()
        assert self._mine.session is not None
        self._mine.session.wait(wait_s)
        return self._take(self._mine, max_rows)

    def _take(self, share: _Share, max_rows: int) -> Fetched | None:
        session = share.session
        assert session is not None
        count = min(max_rows, len(session.received))
        if count == 0:
            if session.is_lost:
                raise ServerAwayError("the connection was closed")
            return None
        share.is_fenced = False
        self._turn += 1
        messages = [session.received.popleft() for _ in range(count)]
        new = [message for message in messages if self._is_new(share, message)]
        self._release(share)
        if not new:
            return None
        return Fetched(
            to_rows(new), share.subtask, self._source.position(), _Receipt(share.subtask, self._turn)
        )

    def _is_new(self, share: _Share, message: Any) -> bool:
        mid, qos = message.mid, message.qos
        if qos == 0:
            return True
        assert share.session is not None
        if qos == 2 and share.session.is_between(mid):
            # It is durable, and PUBREC was lost.
            share.session.release(mid, qos)
            return False
        share.here.add(mid)
        if message.dup and mid in share.pending:
            return False
        share.pending[mid] = (self._turn, qos)
        return True

    def _end_drained(self) -> None:
        """End the last of the sessions that are there no more, if it has nothing left.

        It gets nothing new, as it has no subscription. When it has nothing pending, and the answer to a question that
        was asked then has come without a message before it, the server has nothing for it.
        """
        if not self._gone:
            return
        share = self._gone[-1]
        assert share.session is not None
        if share.pending or share.session.received:
            return
        if not share.is_fenced:
            share.is_fenced = True
            share.session.unsubscribe(self._source.filter)
            return
        share.session.end()
        if self._source.version != "5":
            self._forget(share)
        self._gone.pop()
        logger.info("%s: session %r has nothing left, and is ended", self._source.place, share.client_id)

    @property
    def _unacknowledged(self) -> int:
        return len(self._mine.pending)

    def _note_durable(self, receipts: Sequence[_Receipt]) -> None:
        for receipt in receipts:
            self._durable[receipt.subtask] = max(receipt.turn, self._durable.get(receipt.subtask, 0))

    def _send_acknowledgements(self) -> None:
        for share in (self._mine, *self._gone):
            self._release(share)

    def _release(self, share: _Share) -> None:
        """Acknowledge what is durable, of the messages that this connection has delivered."""
        session, durable = share.session, self._durable.get(share.subtask, 0)
        if session is None or session.is_lost:
            return
        # Numbers are in the order of fetches, but for those of another connection's.
        for mid in [mid for mid, (turn, _) in share.pending.items() if turn <= durable and mid in share.here]:
            _, qos = share.pending.pop(mid)
            share.here.discard(mid)
            session.release(mid, qos)


def _check_filter(topic: str) -> None:
    levels = topic.split("/")
    for level in levels:
        if len(level) > 1 and set(level) & {"+", "#"}:
            raise ConfigError(f"topic: '+' and '#' stand for a whole level, got {level!r} in {topic!r}")
    if "#" in levels[:-1]:
        raise ConfigError(f"topic: '#' is the last level, got {topic!r}")


class MqttDataSource(QueueDataSource):
    """``format("ftlayer-mqtt")`` reads and writes, as `RedisDataSource`; what Spark runs again is published again."""

    format = "ftlayer-mqtt"

    def source(self, options: DataSourceOptions) -> MqttSource:
        return options.made(MqttSource, qos=options.count("qos", 1, most=2))

    def sink(self, options: DataSourceOptions) -> at_least_once.SendingWriter:
        return at_least_once.SendingWriter(options.made(MqttSink))
