"""No secret of a URL or a DSN is in an error, in what leads to it, or in what is shown of a place."""

from __future__ import annotations

import base64
import contextlib
import logging
import socketserver
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ftlayer.checkpoint.storage.files import open_files
from ftlayer.cli.main import app
from ftlayer.common.printable import secrets_of, shown_url, without_secrets
from ftlayer.common.rules.telemetry_settings import Tracing, check_endpoint
from ftlayer.common.telemetry import open_spans
from ftlayer.connectors import amqp, mqtt, redis
from ftlayer.connectors.http.sink import check_request
from ftlayer.connectors.kafka.client import Brokers, check_properties
from ftlayer.connectors.nats import client as nats
from ftlayer.connectors.postgres import catalog as postgres
from ftlayer.errors import ConfigError
from ftlayer.sinks import (
    AmqpSink,
    DeltaSink,
    FileSink,
    HttpSink,
    IcebergSink,
    KafkaSink,
    MqttSink,
    NatsSink,
    PostgresSink,
    RedisSink,
)
from ftlayer.sources import (
    AmqpSource,
    FilesSource,
    KafkaSource,
    MqttSource,
    NatsSource,
    PolledJsonSource,
    PostgresChangesSource,
    PostgresTableSource,
    RedisSource,
    SseSource,
)
from ftlayer.topology.operators import Member, Queue
from tests.connectors.servers import free_port

SECRET = "hunter2"

FORMS = (
    "{0}://u:hunter2@h:1{1}",
    "{0}://:hunter2@h:1x{1}",
    "{0}://u:hunter2@127.0.0.1:99999{1}",
    "{0}://u:hunter2@[::1{1}",
    "{0}://u:hunter2/@h:1{1}",
    "{0}://u:hunter2@h@i:1{1}",
    "{0} ://u:hunter2@h",
    "x{0}://u:hunter2@h:1",
    "{0}:u:hunter2@h",
    "u:hunter2@h:1",
    "{0}://h:1{1}?api_key=hunter2",
    "{0}://h:1{1}#hunter2",
    "{0}://u:hunter2%zz@h:1{1}?hunter2%zz=1",
    "{0}://u:hunter2@h:-1{1}",
    " {0}://u:hunter2@h:1",
    "{0}://u:pa,hunter2@h:1",
    "{0}://u:1,hunter2,b@h:1",
    "{0}://u:hunter2@h:1?password=hunter2&nosuch=hunter2",
)
DSNS = (
    "host=h password=hunter2 x",
    "host=h password='hunter2",
    "host=h passwrd=hunter2",
    "password=hunter2 nosuch=1",
    "host=h password = 'hunter2' oops",
)

CHECKS: dict[str, tuple[str, str, Callable[[str], object]]] = {
    "HttpSink": ("https", "/p", HttpSink),
    "pull": ("http", "/p", lambda url: (check_request(url, None, "source"), None)[1]),
    "nats": ("nats", "", lambda url: (nats.check_nats_url(url), shown_url(url))),
    "redis": ("redis", "/0", lambda url: (redis.check_redis_url(url), shown_url(url))),
    "amqp": ("amqp", "/%2F", lambda url: (amqp.check_amqp_url(url), shown_url(url))),
    "mqtt": ("mqtt", "", mqtt.address_of),
    "postgres": ("postgresql", "/db", lambda dsn: (postgres.check_dsn(dsn), postgres.database_of(dsn))),
    "otlp": ("http", "/v1", lambda url: check_endpoint(url, "otlp_endpoint")),
}


def all_that_is_said(error: BaseException | None) -> str:
    """Return what an error, its causes and contexts say, also where a traceback would leave one out."""
    said = ""
    while error is not None:
        said += "".join(traceback.format_exception_only(error)) + repr(error)
        error = error.__cause__ or error.__context__
    return said


@pytest.mark.parametrize("name", CHECKS)
def test_checks_of_urls_quote_no_secret(name: str) -> None:
    scheme, path, check = CHECKS[name]
    refused = 0
    for form in (*FORMS, *DSNS):
        if name == "postgres" and "#" in form:
            continue  # libpq knows no fragments: it is part of the database's name.
        try:
            said = repr(check(form.format(scheme, path)))
        except ConfigError as error:
            refused += 1
            said = all_that_is_said(error)
        assert SECRET not in said, (form, said)
    assert refused > 3


WORD = st.text(st.characters(exclude_categories=["C"]), max_size=8)


@given(WORD, WORD, st.sampled_from(FORMS))
@example("@", "/", FORMS[0])
@example(",", ",", FORMS[0])
@example("1/", "", FORMS[0])
@example("1?", "", FORMS[0])
def test_no_form_shows_one(before: str, behind: str, form: str) -> None:
    url = form.format("http", "/p").replace(SECRET, f"{before}{SECRET}{behind}")
    assert SECRET not in shown_url(url)


def test_what_is_shown() -> None:
    assert shown_url("https://u:p@h:8/a?k=v#f") == "https://h:8/a"
    assert shown_url("nats://a:1,nats://u:p@[::1]:2") == "nats://a:1,nats://[::1]:2"
    for ambiguous in (
        "redis://u:1234/5@h",
        "http://u:1234?5@h",
        "http://u:1234#5@h",
        "https://h/a?to=me@hunter2",
    ):
        assert shown_url(ambiguous) == ambiguous.partition("://")[0] + "://…"
    assert shown_url("host=a,b password=a,hunter2,b") == "…"
    assert shown_url("/no/url") == "/no/url"
    assert shown_url("hdfs:///jobs/chk-5?user=me") == "hdfs:///jobs/chk-5"
    assert shown_url("redis:///u?\n@h") == shown_url("redis:///u:p") == "redis://…"


def test_an_answer_that_repeats_what_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-some-length"
    sink = HttpSink("https://u:hunter2@h/p?key=s%65cret", headers={"Authorization": f"Bearer {token}"})

    def answer(request: Any) -> httpx.Response:
        if b"away" in request.read():
            raise httpx.ConnectError(f"no {request.url} with {request.headers}")
        return httpx.Response(400, text=f"bad {request.url} with {token}, secret and {dict(request.headers)}")

    sink._client = httpx.Client(transport=httpx.MockTransport(answer), headers=sink._headers)
    for body in (b"{}", b"away"):
        said = all_that_is_said(sink.sent((None, body)))
        assert "https://h/p" in said
        assert not [each for each in (SECRET, token, "secret", "s%65cret") if each in said]


@pytest.mark.parametrize("what", ["source", "sink"])
@pytest.mark.parametrize("value", [SECRET, "a b"])
def test_librdkafka_quotes_values(what: Any, value: str) -> None:
    with pytest.raises(ConfigError, match=r"security\.protocol") as raised:
        check_properties({"security.protocol": value}, what)
    assert value not in all_that_is_said(raised.value)


def test_what_a_repr_leaves_out() -> None:
    assert SECRET not in repr(Brokers("h:1", "g", (("sasl.password", SECRET),)))
    assert SECRET not in repr(mqtt.address_of(f"mqtt://u:{SECRET}@h"))
    assert without_secrets("a hunter2 b", secrets_of("http://u:hunter2@h?k=abc")) == "a … b"


# ---------------------------------------------------------------- connectors that fail

ECHO = "echo"
REFUSED = "refused"
KEY, TOKEN = "s3cr3t-key", "t0ken-of-header"
SECRETS = (SECRET, KEY, TOKEN, base64.b64encode(b"user:hunter2").decode())
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
ROWS = pa.RecordBatch.from_pydict({"value": ["one"]})
MEMBER = Member("job/s", 0, 1)


class _Echo(socketserver.BaseRequestHandler):
    """Answers with what it was sent, as an error of the protocols that have some before a handshake."""

    def handle(self) -> None:
        self.request.settimeout(2)
        with contextlib.suppress(OSError):
            for _ in range(8):
                came = self.request.recv(65536)
                if not came:
                    return
                if b" HTTP/1." in came:
                    body = came * 3
                    head = f"HTTP/1.1 {self.server.status} Echo\r\nContent-Length: {len(body)}\r\n\r\n"  # type: ignore[attr-defined]
                    answer = head.encode() + body
                elif came[:1] == b"*":
                    answer = b"-ERR unknown command, with args " + came.replace(b"\r\n", b" ") + b"\r\n"
                elif came[4:8] in (
                    b"\x00\x03\x00\x00",
                    b"\x00\x03\x00\x02",
                ):  # PostgreSQL asks for the password
                    answer = b"R\x00\x00\x00\x08\x00\x00\x00\x03"
                elif came[:1] == b"p":
                    said = b"SFATAL\0VFATAL\0C28P01\0Mno " + came[5:-1] + b"\0\0"
                    answer = b"E" + (len(said) + 4).to_bytes(4, "big") + said
                elif came[4:8] == b"\x04\xd2\x16\x2f":  # … and before that for TLS
                    answer = b"N"
                elif came[:4] == b"AMQP" or came[:1] == b"\x10":
                    answer = came
                else:
                    answer = b"-ERR '" + came.replace(b"\r\n", b" ") + b"'\r\n"
                self.request.sendall(answer)


class _EchoServer(socketserver.ThreadingTCPServer):
    daemon_threads, allow_reuse_address, status = True, True, 400


@pytest.fixture(scope="module")
def echo() -> Iterator[_EchoServer]:
    with _EchoServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def _sent(sink: Any) -> None:
    sink(ROWS) if callable(sink) else sink.commit([sink.write(iter([ROWS]))], 0)


def _fetched(source: Queue) -> None:
    reader = source.open(MEMBER, {}, stored=True)
    try:
        for _ in range(40):
            reader.fetch(10, 0.05)
    finally:
        reader.close()


def _read(source: Any) -> None:
    source.latestOffset(source.initialOffset(), None)


SHORT = "20ms"
# Each takes host:port of the server that will not do, and a directory.
CONNECTORS: dict[str, Callable[[str, Path], object]] = {
    "HttpSink": lambda at, _: _sent(HttpSink(f"http://user:{SECRET}@{at}/p?k={KEY}", headers=HEADERS)),
    "AmqpSink": lambda at, _: _sent(
        AmqpSink(f"amqp://user:{SECRET}@{at}/%2F", routing_key="q", reconnect_timeout=SHORT)
    ),
    "MqttSink": lambda at, _: _sent(
        MqttSink(f"mqtt://user:{SECRET}@{at}", topic="t", reconnect_timeout=SHORT)
    ),
    "NatsSink": lambda at, _: _sent(NatsSink(f"nats://user:{SECRET}@{at}", "s", "s.x")),
    "NatsSink, token": lambda at, _: _sent(NatsSink(f"nats://{SECRET}@{at}", "s", "s.x")),
    "RedisSink": lambda at, _: _sent(RedisSink(f"redis://user:{SECRET}@{at}/0", "s")),
    "PostgresSink": lambda at, _: _sent(PostgresSink(f"postgresql://user:{SECRET}@{at}/d", "t")),
    "PostgresSink, pairs": lambda at, _: _sent(
        PostgresSink("host={} port={} user=user password={} dbname=d".format(*at.split(":"), SECRET), "t")
    ),
    "KafkaSink": lambda at, _: _sent(
        KafkaSink(
            at,
            "t",
            exactly_once=False,
            config={
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "user",
                "sasl.password": SECRET,
                "message.timeout.ms": 300,
            },
        )
    ),
    "DeltaSink": lambda at, _: _sent(
        DeltaSink(
            "s3://bucket/table",
            storage_options={
                "aws_access_key_id": "user",
                "aws_secret_access_key": SECRET,
                "aws_session_token": TOKEN,
                "aws_endpoint_url": f"http://{at}/?k={KEY}",
                "aws_region": "x",
                "aws_allow_http": "true",
                "aws_max_retries": "0",
                "aws_retry_timeout": "1s",
            },
        )
    ),
    "IcebergSink": lambda at, _: _sent(
        IcebergSink("n.t", {"type": "rest", "uri": f"http://user:{SECRET}@{at}/?k={KEY}", "token": TOKEN})
    ),
    "IcebergSink, SQL": lambda at, _: _sent(
        IcebergSink("n.t", {"type": "sql", "uri": f"postgresql+psycopg://user:{SECRET}@{at}/d"})
    ),
    "IcebergSink, no SQL": lambda at, _: _sent(
        IcebergSink("n.t", {"type": "sql", "uri": f"nosuch:{SECRET}@{at}/d"})
    ),
    "FileSink": lambda at, _: _sent(FileSink(f"ftp://user:{SECRET}@{at}/d")),
    "FileSink, HTTP": lambda at, _: _sent(FileSink(f"http://user:{SECRET}@{at}/d?k={KEY}")),
    "AmqpSource": lambda at, _: _fetched(
        AmqpSource(f"amqp://user:{SECRET}@{at}/", "q", reconnect_timeout=SHORT)
    ),
    "MqttSource": lambda at, _: _fetched(
        MqttSource(f"mqtt://user:{SECRET}@{at}", "t", reconnect_timeout=SHORT)
    ),
    "NatsSource": lambda at, _: _fetched(
        NatsSource(f"nats://user:{SECRET}@{at}", "s", "c", reconnect_timeout=SHORT)
    ),
    "RedisSource": lambda at, _: _fetched(
        RedisSource(f"redis://:{SECRET}@{at}", "s", "g", reconnect_timeout=SHORT)
    ),
    "PostgresChangesSource": lambda at, _: (
        PostgresChangesSource(f"postgresql://u:{SECRET}@{at}/d", "t", "s").schema
    ),
    "PostgresTableSource": lambda at, _: (
        PostgresTableSource(f"postgresql://u:{SECRET}@{at}/d", "t", column="id").schema
    ),
    "SseSource": lambda at, _: _fetched(
        SseSource(f"http://user:{SECRET}@{at}/e?k={KEY}", headers=HEADERS, reconnect_timeout=SHORT)
    ),
    "PolledJsonSource": lambda at, _: _fetched(
        PolledJsonSource(
            f"http://user:{SECRET}@{at}/e?k={KEY}",
            headers=HEADERS,
            reconnect_timeout=SHORT,
            interval="10ms",
            cursor="c",
            param="p",
        )
    ),
    "KafkaSource": lambda at, _: _read(
        KafkaSource(
            at,
            "t",
            reconnect_timeout=SHORT,
            config={
                "security.protocol": "SASL_PLAINTEXT",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "user",
                "sasl.password": SECRET,
                "socket.timeout.ms": 1000,
                "request.timeout.ms": 500,
            },
        )
    ),
    "FilesSource": lambda at, path: _read(
        FilesSource(f"http://user:{SECRET}@{at}/d?k={KEY}", journal=path / "journal")
    ),
    "FilesSource, FTP": lambda at, path: _read(
        FilesSource(f"ftp://user:{SECRET}@{at}/d", journal=path / "journal")
    ),
    "FilesSource, S3": lambda at, path: _read(
        FilesSource(
            "s3://bucket/d",
            journal=path / "journal",
            storage_options={
                "key": "user",
                "secret": SECRET,
                "token": TOKEN,
                "endpoint_url": f"http://{at}",
                "config_kwargs": {"retries": {"max_attempts": 0}},
            },
        )
    ),
    "checkpoints": lambda at, _: open_files(f"ftp://user:{SECRET}@{at}/d").read("file"),
    "checkpoints, HTTP": lambda at, _: open_files(f"http://user:{SECRET}@{at}/d?k={KEY}").read("file"),
    "health": lambda at, _: CliRunner().invoke(app, ["health", f"http://user:{SECRET}@{at}"]).output,
    "otlp": lambda at, _: open_spans(
        Tracing(1.0, f"http://user:{SECRET}@{at}/v1/traces?k={KEY}", ""), "service", "1"
    ),
}


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in CONNECTORS for how in (REFUSED, ECHO)]
    + [
        (name, "echo 500")
        for name in ("HttpSink", "SseSource", "PolledJsonSource", "IcebergSink", "DeltaSink")
    ],
)
def test_no_failure_of_a_connector_tells_a_secret(
    name: str,
    how: str,
    echo: _EchoServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = free_port() if how == REFUSED else echo.server_address[1]
    echo.status = 500 if how == "echo 500" else 400
    monkeypatch.setattr("ftlayer.connectors.kafka.client.CALL_S", 0.2)
    caplog.set_level(logging.INFO)  # Below it, libraries show what is sent.
    try:
        said = repr(CONNECTORS[name](f"127.0.0.1:{port}", tmp_path))
    except Exception as error:  # noqa: BLE001 - whatever it is
        said = all_that_is_said(error) + "".join(traceback.format_exception(error))
    said += caplog.text + "".join(str(record.__dict__) for record in caplog.records)
    assert len(said) > 10
    assert not [secret for secret in SECRETS if secret in said], said
