from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ftlayer.checks import Duration, duration_ms
from ftlayer.clients.reconnecting import Reconnecting
from ftlayer.errors import SourceError
from ftlayer.printable import hides_secrets, shown_url
from ftlayer.records.beside import note
from ftlayer.sinks.http import keep_out_of_log
from ftlayer.sources.http_pull.requests import AnsweredError, check_answer, check_request
from ftlayer.sources.queue_positions import pack_position, unpack_position
from ftlayer.topology.queues import Fetched, Member, Queue

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


@hides_secrets(lambda source: source.secrets)
class SseSource(Queue):
    """Reads an endless answer of Server-Sent Events (``text/event-stream``), and asks for it again when it ends.

    The position is the id of the last event. A new connection sends it as ``Last-Event-ID``, and the server goes on
    behind it, if it keeps its events. Events without ids cannot be asked for again: those of the time between two
    connections are lost.
    """

    most_subtasks = 1

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
        self.headers, self.secrets = check_request(url, headers)
        self.url = url
        self.idle_s = duration_ms(idle_timeout, "idle_timeout") / 1_000
        self.patience_ms = duration_ms(reconnect_timeout, "reconnect_timeout")
        self.schema: pa.Schema = pa.schema(
            [
                pa.field("id", pa.string()),
                pa.field("time", pa.timestamp("us", "UTC")),
                pa.field("event", pa.string()),
                pa.field("data", pa.string()),
            ]
        )

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> SseReader:
        return SseReader(self, positions.get(0), reads=member.subtask == 0)


@hides_secrets(lambda reader: reader._source.secrets)
class SseReader:
    """`QueueReader` of the subtask that reads, or of another one. What comes is read while `fetch` waits for it."""

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
        columns = [
            [event.last_id or None for _, event in found],
            [time_us for time_us, _ in found],
            [event.event for _, event in found],
            [event.data for _, event in found],
        ]
        schema = self._source.schema
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        self._number += 1
        position = pack_position(_NAME, self._number.to_bytes(8), found[-1][1].last_id.encode())
        return Fetched(pa.RecordBatch.from_arrays(arrays, schema=schema), 0, position, None)

    def acknowledge(self, receipts: Sequence[None]) -> None:
        """See `QueueReader.acknowledge`: servers are not told."""

    def waiting(self) -> int | None:
        return None

    @property
    def is_away(self) -> bool:
        return self._away.is_away

    def wake_up(self) -> None:
        """See `QueueReader.wake_up`: nothing waits for acknowledgements."""

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
        """Read the events of one answer to its end."""
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
    number, last_id = unpack_position(position, _NAME, "Server-Sent Events", 2)
    return int.from_bytes(number), last_id.decode()
