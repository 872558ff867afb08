from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ftlayer.errors import ConfigError
from ftlayer.monitor.sources import VertexSource, sources_given, sources_here
from ftlayer.transport import sockets
from ftlayer.transport.sockets import SocketDirectory
from ftlayer.vertex.service.directory import (
    ACCESS_FILE,
    FOUND_ACCESS_FILE,
    AccessFile,
    link_access,
    write_access,
)

TOKEN = "a-token-of-some-length"
GONE_PID = (1 << 22) + 17
"""No process has it: the system's largest is 2^22."""


def access(pid: int | None = None, address: str = "grpc+unix:///tmp/x/vertex") -> AccessFile:
    return AccessFile(address, TOKEN, None, None, os.getpid() if pid is None else pid)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine on which no other test's drivers run; sockets need short paths."""
    with tempfile.TemporaryDirectory(dir="/tmp") as parent:
        monkeypatch.setattr(sockets, "FALLBACK", parent)
        monkeypatch.setattr(tempfile, "tempdir", parent)
        yield Path(parent)


def store(path: Path, pid: int | None = None) -> Path:
    path.mkdir()
    write_access(path / ACCESS_FILE, access(pid))
    return path


def no_token() -> str:
    raise AssertionError("a path has its own token")


def test_the_store_of_a_running_program_is_named_by_its_path(tmp_path: Path) -> None:
    path = store(tmp_path / "my store")
    (source,) = sources_given([str(path), str(path)], token=no_token)
    assert (source.name, source.path, source.token) == ("my-store", str(path), TOKEN)
    assert sources_given([str(path / ACCESS_FILE)], token=no_token) == (source,)
    assert TOKEN not in repr(source)


def test_an_address_takes_the_token_that_is_given() -> None:
    addresses = ["grpc://127.0.0.1:7077", "grpc+tls://w1:7", "grpc+unix:///tmp/dir/vertex"]
    sources = sources_given(addresses, token=lambda: TOKEN, root_certs=b"pem")
    assert [source.name for source in sources] == ["127.0.0.1-7077", "w1-7", "vertex"]
    assert [source.root_certs for source in sources] == [None, b"pem", None]
    assert [source.identity for source in sources] == addresses


def test_a_place_that_is_none_is_said(tmp_path: Path) -> None:
    for place, said in ((tmp_path, "is served by no program that runs"), (tmp_path / "gone", "is not there")):
        with pytest.raises(ConfigError, match=said):
            sources_given([str(place)], token=no_token)
    (killed,) = sources_given([str(store(tmp_path / "killed", GONE_PID))], token=no_token)
    assert f"process {GONE_PID}, which served it, was killed" in str(killed.killed)


def test_all_that_drivers_of_this_user_serve_are_found(tmp_path: Path, here: Path) -> None:
    directories = [made for made in (SocketDirectory.make() for _ in range(4)) if made is not None]
    embedded, own, killed, _slots = directories
    link_access(Path(embedded.path), store(tmp_path / "ft") / ACCESS_FILE)
    write_access(Path(own.path) / FOUND_ACCESS_FILE, access())
    link_access(Path(killed.path), store(tmp_path / "killed", GONE_PID) / ACCESS_FILE)
    found = sources_here()
    assert {source.name for source in found.sources} == {"ft", f"driver-{os.getpid()}"}
    (left,) = found.killed
    assert str(left.killed) == (
        f"process {GONE_PID}, which served it, was killed: start the program again; until then ftlayer inspect "
        f"{tmp_path / 'killed'} shows what its store has, and --store {tmp_path / 'killed'} asks it"
    )
    assert found.left_out == ()
    for each in directories:
        each.remove()
    assert sources_here().sources == ()


def test_one_access_file_that_is_none_hides_no_other(tmp_path: Path, here: Path) -> None:
    good, bad = SocketDirectory.make(), SocketDirectory.make()
    assert good
    assert bad
    write_access(Path(good.path) / FOUND_ACCESS_FILE, access())
    write_access(Path(bad.path) / FOUND_ACCESS_FILE, replace(access(), token="short"))
    found = sources_here()
    assert [source.token for source in found.sources] == [TOKEN]
    assert [
        f"{bad.path}/{FOUND_ACCESS_FILE} is none (ConfigError: token: expected" in left
        for left in found.left_out
    ] == [True]
    good.remove()
    bad.remove()


def test_a_directory_that_others_can_enter_is_passed_over(tmp_path: Path, here: Path) -> None:
    made = SocketDirectory.make()
    assert made
    write_access(Path(made.path) / FOUND_ACCESS_FILE, access())
    Path(made.path).chmod(0o755)
    assert sources_here().sources == ()
    made.remove()


def test_a_source_follows_its_file(tmp_path: Path) -> None:
    path = store(tmp_path / "ft")
    (source,) = sources_given([str(path)], token=no_token)
    assert source.refreshed() == source
    write_access(path / ACCESS_FILE, access(address="grpc+unix:///tmp/y/vertex"))
    again = source.refreshed()
    assert again is not None
    assert (again.address, again.identity) == ("grpc+unix:///tmp/y/vertex", source.identity)
    write_access(path / ACCESS_FILE, access(GONE_PID))
    killed = source.refreshed()
    assert again.killed is None
    assert killed is not None
    assert killed.killed is not None
    (path / ACCESS_FILE).unlink()
    assert source.refreshed() is None
    named = VertexSource("x", "grpc://127.0.0.1:1", TOKEN)
    assert named.refreshed() is named
