"""Whether a Spark session lives, asked of stand-ins for its JVM and its Connect server."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from py4j.protocol import Py4JNetworkError

from ftlayer.errors import ConfigError, SessionLostError
from ftlayer.spark.query.writer import TrackedWriter
from ftlayer.spark.sessions import how_it_ended, tells_of_its_end


class Connected:
    """A session of Spark Connect, as far as is asked of it."""

    def __init__(self, port: int, stopped: bool = False) -> None:
        self.is_stopped = stopped
        self.client = SimpleNamespace(_builder=SimpleNamespace(endpoint=f"127.0.0.1:{port}"))


Connected.__module__ = "pyspark.sql.connect.session"


def classic(jvm_context: Any) -> Any:
    jsc = None if jvm_context is None else SimpleNamespace(sc=lambda: jvm_context)
    return SimpleNamespace(sparkContext=SimpleNamespace(_jsc=jsc))


def gone(error: Exception) -> Any:
    def is_stopped() -> bool:
        raise error

    return SimpleNamespace(isStopped=is_stopped)


@pytest.mark.parametrize(
    "error", [ConnectionRefusedError(111, "Connection refused"), Py4JNetworkError("Answer is empty")]
)
def test_a_jvm_that_does_not_answer_is_gone(error: Exception) -> None:
    ended = how_it_ended(classic(gone(error)))
    assert ended is not None
    assert "the JVM of the Spark session is gone" in str(ended)
    assert "start the program again" in str(ended)


def test_what_is_raised_because_the_session_ended_is_said_to_be_that() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    with (
        pytest.raises(SessionLostError, match="start the program again") as raised,
        tells_of_its_end(classic(gone(refused))),
    ):
        raise refused
    # Py4J's frames say nothing to a user.
    assert raised.value.__suppress_context__
    for error in (ConfigError("name: taken"), KeyError("x")):
        with pytest.raises(type(error)), tells_of_its_end(classic(SimpleNamespace(isStopped=lambda: False))):
            raise error
    with pytest.raises(ConfigError), tells_of_its_end(classic(gone(refused))):
        raise ConfigError("name: taken")


def test_a_query_whose_jvm_is_killed_while_it_starts_says_so() -> None:
    class Streams:
        @property
        def active(self) -> Any:
            raise ConnectionRefusedError(111, "Connection refused")

    session = classic(gone(ConnectionRefusedError(111, "Connection refused")))
    session.streams = Streams()
    plan: Any = SimpleNamespace(steps=(), spark=session, layer=Mock())
    with pytest.raises(SessionLostError):
        TrackedWriter(plan, "state/ck", "lines", Mock()).start()


def test_a_session_that_was_stopped_by_whichever_side() -> None:
    assert how_it_ended(classic(SimpleNamespace(isStopped=lambda: False))) is None
    assert "stopped in its JVM" in str(how_it_ended(classic(SimpleNamespace(isStopped=lambda: True))))
    assert "was stopped" in str(how_it_ended(classic(None)))
    assert "was stopped" in str(how_it_ended(Connected(1, stopped=True)))


def test_a_connect_server_that_refuses_connections_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert how_it_ended(Connected(port)) is None
    ended = how_it_ended(Connected(port))
    assert f"the Spark Connect server 127.0.0.1:{port} is gone" in str(ended)


def test_a_connect_server_that_was_started_again_does_not_know_the_session() -> None:
    error: Any = Exception("no such session")
    error.getCondition = lambda: "INVALID_HANDLE.SESSION_CHANGED"
    ended = how_it_ended(Connected(1), error)
    assert "does not know the session any more (INVALID_HANDLE.SESSION_CHANGED)" in str(ended)


def test_a_network_that_is_down_for_a_while_ends_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any) -> Any:
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    assert how_it_ended(Connected(1)) is None
