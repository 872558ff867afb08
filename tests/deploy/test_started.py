"""The commands of units and images, run as a service manager and a container would, with files where they name them."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftlayer.transport.tls import make_certificate

PATIENCE_S = 120.0
TOKEN = "a-token-that-is-long-enough"
USERS = "operator ada another-token-of-some-length\n"


def _free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        return str(unused.getsockname()[1])


@dataclass
class Place:
    """Where things are here that a command has elsewhere: directories of a machine, and ports."""

    root: Path
    ports: dict[str, str]

    def here(self, command: list[str]) -> list[str]:
        """Return ``command`` as it is run here; only paths, names of hosts and ports are others."""
        text = "\n".join(command)
        for there, name in (("%d", "secrets"), ("/run/secrets", "secrets"), ("/var/lib/ftlayer", "state")):
            text = text.replace(there, str(self.root / name))
        text = text.replace("0.0.0.0", "127.0.0.1").replace("//vertex:", "//127.0.0.1:")
        for port, ours in self.ports.items():
            text = re.sub(rf"\b{port}\b", ours, text)
        program, *arguments = text.split("\n")
        assert Path(program).name == "ftlayer"
        return [sys.executable, "-m", "ftlayer.cli.main", *arguments]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "state").mkdir()
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    certificate = make_certificate(["127.0.0.1"])
    contents = {
        "token": TOKEN.encode(),
        "users": USERS.encode(),
        "ftlayer-token": TOKEN.encode(),
        "ftlayer-users": USERS.encode(),
        "ftlayer-ca.crt": certificate.cert,
        "ftlayer-tls.crt": certificate.cert,
        "ftlayer-tls.key": certificate.key,
        "console-tls.crt": certificate.cert,
        "console-tls.key": certificate.key,
    }
    for name, content in contents.items():
        (secrets / name).write_bytes(content)
        (secrets / name).chmod(0o600)
    return Place(tmp_path, {port: _free_port() for port in ("7077", "7080", "9464")})


@contextmanager
def started(command: list[str], **environ: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, env=os.environ | environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_healthy(check: list[str], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while subprocess.run(check, capture_output=True, check=False).returncode:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline


def ends_well(process: subprocess.Popen[str]) -> bool:
    """Whether SIGTERM ends it as systemd and Kubernetes expect: with 0, or by that signal behind a clean shutdown."""
    process.send_signal(signal.SIGTERM)
    return process.wait(PATIENCE_S) in (0, -signal.SIGTERM)


def test_units_start_are_ready_and_stop(files: Any, place: Place, tmp_path: Path) -> None:
    for name in ("vertex", "console"):
        assert ("Type", "notify") in files.unit_lines(f"ftlayer-{name}.service")
    heard = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    heard.bind(str(tmp_path / "notify"))
    heard.settimeout(PATIENCE_S)
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000000"}

    def hear() -> str:
        return heard.recv(4_096).decode()

    with started(place.here(files.unit_command("ftlayer-vertex.service")), **environ) as vertex:
        assert hear() == f"READY=1\nSTATUS=serving at grpc://127.0.0.1:{place.ports['7077']}"
        assert hear() == "WATCHDOG=1"
        with started(place.here(files.unit_command("ftlayer-console.service")), **environ) as console:
            assert hear() == f"READY=1\nSTATUS=serving at http://127.0.0.1:{place.ports['7080']}/"
            assert hear() == "WATCHDOG=1"
            health = place.here(["ftlayer", "health", "http://127.0.0.1:7080"])
            said = subprocess.run(health, capture_output=True, text=True, check=True).stdout
            assert said == "serving: ok\n", "no note that the vertex is away"
            assert ends_well(console)
            assert hear().startswith("STOPPING=1")
        assert ends_well(vertex)
        assert hear().startswith("STOPPING=1")
    heard.close()


def test_images_commands_start_are_healthy_and_stop(files: Any, place: Place) -> None:
    """With TLS; the check is the image's own."""
    vertex_has, console_has = (files.docker_command("Dockerfile", name) for name in ("vertex", "console"))
    check = place.here([*vertex_has["HEALTHCHECK"], "http://127.0.0.1:9464"])
    with started(place.here(vertex_has["ENTRYPOINT"] + vertex_has["CMD"])) as vertex:
        until_healthy(check, vertex)
        with started(place.here(console_has["ENTRYPOINT"] + console_has["CMD"])) as console:
            until_healthy(place.here(console_has["HEALTHCHECK"]), console)
            said = subprocess.run(
                place.here(console_has["HEALTHCHECK"]), capture_output=True, text=True, check=True
            )
            assert said.stdout == "serving: ok\n"
            assert ends_well(console)
        assert ends_well(vertex)
