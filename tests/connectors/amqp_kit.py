"""RabbitMQ, and a queue of it."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path
from typing import Any

from kit import Kit
from servers import Server, free_port, is_open, until

from ftlayer.topology.operators import Fetched, Queue


class RabbitServer(Server):
    """A RabbitMQ node with an epmd of its own. What is durable is on its disk when it was confirmed.

    Erlang is started with the applications that a node without plugins needs. RabbitMQ's own script has it look through
    seventy, and a node takes twice as long to start.
    """

    HOME = "/usr/lib/rabbitmq/lib"
    PROGRAM = "erl"
    APPLICATIONS = (
        *("rabbit", "rabbit_common", "rabbitmq_prelaunch", "amqp10_common", "credentials_obfuscation"),
        *(
            "ra",
            "aten",
            "gen_batch_server",
            "osiris",
            "seshat",
            "sysmon_handler",
            "enough",
            "accept",
            "ranch",
        ),
        *("cuttlefish", "getopt", "jsx", "observer_cli", "recon", "stdout_formatter", "syslog", "systemd"),
    )

    epmd: subprocess.Popen[bytes] | None = None
    shell: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        boot = ("-noinput", "-boot", "start_sasl", "-s", "rabbit", "boot")
        # As RabbitMQ's script has them.
        settings = ("-syslog", "logger", "[]", "-syslog", "syslog_error_logger", "false")
        return [self.program, *boot, "+W", "w", "+S", "1:1", *settings]

    @property
    def node(self) -> str:
        return f"ftlayer{self.port}@localhost"

    @property
    def environment(self) -> dict[str, str]:
        place = self.directory
        return {
            **os.environ,
            "HOME": str(place),
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_LIBS": str(place / "applications"),
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self.dist_port),
            "RABBITMQ_MNESIA_BASE": str(place / "data"),
            "RABBITMQ_LOG_BASE": str(place / "logs"),
            "RABBITMQ_CONFIG_FILE": str(place / "rabbitmq"),
            "RABBITMQ_PLUGINS_DIR": str(place / "applications"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(place / "plugins"),
        }

    def start(self) -> None:
        if self.epmd is None:
            self._prepare()
            self.epmd_port, self.dist_port = free_port(), free_port()
            listen = ("-port", str(self.epmd_port), "-address", "127.0.0.1")
            self.epmd = subprocess.Popen(["epmd", *listen], stdin=subprocess.DEVNULL)
            # A node that does not find it starts one of its own.
            until(lambda: is_open(self.epmd_port), "start of epmd")
        super().start()

    def _prepare(self) -> None:
        (self.directory / "plugins").write_text("[].")
        limits = "{disk_free_limit, 1000000}, {max_message_size, 1000000}"
        (self.directory / "rabbitmq.config").write_text(f"[{{rabbit, [{limits}]}}].")
        applications = self.directory / "applications"
        applications.mkdir()
        for name in self.APPLICATIONS:
            for found in Path(self.HOME).glob(f"rabbitmq_server-*/plugins/{name}-[0-9]*"):
                (applications / found.name).symlink_to(found)

    def is_ready(self) -> bool:
        import pika

        with contextlib.suppress(pika.exceptions.AMQPError, OSError), self.client():
            return True
        return False

    def close(self) -> None:
        for process in (self.shell, self.epmd):
            if process is not None:
                process.kill()
                process.wait(60)

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2f"

    def client(self) -> Any:
        import pika

        return pika.BlockingConnection(pika.URLParameters(self.url))

    def unacknowledged(self, queue: str) -> int:
        """Ask the node itself: AMQP does not tell."""
        if self.shell is None:
            self.shell = subprocess.Popen(
                ["erl", "-noshell", "-hidden", "-sname", f"asking{self.port}@localhost", "-eval", ASKING],
                env={**self.environment, "NODE": self.node},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        self.shell.stdin.write(queue.encode() + b"\n")
        self.shell.stdin.flush()
        return int(self.shell.stdout.readline())


ASKING = """
Node = list_to_atom(os:getenv("NODE")),
Ask = fun(Ask) ->
    Queue = list_to_binary(string:trim(io:get_line(""))),
    {ok, Found} = rpc:call(Node, rabbit_amqqueue, lookup, [{resource, <<"/">>, queue, Queue}]),
    [{_, Count}] = rpc:call(Node, rabbit_amqqueue, info, [Found, [messages_unacknowledged]]),
    io:format("~b~n", [Count]),
    Ask(Ask)
end,
Ask(Ask).
"""
"""Erlang that answers each line, the name of a queue, by a line with the number of its unacknowledged messages."""


class AmqpKit(Kit):
    column = "value"
    is_given_to_one = False
    parallelism = 1
    # Its server may give to one what it gave to the other before.
    lacks = frozenset({"test_a_savepoint_is_restored_with_fewer_subtasks"})

    def __init__(self, server: RabbitServer, name: str) -> None:
        from ftlayer.sources import AmqpDataSource

        self.server = server
        self.name = name
        self.data_source = AmqpDataSource
        self.options = {"url": server.url, "queue": name}
        self.queue = self.at(server.port)

    def put(self, first: int, end: int) -> None:
        import pika

        with self.server.client() as client:  # type: ignore[attr-defined]
            channel = client.channel()
            channel.queue_declare(self.name, durable=True)
            channel.confirm_delivery()
            for number in range(first, end):
                properties = pika.BasicProperties(delivery_mode=2, message_id=str(number))
                channel.basic_publish("", self.name, b"%d" % number, properties)

    def numbers(self, fetched: Fetched) -> list[int]:
        return [int(number) for number in fetched.rows.column("value").to_pylist()]

    def pending(self) -> int:
        assert isinstance(self.server, RabbitServer)
        return self.server.unacknowledged(self.name)

    def at(self, port: int, **options: Any) -> Queue:
        from ftlayer.sources import AmqpSource

        return AmqpSource(f"amqp://guest:guest@127.0.0.1:{port}/%2f", self.name, **options)
