"""An exactly-once sink of a Redis stream: rows are moved into it by a script that notes the commit."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from ftlayer.common.checks import Duration, check_int, check_text, duration_ms
from ftlayer.common.failures import RowsRejected
from ftlayer.common.printable import described, hides_secrets, secrets_of, shown_url
from ftlayer.connectors.fitting import is_any, whole_or_refused
from ftlayer.connectors.redis.client import check_redis_url, connect, is_away, redis_library
from ftlayer.connectors.table_commits import (
    CleaningSink,
    by_query,
    commits_of,
    streaming_query,
    tried,
    uncommittable,
)
from ftlayer.errors import SinkError, SinkTargetError, UncommittableError

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
        return [
            [_bytes(each) for pair in row or () for each in pair if pair[1] is not None] for row in values
        ]
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


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


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


@hides_secrets(lambda sink: secrets_of(sink._url))
class RedisSink(CleaningSink[RedisMessage]):
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
        query = streaming_query()
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
        found = by_query(messages, RedisMessage)
        try:
            for commit_id, written in commits_of(found, batch_id):
                self._commit(commit_id, written)
        except SinkError as error:
            if isinstance(error, UncommittableError) or not _CLOSED.search(str(error)):
                raise
            way = ": make the key a stream that the user may write, and start again"
            raise uncommittable(str(error), found, batch_id, way) from error.__cause__

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

    # ------------------------------------------------------------ commands

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

    # ------------------------------------------------------------ connection

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
        return tried(
            lambda: self._doing(doing, work),
            secrets_of(self._url),
            may_help=lambda error: isinstance(error.__cause__, Exception) and is_away(error.__cause__),
        )
