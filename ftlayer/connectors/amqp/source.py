"""`AmqpSource` and `AmqpSink` as a Python Data Source."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress, islice
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import Duration, check_bool, check_int, check_text, duration_ms
from ftlayer.common.printable import hides_secrets, secrets_of, shown_url
from ftlayer.connectors.amqp.client import TIMEOUT_S, AmqpConnection, amqp_library, check_amqp_url, is_away
from ftlayer.connectors.amqp.sink import AmqpSink
from ftlayer.connectors.at_least_once import SendingWriter
from ftlayer.connectors.data_source import QueueDataSource
from ftlayer.connectors.queue_stream import NAME_BYTES, RedeliveryWindow, pack_position, unpack_position
from ftlayer.connectors.server_reader import ServerReader
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records import beside
from ftlayer.topology.operators import Fetched, Member, Queue

_TEXTS = pa.map_(pa.string(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("routing_key", pa.string()),
        pa.field("message_id", pa.string()),
        pa.field("timestamp", beside.STAMP),
        pa.field("headers", _TEXTS),
        pa.field("redelivered", pa.bool_()),
    ]
)

Delivery = tuple[Any, Any, bytes]
"""What pika delivers: method, properties, body."""


def to_rows(deliveries: Sequence[Delivery]) -> pa.RecordBatch:
    methods = list(map(itemgetter(0), deliveries))
    properties = list(map(itemgetter(1), deliveries))
    columns = [
        pa.array(list(map(itemgetter(2), deliveries)), pa.binary()),
        beside.texts(list(map(attrgetter("routing_key"), methods)), "AMQP", "a routing key"),
        beside.texts(list(map(attrgetter("message_id"), properties)), "AMQP", "a message's id"),
        beside.times(list(map(attrgetter("timestamp"), properties)), "s", "AMQP", "a timestamp"),
        _headers(list(map(attrgetter("headers"), properties))),
        pa.array(list(map(attrgetter("redelivered"), methods)), pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(found: Sequence[Mapping[str, Any] | None]) -> pa.Array:
    if not any(found):
        return pa.array([()] * len(found), _TEXTS)
    text = partial(beside.text, place="AMQP", what="a header")
    return pa.array([[(text(name), text(it)) for name, it in (each or {}).items()] for each in found], _TEXTS)


MAX_PENDING = 10_000
MOST_PENDING = 65_535
"""AMQP's prefetch count has 16 bits."""

COUNTED = 1_000
"""While those that wait are counted about so many are received at most: the source is not to stand still for it."""

_KEPT_NAMES = 10_000
"""Of messages that were acknowledged: the server may lose acknowledgements when it crashes."""


@hides_secrets(lambda source: secrets_of(source.url))
class AmqpSource(Queue):
    """Reads a queue of RabbitMQ, or of another server that speaks AMQP 0.9.1. Its other consumers get other messages.

    A message is acknowledged once it is durable: stored in the vertex, in a completed checkpoint, or in the spool.
    Until then the server keeps it, and delivers it again after a failure. One that is delivered again is known by its
    ``message_id``, and left out, if it comes to the subtask that had it: always with one subtask. A message without an
    id, or that comes to another subtask, is read twice.
    """

    schema: pa.Schema = SCHEMA

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        max_pending: int = MAX_PENDING,
        unique_ids: bool = True,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``amqp://user:password@host:5672/%2F``, ``amqps://…`` with TLS; slots connect.
            queue: name of the queue; it is made, durable, if it is not there.
            max_pending: how many messages a subtask may have that are not acknowledged (the prefetch count). In
                barrier mode these are all that it reads until the next checkpoint is complete.
            unique_ids: whether a ``message_id`` names one message. False if the senders use ids again: then all that is
                delivered again is read again.
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if pika is missing, and for an option that will not do.
        """
        check_amqp_url(url)
        check_text(queue, "queue", "the name of a queue")
        check_int(max_pending, "max_pending", least=1, most=MOST_PENDING)
        check_bool(unique_ids, "unique_ids")
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.url, self.queue, self.max_pending, self.unique_ids = url, queue, max_pending, unique_ids

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> AmqpReader:
        names = b"".join(self.unpack(position) for position in positions.values())
        window = RedeliveryWindow(names, self.max_pending + min(self.max_pending, _KEPT_NAMES), stored=stored)
        return AmqpReader(self, member.subtask, window)

    @property
    def place(self) -> str:
        return f"queue {self.queue!r} of {shown_url(self.url)}"

    def pack(self, names: bytes) -> bytes:
        """Return the position behind messages, of which some have these names: one like no other."""
        return pack_position(("amqp", self.queue), names, secrets.token_bytes(8))

    def unpack(self, position: bytes) -> bytes:
        """Return the names in a position; `ConfigError` for one of something else."""
        names, _ = unpack_position(position, ("amqp", self.queue), self.place, (bytes, bytes))
        assert len(names) % NAME_BYTES == 0
        return bytes(names)


@hides_secrets(lambda reader: reader._secrets)
class AmqpReader(ServerReader):
    def __init__(self, source: AmqpSource, subtask: int, window: RedeliveryWindow) -> None:
        hidden, errors = secrets_of(source.url), (amqp_library().exceptions.AMQPError, OSError)
        super().__init__(source.place, source.patience_ms, hidden, errors, is_away, source.max_pending)
        self._source = source
        self._subtask = subtask
        self._window = window
        self._connection: AmqpConnection | None = None
        self._delivered: deque[Delivery] = deque()
        self._cancelled = False

    # ------------------------------------------------------------ connecting

    def _connect(self) -> None:
        if self._connection is None:
            connection = AmqpConnection(self._source.url)
            try:
                self._consume(connection)
            except BaseException:
                connection.close()
                raise
            self._connection = connection

    def _consume(self, connection: AmqpConnection) -> None:
        queue = self._source.queue
        # One that is there may be of any kind.
        if not connection.has_queue(queue):
            connection.ask("queue_declare", queue, durable=True)
        connection.ask("basic_qos", prefetch_count=self._source.max_pending)
        connection.channel.add_on_cancel_callback(self._on_cancel)
        connection.ask("basic_consume", queue, on_message_callback=self._on_message)

    def _on_message(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        self._delivered.append((method, properties, body))

    def _on_cancel(self, _: Any) -> None:
        self._cancelled = True

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
        self._delivered.clear()
        self._cancelled = False
        self._window.reconnected()

    # ------------------------------------------------------------ fetching

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """Fetch; what is known already, and comes before what is new, is no reason to return."""
        give_up = time.monotonic() + wait_s
        while True:
            self._receive(max_rows, max(0.0, give_up - time.monotonic()))
            if not self._delivered:
                return None
            if (fetched := self._take(max_rows)) is not None:
                return fetched

    def _count(self) -> int | None:
        """Count the messages that are ready in the queue, and those that were delivered and not fetched.

        While senders send and others read, it may be off by what they just did.

        The server answers before it delivers what the queue has given to this channel meanwhile, and delivers it before
        it answers again. So nothing is on its way if nothing came between two answers. Where more than `COUNTED` come
        before, that is not waited for: what came between the last two counts twice. None if there were no two.
        """
        most = len(self._delivered) + COUNTED
        ready = self._ready(most)
        counted = None
        while ready is not None:
            before = len(self._delivered)
            again = self._ready(most)
            if again is None:
                break
            delivered = len(self._delivered)
            counted = ready + delivered - self._known_of(delivered)
            if delivered == before:
                break
            ready = again
        return counted

    def _ready(self, most: int) -> int | None:
        """Return how many messages the queue has given to no one; None if ``most`` were delivered before the answer."""
        connection = self._connection
        assert connection is not None
        answers: list[Any] = []
        try:
            connection.channel.queue_declare(self._source.queue, passive=True, callback=answers.append)
            if not connection.run(lambda: answers or len(self._delivered) >= most, TIMEOUT_S):
                raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for an answer")
        except amqp_library().exceptions.ChannelClosedByBroker as error:
            raise ConnectionError(f"the queue was deleted: {error}") from error
        return int(answers[0].method.message_count) if answers else None

    def _known_of(self, count: int) -> int:
        if not self._source.unique_ids:
            return 0
        return sum(
            bool(method.redelivered and self._window.knows(properties.message_id))
            for method, properties, _ in islice(self._delivered, count)
        )

    def _receive(self, max_rows: int, wait_s: float) -> None:
        """Wait for a message, and receive what comes right behind it."""
        connection = self._connection
        assert connection is not None
        connection.run(lambda: self._delivered or self._cancelled, wait_s)
        before = 0
        while before < len(self._delivered) < max_rows and not self._cancelled:
            before = len(self._delivered)
            connection.turn()
        if self._cancelled:
            raise ConnectionError("the consumer was cancelled: the queue was deleted, or has moved")

    def _take(self, max_rows: int) -> Fetched | None:
        count = min(max_rows, len(self._delivered))
        deliveries = [self._delivered.popleft() for _ in range(count)]
        if not deliveries:
            return None
        unique = self._source.unique_ids
        are_new = self._window.take(
            (method.delivery_tag, properties.message_id if unique else None, method.redelivered)
            for method, properties, _ in deliveries
        )
        if not any(are_new):
            return None
        rows = to_rows(deliveries if all(are_new) else list(compress(deliveries, are_new)))
        position = self._source.pack(self._window.packed())
        return Fetched(rows, self._subtask, position, self._window.turn)

    # ------------------------------------------------------------ acknowledging

    @property
    def _unacknowledged(self) -> int:
        return self._window.unacknowledged

    def _note_durable(self, receipts: Sequence[int]) -> None:
        self._window.durable(receipts)

    def _send_acknowledgements(self) -> None:
        connection = self._connection
        if connection is not None and (tag := self._window.to_acknowledge()) is not None:
            connection.channel.basic_ack(tag, multiple=True)
            connection.turn()


class AmqpDataSource(QueueDataSource):
    """``spark.dataSource.register(AmqpDataSource)``, then ``format("ftlayer-amqp")`` to read or to write.

    Options of a reader are the parameters of `AmqpSource`, in camel case (``maxPending``); ``spool`` and
    ``maxRowsPerTrigger`` as of `RedisDataSource`. Options of a writer are those of `AmqpSink`. A task or batch that
    Spark runs again publishes its rows again.
    """

    format = "ftlayer-amqp"
    _queue_class = AmqpSource

    def sink(self, options: DataSourceOptions) -> SendingWriter:
        return SendingWriter(options.made(AmqpSink))
