"""Who has changed what."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.audits import audit_of
from ftlayer.console.places import with_query
from ftlayer.console.rendering import console_of, page

router = APIRouter(include_in_schema=False)


@router.get("/audit")
def audit_page(request: Request, vertex: str = "", after: str = "") -> Response:
    """Show the log."""
    watch = console_of(request).watch
    found = audit_of(watch, vertex=vertex, after=after)
    return page(
        request,
        "audit.html",
        here="/audit",
        found=found,
        vertices=[view.vertex for view in watch.views() if view.has_records],
        vertex=vertex,
        more=with_query("/audit", {"vertex": vertex, "after": found.next}) if found.next else "",
    )
