"""Server-Sent Events and polled JSON, of a server that goes away, refuses, and says when to come again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources import PolledJsonSource, SseSource
from ftlayer.topology.operators import Fetched, Member, Queue, QueueReader

MEMBER = Member("job/events", 0, 1)
Answer = Callable[[BaseHTTPRequestHandler], None]
FETCHES = 600


class Server:
    """Answers as the test says; the last answer for ever."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.requests.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()})
                )
                answer = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
                answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/feed"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def answer(status: int, body: bytes = b"", **headers: str) -> Answer:
    def answers(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in headers.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return answers


def events(*texts: str) -> Answer:
    return answer(200, "".join(texts).encode(), Content_Type="text/event-stream; charset=utf-8")


def items(found: Any, **headers: str) -> Answer:
    return answer(200, json.dumps(found).encode(), Content_Type="application/json", **headers)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def fetch_rows(reader: QueueReader, count: int, rows: int = 100) -> list[Fetched]:
    found: list[Fetched] = []
    for _ in range(FETCHES):
        if sum(each.rows.num_rows for each in found) >= count:
            return found
        if (fetched := reader.fetch(rows, 0.1)) is not None:
            found.append(fetched)
    raise AssertionError(f"{count} rows did not come")


def column(found: list[Fetched], name: str) -> list[Any]:
    return [value for each in found for value in each.rows.column(name).to_pylist()]


def opened(source: Queue, position: bytes | None = None) -> Any:
    return source.open(MEMBER, {} if position is None else {0: position}, stored=True)


# ---------------------------------------------------------------- Server-Sent Events


def test_a_connection_that_ends_is_made_again_behind_the_last_event(server: Server) -> None:
    server.answers = [
        events("retry: 10\nid: 1\ndata: a\n\nid: 2\nevent: e\ndata: b\n\nid: 3\ndata: lo"),
        answer(503, Retry_After="0"),
        events("id: 3\ndata: c\n\ndata: d\n\n"),
        events(": nothing\n\n"),
    ]
    source = SseSource(server.url, headers={"Authorization": "Bearer x"})
    reader = opened(source)
    found = fetch_rows(reader, 4, rows=1)
    assert column(found, "data") == ["a", "b", "c", "d"]
    assert column(found, "id") == ["1", "2", "3", "3"]
    assert column(found, "event") == ["message", "e", "message", "message"]
    assert len({each.position for each in found}) == 4
    assert all(each.rows.schema.equals(source.schema) for each in found)
    assert [headers.get("last-event-id") for _, headers in server.requests[:3]] == [None, "2", "2"]
    assert {headers["authorization"] for _, headers in server.requests} == {"Bearer x"}
    reader.close()
    server.requests.clear()
    server.answers = [events("id: 2\ndata: b\n\n")]
    again = opened(source, found[0].position)
    assert column(fetch_rows(again, 1), "data") == ["b"]
    assert server.requests[0][1]["last-event-id"] == "1"
    again.close()


def test_events_come_while_the_connection_is_open(server: Server) -> None:
    """A server that says nothing for too long is asked again."""
    goes_on = threading.Event()

    def trickles(request: BaseHTTPRequestHandler) -> None:
        events("id: ä\ndata: a\n\n")(request)
        request.wfile.flush()
        goes_on.wait(60)

    server.answers = [trickles, events("id: z\ndata: b\n\n")]
    reader = opened(SseSource(server.url, idle_timeout="200ms"))
    assert column(fetch_rows(reader, 1), "data") == ["a"]
    assert reader.fetch(10, 0.01) is None
    assert column(fetch_rows(reader, 1), "data") == ["b"]
    # The server reads bytes of UTF-8 as Latin-1.
    assert server.requests[1][1]["last-event-id"].encode("latin-1").decode() == "ä"
    reader.close()
    goes_on.set()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(204), "it has answered 204: there are no more events"),
        (answer(404, b"no such feed"), "it has answered 404: no such feed"),
        (answer(200, b"{}", Content_Type="application/json"), "expected an answer of text/event-stream"),
    ],
)
def test_an_answer_without_events_fails_the_source(server: Server, given: Answer, said: str) -> None:
    server.answers = [given]
    reader = opened(SseSource(server.url))
    with pytest.raises(SourceError, match=said):
        fetch_rows(reader, 1)
    reader.close()


@pytest.mark.parametrize("kind", [SseSource, PolledJsonSource])
def test_a_server_that_stays_away_is_given_up(kind: Any) -> None:
    reader = opened(kind("http://user:secret@127.0.0.1:1/x?token=y", reconnect_timeout="300ms"))
    with pytest.raises(SourceError, match="longer than reconnect_timeout") as raised:
        fetch_rows(reader, 1)
    assert not {"secret", "token"} & set(str(raised.value).replace("=", " ").replace(":", " ").split())
    reader.close()


# ---------------------------------------------------------------- polled JSON


def test_new_items_of_a_list(server: Server) -> None:
    first = [{"id": n, "v": "ä"} for n in range(3)]
    server.answers = [
        items(first, ETag='"1"'),
        answer(304),
        items([*first[1:], {"id": 3}, {"id": 3}, {"id": "3"}], ETag='"2"'),
        answer(304),
    ]
    source = PolledJsonSource(server.url, interval="1ms")
    reader = opened(source)
    found = fetch_rows(reader, 3, rows=2)
    assert column(found, "id") == ["0", "1", "2"]
    assert [json.loads(item) for item in column(found, "item")] == first
    assert all(each.rows.schema.equals(source.schema) for each in found)
    assert column(fetch_rows(reader, 1), "id") == ["3"]
    tags = [headers.get("if-none-match") for _, headers in server.requests]
    assert tags[:3] == [None, '"1"', '"1"']
    reader.close()
    # In the middle of an answer, of which the whole comes again.
    server.requests.clear()
    server.answers = [items(first, ETag='"1"')]
    again = opened(source, found[0].position)
    assert column(fetch_rows(again, 1), "id") == ["2"]
    assert "if-none-match" not in server.requests[0][1]
    again.close()
    behind = opened(source, found[-1].position)
    assert behind.fetch(10, 0.05) is None
    assert server.requests[-1][1]["if-none-match"] == '"1"'
    behind.close()


def test_a_cursor_goes_through_all_pages(server: Server) -> None:
    """Items of the cursor's value come again, and are known."""
    every = [{"key": {"a": n}, "at": f"2026-11-{n // 2 + 1:02}"} for n in range(20)]

    def page(request: BaseHTTPRequestHandler) -> None:
        query = parse_qs(urlsplit(request.path).query)
        assert query["limit"] == ["5"]
        since = query.get("since", [""])[0]
        items({"data": {"rows": [item for item in every if item["at"] >= since][:5]}})(request)

    server.answers = [page]
    source = PolledJsonSource(
        f"{server.url}?limit=5",
        id=["key.a", "at"],
        items="data.rows",
        cursor="at",
        param="since",
        interval="1h",
    )
    reader = opened(source)
    found = fetch_rows(reader, 20, rows=3)
    assert [json.loads(item)["key"]["a"] for item in column(found, "item")] == list(range(20))
    assert reader.fetch(10, 0.05) is None
    asked = len(server.requests)
    assert reader.fetch(10, 0.05) is None
    assert len(server.requests) == asked, "the next request is due in an hour"
    reader.close()
    for place in range(len(found)):
        again = opened(source, found[place].position)
        rest = sum(each.rows.num_rows for each in found[place + 1 :])
        assert column(fetch_rows(again, rest), "id") == column(found[place + 1 :], "id")
        again.close()


def test_a_server_says_when_to_come_again(server: Server) -> None:
    server.answers = [answer(429, Retry_After="1"), items([{"id": 1}])]
    reader = opened(PolledJsonSource(server.url, interval="1ms"))
    begin = time.monotonic()
    fetch_rows(reader, 1)
    assert time.monotonic() - begin >= 1
    reader.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (answer(401, b"who are you"), "it has answered 401: who are you"),
        (answer(200, b"<html>"), "the answer is no JSON"),
        (items({"rows": []}), "items='': expected a list there, got dict"),
        (items([{"id": 1}, {"ID": 2}]), "an item has no text or number at 'id'"),
        (items([7]), "an item has no text or number at 'id': 7"),
    ],
)
def test_an_answer_without_items_fails_the_source(server: Server, given: Answer, said: str) -> None:
    server.answers = [given]
    reader = opened(PolledJsonSource(server.url))
    with pytest.raises(SourceError, match=said):
        fetch_rows(reader, 1)
    reader.close()


# ---------------------------------------------------------------- both


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": ""}, "url: expected one that begins with http"),
        ({"url": "ftp://x"}, "url: expected one that begins with http"),
        ({"headers": {"a": 1}}, "headers: expected a dict from name to text"),
        ({"id": []}, "id: expected a name in an item"),
        ({"id": [7]}, "id: expected a name in an item"),
        ({"items": 7}, "items: expected a name"),
        ({"cursor": "at"}, "cursor and param belong together"),
        ({"interval": "often"}, "interval"),
        ({"timeout": 0}, "timeout"),
        ({"reconnect_timeout": "x"}, "reconnect_timeout"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, Any], said: str) -> None:
    options = {"url": "http://localhost/x", **given}
    with pytest.raises(ConfigError, match=said):
        PolledJsonSource(options.pop("url"), **options)
    if not {"url", "headers"} & set(given):
        return
    options = {"url": "http://localhost/x", **given}
    with pytest.raises(ConfigError, match=said):
        SseSource(options.pop("url"), **options)


@pytest.mark.parametrize("kind", [SseSource, PolledJsonSource])
def test_one_subtask_reads_and_positions_are_its_own(kind: Any) -> None:
    source = kind("http://127.0.0.1:1/x")
    idle = source.open(Member("job/events", 1, 2), {}, stored=True)
    assert idle.fetch(1, 0.01) is None
    idle.close()
    assert source.most_subtasks == 1
    with pytest.raises(ConfigError, match="give the new one a uid of its own"):
        opened(source, b"\x07")
    with pytest.raises(ConfigError, match="idle_timeout"):
        SseSource("http://x", idle_timeout="x")


def test_a_cursor_or_etag_that_cannot_be_sent_stops_no_source(server: Server) -> None:
    server.answers = [items([{"id": "\ud800", "at": "\udfff"}], ETag='"\xe9"'), items([{"id": 2, "at": 3}])]
    source = PolledJsonSource(server.url, cursor="at", param="since", interval="1ms")
    reader = opened(source)
    found = fetch_rows(reader, 2, rows=1)
    assert column(found, "id") == ["\ufffd", "2"]
    opened(source, found[0].position).close()
    reader.close()
