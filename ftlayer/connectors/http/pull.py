"""`SseSource` and `PolledJsonSource` as Python Data Sources."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from ftlayer.common.checks import Duration, check_text, check_texts, duration_ms, known_options
from ftlayer.common.printable import hides_secrets, shown_url, without_secrets
from ftlayer.connectors.connections import Reconnecting
from ftlayer.connectors.http.sink import check_request, keep_out_of_log, retry_after_s
from ftlayer.connectors.queue_stream import QueueDataSource, pack_position, unpack_position
from ftlayer.errors import ConfigError, SourceError
from ftlayer.functions.data_sources import DataSourceOptions
from ftlayer.records import beside
from ftlayer.records.beside import note
from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader

AWAY = (408, 425, 429)
"""Answers of 400 to 499 that another try may change."""

_SAID = 200


class AnsweredError(Exception):
    """An answer that another try may change. ``pause_s``: when the server wants to be asked again."""

    def __init__(self, status: int, pause_s: float) -> None:
        super().__init__(f"it has answered {status}")
        self.pause_s = pause_s


def check_answer(
    place: str, status: int, headers: Mapping[str, str], said: str, secrets: Sequence[str] = ()
) -> None:
    """Raise `AnsweredError`, or `SourceError` for an answer that will stay as it is, unless it is 200."""
    if status == 200:
        return
    if status in AWAY or status >= 500:
        raise AnsweredError(status, retry_after_s(headers.get("retry-after")) or 0.0)
    raise SourceError(f"{place}: it has answered {status}: {without_secrets(said, secrets)[:_SAID]}")


ID_BYTES = 8
"""Of an id's hash. Two of 10,000 ids are alike once in 10^11 answers."""

_POLLED = ("polled",)


@dataclass(frozen=True, slots=True)
class _Place:
    """Attributes: the cursor that is sent next, the answer's ETag, and the ids that are known, by their hashes."""

    cursor: str = ""
    etag: str = ""
    known: bytes = b""

    @property
    def ids(self) -> set[bytes]:
        return {self.known[at : at + ID_BYTES] for at in range(0, len(self.known), ID_BYTES)}


@dataclass(frozen=True, slots=True)
class _Item:
    id: str
    hashed: bytes
    cursor: str
    text: str
    time_us: int


@known_options
@hides_secrets(lambda source: source.secrets)
class PolledJsonSource(Queue):
    """Asks a server for a list of items every so often, and gives those that are new.

    An item is known by its id: those of the last answer are part of the position. Where a cursor is sent along, the
    server answers with what came since; otherwise each answer is the whole list, and an item that comes and goes
    between two requests is never seen.
    """

    most_subtasks = 1
    schema: pa.Schema = pa.schema([("id", pa.string()), ("time", beside.STAMP), ("item", pa.string())])

    def __init__(
        self,
        url: str,
        *,
        id: str | Sequence[str] = "id",
        items: str = "",
        cursor: str = "",
        param: str = "",
        interval: Duration = "10s",
        headers: Mapping[str, str] | None = None,
        timeout: Duration = "30s",
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``http://…`` or ``https://…``; the slot connects.
            id: name in an item, with dots between names within names, or several, that tell it from all others. A name
                that changes with the item (``["id", "updated_at"]``) makes each version an item.
            items: name in the answer where the list is, ``"data.items"``; "": the answer is the list.
            cursor: name in an item whose value is sent with the next requests: that of the last item of an answer. The
                server may answer with items of the same value again.
            param: the name in the query that it is sent under, ``"since"``.
            interval: from one request to the next. With a cursor an answer that had new items is followed at once.
            headers: sent with each request: ``{"Authorization": "Bearer …"}``.
            timeout: for an answer.
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if httpx is missing, and for an option that will not do.
        """
        self.headers, self.secrets = check_request(url, headers, "source")
        names = [id] if isinstance(id, str) else id
        if not isinstance(names, Sequence) or not names:
            raise ConfigError(f"id: expected a name in an item, or several, got {id!r}")
        check_texts(names, "id", "a name in an item")
        for option, given in (("items", items), ("cursor", cursor), ("param", param)):
            if given != "":
                check_text(given, option, "a name")
        if bool(cursor) != bool(param):
            raise ConfigError("cursor and param belong together: give both, or neither")
        self.url, self.id, self.items, self.cursor, self.param = url, tuple(names), items, cursor, param
        self.interval_s = duration_ms(interval, "interval") / 1_000
        self.timeout_s = duration_ms(timeout, "timeout") / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PolledJsonReader:
        return PolledJsonReader(self, positions.get(0), reads=member.subtask == 0)

    def found(self, body: bytes) -> list[_Item]:
        place = shown_url(self.url)
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{place}: the answer is no JSON: {error}") from error
        listed = _at(answer, self.items) if self.items else answer
        if not isinstance(listed, list):
            raise SourceError(
                f"{place}: items={self.items!r}: expected a list there, got {type(listed).__name__}"
            )
        now_us = time.time_ns() // 1_000
        return [self._item(place, item, now_us) for item in listed]

    def _item(self, place: str, item: Any, now_us: int) -> _Item:
        values = [_at(item, name) for name in self.id]
        cursor = _at(item, self.cursor) if self.cursor else ""
        for name, value in zip((*self.id, self.cursor), (*values, cursor), strict=True):
            if value is None or isinstance(value, dict | list):
                raise SourceError(
                    f"{place}: an item has no text or number at {name!r}: {json.dumps(item)[:200]}"
                )
        texts = [value if isinstance(value, str) else json.dumps(value) for value in (*values, cursor)]
        *ids, cursor = texts
        named = ids[0] if len(ids) == 1 else json.dumps(ids)
        hashed = hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES).digest()
        cursor = beside.text(cursor, place, "a cursor") or ""
        return _Item(
            beside.text(named, place, "an id") or "",
            hashed,
            cursor,
            json.dumps(item, separators=(",", ":")),
            now_us,
        )


@hides_secrets(lambda reader: reader._source.secrets)
class PolledJsonReader(QueueReader):
    """Of the subtask that reads, or of another one. Servers are not told what is durable."""

    def __init__(self, source: PolledJsonSource, position: bytes | None, *, reads: bool) -> None:
        self._source = source
        self._reads = reads
        self._number, self._place = (0, _Place()) if position is None else _unpack_polled(position)
        self._away = Reconnecting(shown_url(source.url), source.patience_ms, source.secrets)
        self._pending: deque[_Item] = deque()
        # Where this goes on when all that is pending is given.
        self._next = self._place
        self._due_s = 0.0
        self._client: Any = None
        self._woken = threading.Event()

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        give_up_s = time.monotonic() + wait_s
        while not self._pending:
            now_s = time.monotonic()
            if self._reads and now_s >= self._due_s and not self._away.is_early:
                self._ask()
                continue
            pause_s = min(give_up_s, max(self._due_s, now_s + 0.05)) - now_s
            if now_s >= give_up_s or self._woken.wait(max(pause_s, 0.0)):
                self._woken.clear()
                return None
        return self._fetched(max_rows)

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def wake_up(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _fetched(self, max_rows: int) -> Fetched:
        items = [self._pending.popleft() for _ in range(min(max_rows, len(self._pending)))]
        if self._pending:
            known = self._place.known + b"".join(item.hashed for item in items)
            self._place = replace(self._place, known=known)
        else:
            self._place = self._next
        columns = {
            "id": [item.id for item in items],
            "time": [item.time_us for item in items],
            "item": [item.text for item in items],
        }
        self._number += 1
        place = self._place
        position = pack_position(
            _POLLED, self._number.to_bytes(8), place.cursor.encode(), place.etag.encode(), place.known
        )
        return Fetched(pa.RecordBatch.from_pydict(columns, schema=self._source.schema), 0, position, None)

    def _ask(self) -> None:
        """Ask for the list once; the next time is due when it says, or the server does."""
        import httpx

        self._due_s = time.monotonic() + self._source.interval_s
        try:
            answer = self._get()
            if answer.status_code not in (204, 304):
                place = shown_url(self._source.url)
                check_answer(place, answer.status_code, answer.headers, answer.text, self._source.secrets)
        except AnsweredError as error:
            self._away.failed(error)
            self._due_s = time.monotonic() + error.pause_s
            return
        except httpx.TransportError as error:
            self._away.failed(error)
            self._due_s = 0.0
            return
        self._away.works()
        if answer.status_code == 200:
            self._take(self._source.found(answer.content), answer.headers.get("etag", ""))

    def _get(self) -> Any:
        import httpx

        source, place = self._source, self._place
        if self._client is None:
            keep_out_of_log(source.secrets)
            self._client = httpx.Client(timeout=source.timeout_s, follow_redirects=True)
        headers = {"Accept": "application/json", **source.headers}
        if place.etag:
            headers["If-None-Match"] = place.etag
        url = httpx.URL(source.url)
        if place.cursor:
            url = url.copy_merge_params({source.param: place.cursor})
        return self._client.get(url, headers=headers)

    def _take(self, items: list[_Item], etag: str) -> None:
        known = self._place.ids
        # An id that comes twice in one answer is one item.
        new = {item.hashed: item for item in items if item.hashed not in known}
        self._pending.extend(new.values())
        all_ids = b"".join(dict.fromkeys(item.hashed for item in items))
        cursor = items[-1].cursor if items else self._place.cursor
        if self._source.cursor and not items:
            all_ids = self._place.known
        # An ETag is that of an answer to a request with this cursor.
        if not etag.isascii():
            beside.note(shown_url(self._source.url), "an ETag is no ASCII, and is not sent back", 1, etag)
            etag = ""
        self._next = _Place(cursor, etag if cursor == self._place.cursor else "", all_ids)
        if not new:
            self._place = self._next
        elif self._source.cursor:
            self._due_s = 0.0


def _at(value: Any, name: str) -> Any:
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unpack_polled(position: bytes) -> tuple[int, _Place]:
    number, cursor, etag, known = unpack_position(position, _POLLED, "polled JSON", 4 * (bytes,))
    return int.from_bytes(number), _Place(cursor.decode(), etag.decode(), known)


MOST_RETRY_MS = 86_400_000
"""A server that says a longer pause between connections would stop the source for good."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """An event. ``last_id``: the id that was sent last, with this event or before it; "": none was."""

    last_id: str
    event: str
    data: str


@dataclass(slots=True)
class SseParser:
    """Parses one connection's bytes, however they are cut.

    Attributes:
        last_id: of the events so far: what the next connection goes on behind.
        retry_ms: how long to wait before it, as the server has said last; None: it has not.
        max_bytes: of an event.
    """

    last_id: str = ""
    retry_ms: int | None = None
    max_bytes: int = 1 << 24
    _rest: bytes = b""
    _begun: bool = False
    _skips_newline: bool = False
    _id: str = ""
    _event: str = ""
    _data: list[str] = field(default_factory=list)
    _size: int = 0

    def begin(self) -> None:
        """A connection begins. What the one before it has left of an event is nothing."""
        self._rest, self._begun, self._skips_newline = b"", False, False
        self._id, self._event = self.last_id, ""
        self._data, self._size = [], 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Take bytes; return the events that they complete. Raises `SourceError` for one that is too large."""
        if self._skips_newline and data:
            data = data.removeprefix(b"\n")
            self._skips_newline = False
        data = self._rest + data
        if not self._begun:
            if len(data) < len(_BOM) and _BOM.startswith(data):
                self._rest = data
                return []
            data, self._begun = data.removeprefix(_BOM), True
        # Behind a carriage return a newline may come with the next bytes.
        self._skips_newline = data.endswith(b"\r")
        *lines, self._rest = _LINE_END.split(data)
        self._size += sum(map(len, lines))
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._size + len(self._rest) > self.max_bytes:
            raise SourceError(f"an event has more than {self.max_bytes} bytes")
        return events

    def _take(self, raw: bytes) -> ServerEvent | None:
        if not raw:
            return self._dispatch()
        line = raw.decode("utf-8", "replace")
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        match name:
            case "event":
                self._event = value
            case "data":
                self._data.append(value)
            case "id":
                if "\0" not in value:
                    self._id = value
            case "retry":
                if value.isascii() and value.isdecimal():
                    digits = value.lstrip("0") or "0"
                    if len(digits) > len(str(MOST_RETRY_MS)) or int(digits) > MOST_RETRY_MS:
                        note("Server-Sent Events", "a retry of more than a day is none", 1, value)
                    else:
                        self.retry_ms = int(digits)
        return None

    def _dispatch(self) -> ServerEvent | None:
        self.last_id = self._id
        data, event = "\n".join(self._data), self._event
        # Fields with nothing in them are an empty line of data, and one empty line is no data.
        is_empty = not self._data or self._data == [""]
        self._data, self._event, self._size = [], "", 0
        return None if is_empty else ServerEvent(self.last_id, event or "message", data)


CONTENT_TYPE = "text/event-stream"

PAUSE_MS = 1_000
"""Between two connections, where the server does not say it (``retry:``)."""

_NAME = ("sse",)
_STEP_S = 0.05


@known_options
@hides_secrets(lambda source: source.secrets)
class SseSource(Queue):
    """Reads an endless answer of Server-Sent Events (``text/event-stream``), and asks for it again when it ends.

    The position is the id of the last event. A new connection sends it as ``Last-Event-ID``, and the server goes on
    behind it, if it keeps its events. Events without ids cannot be asked for again: those of the time between two
    connections are lost.
    """

    most_subtasks = 1
    schema: pa.Schema = pa.schema(
        [("id", pa.string()), ("time", beside.STAMP), ("event", pa.string()), ("data", pa.string())]
    )

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        idle_timeout: Duration = "2m",
        reconnect_timeout: Duration = "5m",
    ) -> None:
        """Nothing is connected to before it is read.

        Args:
            url: ``http://…`` or ``https://…``; the slot connects.
            headers: sent with each request: ``{"Authorization": "Bearer …"}``.
            idle_timeout: a connection over which nothing came for this long, comments included, is taken for lost.
            reconnect_timeout: the source fails when the server was away for this long.

        Raises `ConfigError` if httpx is missing, and for an option that will not do.
        """
        self.headers, self.secrets = check_request(url, headers, "source")
        self.url = url
        self.idle_s = duration_ms(idle_timeout, "idle_timeout") / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> SseReader:
        return SseReader(self, positions.get(0), reads=member.subtask == 0)


@hides_secrets(lambda reader: reader._source.secrets)
class SseReader(QueueReader):
    """Of the subtask that reads, or of another one. What comes is read while `fetch` waits for it."""

    def __init__(self, source: SseSource, position: bytes | None, *, reads: bool) -> None:
        self._source = source
        self._reads = reads
        self._number, last_id = (0, "") if position is None else _unpack(position)
        self._parser = SseParser(last_id=last_id)
        self._away = Reconnecting(shown_url(source.url), source.patience_ms, source.secrets)
        self._ready: deque[tuple[int, ServerEvent]] = deque()
        self._loop = asyncio.new_event_loop()
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def fetch(self, max_rows: int, wait_s: float) -> Fetched | None:
        if not self._ready:
            self._loop.run_until_complete(self._wait(wait_s))
        if not self._ready:
            return None
        found = [self._ready.popleft() for _ in range(min(max_rows, len(self._ready)))]
        columns = {
            "id": [event.last_id or None for _, event in found],
            "time": [time_us for time_us, _ in found],
            "event": [event.event for _, event in found],
            "data": [event.data for _, event in found],
        }
        self._number += 1
        position = pack_position(_NAME, self._number.to_bytes(8), found[-1][1].last_id.encode())
        return Fetched(pa.RecordBatch.from_pydict(columns, schema=self._source.schema), 0, position, None)

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._loop.run_until_complete(asyncio.wait([self._task]))
        self._loop.close()

    async def _wait(self, wait_s: float) -> None:
        """Let the connection go on until something has come, or for this long."""
        if not self._reads:
            await asyncio.sleep(wait_s)
            return
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        self._arrived.clear()
        arrived = asyncio.create_task(self._arrived.wait())
        await asyncio.wait([arrived, self._task], timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        arrived.cancel()
        if self._task.done() and not self._ready:
            self._task.result()

    async def _run(self) -> None:
        import httpx

        timeout = httpx.Timeout(10.0, read=self._source.idle_s)
        keep_out_of_log(self._source.secrets)
        async with httpx.AsyncClient(timeout=timeout, follow_redirects=True) as client:
            while True:
                pause_s = 0.0
                try:
                    await self._connect(client)
                    pause_s = self._pause_s
                except AnsweredError as error:
                    self._away.failed(error)
                    pause_s = max(error.pause_s, self._pause_s)
                except httpx.TransportError as error:
                    self._away.failed(error)
                    pause_s = self._pause_s if self._parser.retry_ms is not None else 0.0
                again_s = time.monotonic() + pause_s
                while self._away.is_early or time.monotonic() < again_s:
                    await asyncio.sleep(_STEP_S)

    @property
    def _pause_s(self) -> float:
        retry_ms = self._parser.retry_ms
        return (PAUSE_MS if retry_ms is None else retry_ms) / 1_000

    async def _connect(self, client: Any) -> None:
        source, parser = self._source, self._parser
        headers = {"Accept": CONTENT_TYPE, "Cache-Control": "no-store", **source.headers}
        if parser.last_id:
            # Ids are UTF-8; httpx takes bytes as they are.
            headers = {name: value.encode() for name, value in headers.items()}  # type: ignore[misc]
            headers["Last-Event-ID"] = parser.last_id.encode()  # type: ignore[assignment]
        async with client.stream("GET", source.url, headers=headers) as answer:
            place = shown_url(source.url)
            if answer.status_code == 204:
                raise SourceError(f"{place}: it has answered 204: there are no more events")
            said = "" if answer.status_code == 200 else (await answer.aread()).decode("utf-8", "replace")
            check_answer(place, answer.status_code, answer.headers, said, source.secrets)
            kind = answer.headers.get("content-type", "")
            if kind.partition(";")[0].strip().lower() != CONTENT_TYPE:
                raise SourceError(f"{place}: expected an answer of {CONTENT_TYPE}, got {kind!r}")
            self._away.works()
            parser.begin()
            async for chunk in answer.aiter_bytes():
                now_us = time.time_ns() // 1_000
                events = parser.feed(chunk)
                if events:
                    self._ready += [(now_us, event) for event in events]
                    self._arrived.set()


def _unpack(position: bytes) -> tuple[int, str]:
    number, last_id = unpack_position(position, _NAME, "Server-Sent Events", 2 * (bytes,))
    return int.from_bytes(number), last_id.decode()


class SseDataSource(QueueDataSource):
    """``spark.dataSource.register(SseDataSource)``, then ``spark.readStream.format("ftlayer-sse")``.

    Options are the parameters of `SseSource`, in camel case (``idleTimeout``), with ``header.<name>`` for each header;
    ``spool`` and ``maxRowsPerTrigger`` as of `RedisDataSource`. The driver connects.
    """

    format = "ftlayer-sse"

    def source(self, options: DataSourceOptions) -> SseSource:
        return options.made(SseSource, headers=options.below("header."))


class PolledJsonDataSource(QueueDataSource):
    """``readStream.format("ftlayer-polled-json")``; options as of `SseDataSource`."""

    format = "ftlayer-polled-json"

    def source(self, options: DataSourceOptions) -> PolledJsonSource:
        names, headers = options.names("id", "id"), options.below("header.")
        return options.made(PolledJsonSource, id=names, headers=headers)
