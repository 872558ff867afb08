"""Mosquitto, and a topic of it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterable
from typing import Any

from kit import Kit
from servers import Server

from ftlayer.topology.operators import Fetched, Member, Queue


class MosquittoServer(Server):
    """It is ended by SIGTERM at any time: by SIGKILL it loses what it has not written since its last autosave."""

    def command(self) -> list[str]:
        # It gives up its rights as root.
        self.directory.chmod(0o777)
        lines = (
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            "persistence true",
            f"persistence_location {self.directory}/",
            "max_queued_messages 0",
            "max_inflight_messages 0",
        )
        (self.directory / "conf").write_text("\n".join(lines))
        return [self.program, "-c", str(self.directory / "conf")]

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def end(self, how: signal.Signals = signal.SIGTERM) -> None:
        super().end(signal.SIGTERM)

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def publish(self, topic: str, numbers: Iterable[int], qos: int) -> None:
        """Send numbers, and wait until the server has them."""
        import paho.mqtt.client as mqtt

        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        client.max_inflight_messages_set(1_000)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        for sent in [client.publish(topic, str(number), qos) for number in numbers]:
            sent.wait_for_publish(60)
        client.disconnect()
        client.loop_stop()


class MqttKit(Kit):
    """One subtask with QoS 1: mosquitto forgets shared subscriptions when it is restarted."""

    column = "value"
    parallelism = 1
    is_given_to_one = False
    tells_what_waits = False
    enters_once = False
    lacks = frozenset(
        {
            # A server does not tell, and messages have no names.
            "test_messages_are_pending_until_they_are_acknowledged",
            "test_what_was_not_stored_comes_again_and_nothing_else",
            "test_a_reader_that_takes_over_acknowledges_nothing_by_itself",
            "test_the_server_is_restarted",
            # Messages are for those who have subscribed.
            "test_members_share_the_messages",
            "test_members_that_are_gone_and_stored_nothing_lose_nothing",
            "test_a_savepoint_is_restored_with_fewer_subtasks",
        }
    )

    def __init__(self, server: MosquittoServer, name: str) -> None:
        from ftlayer.sources import MqttDataSource

        self.server, self.name = server, name
        self.data_source = MqttDataSource
        self.options = {"url": server.url, "topic": name}
        self.queue = self.at(server.port)
        self.begin(f"job/{name}")

    def begin(self, owner: str) -> None:
        self.owner = owner
        session = self._session()
        session.subscribe(self.name, 1)
        session.close()

    def member(self, subtask: int = 0, parallelism: int = 1) -> Member:
        return Member(self.owner, subtask, parallelism)

    def _session(self) -> Any:
        from ftlayer.connectors.mqtt import MqttSession, address_of

        address = address_of(self.server.url)  # type: ignore[attr-defined]
        return MqttSession(address, f"{self.owner}-0", "5", 3_600, 65_535)

    def put(self, first: int, end: int) -> None:
        self.server.publish(self.name, range(first, end), 1)  # type: ignore[attr-defined]

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("value").to_pylist()]

    def pending(self) -> int:
        """Take the session over, which delivers what is pending again; its reader takes it back."""
        from ftlayer.connectors.mqtt import ServerAwayError

        try:
            session = self._session()
        except ServerAwayError:
            return 1
        try:
            session.unsubscribe("nothing")
            return len(session.received)
        except ServerAwayError:
            return 1  # Perhaps: the reader was faster.
        finally:
            session.close()

    def at(self, port: int, **options: Any) -> Queue:
        from ftlayer.sources import MqttSource

        return MqttSource(f"mqtt://127.0.0.1:{port}", self.name, **options)
