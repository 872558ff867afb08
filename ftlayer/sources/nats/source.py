"""A durable consumer of a stream of NATS JetStream as a source."""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any, TypeVar

import msgpack
import pyarrow as pa

from ftlayer.checks import Duration, check_choice, check_int, duration_ms
from ftlayer.clients.nats import (
    TIMEOUT_S,
    NatsAwayError,
    NatsConnection,
    check_credentials,
    check_name,
    check_nats_url,
    check_subject,
    nats_library,
    place_of,
)
from ftlayer.clients.reconnecting import Reconnecting
from ftlayer.errors import SourceError
from ftlayer.sources.nats.pull import REFUSED, Pull
from ftlayer.sources.nats.rows import SCHEMA, delivery_of, reply_to, to_rows
from ftlayer.sources.nats.sequences import Sequences
from ftlayer.sources.nats.window import SequenceWindow
from ftlayer.sources.queue_positions import pack_position, unpack_position
from ftlayer.topology.queues import Fetched, Member, Queue

logger = logging.getLogger(__name__)

MAX_PENDING = 100_000

Result = TypeVar("Result")

START = {"earliest": "all", "latest": "new"}

_PROGRESS_PARTS = 3
"""So often in ``ack_wait`` the server is told that messages are worked on."""

_MOST_SETTLED = 200_000
"""Of so many numbers the server is told at once what became of them; beyond that ``ack_wait`` passes."""


class NatsSource(Queue):
    """Reads a stream of NATS JetStream by a durable pull consumer, which is made if it is missing.

    A message is acknowledged once it is durable: stored in the vertex, in a completed checkpoint, or in the spool.
    Until then the server keeps it, and delivers it again after a failure. One that is delivered again is known by its
    number in the stream, and left out, if it comes to the subtask that had it: always with one subtask.

    The consumer is the source's alone: what another program or job has taken from it would be taken back.
    """

    schema: pa.Schema = SCHEMA

    def __init__(
        self,
        url: str,
        stream: str,
        consumer: str,
        *,
        subject: str | None = None,
        credentials: str | None = None,
        start: str = "earliest",
        max_pending: int = MAX_PENDING,
        ack_wait: Duration = "30s",
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``nats://user:password@host:4222``, ``tls://…``, several of a cluster with commas between them; slots
                connect.
            stream: name of the stream, which is there.
            consumer: name of the durable consumer; it is made, if it is not there.
            subject: the consumer that is made gets messages of this subject alone, which may have wildcards.
            credentials: path of a ``.creds`` file (a user's JWT and seed), there where slots run.
            start: where a consumer begins that this makes: at the ``"earliest"`` message that is there, or
                ``"latest"``: with those that come from then on.
            max_pending: how many messages all subtasks together may have that are not acknowledged. In barrier mode
                these are all that the source reads until the next checkpoint is complete.
            ack_wait: for how long a message stays with a subtask that is not heard of; then it is delivered again.
            reconnect_timeout: the source fails when the server was away for this long.

        ``max_pending`` and ``ack_wait`` are set in a consumer that is there, too. Raises `ConfigError` if nats-py is
        missing, and for an option that will not do.
        """
        check_nats_url(url)
        check_credentials(credentials)
        check_name(stream, "stream", "the name of a stream")
        check_name(consumer, "consumer", "the name of a durable consumer")
        if subject is not None:
            check_subject(subject, "subject", wildcards=True)
        check_choice(start, "start", START)
        check_int(max_pending, "max_pending", least=1)
        self.ack_wait_s = duration_ms(ack_wait, "ack_wait", least=1_000) / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.url, self.stream, self.consumer, self.subject = url, stream, consumer, subject
        self.credentials, self.start, self.max_pending = credentials, start, max_pending

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> NatsReader:
        """See `Queue.open`. The server is connected to by the first fetch."""
        known, until_ns, subjects = Sequences(), 0, ""
        for position in positions.values():
            ranges, at_ns, subjects = self.unpack(position)
            until_ns = max(until_ns, at_ns)
            for first, last in ranges:
                known.add(first, last)
        return NatsReader(self, member, SequenceWindow(known, until_ns, subjects, stored=stored))

    @property
    def place(self) -> str:
        """How errors name it."""
        return f"stream {self.stream!r} of {place_of(self.url)}, consumer {self.consumer!r}"

    def pack(self, window: SequenceWindow) -> bytes:
        """Return the position behind what a window knows: one like no other."""
        state = msgpack.packb([window.known.packed(), window.until_ns, window.subjects])
        return pack_position(self._mine, state, secrets.token_bytes(8))

    def unpack(self, position: bytes) -> tuple[Sequences, int, str]:
        """Return numbers, time and subjects of a window; `ConfigError` for a position of something else."""
        state, _ = unpack_position(position, self._mine, self.place, parts=2)
        known, until_ns, subjects = msgpack.unpackb(state)
        return Sequences.unpacked(known), int(until_ns), str(subjects)

    @property
    def _mine(self) -> tuple[str, ...]:
        return ("nats", self.stream, self.consumer, self.subject or "")


class NatsReader:
    """`QueueReader` of one subtask."""

    def __init__(self, source: NatsSource, member: Member, window: SequenceWindow) -> None:
        self._source = source
        self._subtask = member.subtask
        self._is_alone = member.parallelism == 1
        self._away = Reconnecting(source.place, source.patience_ms)
        self._window = window
        self._guard = threading.Lock()
        """Of the window: the connection's thread asks it what is not acknowledged."""
        self._connection: NatsConnection | None = None
        self._pull: Pull | None = None
        self._last_reply: str | None = None
        self._warned = False

    # ------------------------------------------------------------ what is called

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        """See `QueueReader.fetch`. Raises `SourceError` for what is no matter of the connection."""
        wait_s -= self._away.wait(wait_s)
        if self._away.is_early:
            return None
        try:
            pull = self._connected()
            self._send_acknowledgements()
            messages = pull.take(max_rows, wait_s)
        except (NatsAwayError, nats_library().errors.Error) as error:
            self._failed(error)
            return None
        self._away.works()
        # Nothing may fail between this and the return: what the window knows is not taken again.
        fetched = self._take(messages)
        self._warn_of_standstill(fetched)
        return fetched

    def acknowledge(self, receipts: Sequence[int]) -> None:
        with self._guard:
            self._window.durable(receipts)
        try:
            self._send_acknowledgements()
        except (NatsAwayError, nats_library().errors.Error) as error:
            self._failed(error)

    def waiting(self) -> int | None:
        """See `QueueReader.waiting`. What other subtasks hold is not counted."""
        if self._away.is_early:
            return None
        try:
            return self._waiting(self._connected())
        except (NatsAwayError, nats_library().errors.Error) as error:
            self._failed(error)
            return None

    def _waiting(self, pull: Pull) -> int:
        assert self._connection is not None
        self._send_acknowledgements()
        if self._last_reply is not None:
            # This is answered when all acknowledgements before it have had their effect.
            self._connection.run(self._connection.client.request(self._last_reply, timeout=TIMEOUT_S))
            self._last_reply = None
        info = self._connection.run(self._info())
        if self._is_alone:
            return int(info.num_pending + info.num_ack_pending - self._window.unacknowledged)
        return int(info.num_pending) + pull.received

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def wake_up(self) -> None:
        if (pull := self._pull) is not None:
            pull.wake_up()

    def close(self) -> None:
        """See `QueueReader.close`. What no other reader can have is given back at once."""
        pull, connection = self._pull, self._connection
        if pull is not None and connection is not None and not connection.is_lost:
            try:
                unread = pull.stop()
                pull.send([*self._window.replies(), *unread] if self._is_alone else unread, REFUSED)
            except (NatsAwayError, nats_library().errors.Error) as error:
                logger.info("%s: messages are not given back at once: %s", self._source.place, error)
        self._disconnect()

    # ------------------------------------------------------------ connecting

    def _connected(self) -> Pull:
        if self._pull is None:
            self._connection = NatsConnection(self._source.url, self._source.credentials, self.wake_up)
            info = self._connection.run(self._prepared())
            self._noting_beginnings(lambda: self._window.reads(_subjects_of(info.config)))
            self._settle(info)
            self._pull = Pull(self._connection, self._source.stream, self._source.consumer)
            self._pull.keep(self._source.ack_wait_s / _PROGRESS_PARTS, self._replies)
        return self._pull

    def _disconnect(self) -> None:
        connection, self._connection, self._pull, self._last_reply = self._connection, None, None, None
        if connection is not None:
            connection.close()

    def _failed(self, error: Exception) -> None:
        """Connect again later, or raise. What was not acknowledged is delivered again."""
        if not isinstance(error, NatsAwayError):
            raise SourceError(f"{self._source.place}: {type(error).__name__}: {error}") from error
        self._disconnect()
        self._away.failed(error)

    async def _info(self) -> Any:
        assert self._connection is not None
        return await self._connection.client.jetstream().consumer_info(
            self._source.stream, self._source.consumer
        )

    async def _prepared(self) -> Any:
        """Return what the server knows of the consumer, which is made if it is missing."""
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import NotFoundError

        source = self._source
        assert self._connection is not None
        jetstream = self._connection.client.jetstream()
        try:
            await jetstream.stream_info(source.stream)
        except NotFoundError as error:
            raise SourceError(f"{source.place}: there is no such stream; make it before") from error
        wanted = {"ack_wait": source.ack_wait_s, "max_ack_pending": source.max_pending}
        try:
            info = await self._info()
        except NotFoundError:
            known = self._window.known.first
            # One that was removed: it goes on where this source has begun.
            begins = DeliverPolicy.BY_START_SEQUENCE if known else DeliverPolicy(START[source.start])
            made = ConsumerConfig(
                durable_name=source.consumer,
                description="a source of ftlayer's",
                deliver_policy=begins,
                opt_start_seq=known or None,
                ack_policy=AckPolicy.EXPLICIT,
                filter_subject=source.subject,
                max_deliver=-1,
                **wanted,
            )
            return await jetstream.add_consumer(source.stream, made)
        self._check(info.config)
        if any(getattr(info.config, name) != value for name, value in wanted.items()):
            return await jetstream.add_consumer(source.stream, info.config.evolve(**wanted))
        return info

    def _check(self, config: Any) -> None:
        """Raise `SourceError` for a consumer that will not do."""
        source = self._source
        problems = {
            "pushes its messages": config.deliver_subject is not None,
            f"has the acknowledgement policy {config.ack_policy!r}, not explicit": config.ack_policy
            != "explicit",
            f"gives a message up after {config.max_deliver} deliveries": (config.max_deliver or -1) > 0,
            f"has the subject {config.filter_subject!r}, not {source.subject!r}": source.subject
            not in (None, config.filter_subject),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise SourceError(f"{source.place}: it is there, and {problem}; name another, or remove it")

    def _settle(self, info: Any) -> None:
        """Tell the server what became of messages that it waits for: it would wait for all of ``ack_wait``.

        Those that were durable are acknowledged. Others are known to be free if this one alone reads.
        """
        assert self._connection is not None
        first, last = info.ack_floor.stream_seq + 1, info.delivered.stream_seq
        if not info.num_ack_pending or last - first >= _MOST_SETTLED:
            return
        like = f"$JS.ACK.{self._source.stream}.{self._source.consumer}.1.0.0.0.0"

        async def settle() -> None:
            assert self._connection is not None
            answers = [(number, b"") for number in self._window.settled(first, last)]
            if self._is_alone:
                answers += [(number, REFUSED) for number in self._window.known.missing(first, last)]
            for number, answer in answers:
                reply = reply_to(like, number, info.delivered.consumer_seq)
                await self._connection.client.publish(reply, answer)

        self._connection.run(settle())

    # ------------------------------------------------------------ fetching

    def _take(self, messages: list[Any]) -> Fetched | None:
        """Take what was delivered, without what is known."""
        if not messages:
            return None
        deliveries = [delivery_of(message.reply) for message in messages]
        are_new = self._noting_beginnings(lambda: self._window.take(deliveries))
        if not any(are_new):
            return None
        if not all(are_new):
            messages, deliveries = list(compress(messages, are_new)), list(compress(deliveries, are_new))
        position = self._source.pack(self._window)
        return Fetched(to_rows(messages, deliveries), self._subtask, position, self._window.turn)

    def _noting_beginnings(self, change: Callable[[], Result]) -> Result:
        """Change the window; say so if what it knew is of no use any more."""
        with self._guard:
            beginnings = self._window.beginnings
            result = change()
        if self._window.beginnings > beginnings:
            logger.warning(
                "%s: it was made anew, or has lost messages: what comes is new, though its numbers were there before",
                self._source.place,
            )
        return result

    def _warn_of_standstill(self, fetched: Fetched | None) -> None:
        if fetched is not None:
            self._warned = False
        elif not self._warned and self._window.unacknowledged >= self._source.max_pending:
            self._warned = True
            logger.warning(
                "%s: %d messages wait to be durable, which is max_pending; no others come until then: raise it, or "
                "checkpoint more often",
                self._source.place,
                self._window.unacknowledged,
            )

    # ------------------------------------------------------------ acknowledging

    def _replies(self) -> list[str]:
        with self._guard:
            return self._window.replies()

    def _send_acknowledgements(self) -> None:
        if self._pull is None:
            return
        with self._guard:
            replies = self._window.to_acknowledge()
        if replies:
            self._pull.send(replies)
            self._last_reply = replies[-1]


def _subjects_of(config: Any) -> str:
    """Return which subjects a consumer gets, as a text like no other's."""
    several = config.filter_subjects or [config.filter_subject or ">"]
    return " ".join(sorted(several))
