"""A queue of RabbitMQ, and pika."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.connectors.broker import BODY, FETCHED, Served, free_port
from bench.jobs import wait_until

PREFETCH = 65_535
"""Of both: ours acknowledges with checkpoints, and has to have those messages pending."""


class AmqpBroker:
    """`Broker` of a queue. A new one is made each time."""

    def __init__(self, port: int) -> None:
        self._url = f"amqp://guest:guest@127.0.0.1:{port}/%2f"
        self._queues = 0
        wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        import pika

        try:
            self._connection().close()
        except (pika.exceptions.AMQPError, OSError):
            return False
        return True

    def _connection(self) -> Any:
        import pika

        return pika.BlockingConnection(pika.URLParameters(self._url))

    @property
    def _queue(self) -> str:
        return f"messages-{self._queues}"

    def fill(self, messages: int) -> None:
        import pika

        connection = self._connection()
        channel = connection.channel()
        channel.queue_delete(self._queue)
        self._queues += 1
        channel.queue_declare(self._queue, durable=True)
        for number in range(messages):
            headers = {"kind": "measured"}
            properties = pika.BasicProperties(
                message_id=str(number), timestamp=1_700_000_000, headers=headers, delivery_mode=2
            )
            channel.basic_publish("", self._queue, BODY, properties)
        wait_until(
            lambda: channel.queue_declare(self._queue, passive=True).method.message_count == messages, 600
        )
        connection.close()

    def bare(self, messages: int) -> float:
        connection = self._connection()
        channel = connection.channel()
        channel.basic_qos(prefetch_count=PREFETCH)
        begun = time.monotonic()
        size = 0
        for seen, (method, properties, body) in enumerate(channel.consume(self._queue), 1):
            size += len(body) + properties.timestamp % 2 + len(properties.headers)
            if seen % FETCHED == 0 or seen == messages:
                channel.basic_ack(method.delivery_tag, multiple=True)
            if seen == messages:
                break
        took = time.monotonic() - begun
        connection.close()
        assert size
        return took

    def source(self) -> Any:
        from ftlayer.sources import AmqpSource

        return AmqpSource(self._url, self._queue, max_pending=PREFETCH)


@contextmanager
def _run(root: Path) -> Iterator[AmqpBroker]:
    """Run a node of RabbitMQ with an epmd of its own."""
    port, epmd_port, dist_port = free_port(), free_port(), free_port()
    (root / "plugins").write_text("[].")
    (root / "rabbitmq.config").write_text("[{rabbit, [{disk_free_limit, 1000000}]}].")
    variables = {
        "HOME": str(root),
        "ERL_EPMD_PORT": str(epmd_port),
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(dist_port),
        "RABBITMQ_MNESIA_BASE": str(root / "data"),
        "RABBITMQ_LOG_BASE": str(root / "logs"),
        "RABBITMQ_CONFIG_FILE": str(root / "rabbitmq"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(root / "plugins"),
        "RABBITMQ_PID_FILE": str(root / "pid"),
    }
    epmd = subprocess.Popen(
        ["epmd", "-port", str(epmd_port), "-address", "127.0.0.1"], stdin=subprocess.DEVNULL
    )
    node = subprocess.Popen(
        [PROGRAM], env={**os.environ, **variables}, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield AmqpBroker(port)
    finally:
        node.terminate()
        node.wait()
        epmd.terminate()
        epmd.wait()


PROGRAM = "/usr/lib/rabbitmq/bin/rabbitmq-server"
"""Debian's ``rabbitmq-server`` is a wrapper that wants to be root, or the user of the system's node."""

AMQP = Served(PROGRAM, _run, at_least=0.7)
