"""A webhook with its server: what a sender meets."""

from __future__ import annotations

import contextlib
import pickle
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ftlayer.connectors.http.webhook import WebhookReader
from ftlayer.errors import ConfigError, SourceError
from ftlayer.sources import WebhookSource
from ftlayer.topology.operators import Fetched, Member
from ftlayer.transport.tls import make_certificate

ME = Member("job/hook", 0, 1)


@pytest.fixture
def opened() -> Iterator[Any]:
    readers: list[WebhookReader] = []

    def make(positions: dict[int, bytes] | None = None, member: Member = ME, **options: Any) -> WebhookReader:
        source = pickle.loads(pickle.dumps(WebhookSource(**{"listen": "127.0.0.1:0", **options})))
        readers.append(source.open(member, positions or {}, stored=True))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


def send(reader: WebhookReader, body: bytes, answers: list[int]) -> threading.Thread:
    def post() -> None:
        response = httpx.post(f"http://127.0.0.1:{reader.server.port}/in", content=body, timeout=600)
        answers.append(response.status_code)

    thread = threading.Thread(target=post)
    thread.start()
    return thread


def fetched(reader: WebhookReader, rows: int) -> list[Fetched]:
    """Fetch so many requests."""
    found: list[Fetched] = []
    while sum(each.rows.num_rows for each in found) < rows:
        if (each := reader.fetch(100, 600)) is not None:
            found.append(each)
    return found


def test_requests_become_rows_and_are_answered_when_they_are_durable(opened: Any) -> None:
    reader = opened(headers=["User-Agent", "X-Kind"])
    answers: list[int] = []
    threads = [send(reader, b"%d" % number, answers) for number in range(5)]
    found = fetched(reader, 5)
    rows = [row for each in found for row in each.rows.to_pylist()]
    assert sorted(row["body"] for row in rows) == [b"%d" % number for number in range(5)]
    assert {row["path"] for row in rows} == {"/in"}
    assert all(row["User-Agent"].startswith("python-httpx") and row["X-Kind"] is None for row in rows)
    assert len({row["id"] for row in rows}) == 5
    assert not answers
    reader.acknowledge([each.receipt for each in found])
    for thread in threads:
        thread.join()
    assert answers == [202] * 5


def test_positions_go_on_behind_those_that_are_stored(opened: Any) -> None:
    first = opened()
    thread = send(first, b"x", [])
    (found,) = fetched(first, 1)
    first.acknowledge([found.receipt])
    thread.join()
    second = opened({0: found.position})
    thread = send(second, b"y", [])
    (again,) = fetched(second, 1)
    second.acknowledge([again.receipt])
    thread.join()
    assert again.position > found.position
    assert (again.of, again.rows.num_rows) == (0, 1)


def test_a_fetch_that_waits_is_woken(opened: Any) -> None:
    reader = opened()
    timer = threading.Timer(0.01, reader.wake_up)
    timer.start()
    assert reader.fetch(1, 600) is None
    timer.join()


def test_who_waits_when_it_closes_hears_of_it(opened: Any) -> None:
    reader = opened()
    answers: list[int] = []
    thread = send(reader, b"x", answers)
    fetched(reader, 1)
    reader.close()
    thread.join()
    assert answers == [503]


def test_positions_of_another_source_are_refused(opened: Any) -> None:
    with pytest.raises(ConfigError, match="a uid of its own"):
        opened({0: b"\x07"})


def test_a_port_that_is_taken_is_named(opened: Any) -> None:
    taken = opened()
    with pytest.raises(SourceError, match=rf"listen: .*127\.0\.0\.1:{taken.server.port}"):
        opened(listen=f"127.0.0.1:{taken.server.port}")


def test_subtasks_of_one_host_share_a_port(opened: Any) -> None:
    first = opened(member=Member("job/hook", 0, 2))
    second = opened(member=Member("job/hook", 1, 2), listen=f"127.0.0.1:{first.server.port}")
    assert first.server.port == second.server.port


def test_certificates_that_are_not_there_are_named(opened: Any) -> None:
    with pytest.raises(SourceError, match="tls_cert, tls_key"):
        opened(tls_cert="/no/such/cert.pem", tls_key="/no/such/key.pem")


def test_with_tls(opened: Any, tmp_path: Path) -> None:
    made = make_certificate(["127.0.0.1"])
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.cert)
    key.write_bytes(made.key)
    reader = opened(tls_cert=str(cert), tls_key=str(key))
    context = ssl.create_default_context(cafile=str(cert))
    answer = httpx.get(f"https://127.0.0.1:{reader.server.port}/", verify=context)
    assert answer.status_code == 405


def test_a_server_that_ends_by_itself_fails_the_source(opened: Any) -> None:
    reader = opened()
    reader.server.close()
    with pytest.raises(SourceError, match="ended by itself"):
        reader.fetch(1, 0.01)


def test_connections_without_a_request_lock_nobody_out(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new one beyond the bound ends the oldest that waits; those whose headers do not come are cut off."""
    monkeypatch.setattr("ftlayer.connectors.http.webhook._CONNECTIONS", 5)
    monkeypatch.setattr("ftlayer.transport.sockets.REQUEST_S", 0.2)
    reader = opened()
    at = ("127.0.0.1", reader.server.port)
    idle = [socket.create_connection(at, timeout=600) for _ in range(20)]
    idle[-1].sendall(b"POST /in HTTP/1.1\r\nHost: h")
    answers: list[int] = []
    thread = send(reader, b"x", answers)
    (found,) = fetched(reader, 1)
    reader.acknowledge([found.receipt])
    thread.join()
    assert answers == [202]
    for each in idle:
        with contextlib.suppress(ConnectionError):
            assert each.recv(1) == b""
        each.close()
