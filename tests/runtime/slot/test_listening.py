from __future__ import annotations

import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftlayer.config import TopologyOptions
from ftlayer.runtime.protocol.messages import SlotOrder
from ftlayer.runtime.slot.main import ListeningPlaces
from ftlayer.transport.flight_connection import Endpoint
from ftlayer.transport.sockets import SocketDirectory

NOTHING: Any = None
ORDER = SlotOrder(
    "job",
    3,
    Endpoint("grpc://127.0.0.1:1", "token"),
    NOTHING,
    TopologyOptions(),
    NOTHING,
    "127.0.0.1",
    None,
    None,
    b"",
)


def test_a_slot_of_a_cluster_has_a_directory_of_its_own() -> None:
    places = ListeningPlaces(ORDER, "instance-of-3")
    assert str(places.address) == "grpc://127.0.0.1:0"
    directory = Path(places.socket).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    places.close()
    assert not directory.exists()
    places.close()


def test_a_slot_that_can_have_no_directory_has_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SocketDirectory, "make", lambda without: None)
    places = ListeningPlaces(ORDER, "instance-of-3")
    assert places.socket == ""
    places.close()


def test_in_the_jobs_directory_what_dead_instances_of_the_slot_left_is_removed() -> None:
    sockets = SocketDirectory.make()
    assert sockets is not None
    dead, other, alive = (Path(sockets.path) / name for name in ("3-dead", "30-dead", "3-alive-unix"))
    for path in (dead, other):
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(str(path))
    with closing(socket.socket(socket.AF_UNIX)) as listening:
        listening.bind(str(alive))
        listening.listen()
        places = ListeningPlaces(replace(ORDER, sockets=sockets.path), "instance-of-3")
    assert places.address.path == f"{sockets.path}/3-instance-of-"
    assert places.socket == f"{sockets.path}/3-instance-of--unix"
    assert [dead.exists(), other.exists(), alive.exists()] == [False, True, True]
    places.close()
    assert alive.exists()
    sockets.remove()
