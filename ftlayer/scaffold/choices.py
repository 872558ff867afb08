"""What a new project may be made of, and which combinations there are."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ftlayer.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
"""A name of a module, of a user of Linux and of a replication slot of PostgreSQL."""


class ProjectKind(StrEnum):
    QUERY = "query"
    TOPOLOGY = "topology"


class ProjectMode(StrEnum):
    ACKER = "acker"
    BARRIER = "barrier"


class ProjectSource(StrEnum):
    FILES = "files"
    TAIL = "tail"
    KAFKA = "kafka"
    REDIS = "redis"
    NATS = "nats"
    AMQP = "amqp"
    MQTT = "mqtt"
    WEBHOOK = "webhook"
    SSE = "sse"
    POLLED_JSON = "polled-json"
    POSTGRES_CHANGES = "postgres-changes"
    POSTGRES_TABLE = "postgres-table"


class ProjectSink(StrEnum):
    FILES = "files"
    PRINT = "print"
    KAFKA = "kafka"
    REDIS = "redis"
    NATS = "nats"
    AMQP = "amqp"
    MQTT = "mqtt"
    HTTP = "http"
    POSTGRES = "postgres"
    DELTA = "delta"
    ICEBERG = "iceberg"


SOURCES = {
    ProjectSource.FILES: "files of JSON lines in a directory; needs no server",
    ProjectSource.TAIL: "a log that grows and is rotated; needs no server",
    ProjectSource.KAFKA: "a topic of Kafka",
    ProjectSource.REDIS: "a stream of Redis",
    ProjectSource.NATS: "a stream of NATS JetStream",
    ProjectSource.AMQP: "a queue of RabbitMQ",
    ProjectSource.MQTT: "topics of MQTT",
    ProjectSource.WEBHOOK: "requests that others post; needs no server",
    ProjectSource.SSE: "Server-Sent Events of a server",
    ProjectSource.POLLED_JSON: "a list as JSON, asked for again and again",
    ProjectSource.POSTGRES_CHANGES: "inserts into a table of PostgreSQL, by logical replication",
    ProjectSource.POSTGRES_TABLE: "rows of a table of PostgreSQL, by a column that grows",
}
SINKS = {
    ProjectSink.FILES: "Parquet files; needs no server",
    ProjectSink.PRINT: "the terminal, to look at them; needs no server",
    ProjectSink.KAFKA: "a topic of Kafka",
    ProjectSink.REDIS: "a stream of Redis",
    ProjectSink.NATS: "a stream of NATS JetStream",
    ProjectSink.AMQP: "a queue of RabbitMQ",
    ProjectSink.MQTT: "a topic of MQTT",
    ProjectSink.HTTP: "requests to a server, one a row; not of a query",
    ProjectSink.POSTGRES: "a table of PostgreSQL",
    ProjectSink.DELTA: "a Delta table; needs no server",
    ProjectSink.ICEBERG: "an Iceberg table",
}

_EXTRAS = {
    "webhook": "http",
    "sse": "http",
    "polled-json": "http",
    "postgres-changes": "postgres",
    "postgres-table": "postgres",
    "files": "",
    "tail": "",
    "print": "",
}
"""Extras of ftlayer that are not called like what needs them; "" for none."""

_DIRECTORIES = frozenset({"data", "deploy", "out", "state"})
"""Those of a project that are not its package; two of them are its state and its results, which people remove."""

_ONLY_OF_TOPOLOGIES = frozenset({ProjectSink.HTTP})


@dataclass(frozen=True)
class Choices:
    """What a project is made of. ``mode`` is None for a query. Raises `ConfigError` for what cannot be."""

    name: str
    kind: ProjectKind = ProjectKind.QUERY
    mode: ProjectMode | None = None
    source: ProjectSource = ProjectSource.FILES
    sink: ProjectSink = ProjectSink.FILES

    def __post_init__(self) -> None:
        check_name(self.name)
        if (self.mode is None) != (self.kind is ProjectKind.QUERY):
            raise ConfigError(
                "--mode: a topology is in mode acker or barrier, and a query in none: leave --mode out, or say "
                "--kind topology"
            )
        if self.sink not in sinks_of(self.kind):
            there = ", ".join(sinks_of(self.kind))
            raise ConfigError(
                f"--sink {self.sink}: there is none for a {self.kind}; say --kind topology, or take one of {there}"
            )

    @property
    def variant(self) -> str:
        return str(self.mode or self.kind)

    @property
    def extras(self) -> list[str]:
        """The extras of ftlayer that source and sink need, sorted."""
        wanted = {_EXTRAS.get(choice, choice) for choice in (str(self.source), str(self.sink))}
        return sorted(wanted - {""})


def sinks_of(kind: ProjectKind) -> list[ProjectSink]:
    return [sink for sink in ProjectSink if kind is ProjectKind.TOPOLOGY or sink not in _ONLY_OF_TOPOLOGIES]


def name_of(directory: Path) -> str:
    """Return the name of the project that is made in a directory; it may be one that `check_name` refuses."""
    return re.sub(r"[-. ]", "_", directory.absolute().name)


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a package and a user of the system can be called so."""
    if NAME.fullmatch(name) is None or keyword.iskeyword(name):
        raise ConfigError(
            f"--name: expected the name of a Python package, lower-case letters, digits and _, 31 at most, got {name!r}"
        )
    if name in ("test", "tests") or name in sys.stdlib_module_names or _is_installed(name):
        raise ConfigError(f"--name {name}: a module is called so already; give the project another name")
    if name in _DIRECTORIES:
        raise ConfigError(
            f"--name {name}: a project has a directory of this name beside its package; give it another name"
        )


def _is_installed(name: str) -> bool:
    found = importlib.util.find_spec(name)
    return found is not None and found.origin is not None
