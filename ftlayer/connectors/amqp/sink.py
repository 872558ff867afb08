"""A sink that publishes each row as a message of AMQP 0.9.1 (RabbitMQ)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import Duration, check_text, duration_ms
from ftlayer.common.failures import PermanentFailure
from ftlayer.common.printable import described, hides_secrets, secrets_of, shown_url
from ftlayer.connectors.amqp.client import AmqpConnection, amqp_library, check_amqp_url, is_away
from ftlayer.connectors.at_least_once import Publishing, PublishingSink, bodies_of, check_columns, texts_of
from ftlayer.errors import ConfigError, SinkError

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
        """Why AMQP has no way to send it, if so."""
        if self.routing_key is None:
            return "its routing key is null"
        for name, text in (("routing key", self.routing_key), ("message_id", self.id or "")):
            if len(text.encode("utf-8", "surrogatepass")) > MOST_NAME_BYTES:
                return f"its {name} has more than {MOST_NAME_BYTES} bytes"
        return None


@hides_secrets(lambda sink: sink._secrets)
class AmqpSink(PublishingSink[_Message]):
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
        check_columns(routing_key_column=routing_key_column, body=body, message_id=message_id)
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
        keys = texts_of(batch, self._key_column, "routing_key_column", self._routing_key)
        ids = texts_of(batch, self._id, "message_id")
        messages = dict(enumerate(map(_Message, keys, ids, bodies_of(batch, self._body, "body"))))
        refused = {
            row: reason for row, message in messages.items() if (reason := message.refused) is not None
        }
        errors: dict[int, Exception] = {row: PermanentFailure(reason) for row, reason in refused.items()}
        todo, alone = [{row: message for row, message in messages.items() if row not in refused}], 0
        while todo:
            attempt = Publishing(todo.pop())
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

    def _publish_once(self, attempt: Publishing[_Message]) -> None:
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
        self._attempt = Publishing[_Message]({})
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

    def publish(self, attempt: Publishing[_Message]) -> None:
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
