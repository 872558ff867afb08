"""`MqttSource` and `MqttSink` as a Python Data Source."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import Duration, check_int, check_text, duration_ms
from ftlayer.common.printable import hides_secrets
from ftlayer.connectors.at_least_once import SendingWriter
from ftlayer.connectors.data_source import QueueDataSource
from ftlayer.connectors.mqtt.client import VERSIONS, MqttSession, ServerAwayError, address_of, mqtt_library
from ftlayer.connectors.mqtt.sink import MqttSink
from ftlayer.connectors.queue_stream import pack_position, unpack_position
from ftlayer.connectors.server_reader import ServerReader
from ftlayer.errors import ConfigError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records.beside import STAMP, text, texts
from ftlayer.topology.operators import Fetched, Member, Queue

logger = logging.getLogger(__name__)


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
        self.topic, self.group, self.qos, self.version, self.max_pending = (
            topic,
            group,
            qos,
            version,
            max_pending,
        )

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> MqttReader:
        if member.parallelism > 1 and self.group is None:
            raise ConfigError(
                f"group: {self.place} needs one with {member.parallelism} subtasks: each would read all"
            )
        for position in positions.values():
            self.check_position(position)
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

    def check_position(self, position: bytes) -> None:
        """Raise `ConfigError` for a position of something else."""
        unpack_position(position, ("mqtt", self.filter), self.place)


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

    # ------------------------------------------------------------ what is called

    def wake_up(self) -> None:
        if (session := self._mine.session) is not None:
            session.wake_up()

    # ------------------------------------------------------------ connecting

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

    # ------------------------------------------------------------ fetching

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

    # ------------------------------------------------------------ acknowledging

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
    """``spark.dataSource.register(MqttDataSource)``, then ``format("ftlayer-mqtt")`` to read or to write.

    Options of a reader are the parameters of `MqttSource`, in camel case (``maxPending``); ``spool`` and
    ``maxRowsPerTrigger`` as of `RedisDataSource`. Options of a writer are those of `MqttSink`. A task or batch that
    Spark runs again publishes its rows again.
    """

    format = "ftlayer-mqtt"

    def source(self, options: DataSourceOptions) -> MqttSource:
        return options.made(MqttSource, qos=options.count("qos", 1, most=2))

    def sink(self, options: DataSourceOptions) -> SendingWriter:
        return SendingWriter(options.made(MqttSink))
