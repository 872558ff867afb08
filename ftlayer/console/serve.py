"""Serves a console in this process until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ftlayer.clock import Now, system_now
from ftlayer.console.app import create_app
from ftlayer.console.guard import LOGIN
from ftlayer.console.options import ConsoleOptions
from ftlayer.console.probes import liveness
from ftlayer.console.state import Console
from ftlayer.errors import ConfigError
from ftlayer.monitor.gather import Gatherer
from ftlayer.monitor.sources import VertexSource
from ftlayer.monitor.stored import StoredReports
from ftlayer.transport.sockets import bounded_http, check_socket_free
from ftlayer.transport.systemd import Notifier

_BACKLOG = 128
_CONNECTIONS = 256
_LAST_ANSWERS_S = 2


def serve(
    options: ConsoleOptions,
    look: Callable[[], Sequence[VertexSource | StoredReports]],
    *,
    on_ready: Callable[[str], None],
    stop: threading.Event | None = None,
    clock: Callable[[], Now] = system_now,
    notifier: Notifier | None = None,
) -> None:
    """Serve until ``stop`` is set, or SIGTERM or SIGINT comes (if this is the main thread).

    ``look`` says which vertices there are, whenever they are asked. ``on_ready`` gets the link to open: without a login
    file the token is in it. ``notifier`` learns what probes would. Raises `ConfigError` for what cannot be listened on,
    a login file or certificates that are none.
    """
    options.check_certificates()
    with _listening(options) as listener:
        port = 0 if options.address.path else listener.getsockname()[1]
        console = Console.of(options, Gatherer(look, label="console", clock=clock), clock, port)
        notifier = notifier or Notifier("", None)
        server = _server(options, console, notifier)
        watcher = None if stop is None else _stopped_by(stop, server)
        console.watch.start()
        try:
            notifier.ready(f"serving at {link(options, port, '')}")
            on_ready(link(options, port, "" if options.login_file else console.users.first.token))
            server.run([listener])
        finally:
            console.watch.close()
        if watcher is not None:
            assert stop is not None
            stop.set()
            watcher.join()


def link(options: ConsoleOptions, port: int, token: str) -> str:
    """Return what to open in a browser; a ``token`` is filled into the form."""
    address = options.address
    if address.path:
        return f"unix:{address.path}" + (f" (token {token})" if token else "")
    host = f"[{address.host}]" if ":" in address.host else address.host
    where = f"{'https' if options.has_tls else 'http'}://{host}:{port}"
    return f"{where}{LOGIN}?token={token}" if token else f"{where}/"


class _Server(uvicorn.Server):
    """A server that ends the streams of open pages before it waits for its last answers, and shows that it is alive."""

    def __init__(self, config: uvicorn.Config, console: Console, notifier: Notifier) -> None:
        super().__init__(config)
        self._console = console
        self._notifier = notifier

    async def on_tick(self, counter: int) -> bool:
        # Ten times a second, by the loop that answers requests.
        self._notifier.alive(lambda: liveness(self._console).passes)
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._notifier.stopping()
        self._console.closing.set()
        await super().shutdown(sockets)


def _server(options: ConsoleOptions, console: Console, notifier: Notifier) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(console),
        http=bounded_http(AutoHTTPProtocol, _CONNECTIONS),
        log_config=None,
        log_level="warning",
        access_log=False,  # links have tokens in them
        server_header=False,
        proxy_headers=False,  # anyone could say that he is somebody else
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_LAST_ANSWERS_S,
        ssl_certfile=None if options.tls_cert is None else str(options.tls_cert),
        ssl_keyfile=None if options.tls_key is None else str(options.tls_key),
        ssl_ca_certs=None if options.tls_client_ca is None else str(options.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if options.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    return _Server(config, console, notifier)


def _stopped_by(stop: threading.Event, server: uvicorn.Server) -> threading.Thread:
    def wait() -> None:
        stop.wait()
        server.should_exit = True

    thread = threading.Thread(target=wait, name="ftlayer-console-stop", daemon=True)
    thread.start()
    return thread


@contextmanager
def _listening(options: ConsoleOptions) -> Iterator[socket.socket]:
    """Listen before anything is asked: what is taken is said at once."""
    address = options.address
    if address.path:
        check_socket_free(address.path, "listen")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            listener.bind(address.path)
        except OSError as error:
            raise ConfigError(f"listen: cannot listen on {options.listen}: {error.strerror}") from error
        finally:
            os.umask(before)
    else:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            listener = socket.create_server((address.host, address.port), family=family)
        except OSError as error:
            raise ConfigError(
                f"listen: cannot listen on {options.listen}: {error.strerror or error}"
            ) from error
    listener.listen(_BACKLOG)
    try:
        yield listener
    finally:
        listener.close()
        if address.path:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address.path)
