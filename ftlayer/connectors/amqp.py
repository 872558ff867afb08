"""AMQP 0.9.1 (RabbitMQ): connections, a sink that publishes each row as a message, a queue as a source."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress, islice, takewhile
from operator import attrgetter, itemgetter
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import Duration, check_bool, check_int, check_text, duration_ms, known_options
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.printable import described, hides_secrets, secrets_of, shown_url, url_parts
from ftlayer.connectors import at_least_once, queue_stream
from ftlayer.connectors.connections import ServerReader, client_library
from ftlayer.errors import ConfigError, SinkError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records import beside
from ftlayer.topology.operators import Fetched, Member, Queue

logger = logging.getLogger(__name__)


TIMEOUT_S = 10.0
"""A server that says nothing for this long while it is asked something is taken for away."""

CLOSE_S = 2.0
"""How long it may take to disconnect in order."""

_FORCED = 320  # The server was told to end connections, or is shutting down.
_MISSING = 404
_REFUSED = 406  # Of a channel: among others that acknowledgements took longer than consumer_timeout.


def amqp_library() -> Any:
    return client_library("AMQP", "pika", "amqp", "pika")


def check_amqp_url(url: object) -> None:
    url_parts(url, "url", "amqp://user:password@host:5672/%2F, or amqps://…", ("amqp", "amqps"))
    with contextlib.suppress(ValueError, TypeError):  # What it says quotes what it could not read.
        amqp_library().URLParameters(url)
        return
    raise ConfigError(f"url: pika cannot read the path or the options of {shown_url(str(url))}")


@dataclass(slots=True)
class _Channel:
    open: Any
    closed: Exception | None = None


class AmqpConnection:
    """A connection with one channel, used by one thread: nothing is sent or received but while `run` is called.

    This is pika's `SelectConnection`. Its `BlockingConnection` waits for each confirmation before it publishes on, and
    handles each delivery twice.

    There are no heartbeats: under back-pressure `run` is not called for longer than one may take. TCP tells when the
    server is gone.
    """

    def __init__(self, url: str) -> None:
        """Connect, and open the channel. Raises errors of pika's, of which `is_away` tells."""
        pika = amqp_library()
        parameters = pika.URLParameters(url)
        parameters.heartbeat = 0
        parameters.connection_attempts = 1
        parameters.socket_timeout = parameters.stack_timeout = TIMEOUT_S
        parameters.blocked_connection_timeout = None
        parameters.tcp_options = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
        self._closed: Exception | None = None
        self._connection = pika.SelectConnection(
            parameters, on_open_error_callback=self._on_closed, on_close_callback=self._on_closed
        )
        self._loop = self._connection.ioloop
        self._loop.activate_poller()
        try:
            self._wait(lambda: bool(self._connection.is_open), "the connection")
            self._mine = self._opened()
        except BaseException:
            self.close()
            raise
        self.channel: Any = self._mine.open
        """pika's channel."""

    def run(self, until: Callable[[], Any], wait_s: float) -> bool:
        """Send and receive until a condition holds, for about ``wait_s`` seconds at most; return whether it does.

        Raises what has closed the channel or the connection.
        """
        give_up = time.monotonic() + wait_s
        while not until():
            left = give_up - time.monotonic()
            self.turn(left)
            if left <= 0:
                return bool(until())
        return True

    def turn(self, wait_s: float = 0.0) -> None:
        """Send and receive once what is possible now, or within a time. Raises as `run` does."""
        self._raise_if_closed()
        self._turn(wait_s)
        self._raise_if_closed()

    def ask(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Call a method of the channel that the server answers; return the answer. Raises as `run` does."""
        return self._ask(self._mine, method, *arguments, **named)

    def has_queue(self, queue: str) -> bool:
        asking = self._opened()
        try:
            self._ask(asking, "queue_declare", queue, passive=True)
        except amqp_library().exceptions.ChannelClosedByBroker as error:
            if error.reply_code != _MISSING:
                raise
            return False
        asking.open.close()
        return True

    def close(self) -> None:
        """Disconnect, in order if the server takes part in it soon."""
        errors = (amqp_library().exceptions.AMQPError, OSError)
        if self._closed is None:
            try:
                self._connection.close()
                give_up = time.monotonic() + CLOSE_S
                while self._closed is None and (left := give_up - time.monotonic()) > 0:
                    self._turn(left)
            except errors as error:
                logger.info("a connection of AMQP did not close in order: %s", error)
        self._loop.deactivate_poller()
        self._loop.close()

    # ------------------------------------------------------------ pika's loop

    def _opened(self) -> _Channel:
        channel = _Channel(self._connection.channel(on_open_callback=_nothing))

        def on_close(_: Any, reason: Exception) -> None:
            channel.closed = reason

        channel.open.add_on_close_callback(on_close)
        self._wait(lambda: bool(channel.open.is_open), "the channel", channel)
        return channel

    def _ask(self, channel: _Channel, method: str, *arguments: Any, **named: Any) -> Any:
        answers: list[Any] = []
        getattr(channel.open, method)(*arguments, callback=answers.append, **named)
        self._wait(lambda: bool(answers), f"an answer to {method}", channel)
        return answers[0].method

    def _wait(self, until: Callable[[], bool], what: str, channel: _Channel | None = None) -> None:
        give_up = time.monotonic() + TIMEOUT_S
        while not until():
            closed = self._closed if channel is None else channel.closed or self._closed
            if closed is not None:
                raise closed
            if (left := give_up - time.monotonic()) <= 0:
                raise TimeoutError(f"waited {TIMEOUT_S:.0f} s for {what}")
            self._turn(left)

    def _turn(self, wait_s: float) -> None:
        # Without a timer it would wait for five seconds.
        timer = self._loop.call_later(max(0.0, wait_s), _nothing)
        self._loop.poll()
        self._loop.remove_timeout(timer)
        self._loop.process_timeouts()

    def _raise_if_closed(self) -> None:
        if (closed := self._mine.closed or self._closed) is not None:
            raise closed

    def _on_closed(self, _: Any, reason: Exception) -> None:
        self._closed = _plain(reason)


def _plain(reason: Exception) -> Exception:
    """Return what came of the last attempt to connect: an error of pika's that says why, or of the system's."""
    errors = amqp_library().exceptions
    last: Any = reason
    while type(last) is errors.AMQPConnectionError or not isinstance(last, errors.AMQPError | OSError):
        within = getattr(last, "exceptions", None) or [getattr(last, "exception", None), *last.args]
        if not isinstance(within[-1], Exception):
            return errors.AMQPConnectionError(repr(last))  # type: ignore[no-any-return]
        last = within[-1]
    found: Exception = last
    return found


def _nothing(*_: Any) -> None:
    """What pika calls where nothing is to be done."""


def is_away(error: Exception) -> bool:
    """Whether an error means that the server cannot be reached now, or closed a connection that may be made again."""
    errors = amqp_library().exceptions
    if isinstance(error, errors.ChannelClosedByBroker):
        return error.reply_code == _REFUSED and "timed out" in error.reply_text
    if isinstance(error, errors.ConnectionClosedByBroker):
        return bool(error.reply_code == _FORCED)
    # A password that is refused will be refused again.
    lasting = (
        errors.AuthenticationError,
        errors.ProbableAuthenticationError,
        errors.ProbableAccessDeniedError,
        errors.IncompatibleProtocolError,
    )
    away = (errors.AMQPConnectionError, errors.ChannelWrongStateError, OSError)
    return isinstance(error, away) and not isinstance(error, lasting)


WINDOW = 1_000
"""So many messages are on their way without being confirmed."""

MOST_NAME_BYTES = 255
"""Of a routing key, and of a message's id."""

MOST_ALONE = 8
"""Once as many messages in a row close the channel that are published alone, no more are tried."""

_PERSISTENT = 2

_NEVER = frozenset({311, 406})
"""Reply codes, of a message that is too large, that another try will not change."""


@dataclass(frozen=True, slots=True)
class _Message:
    routing_key: str | None
    id: str | None
    body: bytes

    @property
    def refused(self) -> str | None:
        if self.routing_key is None:
            return "its routing key is null"
        for name, text in (("routing key", self.routing_key), ("message_id", self.id or "")):
            if len(text.encode("utf-8", "surrogatepass")) > MOST_NAME_BYTES:
                return f"its {name} has more than {MOST_NAME_BYTES} bytes"
        return None


@known_options
@hides_secrets(lambda sink: sink._secrets)
class AmqpSink(at_least_once.PublishingSink[_Message]):
    """Publishes each row as a persistent message: the sink of a topology, in both modes.

    A row is done when the server has confirmed its message: it is on disk, in each queue that it was routed to. One
    that no queue takes (``mandatory``), or that the server refuses, fails, and no other does. While the server is away
    the sink waits, connects again, and publishes what was not confirmed.

    Each row is published at least once: give the ``message_id`` by which consumers know those that they have had.
    """

    def __init__(
        self,
        url: str,
        *,
        exchange: str = "",
        routing_key: str = "",
        routing_key_column: str | None = None,
        body: str | None = None,
        message_id: str | None = None,
        reconnect_timeout: Duration = "1m",
    ) -> None:
        """Nothing is connected to before the first rows come.

        Args:
            url: ``amqp://user:password@host:5672/%2F``, ``amqps://…`` with TLS; slots connect.
            exchange: name of an exchange that is there; "": the default one, whose routing keys are names of queues.
            routing_key: of all messages.
            routing_key_column: column that has each message's routing key, in its place.
            body: column that is the body, a text or bytes. None: a JSON object of all columns, bytes in base64, times
                in ISO 8601.
            message_id: column that is the message's id: the same whenever the row is published, and of no other.
            reconnect_timeout: rows fail when the server was away for this long, or confirmed nothing.

        Raises `ConfigError` if pika is missing, and for an option that will not do.
        """
        check_amqp_url(url)
        if exchange != "":
            check_text(exchange, "exchange", "the name of an exchange")
        if routing_key != "":
            check_text(routing_key, "routing_key")
        at_least_once.check_columns(routing_key_column=routing_key_column, body=body, message_id=message_id)
        if routing_key and routing_key_column is not None:
            raise ConfigError("routing_key: expected it or routing_key_column, got both")
        if not (exchange or routing_key or routing_key_column):
            raise ConfigError(
                "routing_key: expected the name of a queue, or a routing_key_column: with the default exchange it is "
                "where messages go"
            )
        if len(routing_key.encode()) > MOST_NAME_BYTES:
            raise ConfigError(f"routing_key: expected {MOST_NAME_BYTES} bytes at most")
        self._patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self._url, self._exchange, self._routing_key = url, exchange, routing_key
        self._key_column, self._body, self._id = routing_key_column, body, message_id
        self._secrets = secrets_of(url)
        self.place = f"exchange {exchange!r} of {shown_url(url)}"

    def _published(self, batch: pa.RecordBatch) -> dict[int, Exception]:
        """Publish rows; return why some were not taken.

        The server closes the channel for a message that it does not want at all (one that is too large, say). Then
        halves are tried, so that just that one fails.
        """
        keys = at_least_once.texts_of(batch, self._key_column, "routing_key_column", self._routing_key)
        ids = at_least_once.texts_of(batch, self._id, "message_id")
        messages = dict(
            enumerate(map(_Message, keys, ids, at_least_once.bodies_of(batch, self._body, "body")))
        )
        refused = {
            row: reason for row, message in messages.items() if (reason := message.refused) is not None
        }
        errors: dict[int, Exception] = {row: PermanentFailure(reason) for row, reason in refused.items()}
        todo, alone = [{row: message for row, message in messages.items() if row not in refused}], 0
        while todo:
            attempt = at_least_once.Publishing(todo.pop())
            try:
                self._publish(attempt)
                alone = 0
            except SinkError as error:
                for rest in (attempt.left, *todo):
                    errors |= dict.fromkeys(rest, error)
                todo.clear()
            except amqp_library().exceptions.AMQPError as error:
                left = list(attempt.left.items())
                failure = SinkError(f"{self.place}: {described(error)}")
                is_final = getattr(error, "reply_code", 0) in _NEVER
                if len(left) > 1:
                    half = len(left) // 2
                    todo += [dict(left[half:]), dict(left[:half])]
                else:
                    kind = PermanentFailure if is_final else SinkError
                    errors |= dict.fromkeys(attempt.left, kind(str(failure)))
                    alone += 1
                if alone >= MOST_ALONE:
                    for rest in todo:
                        errors |= dict.fromkeys(rest, failure)
                    todo.clear()
            errors |= attempt.errors
        return errors

    def _is_away(self, error: Exception) -> bool:
        return is_away(error)

    def _publish_once(self, attempt: at_least_once.Publishing[_Message]) -> None:
        if self._connection is None:
            self._connection = _Publisher(
                self._url, self._exchange, self._body is None, self._patience_ms / 1_000, self.place
            )
        self._connection.publish(attempt)


class _Publisher:
    def __init__(self, url: str, exchange: str, is_json: bool, patience_s: float, place: str) -> None:
        self._exchange = exchange
        self._patience_s = patience_s
        self._content_type = "application/json" if is_json else None
        self._place = place
        self._tag = 0
        self._attempt = at_least_once.Publishing[_Message]({})
        # Rows by the tags of their messages, in this order, and those that were returned.
        self._pending: dict[int, int] = {}
        self._returned: dict[int, str] = {}
        self._last_returned = 0
        self._connection = AmqpConnection(url)
        try:
            self._connection.channel.add_on_return_callback(self._on_return)
            self._connection.ask("confirm_delivery", self._on_confirm)
        except BaseException:
            self._connection.close()
            raise

    def publish(self, attempt: at_least_once.Publishing[_Message]) -> None:
        """Publish what is left of an attempt, and wait until nothing is. Raises errors of pika's, and `OSError`."""
        self._attempt = attempt
        todo = iter(list(attempt.left.items()))
        self._connection.turn()
        while self._send(todo):
            known = len(self._pending)
            if not self._connection.run(
                lambda known=known: len(self._pending) < known,  # type: ignore[misc]
                self._patience_s,
            ):
                raise TimeoutError(f"the server has confirmed nothing for {self._patience_s:.0f} s")

    def close(self) -> None:
        self._connection.close()

    def _send(self, todo: Iterator[tuple[int, _Message]]) -> bool:
        channel, properties_of = self._connection.channel, amqp_library().BasicProperties
        for row, message in islice(todo, WINDOW - len(self._pending)):
            self._tag += 1
            self._pending[self._tag] = row
            properties = properties_of(
                delivery_mode=_PERSISTENT, message_id=message.id, content_type=self._content_type
            )
            channel.basic_publish(
                self._exchange, message.routing_key, message.body, properties, mandatory=True
            )
        return bool(self._pending)

    def _on_return(self, _: Any, method: Any, properties: Any, body: bytes) -> None:
        """No queue takes a message. It is told before it is confirmed, in the order of publishing, without its tag."""
        for tag, row in self._pending.items():
            message = self._attempt.left[row]
            same = (message.routing_key, message.id, message.body)
            if tag > self._last_returned and same == (method.routing_key, properties.message_id, body):
                self._last_returned = tag
                self._returned[tag] = f"{method.reply_text} ({method.reply_code})"
                return
        raise AssertionError("a message came back that was not sent")

    def _on_confirm(self, frame: Any) -> None:
        method = frame.method
        tag, is_taken = method.delivery_tag, method.NAME == "Basic.Ack"
        if not method.multiple:
            self._settle(tag, is_taken)
            return
        for each in list(takewhile(lambda one: one <= tag, self._pending)):
            self._settle(each, is_taken)

    def _settle(self, tag: int, is_taken: bool) -> None:
        row = self._pending.pop(tag)
        message = self._attempt.left.pop(row)
        reason = self._returned.pop(tag, None if is_taken else "the server refuses it (basic.nack)")
        if reason is not None:
            self._attempt.errors[row] = SinkError(
                f"{self._place}, routing key {message.routing_key!r}: {reason}"
            )


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


@known_options
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
        window = queue_stream.RedeliveryWindow(
            names, self.max_pending + min(self.max_pending, _KEPT_NAMES), stored=stored
        )
        return AmqpReader(self, member.subtask, window)

    @property
    def place(self) -> str:
        return f"queue {self.queue!r} of {shown_url(self.url)}"

    def pack(self, names: bytes) -> bytes:
        """Return the position behind messages, of which some have these names: one like no other."""
        return queue_stream.pack_position(("amqp", self.queue), names, secrets.token_bytes(8))

    def unpack(self, position: bytes) -> bytes:
        """Return the names in a position; `ConfigError` for one of something else."""
        names, _ = queue_stream.unpack_position(position, ("amqp", self.queue), self.place, (bytes, bytes))
        assert len(names) % queue_stream.NAME_BYTES == 0
        return bytes(names)


@hides_secrets(lambda reader: reader._secrets)
class AmqpReader(ServerReader):
    def __init__(self, source: AmqpSource, subtask: int, window: queue_stream.RedeliveryWindow) -> None:
        hidden, errors = secrets_of(source.url), (amqp_library().exceptions.AMQPError, OSError)
        super().__init__(source.place, source.patience_ms, hidden, errors, is_away, source.max_pending)
        self._source = source
        self._subtask = subtask
        self._window = window
        self._connection: AmqpConnection | None = None
        self._delivered: deque[Delivery] = deque()
        self._cancelled = False

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


class AmqpDataSource(queue_stream.QueueDataSource):
    """``format("ftlayer-amqp")`` reads and writes, as `RedisDataSource`; what Spark runs again is published again."""

    format = "ftlayer-amqp"
    _queue_class = AmqpSource

    def sink(self, options: DataSourceOptions) -> at_least_once.SendingWriter:
        return at_least_once.SendingWriter(options.made(AmqpSink))
