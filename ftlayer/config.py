"""Every option, with its unit, default and bounds.

A value out of bounds is a `ConfigError` that names the option, at the place where it was given.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Literal

from ftlayer.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30

# A shard's store below this has no room for LMDB's own pages.
MIN_SHARD_BYTES = 8 * MIB

# A token travels in a header of every request: long enough not to be guessed, short enough for a header.
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4_096


class FTStatus(StrEnum):
    """Whether fault tolerance is on. OFF runs the same program as plain Spark."""

    ON = "on"
    OFF = "off"


_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h)")


def duration_ms(value: str | int, option: str) -> int:
    """Return milliseconds for ``"250ms"``, ``"30s"``, ``"5m"``, ``"1h"``, or a number of milliseconds.

    Raises `ConfigError` naming ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{option}: expected a duration like '30s' or milliseconds, got {value!r}")
    if isinstance(value, int):
        milliseconds = value
    else:
        match = _DURATION.fullmatch(value.strip())
        if match is None:
            raise ConfigError(
                f"{option}: expected a duration like '250ms', '30s', '5m' or '1h', got {value!r}"
            )
        milliseconds = round(float(match[1]) * _UNITS_MS[match[2]])
    if milliseconds < 1:
        raise ConfigError(f"{option}: a duration is at least 1 ms, got {value!r}")
    return milliseconds


@dataclass(frozen=True)
class VertexOptions:
    """What a vertex keeps and how.

    Attributes:
        path: the store's directory; made (mode 0700) if it is missing, its parent is not.
        shards: number of shards, a power of two up to 256; fixed when the store is made.
        durability: when a call's changes outlive the machine. ``"batch"``: before the call is answered;
            a duration (``"100ms"``): within that time; ``"none"``: when the system writes them. They outlive
            the process in every case.
        max_store_bytes: how large the store may become, all shards together. Intake stops at 90 % of it.
        persist_timeout_ms: how long intake waits for room before it fails with `IntakeTimeoutError`.
        max_message_bytes: largest message the vertex takes. Longer calls come in parts, up to 16 messages.
        tracker: ``"table"``, or ``"exact"`` for the diagnostic one (some hundred times slower).
        timeout_buckets: a root expires between its timeout and timeout × (1 + 1 / (buckets − 1)).
    """

    path: str | Path
    shards: int = 1
    durability: str = "batch"
    max_store_bytes: int = 8 * GIB
    persist_timeout_ms: int = 60_000
    max_message_bytes: int = 64 * MIB
    tracker: Literal["table", "exact"] = "table"
    timeout_buckets: int = 3

    def __post_init__(self) -> None:
        if not str(self.path):
            raise ConfigError("path: expected the store's directory, got an empty path")
        if not 1 <= self.shards <= 256 or self.shards & (self.shards - 1):
            raise ConfigError(f"shards: expected a power of two from 1 to 256, got {self.shards}")
        if self.durability not in ("batch", "none"):
            duration_ms(self.durability, "durability")
        _at_least("max_store_bytes", self.max_store_bytes, self.shards * MIN_SHARD_BYTES)
        _at_least("persist_timeout_ms", self.persist_timeout_ms, 1)
        # A call's parts have 1 MiB.
        _at_least("max_message_bytes", self.max_message_bytes, 2 * MIB)
        if self.max_message_bytes > GIB:
            raise ConfigError(f"max_message_bytes: gRPC carries up to {GIB}, got {self.max_message_bytes}")
        if self.tracker not in ("table", "exact"):
            raise ConfigError(f"tracker: expected 'table' or 'exact', got {self.tracker!r}")
        if not 2 <= self.timeout_buckets <= 1_000:
            raise ConfigError(f"timeout_buckets: expected 2 to 1000, got {self.timeout_buckets}")


@dataclass(frozen=True)
class ServeOptions:
    """Where a vertex listens, and who may talk to it.

    Attributes:
        vertex: what it keeps.
        token: the secret every request has to bring, 16 to 4096 visible ASCII characters.
        listen: ``"host:port"``; port 0 is any free one. ``"[::1]:7077"`` for IPv6.
        tls_cert, tls_key: PEM text of certificate chain and private key; required off loopback.
        metrics_port: port of the Prometheus endpoint (on the same host), None for none.
    """

    vertex: VertexOptions
    token: str = field(repr=False)
    listen: str = "127.0.0.1:7077"
    tls_cert: bytes | None = None
    tls_key: bytes | None = field(default=None, repr=False)
    metrics_port: int | None = None

    def __post_init__(self) -> None:
        host, _ = self.host_and_port
        check_token(self.token)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls_cert, tls_key: give both or none")
        if self.tls_cert is None and not is_loopback(host):
            raise ConfigError(
                f"listen: {self.listen!r} can be reached from other machines, and without TLS anyone "
                "on the way could read the token: give tls_cert and tls_key, or listen on 127.0.0.1"
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port < 1 << 16:
            raise ConfigError(f"metrics_port: expected 0 to 65535, got {self.metrics_port}")

    @property
    def host_and_port(self) -> tuple[str, int]:
        """``listen`` in its parts, the host without brackets."""
        return split_address(self.listen, "listen")


@dataclass(frozen=True)
class TopologyOptions:
    """How a continuous topology moves its records and watches its slots.

    Attributes:
        batch_rows: records travel in batches of up to this many …
        batch_age_ms: … and wait no longer than this for others.
        channel_bytes: what may be on its way on one channel, in bytes, before its sender has to wait.
        heartbeat_ms: a slot reports this often.
        heartbeat_timeout_ms: a slot that has not reported for so long is lost.
        start_timeout_ms: all slots have to be up by then.
        replay_poll_ms: how often the vertex is asked for replays that are due.
    """

    batch_rows: int = 16_384
    batch_age_ms: int = 5
    channel_bytes: int = 2 * MIB
    heartbeat_ms: int = 1_000
    heartbeat_timeout_ms: int = 30_000
    start_timeout_ms: int = 60_000
    replay_poll_ms: int = 50

    def __post_init__(self) -> None:
        _at_least("batch_rows", self.batch_rows, 1)
        _at_least("batch_age_ms", self.batch_age_ms, 0)
        _at_least("channel_bytes", self.channel_bytes, 1 << 10)
        _at_least("heartbeat_ms", self.heartbeat_ms, 10)
        _at_least("start_timeout_ms", self.start_timeout_ms, 1)
        _at_least("replay_poll_ms", self.replay_poll_ms, 1)
        if self.heartbeat_timeout_ms < 3 * self.heartbeat_ms:
            raise ConfigError(
                f"heartbeat_timeout_ms: expected at least three times heartbeat_ms ({self.heartbeat_ms}), "
                f"got {self.heartbeat_timeout_ms}"
            )


def split_address(address: str, option: str) -> tuple[str, int]:
    """Split ``"host:port"`` (``"[v6]:port"``); `ConfigError` naming ``option`` if it is not of this form."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{option}: write an IPv6 address in brackets, '[::1]:7077', got {address!r}")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) >= 1 << 16:
        raise ConfigError(f"{option}: expected 'host:port' with a port from 0 to 65535, got {address!r}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine only: ``localhost``, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_token(token: str) -> None:
    """Raise `ConfigError` unless ``token`` can be sent in a header and is long enough to be a secret."""
    visible = all("!" <= char <= "~" for char in token)
    if not visible or not MIN_TOKEN_CHARS <= len(token) <= MAX_TOKEN_CHARS:
        raise ConfigError(
            f"token: expected {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} visible ASCII characters, no spaces, "
            f"got {len(token)} characters; make one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )


def _at_least(option: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{option}: expected an integer of at least {least}, got {value!r}")
