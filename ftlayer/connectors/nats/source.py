"""`NatsSource` and `NatsSink` as a Python Data Source."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import threading
import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress, pairwise
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgpack
import pyarrow as pa

from ftlayer.common.checks import Duration, check_choice, check_int, duration_ms, known_options
from ftlayer.common.printable import hides_secrets, secrets_of, shown_url
from ftlayer.connectors.connections import ServerReader
from ftlayer.connectors.nats import client
from ftlayer.connectors.nats.sink import NatsSink
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import SourceChangedError, SourceError
from ftlayer.records import beside
from ftlayer.topology.operators import Fetched, Member, Queue

logger = logging.getLogger(__name__)


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

    def __init__(self, connection: client.NatsConnection, stream: str, consumer: str) -> None:
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
            raise client.NatsAwayError(self._failure or "the connection was closed")
        taken = [self._received.popleft() for _ in range(count)]
        if self._is_filled and not self._received and self._failure is None:
            # There may be more, which comes while this is worked on.
            self._ask(most, lingers=False)
        return taken

    @property
    def received(self) -> int:
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
        except client.nats_library().js.errors.NotFoundError as error:
            raise client.NatsAwayError("the consumer is gone") from error

    async def _send(self, replies: list[str], answer: bytes) -> None:
        for reply in replies:
            await self._connection.client.publish(reply, answer)

    def _wait(self, until: float) -> None:
        with self._changed:
            self._changed.wait_for(self._is_ready, max(0.0, until - time.monotonic()))

    def _is_ready(self) -> bool:
        ended = self._left <= 0 or self._failure is not None or self._connection.is_lost
        return ended or (self._lingers and bool(self._received))


class Sequences:
    """Whole numbers of at least 1, as sorted ranges with gaps between them."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """``ranges``: first and last number of each, in any order; they may overlap."""
        self._firsts: list[int] = []
        self._lasts: list[int] = []
        for first, last in ranges:
            self.add(first, last)

    @classmethod
    def unpacked(cls, packed: Sequence[int]) -> Sequences:
        made, at = cls(), 0
        for gap, length in zip(packed[::2], packed[1::2], strict=True):
            first = at + gap
            at = first + length
            made._firsts.append(first)
            made._lasts.append(at)
        return made

    def packed(self) -> list[int]:
        """Return the ranges as small numbers: how far each begins behind the last, and how far it goes."""
        found: list[int] = []
        at = 0
        for first, last in self:
            found += (first - at, last - first)
            at = last
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._lasts, strict=True)

    def __len__(self) -> int:
        return len(self._firsts)

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._firsts, number) - 1
        return place >= 0 and number <= self._lasts[place]

    @property
    def first(self) -> int:
        return self._firsts[0] if self._firsts else 0

    @property
    def last(self) -> int:
        return self._lasts[-1] if self._lasts else 0

    def add(self, first: int, last: int) -> None:
        lasts = self._lasts
        if lasts and lasts[-1] + 1 == first:
            lasts[-1] = last
            return
        # Those that touch the new one become one with it.
        begin = bisect_left(self._lasts, first - 1)
        end = bisect_right(self._firsts, last + 1)
        if begin < end:
            first = min(first, self._firsts[begin])
            last = max(last, self._lasts[end - 1])
        self._firsts[begin:end] = [first]
        self._lasts[begin:end] = [last]

    def forget_first(self, count: int, below: int) -> None:
        """Forget so many of the lowest ranges, but for those that reach ``below`` or beyond."""
        count = min(count, bisect_left(self._lasts, below))
        del self._firsts[:count], self._lasts[:count]

    def clear(self) -> None:
        self._firsts.clear()
        self._lasts.clear()

    def between(self, first: int, last: int) -> Iterator[int]:
        for begin, end in self:
            yield from range(max(begin, first), min(end, last) + 1)

    def missing(self, first: int, last: int) -> Iterator[int]:
        edges = [
            (0, first - 1),
            *((max(a, first), min(b, last)) for a, b in self if a <= last and b >= first),
        ]
        for (_, end), (begin, _) in pairwise([*edges, (last + 1, last + 1)]):
            yield from range(end + 1, begin)


# Which messages of a stream come a second time, and which may be acknowledged. Rules alone.
#
# A message is known by its sequence number in the stream. A stream that was made anew, or has lost its last messages in
# a crash, gives the same numbers to others: those are later than all that was fetched before, and so it is noticed.


MOST_RANGES = 10_000
"""Of numbers that are remembered: with several subtasks each has but some of the stream's."""

_BEFORE = 0
"""The turn of what a reader was opened with."""


class StreamDelivery(NamedTuple):
    """A message as it was delivered.

    Attributes:
        sequence: its number in the stream.
        consumer_sequence: how many deliveries the consumer had made by then, this one included.
        time_ns: when it was stored.
        delivered: how often it has been delivered, 1 for the first time.
        reply: the subject that acknowledges it.
    """

    sequence: int
    consumer_sequence: int
    time_ns: int
    delivered: int
    reply: str


class SequenceWindow:
    """The messages that were fetched, and those of them that are not acknowledged.

    A delivery waits for a *turn*, the number of a fetch: it is acknowledged when that fetch is durable.
    """

    def __init__(self, known: Sequences, until_ns: int, subjects: str = "", *, stored: bool) -> None:
        """Begin behind what an earlier reader fetched.

        Args:
            known: numbers of the messages that it fetched, and of those that its consumer passed over.
            until_ns: when the last of them was stored.
            subjects: which ones the consumer gets; "": none was fetched.
            stored: whether they are durable.
        """
        self.subjects = subjects
        self.known = known
        self.until_ns = until_ns
        self.turn = _BEFORE
        """The number of the last fetch: the receipt for it."""
        self._durable = _BEFORE if stored else _BEFORE - 1
        self._held: dict[int, tuple[int, str]] = {}
        self._turns: deque[tuple[int, list[int]]] = deque()
        self._again: list[str] = []
        self._last: StreamDelivery | None = None
        self.beginnings = 0
        """How often the stream was found to be another than before."""

    @property
    def unacknowledged(self) -> int:
        return len(self._held)

    def reads(self, subjects: str) -> None:
        """There is a new connection, and the consumer gets these subjects.

        If it got others, what it passed over may be delivered now. It may be another one of the same name, too, whose
        deliveries do not follow those before.
        """
        self._last = None
        if self.subjects not in ("", subjects):
            self._begin_anew()
        self.subjects = subjects

    def take(self, deliveries: Sequence[StreamDelivery]) -> list[bool]:
        self.turn += 1
        numbers: list[int] = []
        self._turns.append((self.turn, numbers))
        are_new = [self._take(delivery, numbers) for delivery in deliveries]
        self._forget()
        return are_new

    def _take(self, delivery: StreamDelivery, numbers: list[int]) -> bool:
        sequence, known = delivery.sequence, self.known
        if sequence <= known.last and sequence in known:
            if delivery.time_ns <= self.until_ns:
                self._take_again(delivery)
                return False
            self._begin_anew()
        known.add(self._first_of_run(delivery), sequence)
        self.until_ns = max(self.until_ns, delivery.time_ns)
        self._held[sequence] = (self.turn, delivery.reply)
        numbers.append(sequence)
        self._last = delivery
        return True

    def _first_of_run(self, delivery: StreamDelivery) -> int:
        """Return from which number on there are no others up to this: the consumer passes over some.

        First deliveries come in the order of the stream. So between two that follow each other in the consumer there is
        nothing for it.
        """
        last = self._last
        if (
            last is not None
            and last.delivered == delivery.delivered == 1
            and last.consumer_sequence + 1 == delivery.consumer_sequence
            and last.sequence < delivery.sequence
        ):
            return last.sequence + 1
        return delivery.sequence

    def _take_again(self, delivery: StreamDelivery) -> None:
        held = self._held.get(delivery.sequence)
        if held is not None:
            self._held[delivery.sequence] = (held[0], delivery.reply)
        elif self._durable >= _BEFORE:
            self._again.append(delivery.reply)
        else:
            self._held[delivery.sequence] = (_BEFORE, delivery.reply)
            self._turns.appendleft((_BEFORE, [delivery.sequence]))

    def _begin_anew(self) -> None:
        self.beginnings += 1
        self.known.clear()
        self._held.clear()
        for _, numbers in self._turns:
            numbers.clear()
        self._last = None

    def durable(self, turns: Iterable[int]) -> None:
        """These fetches are durable, and those before them."""
        self._durable = max([self._durable, *turns])

    def to_acknowledge(self) -> list[str]:
        """Return the replies to what may be acknowledged, and take them out."""
        found, self._again = self._again, []
        while self._turns and self._turns[0][0] <= self._durable:
            _, numbers = self._turns.popleft()
            found += [self._held.pop(number)[1] for number in numbers if number in self._held]
        return found

    def replies(self) -> list[str]:
        return [reply for _, reply in self._held.values()]

    def settled(self, first: int, last: int) -> list[int]:
        """Return the numbers of this range that were durable before, and perhaps not acknowledged."""
        if self._durable < _BEFORE:
            return []
        return [number for number in self.known.between(first, last) if number not in self._held]

    def _forget(self) -> None:
        if len(self.known) > 2 * MOST_RANGES:
            self.known.forget_first(len(self.known) - MOST_RANGES, min(self._held, default=self.known.last))


_TEXTS = pa.map_(pa.string(), pa.string())

SCHEMA = pa.schema(
    [
        pa.field("value", pa.binary()),
        pa.field("subject", pa.string()),
        pa.field("sequence", pa.int64()),
        pa.field("timestamp", beside.STAMP),
        pa.field("headers", _TEXTS),
        pa.field("redelivered", pa.bool_()),
    ]
)

_NUMBER = re.compile("[0-9]{1,18}|[0-8][0-9]{18}", re.ASCII)
"""Of 63 bits: more have no column."""

_V1_TOKENS = 9
"""``$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<ns>.<pending>``; longer ones have domain and
account before the stream."""


def delivery_of(reply: str) -> StreamDelivery | None:
    """Return what the subject says that acknowledges a message; None for what no stream has delivered.

    A time that is none is 0, and null in its row.
    """
    tokens = reply.split(".")
    first = 4 if len(tokens) == _V1_TOKENS else 6
    numbers = [int(token) if _NUMBER.fullmatch(token) else None for token in tokens[first : first + 4]]
    delivered, sequence, consumer_sequence, time_ns = (*numbers, *4 * (None,))[:4]
    if delivered is None or sequence is None or consumer_sequence is None:
        beside.note(
            "NATS", "what acknowledges a message has no numbers, and the message is left out", 1, reply
        )
        return None
    if time_ns is None:
        beside.note("NATS", "a timestamp is no number, and null", 1, reply)
    return StreamDelivery(sequence, consumer_sequence, time_ns or 0, delivered, reply)


def reply_to(like: str, sequence: int, consumer_sequence: int) -> str:
    tokens = like.split(".")
    first = 4 if len(tokens) == _V1_TOKENS else 6
    tokens[first + 1 : first + 3] = str(sequence), str(consumer_sequence)
    return ".".join(tokens)


def to_rows(messages: Sequence[Any], deliveries: Sequence[StreamDelivery]) -> pa.RecordBatch:
    microseconds = [delivery.time_ns // 1_000 if delivery.time_ns else None for delivery in deliveries]
    columns = [
        pa.array(list(map(attrgetter("data"), messages)), pa.binary()),
        beside.texts(list(map(attrgetter("subject"), messages)), "NATS", "a subject"),
        pa.array(list(map(attrgetter("sequence"), deliveries)), pa.int64()),
        beside.times(microseconds, "us", "NATS", "a timestamp"),
        _headers(list(map(attrgetter("headers"), messages))),
        pa.array([delivery.delivered > 1 for delivery in deliveries], pa.bool_()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _headers(found: Sequence[Mapping[str, str] | None]) -> pa.Array:
    text = partial(beside.text, place="NATS", what="a header")
    pairs = ([(text(name), text(value)) for name, value in each.items()] if each else () for each in found)
    return pa.array(list(pairs), _TEXTS)


MAX_PENDING = 100_000

Result = TypeVar("Result")

START = {"earliest": "all", "latest": "new"}

_PROGRESS_PARTS = 3
"""So often in ``ack_wait`` the server is told that messages are worked on."""

_MOST_SETTLED = 200_000
"""Of so many numbers the server is told at once what became of them; beyond that ``ack_wait`` passes."""


@known_options
@hides_secrets(lambda source: secrets_of(source.url))
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
        client.check_nats_url(url)
        client.check_credentials(credentials)
        client.check_name(stream, "stream", "the name of a stream")
        client.check_name(consumer, "consumer", "the name of a durable consumer")
        if subject is not None:
            client.check_subject(subject, "subject", wildcards=True)
        check_choice(start, "start", START)
        check_int(max_pending, "max_pending", least=1)
        self.ack_wait_s = duration_ms(ack_wait, "ack_wait", least=1_000) / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.url, self.stream, self.consumer, self.subject = url, stream, consumer, subject
        self.credentials, self.start, self.max_pending = credentials, start, max_pending

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> NatsReader:
        known, until_ns, subjects = Sequences(), 0, ""
        for position in positions.values():
            ranges, at_ns, subjects = self.unpack(position)
            until_ns = max(until_ns, at_ns)
            for first, last in ranges:
                known.add(first, last)
        return NatsReader(self, member, SequenceWindow(known, until_ns, subjects, stored=stored))

    @property
    def place(self) -> str:
        return f"stream {self.stream!r} of {shown_url(self.url)}, consumer {self.consumer!r}"

    def pack(self, window: SequenceWindow) -> bytes:
        """Return the position behind what a window knows: one like no other."""
        state = msgpack.packb([window.known.packed(), window.until_ns, window.subjects])
        return pack_position(self._mine, state, secrets.token_bytes(8))

    def unpack(self, position: bytes) -> tuple[Sequences, int, str]:
        """Return numbers, time and subjects of a window; `ConfigError` for a position of something else."""
        state, _ = unpack_position(position, self._mine, self.place, (bytes, bytes))
        known, until_ns, subjects = msgpack.unpackb(state)
        return Sequences.unpacked(known), int(until_ns), str(subjects)

    @property
    def _mine(self) -> tuple[str, ...]:
        return ("nats", self.stream, self.consumer, self.subject or "")


@hides_secrets(lambda reader: reader._secrets)
class NatsReader(ServerReader):
    def __init__(self, source: NatsSource, member: Member, window: SequenceWindow) -> None:
        hidden, errors = secrets_of(source.url), (client.NatsAwayError, client.nats_library().errors.Error)
        super().__init__(source.place, source.patience_ms, hidden, errors, _is_away, source.max_pending)
        self._source = source
        self._subtask = member.subtask
        self._is_alone = member.parallelism == 1
        self._window = window
        self._guard = threading.Lock()
        """Of the window: the connection's thread asks it what is not acknowledged."""
        self._connection: client.NatsConnection | None = None
        self._pull: Pull | None = None
        self._last_reply: str | None = None

    def _count(self) -> int:
        """See `waiting`. What other subtasks hold is not counted."""
        pull = self._pull
        assert self._connection is not None
        assert pull is not None
        if self._last_reply is not None:
            # This is answered when all acknowledgements before it have had their effect.
            self._connection.run(self._connection.client.request(self._last_reply, timeout=client.TIMEOUT_S))
            self._last_reply = None
        info = self._connection.run(self._info())
        if self._is_alone:
            return int(info.num_pending + info.num_ack_pending - self._window.unacknowledged)
        return int(info.num_pending) + pull.received

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
            except self._errors as error:
                logger.info("%s: messages are not given back at once: %s", self._source.place, error)
        self._disconnect()

    def _connect(self) -> None:
        if self._pull is None:
            self._connection = client.NatsConnection(self._source.url, self._source.credentials, self.wake_up)
            info = self._connection.run(self._prepared())
            self._noting_beginnings(lambda: self._window.reads(_subjects_of(info.config)))
            self._settle(info)
            self._pull = Pull(self._connection, self._source.stream, self._source.consumer)
            self._pull.keep(self._source.ack_wait_s / _PROGRESS_PARTS, self._replies)

    def _disconnect(self) -> None:
        connection, self._connection, self._pull, self._last_reply = self._connection, None, None, None
        if connection is not None:
            connection.close()

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
            stream = await jetstream.stream_info(source.stream)
        except NotFoundError as error:
            raise SourceError(f"{source.place}: there is no such stream; make it before") from error
        if stream.state.last_seq < self._window.known.last:
            raise SourceChangedError(
                f"{source.place}: the stream ends at message {stream.state.last_seq}, and it was read up to "
                f"{self._window.known.last}: it was made anew, or its last messages are lost. Give the source a uid "
                "and a consumer of its own, which begin where start says"
            )
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

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        assert self._pull is not None
        messages = self._pull.take(max_rows, wait_s)
        if not messages:
            return None
        found = [(message, delivery) for message in messages if (delivery := delivery_of(message.reply))]
        messages, deliveries = [message for message, _ in found], [delivery for _, delivery in found]
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

    @property
    def _unacknowledged(self) -> int:
        return self._window.unacknowledged

    def _note_durable(self, receipts: Sequence[int]) -> None:
        with self._guard:
            self._window.durable(receipts)

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


def _is_away(error: Exception) -> bool:
    return isinstance(error, client.NatsAwayError)


def _subjects_of(config: Any) -> str:
    """Return which subjects a consumer gets, as a text like no other's."""
    several = config.filter_subjects or [config.filter_subject or ">"]
    return " ".join(sorted(several))


class NatsDataSource(QueueDataSource):
    """``format("ftlayer-nats")`` reads and writes, by the parameters of both: see `RedisDataSource`."""

    format = "ftlayer-nats"
    _queue_class = NatsSource
    _sink_class = NatsSink
