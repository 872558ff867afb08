"""Streams of Redis: an exactly-once sink, by a script that moves rows and notes the commit, and a source."""

from __future__ import annotations

import contextlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import msgpack
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import Duration, check_int, check_text, check_texts, duration_ms, known_options
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, hides_secrets, secrets_of, shown_url
from ftlayer.connectors import table_commits
from ftlayer.connectors.connections import ServerReader, client_library
from ftlayer.connectors.fitting import is_any, whole_or_refused
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import ConfigError, SinkError, SinkTargetError, SourceChangedError, UncommittableError
from ftlayer.records import beside
from ftlayer.topology.operators import Fetched, Member, Queue

logger = logging.getLogger(__name__)


TIMEOUT_S = 10.0
"""A server that says nothing for this long is taken for away."""


def redis_library() -> Any:
    return client_library("Redis", "redis-py", "redis", "redis")


def check_redis_url(url: object) -> None:
    check_text(url, "url", "a URL like redis://host:6379/0")
    with contextlib.suppress(ValueError):  # What it says quotes what it could not read.
        redis_library().connection.parse_url(url)
        return
    raise ConfigError(
        "url: expected redis://user:password@host:6379/0, rediss://… with TLS, or unix://path, with options that "
        f"redis-py knows, got {shown_url(str(url))}"
    )


def connect(url: str) -> Any:
    """Return a client of a server, which is connected to when it is used. Replies come as bytes, as they are sent.

    It tries nothing again: whether that is safe depends on the command.
    """
    redis = redis_library()
    client = redis.Redis.from_url(
        url,
        protocol=2,
        decode_responses=False,
        socket_timeout=TIMEOUT_S,
        socket_connect_timeout=TIMEOUT_S,
        retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    )
    # redis-py would make tuples and dicts of each entry of a stream.
    for command in ("XREADGROUP", "XPENDING"):
        client.set_response_callback(command, lambda reply, **_: reply)
    return client


def is_away(error: Exception) -> bool:
    redis = redis_library()
    away = (redis.ConnectionError, redis.TimeoutError)
    # A password that is refused will be refused again.
    lasting = (redis.exceptions.AuthenticationError, redis.exceptions.AuthorizationError)
    return isinstance(error, away) and not isinstance(error, lasting)


Pairs = list[bytes]
"""Name, value, name, value, …"""

MAX_FIELDS = 1_000
"""Of an entry: a script hands all to one command, and Lua has room for some thousand arguments."""


def to_entries(batch: pa.RecordBatch, first: int = 0) -> list[bytes]:
    """Return each row as one packed array of names and values.

    A text or bytes are a field as they are, numbers and times as Arrow writes them, a null is none; the entries of a
    map are fields of their own. Raises `SinkError` for a column that has no text (a list, a struct). Raises
    `RowsRejected`, which counts rows from ``first``, for rows without any field, of which Redis has no entries, and for
    those with more than `MAX_FIELDS`.
    """
    columns = [
        _pairs_of(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    entries = [[each for pairs in row for each in pairs] for row in zip(*columns, strict=True)]
    refused = {
        first + place: f"it has {len(row) // 2} fields that are not null, an entry has 1 to {MAX_FIELDS}"
        for place, row in enumerate(entries)
        if not 0 < len(row) <= 2 * MAX_FIELDS
    }
    if refused:
        raise RowsRejected(refused)
    # Lua's reader knows texts only.
    pack = msgpack.Packer(use_bin_type=False).pack
    return [pack(entry) for entry in entries]


def _pairs_of(name: str, column: pa.Array) -> list[Pairs]:
    if pa.types.is_map(column.type):
        values = column.to_pylist()
        pairs = ([each for pair in row or () for each in pair if pair[1] is not None] for row in values)
        return [[each if isinstance(each, bytes) else str(each).encode() for each in row] for row in pairs]
    named = name.encode()
    return [[] if value is None else [named, value] for value in _as_bytes(name, column)]


def _as_bytes(name: str, column: pa.Array) -> Sequence[bytes | None]:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    try:
        plain = column if is_any(column.type, "binary", "large_binary") else column.cast(pa.string())
        values: list[bytes | None] = plain.cast(pa.binary()).to_pylist()
    except pa.ArrowInvalid:  # Of a value: the others have one.
        raise
    except pa.ArrowException as error:
        raise SinkTargetError(
            f"column {name!r} is {column.type}, which has no text in Redis: make it one in a function before ({error})"
        ) from error
    return values


PUSHED_ROWS = 1_000
"""Rows are staged so many a command."""

_CLOSED = re.compile(r"\b(WRONGTYPE|NOPERM|NoPermissionError|can't run this command)\b")

Result = TypeVar("Result")

# KEYS: stream, commits, staged, then the list of each message. ARGV: commit id, rows, milliseconds that commits are
# remembered, length of the stream or 0, then each message. Returns rows that are there, -1: it was committed before.
_COMMIT = """
local ids, rows = {unpack(ARGV, 5)}, 0
local lists = {unpack(KEYS, 4)}
local now = redis.call('TIME')
local now_ms = now[1] * 1000 + math.floor(now[2] / 1000)
local known = redis.call('ZSCORE', KEYS[2], ARGV[1])
if not known then
  for _, list in ipairs(lists) do rows = rows + redis.call('LLEN', list) end
  if rows ~= tonumber(ARGV[2]) then return rows end
  for _, list in ipairs(lists) do
    for _, entry in ipairs(redis.call('LRANGE', list, 0, -1)) do
      if ARGV[4] == '0' then
        redis.call('XADD', KEYS[1], '*', unpack(cmsgpack.unpack(entry)))
      else
        redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[4], '*', unpack(cmsgpack.unpack(entry)))
      end
    end
  end
  redis.call('ZADD', KEYS[2], now_ms, ARGV[1])
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', now_ms - ARGV[3])
end
redis.call('DEL', unpack(lists))
redis.call('ZREM', KEYS[3], unpack(ids))
return known and -1 or rows
"""


@dataclass(frozen=True)
class RedisMessage(WriterCommitMessage):
    """The rows that one `RedisSink.write` has staged under ``id``. ``query``: see `streaming_query`."""

    id: str
    rows: int
    query: str


@known_options
@hides_secrets(lambda sink: secrets_of(sink._url))
class RedisSink(table_commits.CleaningSink[RedisMessage]):
    """Appends rows to a stream of Redis, each an entry with a field for each column.

    ``write`` puts them into a list beside the stream (``<stream>:ftlayer:…``); the commit moves a message's rows into
    the stream and notes that, in one script: all of them or none. A commit that was called before changes nothing; an
    abort leaves alone what is committed. While a script runs Redis does nothing else: 0.3 s for 100,000 rows, or more
    on a busy machine.

    A row whose columns are all null is refused by `RowsRejected`. Exactly once is as much as the server keeps of what
    it has answered (``appendfsync always``). Redis Cluster is not supported.
    """

    _kind = RedisMessage
    _connections = ("_client",)

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        name: str = "",
        max_length: int | None = None,
        remember: Duration = "7d",
    ) -> None:
        """Make the sink; nothing is connected to before the first rows come.

        Args:
            url: ``redis://user:password@host:6379/0``, ``rediss://…`` with TLS, ``unix:///path``; slots and driver
                connect.
            stream: key of the stream; it is made by its first entry.
            name: of the sink; "": the stream's. Jobs that write to one stream have different ones, and a job keeps
                its own: what was committed is known by it.
            max_length: the stream is kept about this long: older entries are trimmed. None: it is not.
            remember: for how long commits are known, 7 days. A checkpoint that is restored later, and has rows that
                were committed, fails with an `UncommittableError`.

        Raises `ConfigError` if redis-py is missing, and for an option that will not do.
        """
        super().__init__()
        check_redis_url(url)
        check_text(stream, "stream", "the key of a stream")
        if name != "":
            check_text(name, "name")
        if max_length is not None:
            check_int(max_length, "max_length", least=1)
        self._remember_ms = duration_ms(remember, "remember")
        self._url, self._stream, self._max_length = url, stream, max_length
        self._name = name or stream
        self._commits = f"{stream}:ftlayer:commits:{self._name}"
        self._staged = f"{stream}:ftlayer:staged:{self._name}"
        self._place = f"stream {stream!r} of {shown_url(url)}"
        self._client: Any = None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> RedisMessage:
        """Stage rows. Raises `SinkError` and `RowsRejected`; what was staged is removed then."""
        query = table_commits.streaming_query()
        message = f"{self._execution}-{secrets.token_hex(8)}"
        rows = 0
        try:
            for batch in iterator:
                if batch.num_rows:
                    entries = whole_or_refused(
                        batch.num_rows,
                        rows,
                        lambda start, end: to_entries(batch.slice(start, end - start), rows + start),  # noqa: B023
                    )
                    self._stage(message, entries)
                    rows += len(entries)
        except BaseException:
            if rows:
                self._remove([message])
            raise
        return RedisMessage(message, rows, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Move the staged rows into the stream, all rows of a message (in a query: of the batch) or none of them.

        Raises `UncommittableError` if rows are gone that were never committed, and `SinkError` if the server cannot be
        reached (it is tried some times); then it is unknown whether it happened: call it again.
        """
        found = table_commits.by_query(messages, RedisMessage)
        try:
            for commit_id, written in table_commits.commits_of(found, batch_id):
                self._commit(commit_id, written)
        except SinkError as error:
            if isinstance(error, UncommittableError) or not _CLOSED.search(str(error)):
                raise
            way = ": make the key a stream that the user may write, and start again"
            raise table_commits.uncommittable(str(error), found, batch_id, way) from error.__cause__

    def _abort(self, written: list[RedisMessage], batch_id: int) -> None:
        self._trying("aborted", lambda: self._remove([one.id for one in written]))

    def _clean(self, keep: list[RedisMessage], older_than_ms: int) -> list[str]:
        kept = {one.id for one in keep}

        def clean() -> list[str]:
            client = self._connected()
            horizon_ms = self._now_ms(client) - older_than_ms
            found = [each.decode() for each in client.zrangebyscore(self._staged, "-inf", horizon_ms)]
            dead = [each for each in found if each not in kept and not each.startswith(f"{self._execution}-")]
            if dead:
                self._remove(dead)
            return dead

        return self._trying("cleaned", clean)

    def _stage(self, message: str, entries: list[bytes]) -> None:
        def stage() -> None:
            client = self._connected()
            pipeline = client.pipeline(transaction=False)
            # Before its rows: what dies in between is found by `clean`. The server's clock is the same for all.
            pipeline.zadd(self._staged, {message: self._now_ms(client)}, nx=True)
            for first in range(0, len(entries), PUSHED_ROWS):
                pipeline.rpush(self._list(message), *entries[first : first + PUSHED_ROWS])
            pipeline.execute()

        # Not tried again: rows that were pushed, and not answered, would be there twice.
        self._doing("staged", stage)

    def _commit(self, commit_id: str, written: list[RedisMessage]) -> None:
        expected = sum(one.rows for one in written)
        lists = [self._list(one.id) for one in written]
        keys = [self._stream, self._commits, self._staged, *lists]
        options = [commit_id, expected, self._remember_ms, self._max_length or 0]

        def commit() -> int:
            script = self._connected().register_script(_COMMIT)
            return int(script(keys=keys, args=[*options, *(one.id for one in written)]))

        moved = self._trying("committed", commit)
        if moved not in (-1, expected):
            raise self._lost(expected, moved, ", were they committed longer ago than remember says")

    def _remove(self, ids: list[str]) -> None:
        pipeline = self._connected().pipeline(transaction=True)
        pipeline.delete(*map(self._list, ids))
        pipeline.zrem(self._staged, *ids)
        pipeline.execute()

    def _list(self, message: str) -> str:
        return f"{self._stream}:ftlayer:rows:{message}"

    def _now_ms(self, client: Any) -> int:
        seconds, microseconds = client.time()
        return int(seconds * 1_000 + microseconds // 1_000)

    def _connected(self) -> Any:
        if self._client is None:
            self._client = connect(self._url)
        return self._client

    def _doing(self, doing: str, work: Callable[[], Result]) -> Result:
        try:
            return work()
        except redis_library().RedisError as error:
            raise SinkError(f"{self._place}: rows cannot be {doing}: {described(error)}") from error

    def _trying(self, doing: str, work: Callable[[], Result]) -> Result:
        """Do it, again if the connection is lost: each has its effect once."""
        return table_commits.tried(
            lambda: self._doing(doing, work),
            secrets_of(self._url),
            may_help=lambda error: isinstance(error.__cause__, Exception) and is_away(error.__cause__),
        )


PAGE = 1_000
"""Entries are claimed so many at a time."""


class Claims:
    """Looks, twice in ``idle_ms``, for entries that are pending for so long with consumers of others.

    They get a consumer of their own each time, called as one of a subtask that is there no more, whose entries are read
    from the first one. A name that was read before would not do: what is claimed may be older than what it has read.

    ``XAUTOCLAIM`` would claim what this source's own consumers wait to acknowledge, too: so each of the others is
    asked for.
    """

    def __init__(self, client: Any, stream: str, group: str, member: Member, idle_ms: int) -> None:
        self._client = client
        self._stream, self._group = stream, group
        self._member = member
        self._idle_ms = idle_ms
        self._due_s = time.monotonic()

    def claim(self) -> int | None:
        """Claim what there is now, if it is time to look.

        Returns the number of the subtask whose consumer has it; None if there was none. Raises what the client raises:
        what was claimed by then is found in the group by the next start.
        """
        if time.monotonic() < self._due_s:
            return None
        consumers = self._client.xinfo_consumers(self._stream, self._group)
        self._due_s = time.monotonic() + self._idle_ms / 2_000
        number = self._member.subtask + self._member.parallelism * (1 + secrets.randbits(31))
        mine = f"{self._member.owner}-{number}"
        found = sum(
            self._claim_of(one["name"], mine)
            for one in consumers
            if one["pending"] and not self._is_ours(one["name"])
        )
        if not found:
            return None
        logger.warning(
            "stream %r, group %r: claimed %d entries that consumers of others held for %d ms",
            self._stream,
            self._group,
            found,
            self._idle_ms,
        )
        return number

    def _is_ours(self, name: bytes) -> bool:
        prefix = f"{self._member.owner}-".encode()
        return name.startswith(prefix) and name.removeprefix(prefix).isdigit()

    def _claim_of(self, name: bytes, mine: str) -> int:
        found = 0
        while pending := self._client.xpending_range(
            self._stream, self._group, "-", "+", PAGE, name, idle=self._idle_ms
        ):
            ids = [entry[0] for entry in pending]
            self._client.xclaim(self._stream, self._group, mine, self._idle_ms, ids, justid=True)
            found += len(ids)
        return found


ID, TIME, FIELDS = "id", "time", "fields"

_BYTES_BY_NAME = pa.map_(pa.string(), pa.binary())


def schema_of(fields: Sequence[str]) -> pa.Schema:
    """Return the schema of entries: id, time of the server, and a text for each of ``fields``, or all as one map."""
    own = [pa.field(ID, pa.string()), pa.field(TIME, beside.STAMP)]
    if not fields:
        return pa.schema([*own, pa.field(FIELDS, _BYTES_BY_NAME)])
    return pa.schema([*own, *(pa.field(name, pa.string()) for name in fields)])


def to_rows(entries: Sequence[Any], schema: pa.Schema) -> pa.RecordBatch:
    """Return entries ``[id, [name, value, name, value, …]]`` as rows.

    A field that an entry lacks is null; bytes that are no UTF-8 become U+FFFD where a text is asked for.
    """
    ids = pa.array(list(map(itemgetter(0), entries)), pa.binary()).cast(pa.string())
    pairs = list(map(itemgetter(1), entries))
    names = schema.names[2:]
    columns = [_as_map(pairs)] if names == [FIELDS] else _by_name(pairs, names)
    return pa.RecordBatch.from_arrays([ids, _times(ids), *columns], schema=schema)


def _times(ids: pa.Array) -> pa.Array:
    begins = pc.list_element(pc.split_pattern(ids, "-", max_splits=1), 0)
    try:
        milliseconds = begins.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:  # An id has 64 bits without a sign.
        milliseconds = list(map(int, begins.to_pylist()))
    return beside.times(milliseconds, "ms", "Redis", "the time of an id")


def _as_map(pairs: Sequence[Sequence[bytes]]) -> pa.Array:
    flat = list(chain.from_iterable(pairs))
    offsets = np.zeros(len(pairs) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, pairs), np.int32, len(pairs)) // 2, out=offsets[1:])
    return pa.MapArray.from_arrays(
        pa.array(offsets),
        beside.texts(flat[::2], "Redis", "a field's name"),
        pa.array(flat[1::2], pa.binary()),
        type=_BYTES_BY_NAME,
    )


def _by_name(pairs: Sequence[Sequence[bytes]], names: Sequence[str]) -> list[pa.Array]:
    wanted = [name.encode() for name in names]
    flat = list(chain.from_iterable(pairs))
    # The producer of a stream mostly writes the same fields in the same order.
    width = 2 * len(wanted)
    if set(map(len, pairs)) <= {width} and flat[::2] == wanted * len(pairs):
        return [
            beside.texts(flat[2 * place + 1 :: width], "Redis", f"field {wanted[place]!r}")
            for place in range(len(wanted))
        ]
    by_name = [dict(zip(each[::2], each[1::2], strict=True)) for each in pairs]
    return [
        beside.texts([fields.get(name) for fields in by_name], "Redis", f"field {name!r}") for name in wanted
    ]


START = {"earliest": "0", "latest": "$"}

PENDING_ROWS = 1_000
"""Pending entries are listed, and acknowledged, so many at a time."""

_FROM_THE_FIRST = b"0-0"


def _number_of(entry: bytes) -> tuple[int, ...]:
    return tuple(map(int, entry.split(b"-")))


@known_options
@hides_secrets(lambda source: secrets_of(source.url))
class RedisSource(Queue):
    """Reads a stream of Redis as a consumer group does: the group's other consumers get other entries.

    Each subtask is a consumer. An entry is acknowledged (``XACK``) once it is durable: stored in the vertex, in a
    completed checkpoint, or in the spool. Until then Redis keeps it pending, and it is read again after a failure; what
    was stored already is left out by its id. So each entry enters a topology once, if the server keeps what it has
    answered (``appendfsync always``; what it loses in a crash of its own is lost).

    Entries are read as long as they are in the stream: one that was trimmed before it was read is lost. Those that are
    pending for a consumer of others stay with it, unless ``claim_idle`` says when it counts as gone.
    """

    def __init__(
        self,
        url: str,
        stream: str,
        group: str,
        *,
        fields: Sequence[str] = (),
        start: str = "earliest",
        claim_idle: Duration | None = None,
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``redis://user:password@host:6379/0``, ``rediss://…`` with TLS, ``unix:///path``; slots connect.
            stream: key of the stream; it is made, if it is not there.
            group: consumer group; it is made, if it is not there.
            fields: names of fields, each a column with a text. By default there is a column ``fields``, a map of all of
                an entry's fields (names to bytes). Before them are ``id`` and ``time``, that of the server at which
                the entry came.
            start: where a group begins that this makes: ``"earliest"`` entry that is there, or ``"latest"``: those
                that come from then on.
            claim_idle: entries that are pending for so long with consumers of others in the group are claimed: longer
                than any of these takes, or both have the entry. None: they stay.
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if redis-py is missing, and for an option that will not do.
        """
        check_redis_url(url)
        check_text(stream, "stream", "the key of a stream")
        check_text(group, "group", "the name of a consumer group")
        if isinstance(fields, str) or not isinstance(fields, Sequence):
            raise ConfigError(f"fields: expected a list of names, got {fields!r}")
        check_texts(fields, "fields", "the name of a field")
        if len({ID, TIME, *fields}) < len(fields) + 2:
            raise ConfigError(f"fields: {list(fields)!r} has a name twice, or one of {ID!r} and {TIME!r}")
        if list(fields) == [FIELDS]:
            raise ConfigError(
                f"fields: a single column cannot be called {FIELDS!r}; leave fields out for all of them"
            )
        if start not in START:
            raise ConfigError(f"start: expected 'earliest' or 'latest', got {start!r}")
        self.schema: pa.Schema = schema_of(fields)
        self.claim_idle_ms = None if claim_idle is None else duration_ms(claim_idle, "claim_idle")
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.url, self.stream, self.group, self.start = url, stream, group, start

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> RedisReader:
        return RedisReader(self, member, positions, stored=stored)

    @property
    def place(self) -> str:
        return f"stream {self.stream!r} of {shown_url(self.url)}"

    def unpack(self, position: bytes) -> bytes:
        """Return the id of the entry that a position is behind; `ConfigError` for one of something else."""
        (last,) = unpack_position(position, self.name, f"{self.place}, group {self.group!r}")
        return bytes(last)

    @property
    def name(self) -> tuple[str, ...]:
        return "redis", self.stream, self.group


@dataclass(slots=True)
class _Consumer:
    """One name in the group, and the entry that was fetched last of what it was given.

    What it was given has growing ids, and is pending until it is acknowledged. So all that is pending up to ``last``
    was fetched, and nothing behind it. ``is_behind``: there may be some behind it: what it was given when the
    connection was lost, or by an earlier start.
    """

    subtask: int
    name: str
    last: bytes
    is_behind: bool = True


@dataclass(frozen=True, slots=True)
class _Receipt:
    consumer: str
    ids: pa.Array


@dataclass(slots=True)
class _Todo:
    """Acknowledgements that were not sent yet: ids, and what was pending of each consumer up to an id."""

    ids: list[pa.Array] = field(default_factory=list)
    up_to: dict[str, bytes] = field(default_factory=dict)


@hides_secrets(lambda reader: reader._secrets)
class RedisReader(ServerReader):
    """Of one member of the group. An answer may be lost with the connection: what it gave is pending."""

    def __init__(
        self, source: RedisSource, member: Member, positions: Mapping[int, bytes], *, stored: bool
    ) -> None:
        place, errors = f"{source.place}, group {source.group!r}", (redis_library().RedisError,)
        super().__init__(place, source.patience_ms, secrets_of(source.url), errors, is_away)
        self._source = source
        self._member = member
        self._client = connect(source.url)
        self._consumers = [self._consumer(member.subtask, positions)]
        self._consumers += [self._consumer(gone, positions) for gone in positions if gone != member.subtask]
        idle_ms, group = source.claim_idle_ms, source.group
        self._claims = (
            None if idle_ms is None else Claims(self._client, source.stream, group, member, idle_ms)
        )
        self._begun = False
        self._pending = 0
        self._todo = _Todo()
        # Fetched by the reader before this one, and perhaps not acknowledged.
        earlier = {one.name: one.last for one in self._consumers if one.last != _FROM_THE_FIRST}
        self._earlier = {} if stored else earlier
        if stored:
            self._todo.up_to = earlier

    def _connect(self) -> None:
        """Make the group, and find consumers of subtasks that are there no more; the client connects by itself."""
        if self._begun:
            return
        self._check_end()
        self._make_group()
        known = {one.subtask for one in self._consumers}
        for subtask in self._subtasks_in_group():
            if (
                subtask >= self._member.parallelism
                and subtask not in known
                and self._member.reads_for(subtask)
            ):
                self._consumers.append(self._consumer(subtask, {}))
        self._begun = True

    def _check_end(self) -> None:
        read = max((one.last for one in self._consumers), key=_number_of)
        if read == _FROM_THE_FIRST:
            return
        try:
            end = bytes(self._client.xinfo_stream(self._source.stream)["last-generated-id"])
        except redis_library().ResponseError as error:
            if "no such key" not in str(error):
                raise
            end = _FROM_THE_FIRST
        if _number_of(end) < _number_of(read):
            raise SourceChangedError(
                f"{self._source.place}: it ends at entry {end.decode()}, and was read up to {read.decode()}: it was "
                "made anew, or the server has lost its last entries. If it has newer ones, start again; else give the "
                "source a uid and a group of its own, which begin where start says"
            )

    def _make_group(self) -> None:
        source = self._source
        try:
            self._client.xgroup_create(source.stream, source.group, START[source.start], mkstream=True)
        except redis_library().ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _subtasks_in_group(self) -> list[int]:
        prefix = f"{self._member.owner}-".encode()
        found = self._client.xinfo_consumers(self._source.stream, self._source.group)
        names = [one["name"].removeprefix(prefix) for one in found if one["name"].startswith(prefix)]
        return sorted(int(name) for name in names if name.isdigit())

    def _consumer(self, subtask: int, positions: Mapping[int, bytes]) -> _Consumer:
        position = positions.get(subtask)
        last = _FROM_THE_FIRST if position is None else self._source.unpack(position)
        return _Consumer(subtask, f"{self._member.owner}-{subtask}", last)

    def _disconnect(self) -> None:
        self._client.close()
        for consumer in self._consumers:
            consumer.is_behind = True

    def _fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        if self._claims is not None and (claimed := self._claims.claim()) is not None:
            self._consumers.append(self._consumer(claimed, {}))
        for consumer in self._consumers:
            if consumer.is_behind:
                entries = self._read(consumer, consumer.last, max_rows)
                if entries:
                    return self._fetched(consumer, entries)
                consumer.is_behind = False
        mine = self._consumers[0]
        entries = self._read(mine, b">", max_rows, "BLOCK", max(1, int(wait_s * 1_000)))
        return self._fetched(mine, entries) if entries else None

    def _read(self, consumer: _Consumer, behind: bytes, max_rows: int, *blocking: Any) -> list[Any]:
        reply = self._client.execute_command(
            "XREADGROUP",
            *("GROUP", self._source.group, consumer.name),
            *("COUNT", max_rows, *blocking),
            *("STREAMS", self._source.stream, behind),
        )
        return reply[0][1] if reply else []

    def _fetched(self, consumer: _Consumer, entries: list[Any]) -> Fetched:
        # One that was deleted from the stream is pending still, and has no fields.
        rows = to_rows([entry for entry in entries if entry[1] is not None], self._source.schema)
        ids = rows.column(0)
        if len(ids) < len(entries):
            logger.warning(
                "%s: %d entries were deleted before they were read",
                self._source.place,
                len(entries) - len(ids),
            )
            ids = pa.array([entry[0] for entry in entries], pa.binary()).cast(pa.string())
        consumer.last = bytes(entries[-1][0])
        self._pending += len(entries)
        return Fetched(
            rows,
            consumer.subtask,
            pack_position(self._source.name, consumer.last),
            _Receipt(consumer.name, ids),
        )

    def _count(self) -> int | None:
        """See `waiting`. Servers before 7.0 do not know it, nor does one that entries were deleted from."""
        groups = self._client.xinfo_groups(self._source.stream)
        lag = next(one.get("lag") for one in groups if one["name"] == self._source.group.encode())
        if lag is None:
            return None
        mine = {one.name.encode() for one in self._consumers}
        consumers = self._client.xinfo_consumers(self._source.stream, self._source.group)
        pending = sum(one["pending"] for one in consumers if one["name"] in mine)
        return int(lag + pending - self._pending)

    def _note_durable(self, receipts: Sequence[_Receipt]) -> None:
        for receipt in receipts:
            self._todo.ids.append(receipt.ids)
            self._pending -= len(receipt.ids)
            if (earlier := self._earlier.pop(receipt.consumer, None)) is not None:
                self._todo.up_to[receipt.consumer] = earlier

    def _send_acknowledgements(self) -> None:
        """Send all that there are; those that were sent, and not answered, are sent again."""
        if not self._begun:
            return
        for name, last in list(self._todo.up_to.items()):
            self._acknowledge_pending(name, last)
            del self._todo.up_to[name]
        if self._todo.ids:
            pipeline = self._client.pipeline(transaction=False)
            for ids in self._todo.ids:
                pipeline.xack(self._source.stream, self._source.group, *ids.to_pylist())
            pipeline.execute()
            self._todo.ids.clear()
            self._remove_drained()

    def _acknowledge_pending(self, name: str, last: bytes) -> None:
        source = self._source
        while pending := self._client.execute_command(
            "XPENDING", source.stream, source.group, "-", last, PENDING_ROWS, name
        ):
            self._client.xack(source.stream, source.group, *(entry[0] for entry in pending))

    def _remove_drained(self) -> None:
        """Take consumers out of the group that are there no more and have nothing pending."""
        source = self._source
        for consumer in self._consumers[1:]:
            if consumer.is_behind or self._client.execute_command(
                "XPENDING", source.stream, source.group, "-", "+", 1, consumer.name
            ):
                continue
            self._client.xgroup_delconsumer(source.stream, source.group, consumer.name)
            self._consumers.remove(consumer)
            logger.info("%s: consumer %r has nothing left, and is removed", source.place, consumer.name)


class RedisDataSource(QueueDataSource):
    """``spark.dataSource.register(RedisDataSource)``, then ``format("ftlayer-redis")`` to read or to write.

    Options of a reader are the parameters of `RedisSource`, in camel case (``claimIdle``), several names with commas
    between them; ``spool``: a directory for this query alone, a path or any URL of fsspec's, that driver and tasks
    reach; ``maxRowsPerTrigger`` (100,000). Options of a writer are those of `RedisSink`: a batch that Spark runs again
    after a restart from the query's checkpoint adds nothing.
    """

    format = "ftlayer-redis"
    _queue_class = RedisSource
    _sink_class = RedisSink
