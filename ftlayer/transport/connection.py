"""What `Exchange` needs of a client's stream of frames, whatever carries it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Protocol

from pyarrow import flight

from ftlayer.transport.address import parse_address

# All connections are a client's own: one made anew does not share the backoff of the one before it.
_OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
]
_RETRYING = [
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True)
class Endpoint:
    """A Flight server, and what it takes to be let in.

    ``root_certs`` is PEM of what the server's certificate is verified by (None: the system's), ``tls_name`` the name
    on it where that is not the address ("": it is). ``client_cert`` and ``client_key`` are PEM of what is shown to a
    server that asks for it; one text may hold both.
    """

    address: str
    token: str = field(repr=False)
    root_certs: bytes | None = None
    tls_name: str = ""
    client_cert: bytes | None = None
    client_key: bytes | None = field(default=None, repr=False)


def connect(endpoint: Endpoint, *, retries: bool = False) -> flight.FlightClient:
    """Return a client of ``endpoint``; does not wait for the server.

    With ``retries``, for a client that tries again: it soon finds a server that is back, and gives an attempt to
    connect up after a second. Raises `ConfigError` for an address that is none.
    """
    options = [*_OPTIONS, *(_RETRYING if retries else ())]
    if parse_address(endpoint.address, "address").is_here:
        options.append(("grpc.enable_http_proxy", 0))
    return flight.FlightClient(
        endpoint.address,
        tls_root_certs=endpoint.root_certs,
        cert_chain=endpoint.client_cert,
        private_key=endpoint.client_key,
        override_hostname=endpoint.tls_name or None,
        generic_options=options,
    )


_EXPERIMENTS = "GRPC_EXPERIMENTS"
_NO_EVENT_ENGINE = "-event_engine_listener,-event_engine_client"


def poll_in_place() -> None:
    """Let a thread that waits for a message read it from the socket itself.

    By default gRPC reads in threads of its own (its event engine) and hands over, which takes two more changes of
    threads at each end: as much time as a small call and its answer take without them.

    To be called before the process uses gRPC; later it has no effect. A value of `GRPC_EXPERIMENTS` that is there
    already stays.
    """
    os.environ.setdefault(_EXPERIMENTS, _NO_EVENT_ENGINE)


class Connection(Protocol):
    """A stream of frames, both ways. One thread reads, another writes; `cancel` is of any thread.

    Methods raise one of `ftlayer.transport.flight_connection.TRANSPORT_ERRORS` when the stream is broken or
    cancelled, and the `ftlayer.errors.FTLayerError` that the server has ended it with.
    """

    def open(self) -> None:
        """Connect, and begin the stream; comes first, and once."""

    def read(self) -> bytes | None:
        """Wait for the next frame; None when the server has ended the stream in order."""

    def write(self, frame: bytes) -> None:
        """Write a frame; waits while the server does not read."""

    def end(self) -> None:
        """Tell the server that no frame comes behind those written."""

    def cancel(self) -> None:
        """Break the stream: a thread that waits in a method is freed. May come before `open`, and repeatedly."""

    def close(self) -> None:
        """Free everything; comes last, when no other thread uses the stream any more."""
