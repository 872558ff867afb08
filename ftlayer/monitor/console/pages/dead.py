"""Dead letters: groups first; chosen ones are counted, and requeued, purged or exported when that is confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from ftlayer.errors import ConfigError, MalformedRequestError
from ftlayer.monitor.console import asking
from ftlayer.monitor.console.asking import Operator, PostedForm
from ftlayer.monitor.console.guard import Caller
from ftlayer.monitor.console.live import Context, LivePage, Visit
from ftlayer.monitor.console.pages.overview import own_path
from ftlayer.monitor.console.pages.records import check_masking, filter_of, known_record, payload_text
from ftlayer.monitor.console.rendering import console_of, go_to, page, say
from ftlayer.monitor.console.searching import Choice, Console, choice_of
from ftlayer.monitor.console.works import Wanted, Work, WorkState, dead_groups, with_query
from ftlayer.monitor.rules.exporting import Page, exported
from ftlayer.monitor.rules.facts import letter_group_facts, record_facts
from ftlayer.monitor.rules.file_formats import ExportFormat
from ftlayer.monitor.rules.plans import BACK_FROM_FILES
from ftlayer.monitor.rules.row_json import Difference, differences, json_of_row, structured_row
from ftlayer.vertex.calls import MAX_SELECTED, RecordInfo, SelectRecords

router = APIRouter(include_in_schema=False)


@router.get("/records/{vertex}/{key}/edit")
def edit_page(request: Request, vertex: str, key: str, caller: Operator) -> Response:
    console = console_of(request)
    info = known_record(console, vertex, key)
    asking.check_editable(console, vertex, info)
    return _page(request, vertex, info)


@router.post("/records/{vertex}/{key}/edit")
def edit(request: Request, vertex: str, key: str, caller: Operator, form: PostedForm) -> Response:
    """Check a payload and show what would change; with ``confirmed`` requeue the letter with it.

    ``again`` shows the form once more, with what was written.
    """
    console = console_of(request)
    info = known_record(console, vertex, key)
    asking.check_editable(console, vertex, info)
    text = form.text("payload")
    if form.text("again"):
        return _page(request, vertex, info, text=text)
    try:
        payload = asking.parsed_payload(text, info.payload)
        if form.text("confirmed"):
            if asking.requeue_edited(console, caller, vertex, info, payload):
                back = f": {BACK_FROM_FILES}" if console.watch.view(vertex).is_stored else ""
                say(request, f"The letter was requeued with its new payload{back}.")
            else:
                say(request, "The letter was gone already: nothing was changed.", "warn")
            return go_to("/dead")
    except (ConfigError, MalformedRequestError) as error:
        return _page(request, vertex, info, text=text, failure=str(error), status=400)
    changes = differences(json_of_row(info.payload), json_of_row(payload))
    return _page(request, vertex, info, text=text, changes=changes)


def _page(
    request: Request,
    vertex: str,
    info: RecordInfo,
    *,
    text: str | None = None,
    failure: str = "",
    changes: list[Difference] | None = None,
    status: int = 200,
) -> Response:
    said: Context = {
        "record": record_facts(vertex, info, console_of(request).watch.names()),
        "text": payload_text(structured_row(info.payload)) if text is None else text,
        "failure": failure,
        "changes": changes or [],
        "is_checked": changes is not None,
    }
    return page(request, "edit.html", here="/dead", status=status, **said)


_AT_ONCE_S = 0.15
"""A plan is shown with its count where that takes no longer."""


def _groups(visit: Visit) -> Context:
    query = {name: visit.query.get(name, "") for name in ("job", "vertex", "stream", "operator")}
    found = dead_groups(visit.console.watch, **query, mask=visit.mask)
    groups = []
    for group in found.groups:
        vertex, stream, number = group["vertex"], group["stream_id"], group["group"]
        those = {"state": "dead", "vertex": vertex, "stream": stream, "group": number}
        groups.append(group | {"id": f"{vertex}:{number}:{stream}", "href": with_query("/records", those)})
    return {
        "groups": groups,
        "total": sum(group["count"] for group in groups),
        "troubles": found.troubles,
        "many": len(visit.console.watch.views()) > 1,
        "filters": ", ".join(filter(None, query.values())),
    }


def _work(visit: Visit) -> Context:
    watch = visit.console.watch
    watch.views()
    work = known_work(visit.console, visit.params["plan"], visit.caller.user.name)
    groups = [letter_group_facts(group, watch.names(), mask=visit.mask) for group in work.groups]
    stored = {view.vertex for view in watch.views() if view.is_stored}
    is_in_files = any(vertex in stored for vertex, _ in work.letters.keys)
    places = {view.vertex: view.place for view in watch.views()}
    back = BACK_FROM_FILES if is_in_files else ""
    return {"work": work, "groups": groups, "places": places, "back": back}


LIVE = LivePage("/dead", "dead.html", ("dead_groups",), _groups, "/dead")
WORK_PAGE = LivePage("/dead/plans/{plan}", "work.html", ("work",), _work, "/dead")


@router.get("/dead")
def dead_page(request: Request) -> Response:
    return LIVE.respond(request)


@router.post("/dead/plans")
def make_plan(request: Request, caller: Operator, form: PostedForm) -> Response:
    """Count the letters that were chosen; nothing happens to them yet."""
    console = console_of(request)
    choice = choice_of(form.texts("group"), form.texts("key"))
    if form.text("filter"):
        # The button says that it is for all that was found.
        found = filter_of(dict(parse_qsl(form.text("filter"))))
        choice = replace(choice, filter=found, everything=True)
    if choice == Choice():
        say(request, "Nothing is selected: check the boxes of what is meant first.", "warn")
        came_from = urlsplit(request.headers.get("referer", ""))
        return go_to(own_path(f"{came_from.path}?{came_from.query}" if came_from.path else "/dead"))
    work = begin_work(console, caller.user.name, form.text("action"), choice, form.text("function"))
    return go_to(f"/dead/plans/{work.id}")


@router.get("/dead/plans/{plan}")
def work_page(request: Request, plan: str, caller: Operator) -> Response:
    """Show what was counted, and ask whether it is meant; then how far it is."""
    return WORK_PAGE.respond(request)


@router.post("/dead/plans/{plan}/{action}")
def carry_out(request: Request, plan: str, action: Wanted, caller: Operator, form: PostedForm) -> Response:
    work = begin_change(console_of(request), plan, action, caller)
    work.ready.wait(_AT_ONCE_S)
    return go_to(f"/dead/plans/{plan}")


@router.get("/dead/plans/{plan}/export")
def export_plan(
    request: Request, plan: str, caller: Operator, format: ExportFormat = ExportFormat.JSONL
) -> Response:
    console = console_of(request)
    return export(console, known_work(console, plan, caller.user.name), format)


def begin_work(console: Console, user: str, action: str, choice: Choice, function: str = "") -> Work:
    """Begin to count, and wait for a moment whether that is all. Raises `ConfigError`.

    ``function`` is one of those that the console was started with: no other is called, whoever asks.
    """
    try:
        wanted = Wanted(action)
    except ValueError:
        raise ConfigError(f"action: expected one of {', '.join(Wanted)}, got {action!r}") from None
    if wanted is Wanted.EXPORT:
        check_export(console)
    if wanted is Wanted.EDIT:
        asking.check_unmasked(console)
        if function not in console.functions:
            known = ", ".join(console.functions) or "none: start the console with --edit-with module:function"
            raise ConfigError(f"function: expected one of those that this console may call ({known})")
    if choice.filter is not None:
        check_masking(console, choice.filter)
    edits = console.functions[function] if wanted is Wanted.EDIT else None
    work = console.works.count(user, wanted, choice.selections(console), edits)
    work.ready.wait(_AT_ONCE_S)
    return work


def begin_change(console: Console, plan: str, action: Wanted, caller: Caller) -> Work:
    """Begin to do what a plan says. Raises `ConfigError` for another action than the plan's."""
    work = known_work(console, plan, caller.user.name)
    if work.action is not action:
        raise ConfigError(f"this plan is to {work.action}, not to {action}")
    console.works.carry_out(work, asking.by(caller))
    return work


def check_export(console: Console) -> None:
    if console.options.mask_payloads:
        raise ConfigError("this console masks payloads: it exports none")


def known_work(console: Console, plan: str, user: str) -> Work:
    """Return a plan of this user; answers 404 where there is none."""
    work = console.works.get(plan, user)
    if work is None:
        text = "this plan is not known (any more): plans are kept for ten minutes; make another one"
        raise HTTPException(404, text)
    return work


def export(console: Console, work: Work, format: ExportFormat) -> Response:
    """Send letters as a file, read while they are sent. Letters that are gone by then are left out."""
    check_export(console)
    if work.state is not WorkState.COUNTED:
        raise ConfigError(f"this plan is {work.state}; wait until it is counted")
    return StreamingResponse(
        exported(_letters(console, work), console.watch.names(), format),
        media_type=format.media_type,
        headers={"content-disposition": f'attachment; filename="dead-letters-{work.id}.{format}"'},
    )


def _letters(console: Console, work: Work) -> Iterator[Page]:
    for start in range(0, len(work.letters.keys), MAX_SELECTED):
        some = work.letters.keys[start : start + MAX_SELECTED]
        for vertex in dict.fromkeys(at for at, _ in some):
            call = SelectRecords(
                "dead", keys=tuple(key for at, key in some if at == vertex), limit=MAX_SELECTED
            )
            while True:
                page = console.watch.client(vertex).call(call)
                yield vertex, page.records
                if not page.more:
                    break
                call = replace(call, after=page.more)
