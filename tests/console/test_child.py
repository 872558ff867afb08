"""A console that a program starts: it ends with the program, however that happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from ftlayer import CheckpointConfig, FTLayer, StreamEnvironment, partitions
from ftlayer.errors import ConfigError
from ftlayer.monitor.console.options import ConsoleOptions, ConsoleOrder, ConsoleProcess
from ftlayer.monitor.sources import VertexSource, sources_here
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.service.directory import FOUND_ACCESS_FILE, AccessFile, write_access

PATIENCE_S = 60.0

PROGRAM = """
from ftlayer.monitor.console.options import ConsoleProcess
from ftlayer.monitor.console.options import ConsoleOptions
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


def shown(link: str, what: str) -> list[dict[str, Any]]:
    """Return the items of a list of the API, with the token that is in the link."""
    where, _, token = link.partition("/login?token=")
    request = Request(f"{where}/api/v1/{what}", headers={"Authorization": f"Bearer {token}"})
    items: list[dict[str, Any]] = json.load(urlopen(request, timeout=PATIENCE_S))["items"]
    return items


OTHER = f"driver-{os.getppid()}"
"""What the vertex of `others` is called."""


@pytest.fixture
def others() -> Iterator[None]:
    """What another program of this user serves on this machine; its process is this one's parent."""
    directory = SocketDirectory.make()
    assert directory is not None
    # By an address of its own: tests of others, at the same time, are found too.
    address = f"grpc+unix://{directory.path}/nothing"
    access = AccessFile(address, "its-token-of-some-length", None, None, os.getppid())
    write_access(Path(directory.path) / FOUND_ACCESS_FILE, access)
    assert os.getppid() in {source.pid for source in sources_here().sources}
    yield
    directory.remove()


@pytest.mark.usefixtures("others")
def test_a_program_shows_what_it_serves_itself(tmp_path: Path) -> None:
    """And not what else of its user's runs on the machine."""
    with FTLayer.embedded(tmp_path / "ft") as layer:
        assert layer.stats()["pending"] == 0
        console = ConsoleProcess(ConsoleOptions("127.0.0.1:0"))
        try:
            found = shown(console.link, "vertices")
            # This process serves more: vertices that tests share, and the board of their jobs.
            assert str(tmp_path / "ft") in [vertex["path"] for vertex in found]
            assert OTHER not in [vertex["vertex"] for vertex in found]
        finally:
            console.stop()


def test_a_layer_shows_its_vertex(tmp_path: Path) -> None:
    """Asked again it is the same console; it ends with the layer."""
    layer = FTLayer.embedded(tmp_path / "ft")
    try:
        with pytest.raises(ConfigError, match="edit_with: 'nothing'"):
            layer.console(edit_with="nothing")
        console = layer.console()
        assert layer.console() is console
        (vertex,) = shown(console.link, "vertices")
        assert (vertex["path"], vertex["state"]) == (str(tmp_path / "ft"), "up")
        with pytest.raises(ConfigError, match="port"):
            layer.console(port=-1)
    finally:
        layer.close()
    assert not _is_there(console.link)


def numbers() -> Iterator[int]:
    """A partition that goes on until its job is cancelled."""
    number = 0
    while True:
        time.sleep(0.01)
        yield (number := number + 1)


@pytest.mark.spark
@pytest.mark.usefixtures("others")
def test_a_topology_is_shown(spark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One without a vertex too, by the board that its driver serves. Its link is in a file of standard error too."""
    env = StreamEnvironment(spark, name="alone", parallelism=1, checkpointing=CheckpointConfig())
    env.source(partitions(numbers), "number bigint", uid="numbers").sink(print, uid="out")
    job = env.execute_async(console=0)
    try:
        (link,) = re.findall(r"the console is at (\S+)", capsys.readouterr().err)
        deadline = time.monotonic() + PATIENCE_S
        while not (found := [each for each in shown(link, "jobs") if each["name"] == "alone"]):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert [each["mode"] for each in found] == ["barrier"]
        assert OTHER not in [vertex["vertex"] for vertex in shown(link, "vertices")]
    finally:
        job.cancel()
