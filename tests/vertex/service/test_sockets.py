"""Unix sockets of a vertex on this machine: which users can connect, what is left behind, what is in the way."""

from __future__ import annotations

import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftlayer.config import ServeOptions, VertexOptions
from ftlayer.errors import ConfigError, MachineError
from ftlayer.monitor.sources import sources_given
from ftlayer.transport import sockets as sockets_module
from ftlayer.transport.address import parse_address
from ftlayer.transport.sockets import SocketDirectory, check_socket_free, socket_directories
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.directory import ACCESS_FILE, FOUND_ACCESS_FILE, link_access
from ftlayer.vertex.service.embedded import EmbeddedVertex
from ftlayer.vertex.service.serve import serve

TOKEN = "t" * 32
NOBODY = 65_534
CONNECT = """
    import os, socket, sys
    wanted = int(sys.argv[2])
    if wanted != os.geteuid():
        os.setgroups([])
        os.setgid(wanted)
        os.setuid(wanted)
    socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


@pytest.fixture
def made() -> Iterator[SocketDirectory]:
    directory = SocketDirectory.make()
    assert directory is not None
    yield directory
    directory.remove()


@pytest.fixture
def own_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory with a short path, where nothing is but what a test makes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)


def connect(path: str, user: int) -> str:
    """Connect as ``user``; return what went wrong."""
    command = [sys.executable, "-c", textwrap.dedent(CONNECT), path, str(user)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_another_user_cannot_even_connect(embedded: EmbeddedVertex) -> None:
    path = parse_address(embedded.address, "address").path
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    assert connect(path, os.geteuid()) == ""
    if os.geteuid() == 0:  # others cannot become somebody else
        assert "PermissionError" in connect(path, NOBODY)


def test_the_command_line_finds_the_vertex(embedded: EmbeddedVertex) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ftlayer.cli.main", "dead", "list", "--address", embedded.address],
        env=os.environ | {"FTLAYER_TOKEN": embedded.token},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_it_goes_with_the_vertex(tmp_path: Path) -> None:
    with EmbeddedVertex(VertexOptions(tmp_path / "vertex")) as vertex:
        directory = Path(parse_address(vertex.address, "address").path).parent
        assert {path.name for path in directory.iterdir()} == {"vertex", "access.json"}
    assert not directory.exists()


def test_without_room_for_a_socket_it_is_loopback_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(sockets_module, "FALLBACK", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING), EmbeddedVertex(VertexOptions(tmp_path / "vertex")) as vertex:
        assert vertex.address.startswith("grpc://127.0.0.1:")
        with vertex.client() as client:
            assert client.health().incarnation == 1
    assert "every user of this machine can connect" in caplog.text
    assert list(long.iterdir()) == []


def test_where_the_temporary_directory_has_a_long_path_it_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (long := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    directory = SocketDirectory.make()
    assert directory is not None
    assert directory.path.startswith("/tmp/")
    assert socket_directories() == (Path(directory.path),)
    for other in (tmp_path, Path("/tmp")):
        monkeypatch.setattr(tempfile, "tempdir", str(other))
        assert Path(directory.path) not in socket_directories(), "it is of another temporary directory"
    directory.remove()
    directory.remove()
    assert not Path(directory.path).exists()


KILLED = """
    import sys
    from ftlayer.transport.sockets import SocketDirectory
    kept = SocketDirectory.make()
    print(kept.path, flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_goes_with_the_next_one(own_tmp: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(KILLED)]
    env = os.environ | {"TMPDIR": str(own_tmp)}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env, text=True) as process:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        os.utime(left, (0, 0))
        first = SocketDirectory.make()
        assert left.exists(), "it is in use"
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.utime(left, (0, 0))
        second = SocketDirectory.make()
    assert not left.exists()
    assert first is not None
    assert second is not None
    assert {Path(first.path), Path(second.path)} == set(own_tmp.iterdir())
    first.remove()
    second.remove()


def test_a_process_that_ends_removes_its_own(own_tmp: Path) -> None:
    code = "from ftlayer.transport.sockets import SocketDirectory; kept = SocketDirectory.make(); print(kept.path)"
    env = os.environ | {"TMPDIR": str(own_tmp)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(str(own_tmp))
    assert list(own_tmp.iterdir()) == []


def left_behind(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(path)


def test_a_socket_left_behind_is_no_hindrance(made: SocketDirectory) -> None:
    path = made.socket("vertex").path
    check_socket_free(path, "listen")
    left_behind(path)
    check_socket_free(path, "listen")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda directory, path: path.touch(), "Connection refused"),
        (lambda directory, path: directory.chmod(0o755), "chmod 700"),
        (lambda directory, path: directory.rmdir(), "No such file"),
    ],
)
def test_where_no_server_may_listen(
    change: Callable[[Path, Path], None], said: str, made: SocketDirectory
) -> None:
    path = made.socket("vertex").path
    change(Path(made.path), Path(path))
    with pytest.raises(ConfigError, match=said):
        check_socket_free(path, "listen")


def test_serve_takes_a_socket_and_no_second_one_takes_it_away(tmp_path: Path, made: SocketDirectory) -> None:
    path = made.socket("vertex").path
    left_behind(path)
    command = [
        sys.executable,
        "-m",
        "ftlayer.cli.main",
        "serve",
        str(tmp_path / "store"),
        "--listen",
        f"unix:{path}",
    ]
    env = os.environ | {"FTLAYER_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"ftlayer vertex at grpc+unix://{path}, ")
        with VertexClient(f"grpc+unix://{path}", TOKEN, deadline_ms=60_000) as client:
            with pytest.raises(MachineError, match="another server does"):
                serve(ServeOptions(VertexOptions(tmp_path / "other"), TOKEN, f"unix:{path}"))
            assert client.health().incarnation == 1
        process.terminate()
        assert process.wait(600) == 0


@pytest.mark.parametrize("name", ["store", "a store" + "x" * 80])
def test_without_a_word_serve_takes_a_socket_that_the_stores_path_leads_to(
    name: str, own_tmp: Path, tmp_path: Path
) -> None:
    """It took a port of loopback, which every user of the machine can connect to; a path may suit no socket."""
    (store := tmp_path / name).mkdir(mode=0o755)
    env = os.environ | {"FTLAYER_TOKEN": TOKEN, "TMPDIR": str(own_tmp)}
    env.pop("FTLAYER_ADDRESS", None)

    def command(*words: object) -> list[str]:
        return [sys.executable, "-m", "ftlayer.cli.main", *map(str, words)]

    with subprocess.Popen(command("serve", store), stdout=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("ftlayer vertex at ").partition(", ")[0]
        path = Path(parse_address(address, "address").path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert (path.parent.parent == store) == (name == "store")
        (found,) = sources_given([str(store)], token=lambda: TOKEN)
        assert (found.address, found.path) == (address, str(store))
        token_file = own_tmp / "token"
        token_file.touch(mode=0o600)
        token_file.write_text(TOKEN)
        if name == "store":
            words = command("dead", "list", "--token-file", token_file)
            done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
        process.terminate()
        assert process.wait(600) == 0
    assert list(own_tmp.iterdir()) == [token_file]


def left_directory(parent: Path, name: str, link: Path, age_s: float) -> Path:
    """Make what a killed driver of a store has left."""
    left = parent / f"ftlayer-sockets-{name}"
    left.mkdir(mode=0o700)
    (left / FOUND_ACCESS_FILE).symlink_to(link)
    then = time.time() - age_s
    os.utime(left, (then, then))
    return left


def test_who_was_killed_is_known_until_the_store_has_another_driver(own_tmp: Path, tmp_path: Path) -> None:
    file, other = tmp_path / "one" / ACCESS_FILE, tmp_path / "two" / ACCESS_FILE
    for each in (file, other):
        each.parent.mkdir()
        each.touch()
    left = left_directory(own_tmp, "left", file, 3_600)
    beside = left_directory(own_tmp, "beside", other, 3_600)
    old = left_directory(own_tmp, "old", file, 30 * 24 * 3_600)
    gone = left_directory(own_tmp, "gone", tmp_path / "gone" / ACCESS_FILE, 3_600)
    made = SocketDirectory.make()
    assert made
    assert left.exists()
    assert beside.exists()
    assert not old.exists(), "a week is enough"
    assert not gone.exists(), "its driver has ended in order"
    link_access(Path(made.path), file)
    assert not left.exists(), "the store has another driver"
    assert beside.exists()
    made.remove()
