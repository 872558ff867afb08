"""The command ``ftlayer pending``: what is not done yet, by stream, and the oldest of it."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli.connection import Asking, asking
from ftlayer.cli.printing import Wide, new_table, print_json, print_table
from ftlayer.cli.records import (
    FoundRecords,
    Limit,
    RecordListing,
    WhereText,
    keepers,
    page_of,
    parsed_where,
    print_listing,
)
from ftlayer.clock import system_now
from ftlayer.printable import printing_console

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.names import JobNames
    from ftlayer.monitor.search import Search
    from ftlayer.monitor.views import VertexView
    from ftlayer.vertex.calls import RecordInfo


class State(StrEnum):
    """The values of ``--state``."""

    PENDING = "pending"
    WAITING = "waiting"
    DELIVERY = "delivery"


@asking
def pending(
    oldest: Annotated[bool, typer.Option("--oldest", help="List the oldest records.")] = False,
    where: WhereText = "",
    state: Annotated[State, typer.Option(help="With --oldest or --where: which records.")] = State.PENDING,
    limit: Limit = 20,
    wide: Wide = False,
    *,
    asking: Asking,
) -> None:
    """Count what is not done yet, by stream; with --oldest or --where, list such records, the oldest first."""
    from ftlayer.monitor.names import JobNames

    with asking.gatherer() as gatherer:
        views = gatherer.views()
        names = JobNames(views)
        keepers(gatherer)
        if not oldest and not where:
            _print_streams(asking, views, names)
            return
        listing = _oldest(gatherer, names, where, state, limit)
    total = sum(_count(view, state) for view in views)
    if not where:
        listing = replace(listing, count=max(total, listing.count), is_all=True)
    if asking.as_json:
        from ftlayer.monitor.facts import record_facts

        items = [record_facts(record.vertex, record.info, names) for record in listing.records]
        print_json({"items": items, "examined": listing.examined, "total": total})
    else:
        print_listing(printing_console(), listing, names, system_now().wall_ms, total, wide=wide)


def _print_streams(asking: Asking, views: tuple[VertexView, ...], names: JobNames) -> None:
    from ftlayer.monitor.facts import stream_facts
    from ftlayer.monitor.words import spoken

    found = [(view, stream) for view in views for stream in view.streams]
    if asking.as_json:
        print_json([stream_facts(view.vertex, stream, names, view.as_of_ms) for view, stream in found])
        return
    numbers = ("pending", "waiting", "in delivery", "dead", "oldest")
    table = new_table("stream", *numbers, numbers=numbers)
    for view, stream in found:
        counts = (stream.pending, stream.waiting, stream.in_delivery, stream.dead)
        age = spoken(view.as_of_ms - stream.oldest_ms) if stream.oldest_ms else ""
        table.add_row(names.stream(view.vertex, stream.stream), *(f"{count:,}" for count in counts), age)
    console = printing_console()
    print_table(console, table) if found else console.print("no stream has been opened")
    for name in ("pending", "waiting", "in_delivery", "dead"):
        console.print(f"{sum(getattr(stream, name) for _, stream in found):,} {name.replace('_', ' ')}")


def _oldest(gatherer: Gatherer, names: JobNames, where: str, state: State, limit: int) -> RecordListing:
    """Find the oldest of each stream, which is listed from its oldest on, and of all these the oldest."""
    from ftlayer.monitor.search import Search, Selection

    filter_, now_ms = parsed_where(where), system_now().wall_ms
    found: list[FoundRecords] = []
    examined, is_all = 0, True
    for view in gatherer.views():
        for stream in view.streams if view.is_up else ():
            selection = Selection(view.vertex, str(state), filter_, stream_id=stream.stream)
            search = Search(selection, names, now_ms)
            found += _first(gatherer, view.vertex, search, limit)
            examined += search.examined
            is_all = is_all and search.is_over
    found.sort(key=lambda record: _since_ms(record.info))
    is_all = is_all and len(found) <= limit
    return RecordListing(tuple(found[:limit]), len(found), examined, is_all)


def _first(gatherer: Gatherer, vertex: str, search: Search, limit: int) -> list[FoundRecords]:
    found: list[FoundRecords] = []
    while len(found) < limit and (call := search.next_call(limit)) is not None:
        found += [FoundRecords(vertex, info) for info in search.take(page_of(gatherer.client(vertex), call))]
    return found


def _since_ms(info: RecordInfo) -> int:
    return info.registered_ms or (info.history[-1].at_ms if info.history else info.not_before_ms)


def _count(view: VertexView, state: State) -> int:
    name = {"delivery": "in_delivery"}.get(state, str(state))
    return int(view.stats.get(name, 0)) if view.is_up else 0
