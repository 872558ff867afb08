"""Serves a console in this process until it is told to stop."""

from __future__ import annotations

import json
import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from ftlayer import __version__, errors
from ftlayer.common.checks import shown
from ftlayer.common.clock import Now, system_now
from ftlayer.errors import FTLayerError
from ftlayer.monitor.console import api
from ftlayer.monitor.console.asking import RefusedError
from ftlayer.monitor.console.guard import API, EVENTS, LOGIN, METRICS, Guard, answer, error_body
from ftlayer.monitor.console.live import events
from ftlayer.monitor.console.options import ConsoleOptions
from ftlayer.monitor.console.pages import dead, jobs, overview, records
from ftlayer.monitor.console.rendering import STATIC_FILES, console_of, page
from ftlayer.monitor.console.searching import Console
from ftlayer.monitor.console.watch import Counted, console_families, exposition
from ftlayer.monitor.gather import Gatherer, StoredReports
from ftlayer.monitor.sources import VertexSource
from ftlayer.transport.sockets import Door, Notifier, bounded_http, cannot_listen, check_socket_free
from ftlayer.vertex.rules.operating import STUCK_AFTER_MS, Phase, ProbeResult
from ftlayer.vertex.service.metrics import LIVEZ, READYZ


def liveness(console: Console) -> ProbeResult:
    """Say whether only a restart can help: the loop of requests answers if this is asked; so vertices are left."""
    silent_ms, reasons, notes = console.watch.silent_ms(), tuple[str, ...](), tuple[str, ...]()
    if silent_ms > STUCK_AFTER_MS:
        reasons = (f"the thread that asks the vertices has not come round for {silent_ms / 1_000:.0f} s",)
    there = [view for view in console.watch.known() if not view.is_gone]
    if away := sum(not view.is_up for view in there):
        # No addresses: all that reach the console may ask.
        notes = (f"{away} of {len(there)} vertices give no answer",)
    return ProbeResult(Phase.STOPPING if console.closing.is_set() else Phase.SERVING, reasons, notes)


def readiness(console: Console) -> ProbeResult:
    """Say whether pages are served. A vertex that is away makes none of them wait: it is a note."""
    alive = liveness(console)
    stopping = ("the console is stopping",) if alive.phase is Phase.STOPPING else ()
    return replace(alive, reasons=(*alive.reasons, *stopping))


class Probed:
    """Answers probes itself, in front of what asks who a caller is; leaves all else to ``app``."""

    def __init__(self, app: ASGIApp, console: Console) -> None:
        self._app = app
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (LIVEZ, READYZ) or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        result = (liveness if scope["path"] == LIVEZ else readiness)(self._console)
        body = json.dumps(result.facts()).encode() + b"\n"
        headers = [(b"content-type", b"application/json"), (b"cache-control", b"no-store")]
        await answer(send, 200 if result.passes else 503, headers, body)


_STATUS: dict[type[FTLayerError] | tuple[type[FTLayerError], ...], int] = {
    (errors.ConfigError, errors.MalformedRequestError, errors.UnsupportedError): 400,
    errors.UnknownJobError: 404,
    errors.ProtocolError: 409,
    errors.UnauthorizedError: 502,
    errors.VertexUnavailableError: 503,
}

OPENAPI = f"{API}v1/openapi.json"
LIVE_PAGES = (overview.LIVE, jobs.GRAPH_PAGE, jobs.CHECKPOINT_PAGE, dead.LIVE, dead.WORK_PAGE)


def create_app(console: Console) -> ASGIApp:
    about: dict[str, Any] = {"title": "ftlayer console", "version": __version__, "openapi_url": OPENAPI}
    app = FastAPI(**about, docs_url=None, redoc_url=None)
    app.state.console = console
    pages = (overview.router, jobs.router, dead.router, records.router)
    for routes in (*pages, api.job_routes, api.record_routes):
        app.include_router(routes)
    streams: set[object] = set()
    app.add_route(EVENTS, lambda request: events(request, LIVE_PAGES, streams), include_in_schema=False)
    app.add_route(METRICS, _metrics, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC_FILES), name="static")
    app.add_exception_handler(FTLayerError, _on_error)
    app.add_exception_handler(RefusedError, _on_refused)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(Exception, _on_fault)
    guard = Guard(
        app,
        hosts=console.options.hosts(),
        users=console.users,
        sessions=console.sessions,
        throttle=console.throttle,
        cookie=console.cookie,
    )
    return Probed(Counted(guard, console.traffic), console)


def _metrics(request: Request) -> Response:
    # A scraper brings a user's token as any other caller does.
    console = console_of(request)
    families = console_families(console.traffic, console.sessions, console.watch, console.clock().wall_ms)
    text, media_type = exposition(families, request.headers.get("accept", ""))
    return Response(text, media_type=media_type)


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FTLayerError)
    status = next((status for kinds, status in _STATUS.items() if isinstance(error, kinds)), 500)
    return _answer(request, status, error.code, str(error))


def _on_refused(request: Request, error: Exception) -> Response:
    return _answer(request, 403, "FORBIDDEN", str(error))


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    nothing = f"there is nothing at {request.url.path}"
    text = nothing if error.detail == "Not Found" else str(error.detail)
    return _answer(request, error.status_code, "HTTP", text)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem(each) for each in error.errors()]
    wrong, to_do = (" and ".join(dict.fromkeys(texts)) for texts in zip(*problems, strict=True))
    return _answer(request, 400, "MALFORMED", f"{wrong}; {to_do}")


def _problem(error: Mapping[str, Any]) -> tuple[str, str]:
    where = ".".join(map(str, error["loc"][1:])) or "the body"
    match error["type"]:
        case "missing":
            return f"{where} is missing", f"send {where}, as {OPENAPI} has it"
        case "extra_forbidden":
            return f"there is no field {where}", f"leave it out, or write it as {OPENAPI} has it"
        case "json_invalid":
            return f"the body is no JSON: {error['ctx']['error']}", "send one JSON object"
        case "dict_type" | "model_attributes_type" | "model_type" if where == "the body":
            return "the body is no JSON object", "send one, with 'Content-Type: application/json'"
        case _:
            wanted = error["msg"].removeprefix("Input ")
            return f"{where}: {shown(error['input'])} is not taken", f"{where} {wanted}"


def _on_fault(request: Request, error: Exception) -> Response:
    text = f"the console has failed at this ({type(error).__name__}); its log has the traceback"
    return _answer(request, 500, "FAULT", text)


def _answer(request: Request, status: int, code: str, text: str) -> Response:
    if request.url.path.startswith(API):
        return JSONResponse(error_body(code, text), status)
    heading = {403: "Not allowed", 404: "Not found", 503: "No answer"}.get(status, "That did not work")
    return page(request, "problem.html", status=status, heading=heading, text=text[:1].upper() + text[1:])


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
        door = Door(port) if options.has_tls else None
        server = _server(options, console, notifier, door)
        watcher = None
        if stop is not None:
            watcher = threading.Thread(
                target=_stop, args=(stop, server), name="ftlayer-console-stop", daemon=True
            )
            watcher.start()
        console.watch.start()
        try:
            notifier.ready(f"serving at {link(options, port, '')}")
            on_ready(link(options, port, "" if options.login_file else console.users.first.token))
            server.run([listener])
        finally:
            console.watch.close()
            if door is not None:
                door.close()
        if stop is not None and watcher is not None:
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


def _server(
    options: ConsoleOptions, console: Console, notifier: Notifier, door: Door | None
) -> uvicorn.Server:
    config = uvicorn.Config(
        create_app(console),
        http=bounded_http(AutoHTTPProtocol, _CONNECTIONS, door, bodies=True),
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


def _stop(stop: threading.Event, server: uvicorn.Server) -> None:
    stop.wait()
    server.should_exit = True


@contextmanager
def _listening(options: ConsoleOptions) -> Iterator[socket.socket]:
    """Listen before anything is asked: what is taken is said at once."""
    address = options.address
    if address.path:
        check_socket_free(address.path, "listen")
    try:
        if address.path:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            before = os.umask(0o177)
            try:
                listener.bind(address.path)
            finally:
                os.umask(before)
        else:
            family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
            listener = socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise cannot_listen("listen", options.listen, error) from error
    listener.listen(_BACKLOG)
    try:
        yield listener
    finally:
        listener.close()
        if address.path:
            Path(address.path).unlink(missing_ok=True)
