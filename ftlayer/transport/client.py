from __future__ import annotations

from dataclasses import dataclass, field

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
