"""Every option, with its unit, default and bounds.

A value out of bounds is a `ConfigError` that names the option, at the place where it was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal, TypedDict

from ftlayer.common.checks import (
    LONGEST_MS,
    MOST_BYTES,
    Duration,
    check_bytes,
    check_choice,
    check_instance,
    check_int,
    check_text,
    duration_ms,
    known_options,
    named_type,
)
from ftlayer.common.rules.telemetry_settings import check_endpoint
from ftlayer.errors import ConfigError
from ftlayer.transport.address import MAX_PORT, parse_listen

MIB = 1 << 20
GIB = 1 << 30

TCP_LISTEN = "127.0.0.1:7077"

CLIENT_DEADLINE_MS = 120_000
"""So long clients wait for an answer, sending their call again meanwhile, unless they are told otherwise."""

# A shard's store below this has no room for LMDB's own pages.
MIN_SHARD_BYTES = 8 * MIB

# A token travels in a header of every request: long enough not to be guessed, short enough for a header.
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4_096


class FTStatus(StrEnum):
    """Whether fault tolerance is on. OFF runs the same program as plain Spark."""

    ON = "on"
    OFF = "off"


@known_options
@dataclass(frozen=True)
class VertexOptions:
    """How a vertex stores records, and where.

    Attributes:
        path: the store's directory; made (mode 0700) if it is missing, with its parents.
        shards: number of shards, a power of two up to 256; fixed when the store is made.
        durability: when a call's changes outlive the machine. ``"batch"``: before the call is answered;
            a duration (``"100ms"``): within that time; ``"none"``: when the system writes them. They outlive
            the process in every case.
        max_store_bytes: how large the store may become, all shards together. Intake stops at 90 % of it.
        persist_timeout_ms: how long intake waits for room before it fails with `IntakeTimeoutError`; below 120 s.
        max_message_bytes: largest message the vertex takes. Longer calls come in parts, up to 16 messages.
        tracker: ``"table"``, or ``"exact"`` for the diagnostic one (some hundred times slower).
        timeout_buckets: a root expires between its timeout and timeout × (1 + 1 / (buckets − 1)).
        metrics_port: port of the HTTP endpoint for Prometheus (``/metrics``) and probes (``/livez``, ``/readyz``), on
            the host that the vertex listens on, 127.0.0.1 behind a Unix socket; None for none. All that reach it can
            read it: there is no token, and no record in what it says.
        otlp_endpoint: base URL of an OpenTelemetry collector that metrics are pushed to (OTLP over HTTP, like
            ``"http://localhost:4318"``); None: as OpenTelemetry's variables say, ``OTEL_EXPORTER_OTLP_ENDPOINT`` and so
            on, and nowhere without them. Needs the extra ``otel``.
    """

    path: str | Path
    shards: int = 1
    durability: Duration = "batch"
    max_store_bytes: int = 8 * GIB
    persist_timeout_ms: int = 60_000
    max_message_bytes: int = 64 * MIB
    tracker: Literal["table", "exact"] = "table"
    timeout_buckets: int = 3
    metrics_port: int | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        path = str(self.path) if isinstance(self.path, Path) else self.path
        check_text(path, "path", "the store's directory")
        check_int(self.shards, "shards", least=1, most=256)
        if self.shards & (self.shards - 1):
            raise ConfigError(f"shards: expected a power of two from 1 to 256, got {self.shards}")
        if self.durability not in ("batch", "none"):
            within_ms = duration_ms(self.durability, "durability: 'batch', 'none' or a duration")
            # A text: options travel to an embedded vertex as JSON.
            object.__setattr__(self, "durability", f"{within_ms}ms")
        least = self.shards * MIN_SHARD_BYTES
        check_int(self.max_store_bytes, "max_store_bytes", least=least, most=MOST_BYTES)
        check_int(self.persist_timeout_ms, "persist_timeout_ms", least=1, most=LONGEST_MS)
        if self.persist_timeout_ms >= CLIENT_DEADLINE_MS:
            raise ConfigError(
                f"persist_timeout_ms: expected less than {CLIENT_DEADLINE_MS} ms, behind which clients take the vertex "
                f"for unavailable and do not learn that it is full, got {self.persist_timeout_ms}"
            )
        # A call's parts have 1 MiB; gRPC carries up to a GiB.
        check_int(self.max_message_bytes, "max_message_bytes", least=2 * MIB, most=GIB)
        check_choice(self.tracker, "tracker", ("table", "exact"))
        check_int(self.timeout_buckets, "timeout_buckets", least=2, most=1_000)
        if self.metrics_port is not None:
            check_int(self.metrics_port, "metrics_port", least=0, most=MAX_PORT)
        check_endpoint(self.otlp_endpoint, "otlp_endpoint")


class VertexKeywords(TypedDict, total=False):
    """The fields of `VertexOptions` behind its path, as keywords."""

    shards: int
    durability: Duration
    max_store_bytes: int
    persist_timeout_ms: int
    max_message_bytes: int
    tracker: Literal["table", "exact"]
    timeout_buckets: int
    metrics_port: int | None
    otlp_endpoint: str | None


@known_options
@dataclass(frozen=True)
class ServeOptions:
    """Where a vertex listens, and who may talk to it.

    Attributes:
        vertex: what it keeps.
        token: the secret every request has to bring, 16 to 4096 visible ASCII characters.
        listen: ``"unix:/path"``, a Unix socket in a directory of yours that other users cannot enter; None: one in the
            store's directory, or with ``tls_cert`` ``"127.0.0.1:7077"``. ``"host:port"`` (``"[::1]:7077"`` for IPv6;
            port 0 is any free one) lets all connect that reach it, who are bounded, not kept out, before their token.
        tls_cert, tls_key: PEM text of certificate chain and private key; required off loopback.
        tls_client_ca: PEM of what clients' certificates are signed by; None: clients need none.
    """

    vertex: VertexOptions
    token: str = field(repr=False)
    listen: str | None = None
    tls_cert: bytes | None = None
    tls_key: bytes | None = field(default=None, repr=False)
    tls_client_ca: bytes | None = None

    def __post_init__(self) -> None:
        check_instance(self.vertex, "vertex", VertexOptions)
        address = parse_listen(self.listen or TCP_LISTEN, "listen")
        check_token(self.token)
        check_bytes(self.tls_cert, "tls_cert")
        check_bytes(self.tls_key, "tls_key")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert, tls_key: give both or none")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError(
                "tls_client_ca: clients show certificates over TLS only; give tls_cert and tls_key too"
            )
        if self.tls_cert is not None and address.path:
            raise ConfigError("tls_cert: a Unix socket has no TLS; give both for 'host:port' alone")
        if self.tls_cert is None and not address.is_here:
            raise ConfigError(
                f"listen: {self.listen!r} can be reached from other machines, and without TLS anyone "
                "on the way could read the token: give tls_cert and tls_key, or listen on 127.0.0.1"
            )


@known_options
@dataclass(frozen=True)
class TopologyOptions:
    """How a continuous topology moves its records and watches its slots.

    Attributes:
        batch_rows: records travel in batches of up to this many …
        batch_age_ms: … and wait no longer than this for others; in a slot that is always busy up to 200 times as long.
        channel_bytes: what may be on its way on one channel, in bytes, before its sender has to wait.
        heartbeat_ms: a slot reports this often.
        heartbeat_timeout_ms: a slot that has not reported for so long is lost.
        start_timeout_ms: all slots have to be up by then.
        replay_poll_ms: how often the vertex is asked for replays that are due.
        metrics_port: barrier mode: port of a Prometheus endpoint in the driver's program, which tells of all its
            topologies, until the program ends; on the host that slots reach the driver by. None for none.
        otlp_endpoint: barrier mode: base URL of an OpenTelemetry collector that the driver's program pushes the same
            metrics to, as `VertexOptions.otlp_endpoint`.
    """

    batch_rows: int = 16_384
    batch_age_ms: int = 5
    channel_bytes: int = 2 * MIB
    heartbeat_ms: int = 1_000
    heartbeat_timeout_ms: int = 30_000
    start_timeout_ms: int = 60_000
    replay_poll_ms: int = 50
    metrics_port: int | None = None
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        check_int(self.batch_rows, "batch_rows", least=1)
        check_int(self.batch_age_ms, "batch_age_ms", least=0, most=LONGEST_MS)
        check_int(self.channel_bytes, "channel_bytes", least=1 << 10, most=MOST_BYTES)
        check_int(self.heartbeat_ms, "heartbeat_ms", least=10, most=LONGEST_MS)
        check_int(self.heartbeat_timeout_ms, "heartbeat_timeout_ms", least=1, most=LONGEST_MS)
        check_int(self.start_timeout_ms, "start_timeout_ms", least=1, most=LONGEST_MS)
        check_int(self.replay_poll_ms, "replay_poll_ms", least=1, most=LONGEST_MS)
        if self.metrics_port is not None:
            check_int(self.metrics_port, "metrics_port", least=0, most=MAX_PORT)
        check_endpoint(self.otlp_endpoint, "otlp_endpoint")
        if self.heartbeat_timeout_ms < 3 * self.heartbeat_ms:
            raise ConfigError(
                f"heartbeat_timeout_ms: expected at least three times heartbeat_ms ({self.heartbeat_ms}), "
                f"got {self.heartbeat_timeout_ms}"
            )


def check_token(token: str) -> None:
    """Raise `ConfigError` unless ``token`` can be sent in a header and is long enough to be a secret."""
    if not isinstance(token, str):
        raise ConfigError(f"token: expected a text, got {named_type(token)}")
    visible = all("!" <= char <= "~" for char in token)
    if not visible or not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"token: expected {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} visible ASCII characters, no spaces, "
            f"got {len(token)} characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
