"""Who has changed what: the audit logs of all vertices together."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.places import with_query
from ftlayer.console.rendering import console_of, page
from ftlayer.console.watch import Watch
from ftlayer.errors import ConfigError, UnsupportedError, VertexUnavailableError
from ftlayer.monitor.facts import Facts, audit_facts
from ftlayer.vertex.calls import AuditPage, ListAudit

ENTRIES = 100
MOST_ENTRIES = 500

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


@dataclass(frozen=True, slots=True)
class FoundAudit:
    """Entries, the latest first; ``next`` goes on in the log of one vertex; ``troubles`` say why there may be more."""

    entries: list[Facts]
    next: str
    troubles: list[str]


def audit_of(watch: Watch, *, vertex: str = "", after: str = "", limit: int = ENTRIES) -> FoundAudit:
    """Return the latest entries of all vertices, or of one, where ``after`` goes on. Raises `ConfigError`."""
    if vertex:
        watch.client(vertex)  # which says so where there is none
    views = [view for view in watch.views() if not view.is_gone and vertex in ("", view.vertex)]
    if after and len(views) != 1:
        raise ConfigError("after: a page goes on in the log of one vertex; say which, by vertex")
    entries: list[Facts] = []
    troubles: list[str] = []
    more = ""
    for view in views:
        try:
            page = watch.client(view.vertex).call(ListAudit(_cursor(after), limit))
        except UnsupportedError:
            continue  # a driver's own board changes no records
        except VertexUnavailableError as error:
            troubles.append(f"{view.vertex} gives no answer: {error if view.is_up else view.failure}")
            continue
        assert isinstance(page, AuditPage)
        entries += [{"vertex": view.vertex} | audit_facts(entry) for entry in page.entries]
        more = page.more.hex() if len(views) == 1 else ""
    entries.sort(key=lambda entry: entry["at"] or "", reverse=True)
    return FoundAudit(entries[:limit], more, troubles)


def _cursor(after: str) -> bytes:
    try:
        return bytes.fromhex(after)
    except ValueError:
        raise ConfigError("after: this is not where a page ended; begin anew") from None
