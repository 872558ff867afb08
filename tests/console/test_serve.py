"""A console that listens: the link it prints, and its end."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import httpx
import pytest

from ftlayer.errors import MachineError
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.serve import serve
from ftlayer.transport.tls import make_certificate

PATIENCE_S = 60.0


class Running:
    """A console in a thread; `link` waits until it listens."""

    def __init__(self, options: ConsoleOptions) -> None:
        self.stop = threading.Event()
        self._links: list[str] = []
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(options,))
        self._thread.start()

    def _run(self, options: ConsoleOptions) -> None:
        serve(options, lambda: (), on_ready=self._on_ready, stop=self.stop)

    def _on_ready(self, link: str) -> None:
        self._links.append(link)
        self._ready.set()

    @property
    def link(self) -> str:
        assert self._ready.wait(PATIENCE_S)
        return self._links[0]

    def end(self) -> None:
        self.stop.set()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def test_without_a_login_file_the_link_lets_in() -> None:
    """The token is in the link and fills the form; nobody else is let in."""
    running = Running(ConsoleOptions(listen="127.0.0.1:0"))
    try:
        text = urlopen(running.link, timeout=PATIENCE_S).read().decode()
        token = re.search(r'name="token" value="([^"]+)"', text)
        assert token is not None
        where = running.link.partition("/login")[0]
        with httpx.Client(base_url=where) as client:
            answer = client.post("/login", data={"token": token[1]}, headers={"origin": where})
            assert answer.status_code == 303
            assert "Overview" in client.get("/").text
    finally:
        running.end()


def test_a_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    """Mode 0600, and gone at the end."""
    path = tmp_path / "console"
    running = Running(ConsoleOptions(listen=f"unix:{path}"))
    try:
        assert running.link.startswith(f"unix:{path} (token ")
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(
            transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost"
        ) as client:
            assert client.get("/login").status_code == 200
    finally:
        running.end()
    assert not path.exists()


def test_over_tls(tmp_path: Path, login_file: Path) -> None:
    """By https, with the users of the login file; the link has no token in it."""
    made = make_certificate(["127.0.0.1"])
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes(made.cert)
    key.write_bytes(made.key)
    key.chmod(0o600)
    running = Running(ConsoleOptions("127.0.0.1:0", login_file, cert, key))
    try:
        assert running.link.startswith("https://127.0.0.1:")
        assert "token" not in running.link
        import ssl

        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            assert client.get(f"{running.link}login").status_code == 200
    finally:
        running.end()


def test_connections_without_a_token_lock_nobody_out(
    tmp_path: Path, login_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bodies that do not come held all connections for good, and each with TLS that says nothing one for a minute."""
    monkeypatch.setattr("ftlayer.monitor.console.serve._CONNECTIONS", 5)
    monkeypatch.setattr("ftlayer.transport.sockets.REQUEST_S", 1)
    made = make_certificate(["127.0.0.1"])
    for name, text in (("cert", made.cert), ("key", made.key)):
        (tmp_path / name).write_bytes(text)
        (tmp_path / name).chmod(0o600)
    plain = Running(ConsoleOptions("127.0.0.1:0"))
    secured = Running(ConsoleOptions("127.0.0.1:0", login_file, tmp_path / "cert", tmp_path / "key"))
    try:
        for running in (plain, secured):
            where = running.link.partition("/login")[0].rstrip("/")
            at = ("127.0.0.1", int(where.rpartition(":")[2]))
            held = [socket.create_connection(at, timeout=PATIENCE_S / 2) for _ in range(12)]
            for each in held if running is plain else ():
                head = f"POST /login HTTP/1.1\r\nHost: {where[7:]}\r\nOrigin: {where}\r\n"
                head += "Content-Type: application/x-www-form-urlencoded\r\n"
                with contextlib.suppress(ConnectionError):
                    each.sendall(f"{head}Content-Length: 100\r\n\r\ntoken".encode())
            answer = httpx.get(f"{where}/login", verify=False, timeout=PATIENCE_S)
            assert answer.status_code == 200
            for each in held:
                with contextlib.suppress(ConnectionError):
                    assert each.recv(1) == b""
                each.close()
    finally:
        plain.end()
        secured.end()


def test_a_place_that_is_taken_is_said() -> None:
    """Before anything else happens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(MachineError, match="listen: cannot listen on"):
            serve(ConsoleOptions(listen=listen), lambda: (), on_ready=lambda link: None)


def test_the_command_ends_with_a_signal() -> None:
    """``ftlayer console`` prints its link and stops when it is told to; pages that are open do not hold it up."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ftlayer.cli.main", "console", "--listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    with process:
        line = process.stdout.readline()
        assert line.startswith("ftlayer console at http://127.0.0.1:")
        where, _, token = line.split()[-1].partition("/login?token=")
        headers = {"authorization": f"Bearer {token}"}
        with httpx.stream("GET", f"{where}/events?page=/", headers=headers, timeout=PATIENCE_S) as news:
            lines = news.iter_lines()
            assert next(lines) == "event: part"
            process.terminate()
            assert "event: over" not in list(lines)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in said


def test_the_command_says_what_is_not_safe() -> None:
    """In words of its options, exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "ftlayer.cli.main", "console", "--listen", "0.0.0.0:0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--tls-cert and --login-file missing" in done.stderr
