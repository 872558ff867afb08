"""A sink of a stream of NATS JetStream: rows are staged beside it, and published once."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgpack
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import Duration, duration_ms, known_options
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, hides_secrets, secrets_of, shown_url
from ftlayer.connectors import table_commits
from ftlayer.connectors.at_least_once import bodies_of, check_columns, column_of, texts_of
from ftlayer.connectors.fitting import whole_or_refused
from ftlayer.connectors.nats.client import (
    TIMEOUT_S,
    NatsAwayError,
    NatsConnection,
    check_credentials,
    check_name,
    check_nats_url,
    check_subject,
    nats_library,
)
from ftlayer.errors import ConfigError, SinkError, SinkTargetError

logger = logging.getLogger(__name__)


ID_HEADER = "Nats-Msg-Id"
"""A message with the id of one that came within the stream's ``duplicate_window`` is left out by the server."""

_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
"""Of a header."""

_OWN = "Nats-"
"""Headers that begin so tell the server something: those of a message that is copied are not for the copy."""

CHUNK_BYTES = 256 * 1024
"""Rows are staged so much at a time."""

OVERHEAD_BYTES = 1_024
"""What a message takes beside body, id and headers, at most."""


class NatsRow(NamedTuple):
    body: bytes
    id: str | None
    headers: Sequence[tuple[str, str]]

    @property
    def size(self) -> int:
        named = sum(len(name.encode()) + len(value.encode()) + 4 for name, value in self.headers)
        return len(self.body) + named + len((self.id or "").encode())


@dataclass(frozen=True)
class NatsColumns:
    """Which columns of the rows are what of a message.

    Attributes:
        value: the body, a text or bytes; None: a JSON object of all columns.
        id: what names the message; None: it is named by where it was written.
        headers: a map of texts.
    """

    value: str | None
    id: str | None
    headers: str | None

    def messages(self, batch: pa.RecordBatch, most_bytes: int, first: int = 0) -> list[NatsRow]:
        """Return rows as messages.

        Raises `ConfigError` for a column that is missing or of another type, and `RowsRejected`, which counts rows from
        ``first``, for rows that are larger than ``most_bytes``, or have headers that NATS does not take.
        """
        ids = texts_of(batch, self.id, "id_column")
        bodies, headers = bodies_of(batch, self.value, "value"), self._headers(batch)
        rows = [
            NatsRow(body, (name or "").strip() or None, each)
            for body, name, each in zip(bodies, ids, headers, strict=True)
        ]
        refused = {first + place: why for place, row in enumerate(rows) if (why := _refusal(row, most_bytes))}
        if refused:
            raise RowsRejected(refused)
        return rows

    def _headers(self, batch: pa.RecordBatch) -> Sequence[Sequence[tuple[str, str]]]:
        if self.headers is None:
            return [()] * batch.num_rows
        column = column_of(batch, self.headers, "headers")
        texts = pa.map_(pa.string(), pa.string())
        try:
            found = column.cast(texts).to_pylist()
        except pa.ArrowException as error:
            raise ConfigError(
                f"headers: column {self.headers!r} is {column.type}, expected a map of texts"
            ) from error
        return [
            [(name, value) for name, value in each or () if value is not None and not name.startswith(_OWN)]
            for each in found
        ]


def _refusal(row: NatsRow, most_bytes: int) -> str | None:
    if row.size > most_bytes - OVERHEAD_BYTES:
        return f"it takes {row.size:,} bytes as a message, and the stream takes {most_bytes:,}"
    for name, value in (*row.headers, (ID_HEADER, row.id or "")):
        if not _NAME.fullmatch(name) or {"\r", "\n"} & set(value):
            return f"its header {name!r} has a name or a value that NATS does not take"
    return None


def to_chunks(rows: Iterable[NatsRow]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for row in rows:
        packed = msgpack.packb([row.body, row.id, [list(pair) for pair in row.headers]])
        if chunk and size + len(packed) > CHUNK_BYTES:
            yield b"".join(chunk)
            chunk, size = [], 0
        chunk.append(packed)
        size += len(packed)
    if chunk:
        yield b"".join(chunk)


def of_chunk(chunk: bytes) -> Iterator[NatsRow]:
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    unpacker.feed(chunk)
    for body, name, headers in unpacker:
        yield NatsRow(body, name, [(key, value) for key, value in headers])


# What a NATS sink does in the server: staged rows, notes of commits, and messages that are published.
#
# Beside a stream ``ORDERS`` there are two others:
#
# | stream | subjects | what |
# | --- | --- | --- |
# | ``ORDERS_ftlayer_rows`` | ``ORDERS_ftlayer.rows.<message>`` | chunks of rows that are not committed |
# | ``ORDERS_ftlayer_commits`` | ``ORDERS_ftlayer.commits.<id>`` | a `Note` of each commit that is remembered |


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

    async def make(self, remember_s: float) -> int:
        """Make the streams that are missing; return how many bytes a message may have.

        Raises `SinkError` if the target is missing, or has not this subject.
        """
        from nats.js.api import StorageType

        target = (await self._target()).config
        if not any(_takes(pattern, self.subject) for pattern in target.subjects or ()):
            raise SinkTargetError(
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
            raise SinkTargetError(
                f"there is no stream {self.stream!r}; make it before the job starts"
            ) from error

    @property
    def _api(self) -> Any:
        return self.client.jetstream(timeout=TIMEOUT_S)

    async def stage(self, message: str, first: int, chunks: Sequence[bytes]) -> None:
        """Store chunks of a message's rows, numbered from ``first``; those that are there change nothing."""
        subject = f"{self.base}.rows.{message}"
        numbered = [
            (subject, chunk, {ID_HEADER: f"{message}-{first + place}"}) for place, chunk in enumerate(chunks)
        ]
        await self._publish(numbered)

    async def staged(self, message: str) -> list[NatsRow]:
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
        await self._publish([(self._subject_of(commit), _as_json(replace(note, done=True)), {})])

    def _subject_of(self, commit: str) -> str:
        # Ids of queries have characters that a subject may not have.
        return f"{self.base}.commits.{hashlib.sha256(commit.encode()).hexdigest()[:32]}"

    async def publish(self, named: Sequence[tuple[str, NatsRow]]) -> None:
        """Publish rows, in order, by their names where they have no ids. The server leaves out ids that it knows."""
        await self._publish(
            (self.subject, row.body, {**dict(row.headers), ID_HEADER: row.id or name}) for name, row in named
        )

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
    wanted, tokens = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted = wanted[:-1]
        if len(tokens) <= len(wanted):
            return False
        tokens = tokens[: len(wanted)]
    return len(wanted) == len(tokens) and all(
        want in ("*", token) for want, token in zip(wanted, tokens, strict=True)
    )


TRIES = 10
"""How often something is tried whose connection is lost; each has its effect once."""
TRY_AGAIN_S = 0.3

Result = TypeVar("Result")


@dataclass(frozen=True)
class NatsMessage(WriterCommitMessage):
    """The rows that one `NatsSink.write` has staged under ``id``. ``query``: see `streaming_query`."""

    id: str
    rows: int
    query: str


@known_options
@hides_secrets(lambda sink: secrets_of(sink._url))
class NatsSink(table_commits.CleaningSink[NatsMessage]):
    """Publishes each row as a message of JetStream.

    ``write`` stages rows in a stream beside the target; the commit publishes them, each under an id of its own
    (``Nats-Msg-Id``), and notes that it did. A commit that was called before changes nothing. One that was
    interrupted looks which of its messages are in the stream, and publishes the others; the messages of a commit are
    seen one by one. An abort leaves alone what is committed.

    Exactly once is as much as the server keeps of what it has answered, and see ``docs/connectors/nats.md`` for streams
    whose messages are removed while a commit is interrupted.
    """

    _kind = NatsMessage

    def __init__(
        self,
        url: str,
        stream: str,
        subject: str,
        *,
        value: str | None = None,
        headers: str | None = None,
        credentials: str | None = None,
        id_column: str | None = None,
        name: str = "",
        remember: Duration = "7d",
    ) -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            url: ``nats://user:password@host:4222``, ``tls://…``, several of a cluster with commas between them; slots
                and driver connect.
            stream: name of the stream, which is there.
            subject: the subject of the messages, one of the stream's.
            value: column that is the message, a text or bytes. None: a JSON object of all columns.
            headers: column with a map of texts, the headers.
            credentials: path of a ``.creds`` file (a user's JWT and seed), there where slots and driver run.
            id_column: column whose text is ``Nats-Msg-Id``: the server leaves out a row whose id it has had within the
                stream's ``duplicate_window``. None, or a null: an id is made for each row that is written.
            name: of the sink; jobs that write to one stream have different ones, and a job keeps its own: what was
                committed is known by it.
            remember: for how long commits are known, 7 days. A checkpoint that is restored later, and has rows that
                were committed, fails with an `UncommittableError`.

        Raises `ConfigError` if nats-py is missing, and for an option that will not do.
        """
        super().__init__()
        check_nats_url(url)
        check_credentials(credentials)
        check_name(stream, "stream", "the name of a stream")
        check_subject(subject, "subject", wildcards=False)
        check_columns(value=value, headers=headers, id_column=id_column)
        if name != "":
            check_name(name, "name", "a name")
        self._remember_s = duration_ms(remember, "remember", least=1_000) / 1_000
        self._url, self._stream, self._subject, self._name = url, stream, subject, name
        self._credentials = credentials
        self._most_bytes: int | None = None
        """Of a message, once the streams are there."""
        self._columns = NatsColumns(value, id_column, headers)
        self._base = f"{stream}_ftlayer" + (f"_{name}" if name else "")
        self._place = f"stream {stream!r} of {shown_url(url)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> NatsMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = table_commits.streaming_query()
        message = f"{self._execution}-{secrets.token_hex(8)}"
        batches = (batch for batch in iterator if batch.num_rows)
        first = next(batches, None)
        if first is None:
            return NatsMessage(message, 0, query)
        with self._session("staged") as session:
            if self._most_bytes is None:
                self._most_bytes = session.do(lambda streams: streams.make(self._remember_s))
            try:
                rows = self._stage(session, message, self._most_bytes, chain([first], batches))
            except BaseException:
                session.do(lambda streams: streams.drop([message]))
                raise
        return NatsMessage(message, rows, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Publish the staged rows, each once.

        Raises `UncommittableError` if rows are gone that were never committed, and `SinkError` if the server cannot be
        reached (it is tried some times); then some may be published: call it again.
        """
        found = table_commits.by_query(messages, NatsMessage)
        if not found:
            return
        try:
            with self._session("committed") as session:
                for commit_id, written in table_commits.commits_of(found, batch_id):
                    ids, rows = [one.id for one in written], sum(one.rows for one in written)
                    session.do(partial(self._commit, commit_id, ids, rows))
        except SinkTargetError as error:
            raise table_commits.uncommittable(
                str(error), found, batch_id, f" in {self._base}_rows; then start again"
            ) from error

    def _abort(self, written: list[NatsMessage], batch_id: int) -> None:
        with self._session("aborted") as session:
            session.do(lambda streams: streams.drop(one.id for one in written))

    def _clean(self, keep: list[NatsMessage], older_than_ms: int) -> list[str]:
        kept = {one.id for one in keep}
        with self._session("cleaned") as session:
            session.do(lambda streams: streams.make(self._remember_s))
            found = session.do(lambda streams: streams.messages(older_than_ms / 1_000))
            dead = [each for each in found if each not in kept and not each.startswith(f"{self._execution}-")]
            session.do(lambda streams: streams.drop(dead))
        return dead

    def _stage(
        self, session: _Session, message: str, most_bytes: int, batches: Iterable[pa.RecordBatch]
    ) -> int:
        rows = chunks = 0
        for batch in batches:

            def messages(start: int, end: int) -> list[NatsRow]:
                return self._columns.messages(batch.slice(start, end - start), most_bytes, rows + start)  # noqa: B023

            packed = list(to_chunks(whole_or_refused(batch.num_rows, rows, messages)))
            session.do(partial(NatsStreams.stage, message=message, first=chunks, chunks=packed))
            rows, chunks = rows + batch.num_rows, chunks + len(packed)
        return rows

    async def _commit(self, commit_id: str, ids: list[str], rows: int, streams: NatsStreams) -> None:
        note, is_new = await streams.note(commit_id), False
        if note is None:
            await self._rows_of(streams, Note(ids, rows, 0))
            note, is_new = await streams.begin(commit_id, ids, rows), True
        if note is None:
            note, is_new = await streams.note(commit_id), False
            assert note is not None
        if not note.done:
            # A batch that is run again has other messages of the same rows: those of the first time are published.
            named = await self._rows_of(streams, note)
            if not is_new:
                names = {row.id or name for name, row in named}
                there = await streams.published(note.behind, names)
                named = [(name, row) for name, row in named if (row.id or name) not in there]
            await streams.publish(named)
            await streams.end(commit_id, note)
        await streams.drop({*note.messages, *ids})

    async def _rows_of(self, streams: NatsStreams, note: Note) -> list[tuple[str, NatsRow]]:
        """Return the staged rows of a commit, with names that are the same each time."""
        named = [
            (f"{message}-{place}", row)
            for message in note.messages
            for place, row in enumerate(await streams.staged(message))
        ]
        if len(named) != note.rows:
            raise self._lost(note.rows, len(named), ", were they committed longer ago than remember says")
        return named

    def _session(self, doing: str) -> _Session:
        return _Session(
            partial(NatsConnection, self._url, self._credentials),
            self._place,
            partial(NatsStreams, self._stream, self._subject, self._base),
            doing,
        )


class _Session:
    """A connection for one call of a sink's, made again if it is lost."""

    def __init__(
        self,
        connect: Callable[[], NatsConnection],
        place: str,
        streams: Callable[[Any], NatsStreams],
        doing: str,
    ) -> None:
        """``streams`` returns those of a client; ``doing`` is what errors say of rows."""
        self._connect, self._place, self._streams, self._doing = connect, place, streams, doing
        self._connection: NatsConnection | None = None

    def __enter__(self) -> _Session:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def do(self, work: Callable[[NatsStreams], Coroutine[Any, Any, Result]]) -> Result:
        """Do this, again if the connection is lost: it has its effect once. Raises `SinkError`."""
        for left in reversed(range(TRIES)):
            try:
                connection = self._connected()
                # Whole commits: each answer in them is waited for by itself.
                return connection.run(work(self._streams(connection.client)), None)
            except NatsAwayError as error:
                self._close()
                said = f"{self._place}: rows cannot be {self._doing}: {error}"
                if not left:
                    raise SinkError(said) from error
                logger.warning("%s; it is tried again", said)
                time.sleep(TRY_AGAIN_S)
            except nats_library().errors.Error as error:
                raise SinkError(f"{self._place}: rows cannot be {self._doing}: {described(error)}") from error
        raise AssertionError

    def _connected(self) -> NatsConnection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
