"""Rows by HTTP: what a server gets, and what becomes of a row by its answer."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pyarrow as pa
import pytest

from ftlayer.common.failures import PermanentFailure, RetryLater, RowsRejected
from ftlayer.connectors.http.sink import retry_after_s
from ftlayer.errors import ConfigError, SinkError
from ftlayer.runtime.connectors.sinks import FunctionSinkBody
from ftlayer.sinks import HttpSink

Answer = Callable[[dict[str, Any]], tuple[int, dict[str, str]]]
"""Of a request's body: status and headers."""


class Api:
    """A server that answers as it is told, and keeps what it was sent."""

    def __init__(self) -> None:
        self.answer: Answer = lambda _: (200, {})
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        lock = threading.Lock()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                with lock:
                    api.requests.append((f"{self.command} {self.path}", dict(self.headers.items()), body))
                status, headers = api.answer(json.loads(body))
                self.send_response(status)
                for name, text in headers.items():
                    self.send_header(name, text)
                self.send_header("content-length", "3")
                self.end_headers()
                self.wfile.write(b"why")

            do_PUT = do_POST  # noqa: N815 - the server asks for it

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/in"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def api() -> Iterator[Api]:
    made = Api()
    yield made
    made.close()


def rows(count: int) -> pa.RecordBatch:
    return pa.record_batch({"n": range(count), "name": [f"row {n}" for n in range(count)]})


def rejected(sink: HttpSink, batch: pa.RecordBatch) -> dict[int, Any]:
    with pytest.raises(RowsRejected) as found:
        sink(batch)
    return found.value.errors


def test_each_row_is_a_request_with_its_key(api: Api) -> None:
    sink = pickle.loads(pickle.dumps(HttpSink(api.url, key="name", headers={"Authorization": "Bearer x"})))
    sink(rows(20))
    sink(rows(0))
    assert sorted(json.loads(body)["n"] for _, _, body in api.requests) == list(range(20))
    for what, headers, body in api.requests:
        assert what == "POST /in"
        assert headers["Idempotency-Key"] == json.loads(body)["name"]
        assert headers["Authorization"] == "Bearer x"
        assert headers["Content-Type"] == "application/json"


def test_a_body_of_its_own(api: Api) -> None:
    texts = pa.record_batch({"body": ["[1]", "[2]"], "more": [1, 2]})
    HttpSink(api.url, body="body", method="PUT")(texts)
    assert sorted((what, body) for what, _, body in api.requests) == [
        ("PUT /in", b"[1]"),
        ("PUT /in", b"[2]"),
    ]
    assert "Idempotency-Key" not in api.requests[0][1]


def test_values_that_json_lacks(api: Api) -> None:
    values = {
        "b": b"\xff",
        "t": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "d": Decimal("1.50"),
        "l": [{"x": None}],
    }
    HttpSink(api.url)(pa.RecordBatch.from_pylist([values]))
    ((_, _, body),) = api.requests
    assert json.loads(body) == {
        "b": "/w==",
        "t": "2026-01-02T00:00:00+00:00",
        "d": "1.50",
        "l": [{"x": None}],
    }
    with pytest.raises(ValueError, match="JSON"):
        HttpSink(api.url)(pa.record_batch({"x": [float("nan")]}))


@pytest.mark.parametrize(
    ("status", "headers", "kind"),
    [
        (400, {}, PermanentFailure),
        (401, {}, PermanentFailure),
        (422, {}, PermanentFailure),
        (301, {"location": "/elsewhere"}, PermanentFailure),
        (408, {}, SinkError),
        (409, {}, SinkError),
        (429, {}, SinkError),
        (500, {}, SinkError),
        (503, {"retry-after": "7"}, RetryLater),
        (429, {"retry-after": "0"}, RetryLater),
    ],
)
def test_the_answer_decides_on_the_row(
    api: Api, status: int, headers: dict[str, str], kind: type[Exception]
) -> None:
    api.answer = lambda row: (status, headers) if row["n"] == 3 else (202, {})
    errors = rejected(HttpSink(api.url), rows(6))
    assert list(errors) == [3]
    assert type(errors[3]) is kind
    assert f"answered {status}: why" in str(errors[3])
    if kind is RetryLater:
        assert (errors[3].after_ms, errors[3].uses_attempt) == (
            max(1, int(headers["retry-after"]) * 1_000),
            False,
        )


def test_just_these_fail_in_a_topology_and_no_other_is_sent_again(api: Api) -> None:
    api.answer = lambda row: (400 if row["n"] % 10 == 3 else 500 if row["n"] == 7 else 200, {})
    settled = FunctionSinkBody("out", HttpSink(api.url)).write(rows(20), 0)
    assert [(failure.row, failure.fatal) for failure in settled.failures] == [
        (3, True),
        (7, False),
        (13, True),
    ]
    assert len(api.requests) == 20


def test_a_server_that_is_away_is_not_asked_for_each_row(api: Api) -> None:
    url = api.url
    api.close()
    errors = rejected(HttpSink(url, connections=2), rows(1_000))
    assert sorted(errors) == list(range(1_000))
    assert len({id(error) for error in errors.values()}) <= 4
    assert "no answer: ConnectError" in str(errors[999])


def test_a_server_that_is_overloaded_is_not_asked_for_each_row(api: Api) -> None:
    api.answer = lambda _: (503, {})
    assert len(rejected(HttpSink(api.url, connections=2), rows(1_000))) == 1_000
    assert len(api.requests) <= 4


@pytest.mark.parametrize(
    ("text", "pause_s"),
    [
        (None, None),
        ("soon", None),
        ("12", 12.0),
        ("99999999", 3_600.0),
        ("Thu, 01 Jan 2026 00:00:30 GMT", 30.0),
        ("Wed, 31 Dec 2025 00:00:00 GMT", 0.0),
        ("Thu, 01 Jan 2026 00:00:30 -0000", 30.0),
    ],
)
def test_retry_after(text: str | None, pause_s: float | None) -> None:
    assert retry_after_s(text, dt.datetime(2026, 1, 1, tzinfo=dt.UTC)) == pause_s


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"url": ""}, "url"),
        ({"url": "host/path"}, "url"),
        ({"key": ""}, "key"),
        ({"body": 1}, "body"),
        ({"method": "GET"}, "method"),
        ({"headers": ["a"]}, "headers"),
        ({"headers": {"a": 1}}, "headers"),
        ({"headers": {"idempotency-key": "1"}}, "headers: Idempotency-Key"),
        ({"connections": 0}, "connections"),
        ({"timeout": "soon"}, "timeout"),
    ],
)
def test_an_option_that_will_not_do_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        HttpSink(**{"url": "http://localhost", **options})


def test_a_column_that_is_not_there_is_named(api: Api) -> None:
    with pytest.raises(ConfigError, match="key: rows have no column 'id'; they have n, name"):
        HttpSink(api.url, key="id")(rows(1))
    with pytest.raises(ConfigError, match="body: column 'n' is int64"):
        HttpSink(api.url, body="n")(rows(1))
