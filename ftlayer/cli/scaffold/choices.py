"""What a new project may be made of, and which combinations there are."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from ftlayer.errors import ConfigError

NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
"""A name of a module, of a user of Linux and of a replication slot of PostgreSQL."""


class ProjectKind(StrEnum):
    QUERY = "query"
    TOPOLOGY = "topology"


class ProjectMode(StrEnum):
    ACKER = "acker"
    BARRIER = "barrier"


class ProjectPart(StrEnum):
    """A source or a sink.

    Attributes:
        what: it is, as it is offered.
        extra: of ftlayer, that it needs; "": none.
    """

    what: str
    extra: str

    def __new__(cls, value: str, what: str = "", extra: str | None = None) -> Self:
        """``extra`` None: it is called as the part is."""
        member = str.__new__(cls, value)
        member._value_, member.what, member.extra = value, what, value if extra is None else extra
        return member


class ProjectSource(ProjectPart):
    FILES = "files", "files of JSON lines in a directory; needs no server", ""
    TAIL = "tail", "a log that grows and is rotated; needs no server", ""
    KAFKA = "kafka", "a topic of Kafka"
    REDIS = "redis", "a stream of Redis"
    NATS = "nats", "a stream of NATS JetStream"
    AMQP = "amqp", "a queue of RabbitMQ"
    MQTT = "mqtt", "topics of MQTT"
    WEBHOOK = "webhook", "requests that others post; needs no server", "http"
    SSE = "sse", "Server-Sent Events of a server", "http"
    POLLED_JSON = "polled-json", "a list as JSON, asked for again and again", "http"
    POSTGRES_CHANGES = (
        "postgres-changes",
        "inserts into a table of PostgreSQL, by logical replication",
        "postgres",
    )
    POSTGRES_TABLE = "postgres-table", "rows of a table of PostgreSQL, by a column that grows", "postgres"


class ProjectSink(ProjectPart):
    FILES = "files", "Parquet files; needs no server", ""
    PRINT = "print", "the terminal, to look at them; needs no server", ""
    KAFKA = "kafka", "a topic of Kafka"
    REDIS = "redis", "a stream of Redis"
    NATS = "nats", "a stream of NATS JetStream"
    AMQP = "amqp", "a queue of RabbitMQ"
    MQTT = "mqtt", "a topic of MQTT"
    HTTP = "http", "requests to a server, one a row; not of a query"
    POSTGRES = "postgres", "a table of PostgreSQL"
    DELTA = "delta", "a Delta table; needs no server"
    ICEBERG = "iceberg", "an Iceberg table"


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
        return sorted({self.source.extra, self.sink.extra} - {""})


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
