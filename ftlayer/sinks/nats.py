"""A sink of a stream of NATS JetStream: rows are staged beside it, and published once."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage

from ftlayer.checks import Duration, check_text, duration_ms
from ftlayer.clients.nats import (
    NatsAwayError,
    NatsConnection,
    check_credentials,
    check_name,
    check_nats_url,
    check_subject,
    nats_library,
    place_of,
)
from ftlayer.errors import SinkError, UncommittableError
from ftlayer.sinks.nats_rows import NatsColumns, NatsRow, to_chunks
from ftlayer.sinks.nats_streams import NatsStreams, Note
from ftlayer.sinks.origin import by_query, streaming_query

logger = logging.getLogger(__name__)

DAY_S = 86_400.0
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


class NatsSink(DataSourceStreamArrowWriter):
    """Publishes each row as a message of JetStream.

    ``write`` stages rows in a stream beside the target; the commit publishes them, each under an id of its own
    (``Nats-Msg-Id``), and notes that it did. A commit that was called before changes nothing. One that was
    interrupted looks which of its messages are in the stream, and publishes the others; the messages of a commit are
    seen one by one. An abort leaves alone what is committed.

    Exactly once is as much as the server keeps of what it has answered, and see ``docs/connectors/nats.md`` for streams
    whose messages are removed while a commit is interrupted.
    """

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
        remember: Duration = 7 * 86_400_000,
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
        check_nats_url(url)
        check_credentials(credentials)
        check_name(stream, "stream", "the name of a stream")
        check_subject(subject, "subject", wildcards=False)
        for column, option in ((value, "value"), (headers, "headers"), (id_column, "id_column")):
            if column is not None:
                check_text(column, option, "the name of a column")
        if name != "":
            check_name(name, "name", "a name")
        self._remember_s = duration_ms(remember, "remember", least=1_000) / 1_000
        self._url, self._stream, self._subject, self._name = url, stream, subject, name
        self._credentials = credentials
        self._most_bytes: int | None = None
        """Of a message, once the streams are there."""
        self._columns = NatsColumns(value, id_column, headers)
        self._base = f"{stream}_ftlayer" + (f"_{name}" if name else "")
        self._execution = secrets.token_hex(8)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> NatsMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = streaming_query()
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
        found = by_query(messages, NatsMessage, "NatsSink")
        if not found:
            return
        with self._session("committed") as session:
            for query, written in found.items():
                if query:
                    self._commit(session, f"{query}/{batch_id}", written)
                    continue
                for message in written:
                    self._commit(session, message.id, [message])

    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Remove the staged rows of messages; what is committed stays."""
        ids = [one.id for written in by_query(messages, NatsMessage, "NatsSink").values() for one in written]
        if ids:
            with self._session("aborted") as session:
                session.do(lambda streams: streams.drop(ids))

    def clean(
        self, keep: Iterable[WriterCommitMessage | None] = (), *, older_than_s: float = DAY_S
    ) -> list[str]:
        """Remove rows that writers have staged that died before they could abort; returns their messages' ids.

        That is: what other executions than this object's have staged under the sink's name, longer ago than
        ``older_than_s``, and what ``keep`` (messages of checkpoints that may still be restored) does not name.
        Checkpoints and savepoints that hold other rows cannot be restored any more, if their commit had not come.
        """
        kept = {one.id for written in by_query(keep, NatsMessage, "NatsSink").values() for one in written}
        with self._session("cleaned") as session:
            session.do(lambda streams: streams.make(self._remember_s))
            found = session.do(lambda streams: streams.messages(older_than_s))
            dead = [each for each in found if each not in kept and not each.startswith(f"{self._execution}-")]
            session.do(lambda streams: streams.drop(dead))
        return dead

    # ------------------------------------------------------------ staging and committing

    def _stage(
        self, session: _Session, message: str, most_bytes: int, batches: Iterable[pa.RecordBatch]
    ) -> int:
        """Stage the rows of batches; return how many there are."""
        rows = chunks = 0
        for batch in batches:
            packed = list(to_chunks(self._columns.messages(batch, most_bytes, rows)))
            session.do(partial(_staged, message, chunks, packed))
            rows, chunks = rows + batch.num_rows, chunks + len(packed)
        return rows

    def _commit(self, session: _Session, commit_id: str, written: list[NatsMessage]) -> None:
        ids, rows = [one.id for one in written], sum(one.rows for one in written)
        session.do(lambda streams: self._committed(streams, commit_id, ids, rows))

    async def _committed(self, streams: NatsStreams, commit_id: str, ids: list[str], rows: int) -> None:
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
            raise UncommittableError(
                f"{self._place}: {note.rows:,} rows were staged and {len(named):,} are there, which were not "
                "committed: did something else remove them (NatsSink.clean with a checkpoint that was kept, say), were "
                "they committed longer ago than remember says, or had the sink another name than "
                f"{self._name!r} then?"
            )
        return named

    def _session(self, doing: str) -> _Session:
        return _Session(
            partial(NatsConnection, self._url, self._credentials),
            self._place,
            partial(NatsStreams, self._stream, self._subject, self._base),
            doing,
        )

    @property
    def _place(self) -> str:
        return f"stream {self._stream!r} of {place_of(self._url)}"


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

    def do(self, work: Callable[[NatsStreams], Awaitable[Result]]) -> Result:
        """Do this, again if the connection is lost: it has its effect once. Raises `SinkError`."""
        for left in reversed(range(TRIES)):
            try:
                connection = self._connected()
                # Whole commits: each answer in them is waited for by itself.
                return connection.run(_awaited(work, self._streams(connection.client)), None)
            except NatsAwayError as error:
                self._close()
                said = f"{self._place}: rows cannot be {self._doing}: {error}"
                if not left:
                    raise SinkError(said) from error
                logger.warning("%s; it is tried again", said)
                time.sleep(TRY_AGAIN_S)
            except nats_library().errors.Error as error:
                raise SinkError(
                    f"{self._place}: rows cannot be {self._doing}: {type(error).__name__}: {error}"
                ) from error
        raise AssertionError

    def _connected(self) -> NatsConnection:
        if self._connection is None:
            self._connection = self._connect()
        return self._connection

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


async def _staged(message: str, first: int, chunks: list[bytes], streams: NatsStreams) -> None:
    await streams.stage(message, first, chunks)


async def _awaited(work: Callable[[NatsStreams], Awaitable[Result]], streams: NatsStreams) -> Result:
    return await work(streams)
