"""A pull subscription of a consumer: what is asked for, and what has arrived."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ftlayer.clients.nats import NatsAwayError, NatsConnection, nats_library

LINGER_S = 20.0
"""A request waits this long in the server for messages."""

PROGRESS = b"+WPI"
"""Acknowledges that a message is worked on: the server waits ``ack_wait`` again."""
REFUSED = b"-NAK"
"""The server is to deliver a message again."""

SILENCE_S = 2.0
"""A request that is not answered for this long may be to a consumer that is gone: the server says nothing of that."""

_ENDED = frozenset({"404", "408"})


class Pull:
    """Messages of one consumer by one connection. The connection's thread receives them.

    One request at a time is under way: first for what there is, and when there is nothing, for what comes.
    """

    def __init__(self, connection: NatsConnection, stream: str, consumer: str) -> None:
        """Subscribe. Raises `NatsAwayError`."""
        self._connection = connection
        self._stream, self._consumer = stream, consumer
        self._next = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
        self._inbox = connection.client.new_inbox()
        self._received: deque[Any] = deque()
        self._left = 0
        """Of the request that is under way."""
        self._is_filled = False
        self._lingers = False
        self._asked_at = 0.0
        self._is_checked = False
        self._failure: str | None = None
        self._is_told = False
        self._changed = threading.Condition()
        # No limits of the client's own: it would drop what is beyond them.
        limits = {"pending_msgs_limit": 0, "pending_bytes_limit": 0}
        self._subscription = connection.run(
            connection.client.subscribe(self._inbox, cb=self._on_message, **limits)
        )

    # ------------------------------------------------------------ the connection's thread

    async def _on_message(self, message: Any) -> None:
        if message.reply:
            self._received.append(message)
            self._left -= 1
            self._is_filled = self._left <= 0
        else:
            status = (message.headers or {}).get("Status", "")
            if status not in _ENDED:
                self._failure = (
                    f"the server answers {status} {(message.headers or {}).get('Description', '')}"
                )
            self._left = 0
        if not self._is_told:
            # Behind all that has arrived with this one.
            self._is_told = True
            self._connection.soon(self.wake_up)

    def wake_up(self) -> None:
        """End a `take` that waits, if there is something."""
        self._is_told = False
        with self._changed:
            self._changed.notify_all()

    async def _keep(self, period_s: float, replies: Callable[[], list[str]]) -> None:
        """Say that messages are worked on: those that were there a period ago."""
        earlier: set[str] = set()
        while True:
            await asyncio.sleep(period_s)
            now = {*replies(), *(message.reply for message in self._received)}
            for reply in earlier & now:
                await self._connection.client.publish(reply, PROGRESS)
            earlier = now

    # ------------------------------------------------------------ the reader's thread

    def keep(self, period_s: float, replies: Callable[[], list[str]]) -> None:
        """From now on have the server wait for these, and for what was received: called by the connection's thread."""
        self._connection.start(self._keep(period_s, replies))

    def take(self, most: int, wait_s: float) -> list[Any]:
        """Return up to ``most`` messages: all that there are, or the first that come in this time.

        Raises `NatsAwayError`.
        """
        until = time.monotonic() + wait_s
        self._look_after_request()
        if self._left <= 0 and not self._received:
            self._ask(most, lingers=False)
        self._wait(until)
        if not self._received and self._left <= 0:
            self._ask(most, lingers=True)
            self._wait(until)
        count = min(most, len(self._received))
        if count == 0 and (self._failure is not None or self._connection.is_lost):
            raise NatsAwayError(self._failure or "the connection was closed")
        taken = [self._received.popleft() for _ in range(count)]
        if self._is_filled and not self._received and self._failure is None:
            # There may be more, which comes while this is worked on.
            self._ask(most, lingers=False)
        return taken

    @property
    def received(self) -> int:
        """How many messages wait for a `take`."""
        return len(self._received)

    def send(self, replies: Iterable[str], answer: bytes = b"") -> None:
        """Acknowledge messages, or say something else of them. Raises `NatsAwayError`."""
        self._connection.run(self._send(list(replies), answer))

    def stop(self) -> list[str]:
        """Receive no more; return the replies to what was received and not taken. Raises `NatsAwayError`."""
        self._connection.run(self._subscription.drain())
        return [message.reply for message in self._received]

    def _ask(self, most: int, *, lingers: bool) -> None:
        self._left, self._is_filled, self._lingers = most, False, lingers
        self._asked_at, self._is_checked = time.monotonic(), False
        how = {"expires": int(LINGER_S * 1e9)} if lingers else {"no_wait": True}
        request = json.dumps({"batch": most, **how}).encode()
        self._connection.run(self._connection.client.publish(self._next, request, self._inbox))

    def _look_after_request(self) -> None:
        """Ask anew where a request seems to be lost. Raises `NatsAwayError` if the consumer is gone."""
        silent_s = time.monotonic() - self._asked_at
        if self._left <= 0 or self._received or silent_s < SILENCE_S:
            return
        if self._lingers and silent_s < LINGER_S + SILENCE_S:
            if self._is_checked:
                return
            self._is_checked = True
        else:
            self._left = 0
        jetstream = self._connection.client.jetstream()
        try:
            self._connection.run(jetstream.consumer_info(self._stream, self._consumer))
        except nats_library().js.errors.NotFoundError as error:
            raise NatsAwayError("the consumer is gone") from error

    async def _send(self, replies: list[str], answer: bytes) -> None:
        for reply in replies:
            await self._connection.client.publish(reply, answer)

    def _wait(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(self._is_ready, max(0.0, until - time.monotonic()))

    def _is_ready(self) -> bool:
        ended = self._left <= 0 or self._failure is not None or self._connection.is_lost
        return ended or (self._lingers and bool(self._received))
