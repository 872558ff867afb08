"""Access files: who may read them, and what is told of those that lead nowhere."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ftlayer.errors import ConfigError, StorePathError
from ftlayer.vertex.client.client import VertexClient
from ftlayer.vertex.service.directory import (
    ACCESS_FILE,
    FOUND_ACCESS_FILE,
    AccessFile,
    is_process,
    read_access,
    remove_access,
    write_access,
)
from ftlayer.vertex.service.embedded import EmbeddedVertex

ACCESS = AccessFile("grpc+unix:///run/x/vertex", "t" * 43, b"cert\n", b"cert and key\n", os.getpid())


GOOD = {"address": ACCESS.address, "token": ACCESS.token, "root_certs": None, "client_pem": None, "pid": 1}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / ACCESS_FILE


@pytest.mark.parametrize("access", [ACCESS, dataclasses.replace(ACCESS, root_certs=None, client_pem=None)])
def test_what_is_written_is_read(path: Path, access: AccessFile) -> None:
    write_access(path, access)
    assert read_access(path) == access


def test_only_its_owner_can_read_it_whatever_the_umask_is(path: Path) -> None:
    before = os.umask(0)
    try:
        write_access(path, ACCESS)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        read_access(path)


def test_what_a_killed_writer_left_is_neither_read_nor_in_the_way(path: Path) -> None:
    half = path.with_name(path.name + ".new")
    half.write_text('{"address": "gr')
    half.chmod(0o666)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_access(path)
    write_access(path, ACCESS)
    assert read_access(path) == ACCESS
    assert [file.name for file in path.parent.iterdir()] == [ACCESS_FILE]


def test_a_new_one_takes_the_place_of_an_old_one(path: Path) -> None:
    write_access(path, dataclasses.replace(ACCESS, token="old" * 10))
    write_access(path, ACCESS)
    assert read_access(path) == ACCESS


def test_whether_a_driver_is_there_is_told_by_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    assert [is_process(pid) for pid in (os.getpid(), 1, gone.pid, 1 << 40)] == [True, True, False, False]


def test_a_stranger_s_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root could read it, and would bring records to a server of that user."""
    write_access(path, ACCESS)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="not a file of yours"):
        read_access(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        *(
            json.dumps(GOOD | {name: wrong}).encode()
            for name, wrong in (
                *(("pid", "1"), ("pid", 0), ("root_certs", 7), ("address", 7), ("address", "nowhere")),
                *(("token", "too short"), ("token", 7)),
            )
        ),
    ],
)
def test_other_content_is_a_clear_error(path: Path, content: bytes) -> None:
    path.touch(0o600)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="access file"):
        read_access(path)


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorePathError, match="cannot be written"):
        write_access(tmp_path / "missing" / ACCESS_FILE, ACCESS)


def test_a_driver_removes_its_own_file_alone(path: Path) -> None:
    write_access(path, dataclasses.replace(ACCESS, token="next" * 10))
    remove_access(path, ACCESS)
    assert path.exists()
    remove_access(path, dataclasses.replace(ACCESS, token="next" * 10))
    remove_access(path, ACCESS)
    assert not path.exists()


def test_an_embedded_vertex_lets_tools_in_until_it_stops(embedded: EmbeddedVertex, tmp_path: Path) -> None:
    path = tmp_path / "vertex" / ACCESS_FILE
    access = read_access(path)
    assert access.pid == os.getpid()
    assert path.stat().st_mode & 0o777 == 0o600
    with VertexClient(access.address, access.token) as client:
        assert client.health().incarnation == 1
    link = Path(access.address.removeprefix("grpc+unix://")).with_name(FOUND_ACCESS_FILE)
    assert (link.readlink(), read_access(link)) == (path, access)
    embedded.stop()
    assert not path.exists()
    assert not link.parent.exists()
