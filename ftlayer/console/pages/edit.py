"""Editing the payload of a dead letter: written, checked against its types, shown beside what was, confirmed."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ftlayer.console.editing import check_editable, differing, parsed_payload, requeue_edited
from ftlayer.console.forms import Operator, PostedForm
from ftlayer.console.pages.records import known_record, payload_text
from ftlayer.console.rendering import console_of, go_to, page, say
from ftlayer.errors import ConfigError, MalformedRequestError
from ftlayer.monitor.facts import payload_facts, record_facts
from ftlayer.vertex.calls import RecordInfo

router = APIRouter(include_in_schema=False)


@router.get("/records/{vertex}/{key}/edit")
def edit_page(request: Request, vertex: str, key: str, caller: Operator) -> Response:
    """Show the payload in a form."""
    console = console_of(request)
    info = known_record(console, vertex, key)
    check_editable(console, info)
    return _page(request, vertex, info)


@router.post("/records/{vertex}/{key}/edit")
def edit(request: Request, vertex: str, key: str, caller: Operator, form: PostedForm) -> Response:
    """Check a payload and show what would change; with ``confirmed`` requeue the letter with it.

    ``again`` shows the form once more, with what was written.
    """
    console = console_of(request)
    info = known_record(console, vertex, key)
    check_editable(console, info)
    text = form.text("payload")
    if form.text("again"):
        return _page(request, vertex, info, text=text)
    try:
        payload = parsed_payload(text, info.payload.schema)
        if form.text("confirmed"):
            if requeue_edited(console, caller, vertex, info, payload):
                say(request, "The letter was requeued with its new payload.")
            else:
                say(request, "The letter was gone already: nothing was changed.", "warn")
            return go_to("/dead")
    except (ConfigError, MalformedRequestError) as error:
        return _page(request, vertex, info, text=text, failure=str(error), status=400)
    changes = differing(payload_facts(info.payload), payload_facts(payload))
    return _page(request, vertex, info, text=text, changes=changes, is_checked=True)


def _page(
    request: Request,
    vertex: str,
    info: RecordInfo,
    *,
    text: str | None = None,
    failure: str = "",
    changes: list[tuple[str, str, str]] | None = None,
    is_checked: bool = False,
    status: int = 200,
) -> Response:
    facts = record_facts(vertex, info, console_of(request).watch.names())
    return page(
        request,
        "edit.html",
        here="/dead",
        record=facts,
        text=payload_text(facts["record"]) if text is None else text,
        failure=failure,
        changes=changes or [],
        is_checked=is_checked,
        status=status,
    )
