"""The ASGI application of a console."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from ftlayer import __version__
from ftlayer.checks import shown
from ftlayer.console.api import jobs as api_jobs
from ftlayer.console.api import records as api_records
from ftlayer.console.forms import RefusedError
from ftlayer.console.guard import API, EVENTS, METRICS, Guard, error_body
from ftlayer.console.live import events
from ftlayer.console.metrics import Counted, console_families, exposition
from ftlayer.console.pages import audit, checkpoints, dead, edit, entry, jobs, overview, records
from ftlayer.console.probes import Probed
from ftlayer.console.rendering import STATIC_FILES, console_of, page
from ftlayer.console.state import Console
from ftlayer.errors import (
    ConfigError,
    FTLayerError,
    MalformedRequestError,
    ProtocolError,
    UnauthorizedError,
    UnknownJobError,
    UnsupportedError,
    VertexUnavailableError,
)

_STATUS: tuple[tuple[type[FTLayerError], int], ...] = (
    (ConfigError, 400),
    (MalformedRequestError, 400),
    (UnsupportedError, 400),
    (UnknownJobError, 404),
    (ProtocolError, 409),
    (UnauthorizedError, 502),
    (VertexUnavailableError, 503),
)

OPENAPI = f"{API}v1/openapi.json"
LIVE_PAGES = (overview.LIVE, jobs.GRAPH_PAGE, jobs.CHECKPOINT_PAGE, dead.LIVE, dead.WORK_PAGE)


def create_app(console: Console) -> ASGIApp:
    """Return the application of a console, its guard in front."""
    app = FastAPI(
        title="ftlayer console",
        version=__version__,
        openapi_url=OPENAPI,
        docs_url=None,
        redoc_url=None,
    )
    app.state.console = console
    for routes in (entry, overview, jobs, dead, records, edit, audit, checkpoints, api_jobs, api_records):
        app.include_router(routes.router)
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
    """Answer a scraper, which brings a user's token as any other caller does."""
    console = console_of(request)
    families = console_families(console.traffic, console.sessions, console.watch, console.clock().wall_ms)
    text, media_type = exposition(families, request.headers.get("accept", ""))
    return Response(text, media_type=media_type)


def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FTLayerError)
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    return _answer(request, status, error.code, str(error))


def _on_refused(request: Request, error: Exception) -> Response:
    return _answer(request, 403, "FORBIDDEN", str(error))


def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = str(error.detail)
    if text == "Not Found":
        text = f"there is nothing at {request.url.path}"
    return _answer(request, error.status_code, "HTTP", text)


def _on_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problems = [_problem(each) for each in error.errors()]
    wrong, to_do = (" and ".join(dict.fromkeys(texts)) for texts in zip(*problems, strict=True))
    return _answer(request, 400, "MALFORMED", f"{wrong}; {to_do}")


def _problem(error: Mapping[str, Any]) -> tuple[str, str]:
    """Return what is wrong with a field or a parameter, and what to do about it."""
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
    """Answer what is a mistake of ours; the server logs the traceback."""
    return _answer(
        request,
        500,
        "FAULT",
        f"the console has failed at this ({type(error).__name__}); its log has the traceback",
    )


def _answer(request: Request, status: int, code: str, text: str) -> Response:
    if request.url.path.startswith(API):
        return JSONResponse(error_body(code, text), status)
    heading = {403: "Not allowed", 404: "Not found", 503: "No answer"}.get(status, "That did not work")
    return page(request, "problem.html", status=status, heading=heading, text=text[:1].upper() + text[1:])
