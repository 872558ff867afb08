"""Kits of sources that have no server of their own kind: files, a growing log, and HTTP that this process serves."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kit import Kit

from ftlayer.sources import (
    FilesDataSource,
    FilesSource,
    PolledJsonDataSource,
    PolledJsonSource,
    SseDataSource,
    SseSource,
    TailDataSource,
    TailSource,
)

ROTATES_AT = 2_000
CUT = 150


class LocalKit(Kit):
    """Numbers in a directory. ``server`` has only the directory."""

    parallelism = 1

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.server = SimpleNamespace(directory=directory)  # type: ignore[assignment]

    def pending(self) -> int:
        return 0

    def end(self) -> None:
        """End what runs."""


class TailKit(LocalKit):
    """A log with a number a line, which is rotated."""

    column = "value"
    data_source = TailDataSource

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        logs = directory / f"{name}-logs"
        logs.mkdir()
        self._log = logs / "app.log"
        self._log.touch()
        self.queue = TailSource(self._log)
        self.options = {"path": str(self._log)}

    def put(self, first: int, end: int) -> None:
        with self._log.open("a") as file:
            file.writelines(f"{number}\n" for number in range(first, end))
        if self._log.stat().st_size > ROTATES_AT:
            copies = sorted(self._log.parent.glob("app.log.*"), key=lambda path: -int(path.suffix[1:]))
            for copy in copies:
                copy.rename(copy.with_suffix(f".{int(copy.suffix[1:]) + 1}"))
            self._log.rename(f"{self._log}.1")
            self._log.touch()


class FilesKit(LocalKit):
    """A directory into which files are moved, with a number a line."""

    column = "value"
    data_source = FilesDataSource
    parallelism = 2
    has_spool = False

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self._inbox = directory / f"{name}-inbox"
        self._inbox.mkdir()
        journal = directory / f"{name}-journal"
        self.queue: Any = FilesSource(self._inbox, journal=journal, poll="50ms", max_files=2)
        self.options = {"path": str(self._inbox), "journal": str(journal), "maxFilesPerTrigger": "2"}

    def put(self, first: int, end: int) -> None:
        for begin in range(first, end, 100):
            numbers = range(begin, min(begin + 100, end))
            hidden = self._inbox / f".{begin}"
            hidden.write_text("".join(f"{number}\n" for number in numbers))
            hidden.rename(self._inbox / f"{begin}.txt")


class _Handler(BaseHTTPRequestHandler):
    """Gives at most `CUT` numbers at a time, behind the last id or cursor, of those that there are."""

    there = 0

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        is_stream = self.path.startswith("/events")
        behind = int(self.headers.get("Last-Event-ID", "-1") if is_stream else query.get("since", ["-1"])[0])
        numbers = range(behind + 1, min(behind + 1 + CUT, self.there))
        if is_stream:
            body = "retry: 20\n\n" + "".join(f"id: {number}\ndata: {number}\n\n" for number in numbers)
        else:
            body = json.dumps([{"id": number} for number in numbers])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


class HttpKit(LocalKit):
    """A server of this process, which has more numbers when they are put."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self._handler = type("Handler", (_Handler,), {})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def put(self, first: int, end: int) -> None:
        self._handler.there = end  # type: ignore[attr-defined]

    def end(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class SseKit(HttpKit):
    """Server-Sent Events."""

    column = "data"
    data_source = SseDataSource

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.queue = SseSource(f"{self.url}/events")
        self.options = {"url": f"{self.url}/events"}


class PolledKit(HttpKit):
    """JSON that is asked for again and again; the id of an item is its number."""

    column = "id"
    data_source = PolledJsonDataSource

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.queue = PolledJsonSource(f"{self.url}/items", cursor="id", param="since", interval="50ms")
        self.options = {"url": f"{self.url}/items", "cursor": "id", "param": "since", "interval": "50ms"}


LOCAL_KITS: dict[str, type[LocalKit]] = {
    "tail": TailKit,
    "files": FilesKit,
    "sse": SseKit,
    "polled": PolledKit,
}
