"""What systemd hears: over a real socket, under a clock that the test moves."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftlayer.transport.sockets import Notifier


class Manager:
    """The socket of a service manager."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(f"\0{path[1:]}" if path.startswith("@") else path)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        messages = []
        while True:
            try:
                messages.append(self.socket.recv(4_096).decode())
            except BlockingIOError:
                return messages


@pytest.fixture(params=["file", "abstract"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "notify") if request.param == "file" else f"@ftlayer-test-{tmp_path}"


@pytest.fixture
def manager(place: str) -> Iterator[Manager]:
    it = Manager(place)
    yield it
    it.socket.close()


def test_it_hears_ready_and_stopping(place: str, manager: Manager) -> None:
    notifier = Notifier.of({"NOTIFY_SOCKET": place})
    notifier.ready("serving at grpc://127.0.0.1:7077")
    notifier.alive(lambda: True)
    notifier.stopping()
    assert manager.heard() == [
        "READY=1\nSTATUS=serving at grpc://127.0.0.1:7077",
        "STOPPING=1\nSTATUS=stopping",
    ]


def test_life_is_shown_twice_in_the_time_given_and_only_where_there_is_life(
    place: str, manager: Manager
) -> None:
    now_s = 100.0
    notifier = Notifier(place, 10.0, clock=lambda: now_s)
    notifier.alive(lambda: True)
    now_s += 4.9
    notifier.alive(lambda: True)
    assert manager.heard() == ["WATCHDOG=1"]
    now_s += 0.1
    notifier.alive(lambda: False)
    assert manager.heard() == []
    now_s += 5.0
    notifier.alive(lambda: True)
    assert manager.heard() == ["WATCHDOG=1"]


def test_a_watchdog_that_is_another_process_s_is_none(place: str, manager: Manager) -> None:
    environ = {"NOTIFY_SOCKET": place, "WATCHDOG_USEC": "1000000"}
    Notifier.of(environ | {"WATCHDOG_PID": "1"}).alive(lambda: True)
    assert manager.heard() == []
    Notifier.of(environ | {"WATCHDOG_PID": str(os.getpid())}).alive(lambda: True)
    assert manager.heard() == ["WATCHDOG=1"]


def test_without_a_manager_nothing_is_asked() -> None:
    Notifier.of({}).ready("serving")
    Notifier.of({"WATCHDOG_USEC": "1000000"}).alive(lambda: True)


def test_a_manager_that_is_gone_is_logged_and_no_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Notifier.of({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready("serving")
    assert "NOTIFY_SOCKET" in caplog.text
