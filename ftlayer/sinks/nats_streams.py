"""What a NATS sink does in the server: staged rows, notes of commits, and messages that are published.

Beside a stream ``ORDERS`` there are two others:

| stream | subjects | what |
| --- | --- | --- |
| ``ORDERS_ftlayer_rows`` | ``ORDERS_ftlayer.rows.<message>`` | chunks of rows that are not committed |
| ``ORDERS_ftlayer_commits`` | ``ORDERS_ftlayer.commits.<id>`` | a `Note` of each commit that is remembered |
"""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ftlayer.clients.nats import TIMEOUT_S, NatsAwayError, nats_library
from ftlayer.errors import SinkError
from ftlayer.sinks.nats_rows import ID_HEADER, NatsRow, headers_of, of_chunk

UNANSWERED = 1_000
"""So many messages are published before the server has answered the first of them."""

_NOBODY_LISTENS = "503"
_ENDED = "404"
_ANOTHER_WAS_FIRST = 10_071
"""The error code for a message that is expected to be the first of its subject, and is not."""


@dataclass(frozen=True)
class Note:
    """What is known of a commit.

    Attributes:
        messages: ids under which its rows are staged, in the order in which they are published.
        rows: how many they are.
        behind: the last number of the target when it began.
        done: whether all rows are published.
    """

    messages: list[str]
    rows: int
    behind: int
    done: bool = False


@dataclass(frozen=True)
class NatsStreams:
    """The target of a sink, and the streams beside it. Everything here runs in the loop of ``client``."""

    stream: str
    subject: str
    base: str
    client: Any

    # ------------------------------------------------------------ streams

    async def make(self, remember_s: float) -> int:
        """Make the streams that are missing; return how many bytes a message may have.

        Raises `SinkError` if the target is missing, or has not this subject.
        """
        from nats.js.api import StorageType

        target = (await self._target()).config
        if not any(_takes(pattern, self.subject) for pattern in target.subjects or ()):
            raise SinkError(
                f"stream {self.stream!r} has the subjects {target.subjects}, and not {self.subject!r}"
            )
        for kind, age_s in (("rows", 0.0), ("commits", remember_s)):
            name = f"{self.base}_{kind}"
            config = {
                "subjects": [f"{self.base}.{kind}.>"],
                "max_age": age_s,
                "storage": StorageType.FILE,
                "num_replicas": target.num_replicas,
            }
            try:
                there = (await self._api.stream_info(name)).config
            except nats_library().js.errors.NotFoundError:
                await self._api.add_stream(name=name, **config)
                continue
            if there.max_age != age_s:
                await self._api.update_stream(there.evolve(max_age=age_s))
        longest = int(self.client.max_payload)
        return min(longest, target.max_msg_size) if (target.max_msg_size or -1) > 0 else longest

    async def _target(self) -> Any:
        try:
            return await self._api.stream_info(self.stream)
        except nats_library().js.errors.NotFoundError as error:
            raise SinkError(f"there is no stream {self.stream!r}; make it before the job starts") from error

    @property
    def _api(self) -> Any:
        return self.client.jetstream(timeout=TIMEOUT_S)

    # ------------------------------------------------------------ staged rows

    async def stage(self, message: str, first: int, chunks: Sequence[bytes]) -> None:
        """Store chunks of a message's rows, numbered from ``first``; those that are there change nothing."""
        subject = f"{self.base}.rows.{message}"
        numbered = [
            (subject, chunk, {ID_HEADER: f"{message}-{first + place}"}) for place, chunk in enumerate(chunks)
        ]
        await self._publish(numbered)

    async def staged(self, message: str) -> list[NatsRow]:
        """Return a message's rows; none if they are gone."""
        rows: list[NatsRow] = []
        number = 1
        while True:
            try:
                chunk = await self._api.get_msg(
                    f"{self.base}_rows", seq=number, subject=f"{self.base}.rows.{message}", next=True
                )
            except nats_library().js.errors.NotFoundError:
                return rows
            rows += of_chunk(chunk.data)
            number = chunk.seq + 1

    async def drop(self, messages: Iterable[str]) -> None:
        """Remove messages' rows; again does no harm."""
        for message in messages:
            await self._api.purge_stream(f"{self.base}_rows", subject=f"{self.base}.rows.{message}")

    async def messages(self, older_than_s: float) -> list[str]:
        """Return the messages whose rows were staged so long ago."""
        prefix = f"{self.base}.rows."
        state = (await self._api.stream_info(f"{self.base}_rows", subjects_filter=f"{prefix}>")).state
        until = dt.datetime.now(dt.UTC) - dt.timedelta(seconds=older_than_s)
        found = []
        for subject in state.subjects or ():
            try:
                last = await self._api.get_msg(f"{self.base}_rows", subject=subject)
            except nats_library().js.errors.NotFoundError:
                continue
            if last.time <= until:
                found.append(subject.removeprefix(prefix))
        return found

    # ------------------------------------------------------------ notes of commits

    async def note(self, commit: str) -> Note | None:
        """Return what is known of a commit; None: it was never begun, or is forgotten."""
        try:
            found = await self._api.get_msg(f"{self.base}_commits", subject=self._subject_of(commit))
        except nats_library().js.errors.NotFoundError:
            return None
        return Note(**json.loads(found.data))

    async def begin(self, commit: str, messages: list[str], rows: int) -> Note | None:
        """Note that a commit begins; None if another has done so meanwhile."""
        behind = (await self._target()).state.last_seq
        note = Note(messages, rows, behind)
        first = {"Nats-Expected-Last-Subject-Sequence": "0"}
        try:
            await self._publish([(self._subject_of(commit), _as_json(note), first)])
        except nats_library().js.errors.APIError as error:
            if error.err_code != _ANOTHER_WAS_FIRST:
                raise
            return None
        return note

    async def end(self, commit: str, note: Note) -> None:
        """Note that all rows of a commit are published."""
        await self._publish([(self._subject_of(commit), _as_json(replace(note, done=True)), {})])

    def _subject_of(self, commit: str) -> str:
        # Ids of queries have characters that a subject may not have.
        return f"{self.base}.commits.{hashlib.sha256(commit.encode()).hexdigest()[:32]}"

    # ------------------------------------------------------------ the target

    async def publish(self, named: Sequence[tuple[str, NatsRow]]) -> None:
        """Publish rows, in order. Those whose id the server knows it leaves out."""
        await self._publish((self.subject, row.body, headers_of(row, name)) for name, row in named)

    async def published(self, behind: int, names: set[str]) -> set[str]:
        """Return which of these ids are in the target behind a number, as far as its messages are there still."""
        from nats.js.api import RetentionPolicy

        target = await self._target()
        last = target.state.last_seq
        if last <= behind or target.config.retention == RetentionPolicy.WORK_QUEUE:
            # A work queue has one reader; the server's own memory of ids has to do.
            return set()
        consumer = await self._reading(behind + 1)
        try:
            return names & await self._ids(consumer, last)
        finally:
            await self._api.delete_consumer(self.stream, consumer)

    async def _reading(self, first: int) -> str:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=first,
            filter_subject=self.subject,
            ack_policy=AckPolicy.NONE,
            headers_only=True,
            mem_storage=True,
            inactive_threshold=3 * TIMEOUT_S,
        )
        info = await self._api.add_consumer(self.stream, config)
        return str(info.name)

    async def _ids(self, consumer: str, last: int) -> set[str]:
        """Return the ids of all messages that a consumer gets up to a number."""
        found: set[str] = set()
        ended = asyncio.Event()
        left = 0

        async def receive(message: Any) -> None:
            nonlocal left
            headers = message.headers or {}
            if message.reply:
                found.add(headers.get(ID_HEADER, ""))
                left -= 1
                if message.metadata.sequence.stream >= last:
                    left = -1
            else:
                # 408 ends a request that has got a part; what was published meanwhile is of no interest.
                left = -1 if headers.get("Status") in (_ENDED, "408") else 0
            if left <= 0:
                ended.set()

        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(
            inbox, cb=receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            while left >= 0:
                left = UNANSWERED
                ended.clear()
                request = json.dumps({"batch": UNANSWERED, "no_wait": True}).encode()
                await self.client.publish(
                    f"$JS.API.CONSUMER.MSG.NEXT.{self.stream}.{consumer}", request, inbox
                )
                await asyncio.wait_for(ended.wait(), TIMEOUT_S)
        finally:
            await subscription.unsubscribe()
        return found

    async def _publish(self, messages: Iterable[tuple[str, bytes, Mapping[str, str]]]) -> None:
        """Publish messages, and wait until the server has stored all. Raises the first error that it answers."""
        answers = _Answers()
        inbox = self.client.new_inbox()
        subscription = await self.client.subscribe(
            inbox, cb=answers.receive, pending_msgs_limit=0, pending_bytes_limit=0
        )
        try:
            for subject, body, headers in messages:
                await answers.room()
                await self.client.publish(subject, body, inbox, dict(headers) or None)
                answers.expected += 1
            await answers.all()
        finally:
            if not self.client.is_closed:
                await subscription.unsubscribe()


class _Answers:
    """How many of the messages that were published are stored."""

    def __init__(self) -> None:
        self.expected = 0
        self._stored = 0
        self._changed = asyncio.Event()
        self._error: Exception | None = None

    async def receive(self, message: Any) -> None:
        self._stored += 1
        if (message.headers or {}).get("Status") == _NOBODY_LISTENS:
            self._error = self._error or NatsAwayError(f"no stream takes {message.subject!r}")
        elif b'"error"' in message.data and "error" in (answer := json.loads(message.data)):
            self._error = self._error or nats_library().js.errors.APIError.from_error(answer["error"])
        self._changed.set()

    async def room(self) -> None:
        """Wait until another message may be published: until there is room for many, which are sent together."""
        if self.expected - self._stored >= UNANSWERED:
            await self._until(UNANSWERED // 2)

    async def all(self) -> None:
        """Wait until all are stored."""
        await self._until(0)

    async def _until(self, unanswered: int) -> None:
        while self._error is None and self.expected - self._stored > unanswered:
            self._changed.clear()
            # Each answer begins it anew: a large commit may take longer.
            await asyncio.wait_for(self._changed.wait(), TIMEOUT_S)
        if self._error is not None:
            raise self._error


def _as_json(note: Note) -> bytes:
    return json.dumps(asdict(note)).encode()


def _takes(pattern: str, subject: str) -> bool:
    """Whether a stream's subject, which may have wildcards, takes messages of this one."""
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )
