"""Pages out of templates. Everything that is put into one is escaped."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ftlayer.monitor.console import charts, formats
from ftlayer.monitor.console import works as places
from ftlayer.monitor.console.guard import Caller
from ftlayer.monitor.console.options import Notice
from ftlayer.monitor.console.searching import Console

HERE = Path(__file__).parent
STATIC_FILES = HERE / "static"
NAVIGATION = (("/", "Overview"), ("/dead", "Dead letters"), ("/records", "Records"), ("/audit", "Audit"))


@cache
def templates() -> Environment:
    """Return the templates; a name that a page does not give is an error, not an empty text."""
    environment = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols"],
    )
    environment.globals |= {
        "static": _static,
        "formats": formats,
        "charts": charts,
        "href_of": places.href_of,
        "job_href": places.job_href,
        "record_href": places.record_href,
    }
    return environment


def page(
    request: Request, template: str, *, here: str = "", events: str = "", status: int = 200, **context: Any
) -> HTMLResponse:
    """Render a page; ``here`` is where it is in the navigation, ``events`` where its news come from."""
    options, caller, said = console_of(request).options, caller_of(request), None
    if caller is not None and (session := caller.session) is not None:
        said, session.said = session.said, None
    html = render(
        caller,
        template,
        here=here,
        events=events,
        said=said,
        masked=options.mask_payloads,
        functions=options.edit_with,
        navigation=[*NAVIGATION, *([("/checkpoints", "Checkpoints")] if options.checkpoints else ())],
        **context,
    )
    return HTMLResponse(html, status)


def render(caller: Caller | None, template: str, **context: Any) -> str:
    can_ask = caller is not None and caller.user.is_operator
    asked = {"caller": caller, "csrf": lambda: csrf_field(caller), "can_ask": can_ask}
    return templates().get_template(template).render(**asked, **context)


def say(request: Request, text: str, kind: str = "ok") -> None:
    """Have the next page of this session say something; ``kind`` is "ok", "warn" or "bad"."""
    caller = caller_of(request)
    if caller is not None and caller.session is not None:
        caller.session.said = Notice(text, kind)


def go_to(place: str) -> Response:
    return RedirectResponse(place, 303)


def csrf_field(caller: Caller | None) -> Markup:
    token = "" if caller is None or caller.session is None else caller.session.csrf
    return Markup('<input type="hidden" name="csrf" value="{}">').format(token)


def console_of(request: Request) -> Console:
    console = request.app.state.console
    assert isinstance(console, Console)
    return console


def caller_of(request: Request) -> Caller | None:
    caller: Caller | None = request.state.caller
    return caller


@cache
def _static(name: str) -> str:
    """Return where a static file is; its digest makes browsers take the new one after an upgrade."""
    digest = hashlib.sha256((STATIC_FILES / name).read_bytes()).hexdigest()[:12]
    return f"/static/{name}?v={digest}"
