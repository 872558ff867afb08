"""One client's connection to a vertex: made late, made again after a failure, never carried over a fork."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from pyarrow import flight

from ftlayer.checks import check_bytes
from ftlayer.config import check_token
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    UnauthorizedError,
    UnsupportedError,
    VertexUnavailableError,
)
from ftlayer.transport.address import parse_address
from ftlayer.transport.client import Endpoint, connect
from ftlayer.transport.failures import TRANSPORT_ERRORS
from ftlayer.transport.tokens import call_options
from ftlayer.vertex.wire.frames import decode_reply

T = TypeVar("T")

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5

# gRPC keeps threads and locks that a fork does not copy. Set by the first connection of a process.
_grpc_process: int | None = None


def monotonic_ms() -> int:
    """Return the monotone clock in milliseconds."""
    return time.monotonic_ns() // 1_000_000


class Connection:
    """Where a vertex is and how it is talked to. Any thread may use it.

    ``address`` is ``"grpc://host:port"``, ``"grpc+tls://host:port"`` or ``"grpc+unix:///path"``; ``root_certs`` the PEM
    that the vertex's certificate is verified by (None: the system's), ``client_pem`` the certificate and the key that
    are shown to a vertex that asks for one.
    """

    def __init__(
        self, address: str, token: str, root_certs: bytes | None, client_pem: bytes | None = None
    ) -> None:
        """Check the arguments (`ConfigError`); connects to nothing yet."""
        where = parse_address(address, "address")
        way_out = "grpc+tls://host:port" if where.path else f"grpc+tls://{where.listen}"
        if not where.tls and not where.is_here:
            raise ConfigError(f"address: the token would cross the network unencrypted; use {way_out}")
        if not where.tls and root_certs is not None:
            raise ConfigError(f"address: with root_certs use {way_out}")
        if not where.tls and client_pem is not None:
            raise ConfigError(f"address: with client_pem use {way_out}")
        _check_certificates(root_certs, client_pem)
        check_token(token)
        self.address = address
        self.token = token
        self.root_certs = root_certs
        self.client_pem = client_pem
        self._lock = threading.Lock()
        self._client: flight.FlightClient | None = None
        self._end: FTLayerError | None = None
        self._pid = os.getpid()

    def __reduce__(self) -> tuple[type[Connection], tuple[str, str, bytes | None, bytes | None]]:
        return Connection, (self.address, self.token, self.root_certs, self.client_pem)

    def client(self) -> flight.FlightClient:
        """Return the Flight client; made on the first call of a process, without waiting for the vertex.

        Raises what `end` was told, after it.
        """
        with self._lock:
            if self._end is not None:
                # A copy: several threads raise it.
                raise type(self._end)(*self._end.args)
            self.check_process()
            if self._client is None:
                # One PEM has both certificate and key; each is found by its name.
                endpoint = Endpoint(
                    self.address,
                    self.token,
                    self.root_certs,
                    client_cert=self.client_pem,
                    client_key=self.client_pem,
                )
                self._client = connect(endpoint, retries=True)
            return self._client

    def check_process(self) -> None:
        """Raise `UnsupportedError` in a process forked from one that has used gRPC: it would hang."""
        global _grpc_process
        pid = os.getpid()
        if _grpc_process not in (None, pid):
            raise UnsupportedError(
                f"process {pid} was forked from process {_grpc_process} after that had talked to a vertex, "
                "which gRPC does not survive: fork before the first call, or start processes with 'spawn'"
            )
        _grpc_process = pid
        if self._pid != pid:
            self._pid, self._client = pid, None

    def options(self, timeout_s: float | None) -> flight.FlightCallOptions:
        """Return what goes with every request; ``timeout_s`` None is for streams."""
        return call_options(self.token, timeout_s)

    def close(self) -> None:
        """Give the connection up; a later call makes another."""
        with self._lock:
            if self._client is not None and self._pid == os.getpid():
                self._client.close()
            self._client = None

    def end(self, reason: FTLayerError) -> None:
        """Give the connection up permanently: later calls of this process, and further attempts, raise ``reason``."""
        with self._lock:
            self._end = reason
        self.close()


def _check_certificates(root_certs: bytes | None, client_pem: bytes | None) -> None:
    """Look at the certificates before gRPC does, which would try until the deadline and name no reason."""
    check_bytes(root_certs, "root_certs")
    check_bytes(client_pem, "client_pem")
    if root_certs is None and client_pem is None:
        return
    # Late: most clients have none.
    from ftlayer.transport.tls import check_certificate, check_roots

    if root_certs is not None:
        check_roots(root_certs, "root_certs")
    if client_pem is not None:
        check_certificate(client_pem, client_pem, cert_option="client_pem", key_option="client_pem")


def vertex_error(error: BaseException) -> FTLayerError | None:
    """Return the vertex's own error in an exception of Flight; None where the transport failed."""
    if isinstance(error, flight.FlightError) and error.extra_info:
        answer, _ = decode_reply(error.extra_info)
        if isinstance(answer, VertexUnavailableError):
            return None
        if isinstance(answer, FTLayerError):
            return answer
    if isinstance(error, flight.FlightUnauthenticatedError):
        return UnauthorizedError(str(error))
    return None


def possible_cause(address: str, failure: str) -> str:
    """Return what a failure of the transport may come from, to follow its text; empty where its text says enough.

    gRPC has no codes for these: its texts are all there is.
    """
    where = parse_address(address, "address")
    cause = ""
    if where.tls and "certificate verify failed" in failure:
        cause = "the vertex's certificate was not accepted: root_certs needs it, or what it is signed by"
    elif where.tls and "wrong version number" in failure:
        cause = f"a vertex without TLS is addressed as {replace(where, tls=False)}"
    elif where.tls and "Socket closed" in failure:
        cause = "a vertex with --tls-client-ca takes only clients whose client_pem is signed by that"
    elif not where.path and "Socket closed" in failure:
        cause = f"a vertex with TLS is addressed as {replace(where, tls=True)}"
    return cause and f"; possible cause: {cause}"


def retried(attempt: Callable[[float], T], what: str, address: str, deadline_ms: int) -> T:
    """Call ``attempt(seconds left)`` until it answers; what the vertex refuses is raised at once.

    Raises `VertexUnavailableError` with the last failure when ``deadline_ms`` (monotone) has passed.
    """
    pause = FIRST_PAUSE_S
    while True:
        left = (deadline_ms - monotonic_ms()) / 1_000
        try:
            return attempt(max(left, 0.001))
        except (*TRANSPORT_ERRORS, VertexUnavailableError) as error:
            refusal = vertex_error(error)
            if refusal is not None:
                raise refusal from None
            left = (deadline_ms - monotonic_ms()) / 1_000
            if left <= pause:
                raise VertexUnavailableError(
                    f"{what}: no answer from the vertex at {address} before the deadline; "
                    f"last failure: {error}{possible_cause(address, str(error))}"
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
