"""A topic of Mosquitto with QoS 1, and paho."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.connectors.broker import BODY, FETCHED, Served, free_port, is_listening
from bench.jobs import wait_until
from ftlayer.connectors.mqtt import MqttReader
from ftlayer.sources import MqttSource
from ftlayer.topology.operators import Member

SESSION = "bench-0"
PENDING = 65_535
"""Of both: ours acknowledges with checkpoints, and has to have those messages pending."""

_CONNACK_BYTES, _PUBACK_BYTES = 4, 4
_SENT = 1_000


class MqttBroker:
    """`Broker` of a topic, with one session, which keeps what is sent until someone reads it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._topics = 0
        wait_until(lambda: is_listening(port))

    @property
    def _topic(self) -> str:
        return f"messages-{self._topics}"

    def _client(self, *, clean: bool = False) -> Any:
        import paho.mqtt.client as mqtt
        from paho.mqtt.packettypes import PacketTypes
        from paho.mqtt.properties import Properties

        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, SESSION, protocol=mqtt.MQTTv5, manual_ack=True)
        kept: Any = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
        kept.SessionExpiryInterval, kept.ReceiveMaximum = 3_600, PENDING
        client.on_connect = lambda connected, *_: connected.subscribe(self._topic, 1)
        client.connect("127.0.0.1", self._port, clean_start=clean, properties=kept)
        return client

    def fill(self, messages: int) -> None:
        self._topics += 1
        subscribed: list[int] = []
        client = self._client(clean=True)
        client.on_subscribe = lambda _, __, mid, *___: subscribed.append(mid)
        while not subscribed:
            client.loop(0.1)
        client.disconnect()
        _publish(self._port, self._topic, messages)

    def bare(self, messages: int) -> float:
        waiting: list[Any] = []
        seen = size = 0

        def on_message(client: Any, _: Any, message: Any) -> None:
            nonlocal seen, size
            seen += 1
            size += len(message.payload) + len(message.topic) + message.dup + message.retain
            waiting.append(message)
            if len(waiting) == FETCHED or seen == messages:
                for each in waiting:
                    client.ack(each.mid, each.qos)
                waiting.clear()

        client = self._client()
        client.on_message = on_message
        begun = time.monotonic()
        while seen < messages:
            client.loop(1.0)
        took = time.monotonic() - begun
        client.disconnect()
        assert size
        return took

    def source(self) -> Any:
        return _OfSession(f"mqtt://127.0.0.1:{self._port}", self._topic, max_pending=PENDING)


class _OfSession(MqttSource):
    """Reads the one session, whatever the topology is called."""

    def open(self, member: Member, positions: Mapping[int, bytes], *, stored: bool) -> MqttReader:
        return super().open(Member(SESSION.removesuffix("-0"), 0, 1), positions, stored=stored)


def _publish(port: int, topic: str, messages: int) -> None:
    """Send messages with QoS 1, as 3.1.1 has them on the wire: paho would take a minute for as many."""
    name = topic.encode()
    with socket.create_connection(("127.0.0.1", port)) as server:
        hello = struct.pack("!H4sBBHH", 4, b"MQTT", 4, 2, 0, 0)
        server.sendall(bytes([0x10, len(hello)]) + hello)
        answers = server.makefile("rb")
        answers.read(_CONNACK_BYTES)
        for first in range(0, messages, _SENT):
            packets = [
                struct.pack("!H", len(name)) + name + struct.pack("!H", number) + BODY
                for number in range(1, min(_SENT, messages - first) + 1)
            ]
            server.sendall(b"".join(bytes([0x32]) + _length(len(each)) + each for each in packets))
            answers.read(_PUBACK_BYTES * len(packets))
        server.sendall(b"\xe0\x00")


def _length(size: int) -> bytes:
    return bytes([size]) if size < 128 else bytes([size % 128 | 128, size // 128])


@contextmanager
def _run(root: Path) -> Iterator[MqttBroker]:
    """Run a server that keeps nothing: its disk is not what is measured."""
    port = free_port()
    lines = ("max_queued_messages 0", "max_inflight_messages 0", "allow_anonymous true")
    (root / "conf").write_text("\n".join((f"listener {port} 127.0.0.1", *lines)))
    server = subprocess.Popen(
        ["mosquitto", "-c", str(root / "conf")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield MqttBroker(port)
    finally:
        server.terminate()
        server.wait()


MQTT = Served("mosquitto", _run, at_least=0.7)
