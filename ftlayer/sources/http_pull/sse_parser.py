"""Server-Sent Events as they come over a connection: the parser of the HTML standard, 9.2.6. Rules alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ftlayer.errors import SourceError
from ftlayer.sources.beside import note

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
