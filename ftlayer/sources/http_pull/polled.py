"""JSON that is asked for again and again as a source."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ftlayer.checks import Duration, check_text, check_texts, duration_ms
from ftlayer.clients.reconnecting import Reconnecting
from ftlayer.errors import ConfigError, SourceError
from ftlayer.printable import hides_secrets, shown_url
from ftlayer.records import beside
from ftlayer.sinks.http import keep_out_of_log
from ftlayer.sources.http_pull.requests import AnsweredError, check_answer, check_request
from ftlayer.sources.queue_positions import pack_position, unpack_position
from ftlayer.topology.queues import Fetched, Member, Queue

ID_BYTES = 8
"""Of an id's hash. Two of 10,000 ids are alike once in 10^11 answers."""

_NAME = ("polled",)


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


@hides_secrets(lambda source: source.secrets)
class PolledJsonSource(Queue):
    """Asks a server for a list of items every so often, and gives those that are new.

    An item is known by its id: those of the last answer are part of the position. Where a cursor is sent along, the
    server answers with what came since; otherwise each answer is the whole list, and an item that comes and goes
    between two requests is never seen.
    """

    most_subtasks = 1

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
        self.headers, self.secrets = check_request(url, headers)
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
        self.schema: pa.Schema = pa.schema(
            [
                pa.field("id", pa.string()),
                pa.field("time", pa.timestamp("us", "UTC")),
                pa.field("item", pa.string()),
            ]
        )

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> PolledJsonReader:
        return PolledJsonReader(self, positions.get(0), reads=member.subtask == 0)

    def found(self, body: bytes) -> list[_Item]:
        """Return the items of an answer. Raises `SourceError` for one that is not as the options say."""
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
class PolledJsonReader:
    """`QueueReader` of the subtask that reads, or of another one."""

    def __init__(self, source: PolledJsonSource, position: bytes | None, *, reads: bool) -> None:
        self._source = source
        self._reads = reads
        self._number, self._place = (0, _Place()) if position is None else _unpack(position)
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

    def acknowledge(self, receipts: Sequence[None]) -> None:
        """See `QueueReader.acknowledge`: servers are not told."""

    def waiting(self) -> int | None:
        return None

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
        columns = [
            [item.id for item in items],
            [item.time_us for item in items],
            [item.text for item in items],
        ]
        schema = self._source.schema
        arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
        self._number += 1
        place = self._place
        position = pack_position(
            _NAME, self._number.to_bytes(8), place.cursor.encode(), place.etag.encode(), place.known
        )
        return Fetched(pa.RecordBatch.from_arrays(arrays, schema=schema), 0, position, None)

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
    """Return what is in a JSON value under this name; None if there is nothing."""
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _unpack(position: bytes) -> tuple[int, _Place]:
    number, cursor, etag, known = unpack_position(position, _NAME, "polled JSON", 4)
    return int.from_bytes(number), _Place(cursor.decode(), etag.decode(), known)
