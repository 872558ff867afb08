from __future__ import annotations

import socket
import threading
from typing import Any

from ftlayer.errors import SourceError
from ftlayer.sources.webhook.app import AsgiApp
from ftlayer.transport.address import Address
from ftlayer.transport.sockets import bounded_http

_BACKLOG = 2_048
_CONNECTIONS = 512
_LAST_ANSWERS_S = 1
"""How long answers may take when the server ends."""


class WebServer:
    """Serves one application. The thread that makes it knows that it listens."""

    def __init__(
        self, app: AsgiApp, address: Address, tls: tuple[str, str] | None, *, shares_port: bool
    ) -> None:
        """Listen. ``tls`` names certificate and key; ``shares_port``: with other processes of this host.

        Raises `SourceError` if that cannot be.
        """
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        self._socket = _listening(address, shares_port=shares_port)
        config = uvicorn.Config(
            app,
            http=bounded_http(AutoHTTPProtocol, _CONNECTIONS),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="auto",
            ws="none",
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
            ssl_certfile=None if tls is None else tls[0],
            ssl_keyfile=None if tls is None else tls[1],
        )
        try:
            config.load()
        except OSError as error:
            self._socket.close()
            raise SourceError(f"tls_cert, tls_key: {error}") from error
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="ftlayer-webhook", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._socket.getsockname()[1]
        return port

    @property
    def is_running(self) -> bool:
        """Whether it serves, or is about to."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End it: what was taken is answered first."""
        self._server.should_exit = True
        self._thread.join()

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()


def _listening(address: Address, *, shares_port: bool) -> socket.socket:
    family: Any = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server(
            (address.host, address.port), family=family, backlog=_BACKLOG, reuse_port=shares_port
        )
    except OSError as error:
        raise SourceError(
            f"listen: a webhook cannot listen on {address.host}:{address.port}: {error.strerror or error}"
        ) from error
