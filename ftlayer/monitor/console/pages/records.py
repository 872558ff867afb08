"""Records of any state: looked for, and one of them with all that is known of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from ftlayer.checkpoint.letters import TIMER_SCHEMA
from ftlayer.errors import ConfigError, UnsupportedError
from ftlayer.monitor.console.asking import AnyCaller
from ftlayer.monitor.console.rendering import console_of, page
from ftlayer.monitor.console.searching import STATES, Console, RecordFilter, SearchResult, record_of, search
from ftlayer.monitor.console.works import with_query
from ftlayer.monitor.rules.facts import Facts, explained_facts, job_summary_facts, record_facts
from ftlayer.monitor.rules.plans import DEAD, no_way_back
from ftlayer.monitor.rules.row_json import structured_row
from ftlayer.vertex.calls import Explain, RecordInfo

LONGEST_PAYLOAD = 160
_TEXTS = ("state", "vertex", "job", "stream", "operator", "q", "root", "where")

router = APIRouter(include_in_schema=False)


@router.get("/records")
def records_page(request: Request, caller: AnyCaller, after: str = "") -> Response:
    """Show records; of a search that makes no sense the form with what was written, and why."""
    console = console_of(request)
    watch, mask = console.watch, console.options.mask_payloads
    wanted, status = RecordFilter(), 200
    try:
        wanted = filter_of(request.query_params)
        check_masking(console, wanted)
        found = search(watch, wanted, after=after, clock=console.clock)
    except ConfigError as error:
        found, status = SearchResult((), "", 0, (f"That did not work: {error}",)), 400
    names = watch.names()
    records = [record_facts(vertex, info, names, mask=mask) for vertex, info in found.records]
    for record in records:
        text = json.dumps(record["record"], ensure_ascii=False)
        record["shown"] = text if len(text) <= LONGEST_PAYLOAD else f"{text[: LONGEST_PAYLOAD - 1]}…"
    fields: dict[str, str | int | None] = {name: getattr(wanted, name) for name in _TEXTS}
    fields["group"] = wanted.group if wanted.group >= 0 else None
    given = {name: value for name, value in fields.items() if value not in ("", None)}
    selectable = wanted.state == "dead" and caller.user.is_operator
    jobs = [job_summary_facts(view, job, names, mask=mask) for view in watch.views() for job in view.jobs]
    narrowing = (("source", wanted.stream), ("vertex", wanted.vertex))
    return page(
        request,
        "records.html",
        here="/records",
        status=status,
        filter=wanted,
        states=STATES,
        jobs=jobs,
        many=len(watch.views()) > 1,
        records=records,
        examined=found.examined,
        troubles=found.troubles,
        selectable=selectable,
        # A root is looked for, and letters that are changed are chosen by what an index or a condition says.
        whole=urlencode(given) if selectable and (records or found.next) and not wanted.root else "",
        more=with_query("/records", fields | {"after": found.next}) if found.next else "",
        narrowed=", ".join(f"{name} {value}" for name, value in narrowing if value),
        without_group=with_query("/records", {"state": wanted.state}),
        kept=[(name, given[name]) for name in ("vertex", "stream", "group") if name in given],
    )


@router.get("/records/{vertex}/{key}")
def record_page(request: Request, vertex: str, key: str) -> Response:
    console = console_of(request)
    info = known_record(console, vertex, key)
    mask = console.options.mask_payloads
    facts = record_facts(vertex, info, console.watch.names(), mask=mask)
    return page(
        request,
        "record.html",
        here="/dead" if info.state == "dead" else "/records",
        record=facts,
        payload=payload_text(facts["record"] if mask else structured_row(info.payload)),
        no_way_back=no_way_back(console.watch.view(vertex), info.stream) if info.state == DEAD else "",
        is_timer=info.payload.schema.equals(TIMER_SCHEMA),
        explained=explanation_of(console, vertex, info) if info.state == "pending" else None,
    )


def filter_of(query: Mapping[str, str]) -> RecordFilter:
    texts: dict[str, Any] = {name: query[name].strip() for name in _TEXTS if query.get(name, "").strip()}
    group = query.get("group", "")
    if group and not group.isdecimal():
        raise ConfigError(f"group: expected a number, got {group!r}")
    return replace(RecordFilter(group=int(group) if group else -1), **texts)


def check_masking(console: Console, wanted: RecordFilter) -> None:
    """Raise `ConfigError` for a question whose answer would tell what payloads hold."""
    if console.options.mask_payloads and (wanted.q or wanted.where):
        raise ConfigError("this console masks payloads: text and conditions on fields are not searched for")


def known_record(console: Console, vertex: str, key: str) -> RecordInfo:
    """Return a record that is there; answers 404 where it is not."""
    info = record_of(console.watch, vertex, key)
    if info is None:
        raise HTTPException(404, "this record is not there (any more): it is done, or was requeued or purged")
    return info


def explanation_of(console: Console, vertex: str, info: RecordInfo) -> Facts:
    """Return which ids a pending record waits for, and who owes them; says so where the vertex does not keep ids."""
    try:
        explained = console.watch.client(vertex).call(Explain(info.root)).found
    except UnsupportedError as error:
        return {"text": str(error), "owed": []}
    text = ""
    if explained is None:
        text = "It is not pending any more: it is done, or has failed."
    elif not explained.registered:
        text = "Its registration is missing: only later events have come, and are held."
    elif not explained.ids_known:
        text = "Some of its events came without ids: what follows is not all."
    return explained_facts(info.root, explained) | {"text": text}


def payload_text(record: Mapping[str, Any]) -> str:
    return json.dumps(record, indent=2, ensure_ascii=False)
