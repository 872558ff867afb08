"""A console that a program starts: it ends with the program, however that happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from ftlayer import FTLayer
from ftlayer.console.child import ConsoleOrder, ConsoleProcess
from ftlayer.console.options import ConsoleOptions
from ftlayer.errors import ConfigError
from ftlayer.monitor.sources import VertexSource

PATIENCE_S = 60.0

PROGRAM = """
from ftlayer.console.child import ConsoleProcess
from ftlayer.console.options import ConsoleOptions
print(ConsoleProcess(ConsoleOptions("127.0.0.1:0")).link, flush=True)
input()
"""


def test_an_order_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Paths, certificates and all."""
    order = ConsoleOrder(
        ConsoleOptions("127.0.0.1:0", tmp_path / "logins", mask_payloads=True),
        (
            VertexSource(
                "shop", "grpc://127.0.0.1:7077", "token", b"\x00pem", b"\xffkey", "/store", "/store/f", 7
            ),
        ),
    )
    assert ConsoleOrder.from_line(order.to_line()) == order


def test_it_listens_until_it_is_stopped() -> None:
    """The link works, and then nobody listens there."""
    console = ConsoleProcess(ConsoleOptions("127.0.0.1:0"))
    assert b"ftlayer console" in urlopen(console.link, timeout=PATIENCE_S).read()
    console.stop()
    console.stop()
    with pytest.raises(URLError):
        urlopen(console.link, timeout=PATIENCE_S)


def test_it_ends_with_a_program_that_is_killed() -> None:
    """Its end of the pipe is closed by the system."""
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    link = program.stdout.readline().strip()
    assert b"ftlayer console" in urlopen(link, timeout=PATIENCE_S).read()
    with program:
        os.kill(program.pid, signal.SIGKILL)
    deadline = time.monotonic() + PATIENCE_S
    while _is_there(link):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _is_there(link: str) -> bool:
    try:
        urlopen(link, timeout=PATIENCE_S)
    except OSError:
        return False
    return True


def test_what_keeps_it_from_starting_is_said(tmp_path: Path) -> None:
    """With the error that the command would end with."""
    with pytest.raises(ConfigError, match="login_file"):
        ConsoleProcess(ConsoleOptions("127.0.0.1:0", login_file=tmp_path / "nothing"))


def test_a_layer_shows_its_vertex(tmp_path: Path) -> None:
    """Asked again it is the same console; it ends with the layer."""
    layer = FTLayer.embedded(tmp_path / "ft")
    try:
        console = layer.console()
        assert layer.console() is console
        where, _, token = console.link.partition("/login?token=")
        request = Request(f"{where}/api/v1/vertices", headers={"Authorization": f"Bearer {token}"})
        (vertex,) = json.load(urlopen(request, timeout=PATIENCE_S))["items"]
        assert (vertex["path"], vertex["state"]) == (str(tmp_path / "ft"), "up")
        with pytest.raises(ConfigError, match="port"):
            layer.console(port=-1)
    finally:
        layer.close()
    assert not _is_there(console.link)
