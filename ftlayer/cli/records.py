"""What commands about records share: which vertices keep some, how a search is gone through, what is printed."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftlayer.cli.connection import warn
from ftlayer.cli.printing import new_table, print_line, time_text
from ftlayer.common.checks import shown
from ftlayer.common.printable import shown_url
from ftlayer.errors import ConfigError, MalformedRequestError

if TYPE_CHECKING:
    from rich.console import Console

    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.rules.names import JobNames, VertexView
    from ftlayer.monitor.rules.plans import LetterGroup, Search
    from ftlayer.vertex.calls import RecordInfo

COUNTING_S = 2.0
"""So long a listing goes on to count what it does not show."""

LONGEST_PAYLOAD = 200
"""Characters of a record that a list shows; `ftlayer dead show` shows it all."""


def _read_where(text: str) -> str:
    """Refuse what is no filter before anything is asked."""
    if text:
        from ftlayer.monitor.rules.where import parse_where

        parse_where(text)
    return text


WhereText = Annotated[
    str,
    typer.Option(
        "--where",
        callback=_read_where,
        metavar="FILTER",
        help="Such records alone: operator = parse and reason ~ timeout and record.price > 10 and age > 5m.",
    ),
]
Limit = Annotated[int, typer.Option(min=1, help="How many to list at most.")]


@dataclass(frozen=True, slots=True)
class FoundRecords:
    vertex: str
    info: RecordInfo


@dataclass(frozen=True, slots=True)
class RecordListing:
    """What a listing shows: ``count`` of ``found`` so far; ``examined`` of ``total`` unless all was (``is_all``)."""

    records: tuple[FoundRecords, ...]
    count: int
    examined: int
    is_all: bool


def keepers(gatherer: Gatherer) -> list[str]:
    """Return the vertices that keep records and answer. Raises `ConfigError` where none does."""
    up = [view for view in gatherer.views() if view.is_up]
    there = [view.vertex for view in up if view.has_records]
    if not there:
        names = ", ".join(view.vertex for view in up)
        kept = [each.job for view in up for each in view.jobs if each.job.kept_in]
        those = [f"those of {job.name} are named by --checkpoints {shown_url(job.kept_in)}" for job in kept]
        told = f" ({'; '.join(those)})" if those else ""
        raise ConfigError(
            f"nothing of what was found ({names}) keeps records: a job in barrier mode has dead letters alone, and "
            f"those if it has a failure policy{told}. Others are named by --vertex (a store that a program has open, "
            "or an address) and --checkpoints (a job's directory); ftlayer inspect PATH reads one that no program has "
            "open, and --store PATH asks it"
        )
    return there


def warn_of_killed(views: Iterable[VertexView]) -> None:
    """Where nothing was found, say of which stores nothing is known, since their program was killed."""
    for view in views:
        if view.is_killed and view.path:
            warn(f"what the store of {view.vertex} has is not known: {view.failure}")


def parsed_keys(keys: list[str]) -> tuple[bytes, ...]:
    """Return keys as they were printed, each once. Raises `ConfigError`."""
    for key in keys:
        if len(key) < 6 or not re.fullmatch(r"([0-9A-Fa-f]{2})+", key):
            raise ConfigError(
                f"KEY: {shown(key)} is no key of a record: these are hexadecimal digits, two a byte, as `ftlayer dead "
                "list` and `ftlayer pending --oldest` show them first"
            )
    return tuple(dict.fromkeys(map(bytes.fromhex, keys)))


def listed(
    gatherer: Gatherer,
    searches: dict[str, Search],
    limit: int,
    known: int | None = None,
    *,
    newest: bool = False,
) -> RecordListing:
    """Find ``limit`` records, and go on for a while to count the others, unless it is ``known`` how many there are.

    With ``newest`` each search gives its latest first, and so does the listing of all of them.
    """
    from ftlayer.vertex.calls import MAX_SELECTED

    found: list[FoundRecords] = []
    count, until = 0, time.monotonic() + COUNTING_S
    for vertex, search in searches.items():
        client = gatherer.client(vertex)
        end = len(found) + limit if newest else limit
        while (call := search.next_call(limit if known is not None else MAX_SELECTED)) is not None:
            if len(found) >= end and (known is not None or time.monotonic() > until):
                break
            records = search.take(client.call(call))
            count += len(records)
            found += [FoundRecords(vertex, info) for info in records[: end - len(found)]]
    if newest:
        found.sort(key=_failed_ms, reverse=True)
    examined = sum(search.examined for search in searches.values())
    is_all = known is not None or all(search.is_over for search in searches.values())
    return RecordListing(tuple(found[:limit]), max(known or count, len(found)), examined, is_all)


def _failed_ms(record: FoundRecords) -> int:
    return record.info.history[-1].at_ms if record.info.history else 0


def found_by_keys(gatherer: Gatherer, keys: tuple[bytes, ...]) -> Iterator[FoundRecords]:
    from ftlayer.monitor.rules.names import JobNames
    from ftlayer.monitor.rules.plans import Search, Selection

    for vertex in keepers(gatherer):
        search = Search(Selection(vertex, keys=keys), JobNames([]), 0)
        while (call := search.next_call()) is not None:
            try:
                page = gatherer.client(vertex).call(call)
            except MalformedRequestError:
                break  # one with fewer shards has given out none of these
            for info in search.take(page):
                yield FoundRecords(vertex, info)


# ---------------------------------------------------------------- printing


def print_listing(
    console: Console, listing: RecordListing, names: JobNames, now_ms: int, total: int, *, wide: bool = False
) -> None:
    """Print records, two or three lines each, and how many there are, of ``total`` whatever the filter says.

    On a terminal lines are cut to its width unless ``wide``.
    """
    vertices = sorted({record.vertex for record in listing.records})
    several = len(vertices) > 1
    for record in listing.records:
        print_head(console, record, names, now_ms, several=several)
        info = record.info
        if info.reason:
            where = f"(in {info.operator}) " if info.operator else ""
            print_line(console, f"  {where}{info.reason}", wide=wide)
        print_line(console, f"  {payload_text(info, None if wide else LONGEST_PAYLOAD)}", wide=wide)
    for vertex in vertices if several else ():
        console.print(f"  {names.place(vertex)}", soft_wrap=True)
    shown, examined = len(listing.records), ""
    if not listing.is_all:
        examined = f" found among the first {listing.examined:,} of {total:,}"
    more = f" of {listing.count:,}{examined}; --limit shows more"
    is_more = listing.count > shown or not listing.is_all
    said = f"{shown:,} listed{more if is_more else ''}" if shown or not listing.is_all else "none"
    console.print(said, soft_wrap=True)


def print_head(
    console: Console, record: FoundRecords, names: JobNames, now_ms: int, *, several: bool
) -> None:
    from ftlayer.monitor.rules.facts import record_stream
    from ftlayer.monitor.rules.names import spoken

    info = record.info
    stream = record_stream(record.vertex, info, names)
    attempt = f"attempt {_attempt(info)}{', final' if info.is_final else ''}"
    state = () if info.state == "dead" else (info.state,)
    parts = [info.key.hex(), *((record.vertex,) if several else ()), stream, *state, attempt]
    if since_ms := _failed_ms(record) or info.registered_ms:
        parts.append(f"{spoken(now_ms - since_ms)} ago")
    if info.not_before_ms:
        parts.append(f"not before {time_text(info.not_before_ms)}")
    console.print("  ".join(parts), style="cyan", soft_wrap=True)


def _attempt(info: RecordInfo) -> str:
    return f"{info.attempt} of {info.max_attempts}" if info.max_attempts else f"{info.attempt}"


def print_record(console: Console, record: FoundRecords, names: JobNames, *, several: bool) -> None:
    from ftlayer.monitor.rules.facts import came_from, final_of, record_stream

    info = record.info
    console.print(info.key.hex(), style="bold cyan", soft_wrap=True)
    lines = {
        "vertex": names.place(record.vertex) if several else "",
        "stream": record_stream(record.vertex, info, names),
        "from": came_from(info),
        "state": info.state,
        "root": f"{info.root:016x}",
        "origin": f"{info.origin:016x}",
        "attempt": _attempt(info) + (f": {final_of(info)}" if info.is_final else ""),
        "operator": info.operator,
        "reason": info.reason,
        "edited": f"{time_text(info.edited_ms)} by {info.edited_by}" if info.edited_ms else "",
        "record": _structured_text(info),
    }
    for name, value in lines.items():
        if value:
            console.print(f"  {name:9}{value}", soft_wrap=True)
    _print_attempts(console, info)


def _structured_text(info: RecordInfo) -> str:
    """Return a payload on one line; on several where a text of it is JSON."""
    import json

    from ftlayer.monitor.rules.row_json import json_of_row, structured_row

    row = structured_row(info.payload)
    if row == json_of_row(info.payload):
        return payload_text(info)
    return json.dumps(row, indent=2, ensure_ascii=False).replace("\n", "\n" + " " * 11)


def _print_attempts(console: Console, info: RecordInfo) -> None:
    """Print failed attempts, a traceback as that before once, and when and by whom the record was requeued."""
    before = ""
    for attempt, behind in zip_longest(info.history, info.history[1:]):
        where = f"  ({attempt.place})" if attempt.place else ""
        said = f"{attempt.operator}: {attempt.reason}" if attempt.operator else attempt.reason
        head = f"  failed   {attempt.number:<3} {time_text(attempt.at_ms)}  {said}{where}"
        console.print(head, soft_wrap=True)
        if attempt.traceback and attempt.traceback == before:
            console.print("  (traceback as above)", style="dim", soft_wrap=True)
        elif attempt.traceback:
            console.print(attempt.traceback.rstrip(), style="dim", soft_wrap=True)
        before = attempt.traceback
        if attempt.requeued_ms:
            back = "edited" if attempt.requeued_ms == info.edited_ms else "requeued"
            by = f"  by {attempt.requeued_by}" if attempt.requeued_by else ""
            console.print(f"  {back:13}{time_text(attempt.requeued_ms)}{by}", soft_wrap=True)
        elif behind is not None and behind.number <= attempt.number:
            console.print("  requeued", soft_wrap=True)


def payload_text(info: RecordInfo, longest: int | None = None) -> str:
    """Return a record's payload as JSON, cut to ``longest`` characters."""
    import json

    from ftlayer.monitor.rules.row_json import json_of_row

    text = json.dumps(json_of_row(info.payload), ensure_ascii=False)
    return text if longest is None or len(text) <= longest else f"{text[: longest - 1]}…"


def table_of_groups(groups: list[LetterGroup], names: JobNames, now_ms: int) -> Any:
    from ftlayer.monitor.rules.names import spoken

    vertex = ("vertex",) if len({group.vertex for group in groups}) > 1 else ()
    table = new_table("count", *vertex, "stream", "operator", "last", "reason", numbers=("count",))
    for group in groups:
        stream = names.stream(group.vertex, group.stream)
        last = f"{spoken(now_ms - group.last_seen_ms)} ago"
        table.add_row(
            f"{group.count:,}", *((group.vertex,) if vertex else ()), stream, group.operator, last, group.kind
        )
    return table
