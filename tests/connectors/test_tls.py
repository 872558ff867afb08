"""Servers that speak TLS alone, with a certificate that no public authority has signed."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from servers import Server, is_open, started

from ftlayer.errors import SourceError
from ftlayer.sources import MqttSource, NatsSource, RedisSource
from ftlayer.topology.operators import Member, Queue
from ftlayer.transport.tls import make_certificate

COUNT = 5


class TlsServer(Server):
    """Has a key and a certificate for localhost in its directory."""

    queue: Callable[[TlsServer], Queue]

    def start(self) -> None:
        # Some give up their rights as root.
        self.directory.chmod(0o755)
        made = make_certificate(["localhost"])
        for name, content in (("cert.pem", made.cert), ("key.pem", made.key)):
            (self.directory / name).write_bytes(content)
        super().start()

    @property
    def certificate(self) -> str:
        return str(self.directory / "cert.pem")

    def is_ready(self) -> bool:
        return is_open(self.port)

    def put(self) -> None:
        """Send messages by the client itself, which trusts the certificate."""
        raise NotImplementedError


class TlsRedis(TlsServer):
    def command(self) -> list[str]:
        files = ("--tls-cert-file", self.certificate, "--tls-key-file", str(self.directory / "key.pem"))
        clients = ("--tls-ca-cert-file", self.certificate, "--tls-auth-clients", "no")
        return [self.program, "--port", "0", "--tls-port", str(self.port), "--save", "", *files, *clients]

    def queue(self) -> Queue:
        return RedisSource(f"rediss://localhost:{self.port}", "s", "g", reconnect_timeout="1ms")

    def put(self) -> None:
        import redis

        with redis.Redis("localhost", self.port, ssl=True, ssl_ca_certs=self.certificate) as client:
            for number in range(COUNT):
                client.xadd("s", {"n": number})


class TlsMosquitto(TlsServer):
    def command(self) -> list[str]:
        (self.directory / "key.pem").chmod(0o644)
        lines = (
            f"listener {self.port} 127.0.0.1",
            "allow_anonymous true",
            f"certfile {self.certificate}",
            f"keyfile {self.directory}/key.pem",
        )
        (self.directory / "conf").write_text("\n".join(lines))
        return [self.program, "-c", str(self.directory / "conf")]

    def queue(self) -> Queue:
        return MqttSource(f"mqtts://localhost:{self.port}", "t", group="g", reconnect_timeout="1ms")

    def put(self) -> None:
        import paho.mqtt.client as mqtt

        client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
        client.tls_set(self.certificate)
        client.connect("localhost", self.port)
        client.loop_start()
        for number in range(COUNT):
            client.publish("t", str(number), qos=1).wait_for_publish(60)
        client.disconnect()
        client.loop_stop()


class TlsNats(TlsServer):
    def command(self) -> list[str]:
        tls = ("--tls", "--tlscert", self.certificate, "--tlskey", str(self.directory / "key.pem"))
        return [self.program, "-p", str(self.port), "-js", "-sd", str(self.directory), *tls]

    def queue(self) -> Queue:
        return NatsSource(f"tls://localhost:{self.port}", "s", "c", reconnect_timeout="1ms")

    def put(self) -> None:
        import nats

        async def published() -> None:
            trusted = ssl.create_default_context(cafile=self.certificate)
            client = await nats.connect(f"tls://localhost:{self.port}", tls=trusted)
            stream = client.jetstream()
            await stream.add_stream(name="s", subjects=["s.in"])
            for number in range(COUNT):
                await stream.publish("s.in", b"%d" % number)
            await client.close()

        asyncio.run(published())


SERVERS = {
    "redis": (TlsRedis, "redis-server", "redis"),
    "mqtt": (TlsMosquitto, "mosquitto", "paho"),
    "nats": (TlsNats, "nats-server", "nats"),
}


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield from started(*SERVERS[request.param])


def test_a_certificate_is_trusted_by_the_environment_and_otherwise_not(
    server: Any, monkeypatch: pytest.MonkeyPatch, wait_until: Any, tmp_path: Path
) -> None:
    def opened() -> Any:
        return server.queue().open(Member("job/messages", 0, 1), {}, stored=True)

    def refused() -> None:
        reader = opened()
        while True:
            reader.fetch(1, 0.01)

    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    with pytest.raises(SourceError, match=r"(?i)certificate"):
        refused()
    monkeypatch.setenv("SSL_CERT_FILE", server.certificate)
    if not isinstance(server, TlsMosquitto):
        server.put()
    reader = opened()
    if isinstance(server, TlsMosquitto):
        assert reader.fetch(1, 0.2) is None  # A session keeps what comes from its subscription on.
        server.put()
    found = 0

    def all_fetched() -> bool:
        nonlocal found
        if (fetched := reader.fetch(COUNT, 0.05)) is not None:
            found += fetched.rows.num_rows
            reader.acknowledge([fetched.receipt])
        return found == COUNT

    wait_until(all_fetched, "messages over TLS")
    reader.close()
