"""The commands ``ftlayer dead``: what has died, why, and what to do about it."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli import records
from ftlayer.cli.connection import EXIT_ERROR, Asking, asking_letters, confirm, warn
from ftlayer.cli.printing import Wide, print_differences, print_json, print_table
from ftlayer.common.clock import system_now
from ftlayer.common.printable import printable, printing_console
from ftlayer.errors import ConfigError, FTLayerError
from ftlayer.monitor.rules.file_formats import ExportFormat

if TYPE_CHECKING:
    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.rules.names import JobNames
    from ftlayer.monitor.rules.plans import Carrying, Editing, LetterGroup, Letters, Selection

app = typer.Typer(
    no_args_is_help=True,
    help="Dead letters of running vertices, or beside checkpoints: group, list, show, edit, requeue, purge, export.",
)

Keys = Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys as `ftlayer dead list` shows them.")]
SomeKeys = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY...]", help="Keys as `ftlayer dead list` shows them.")
]
Everything = Annotated[bool, typer.Option("--all", help="All dead letters there are.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Say how many it would be, and of what; change nothing.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


# ---------------------------------------------------------------- looking


@app.command()
@asking_letters
def group(where: records.WhereText = "", wide: Wide = False, *, asking: Asking) -> None:
    """Count dead letters by stream, operator and kind of reason, the largest group first."""
    with asking.gatherer(only_there=True) as gatherer:
        groups = _grouped(gatherer, _selections(gatherer, where))
        if not groups:
            records.warn_of_killed(gatherer.views())
        names = gatherer.names()
    _print_groups(asking, groups, names, wide=wide)


@app.command("list")
@asking_letters
def list_dead(
    where: records.WhereText = "",
    limit: records.Limit = 20,
    newest: Annotated[bool, typer.Option("--newest", help="From the latest on.")] = False,
    wide: Wide = False,
    *,
    asking: Asking,
) -> None:
    """List dead letters: key, stream, age, reason, record."""
    from ftlayer.monitor.rules.facts import record_facts
    from ftlayer.monitor.rules.plans import Search

    now_ms = system_now().wall_ms
    with asking.gatherer(only_there=True) as gatherer:
        views, names = gatherer.views(), gatherer.names()
        selections = [replace(each, newest=newest) for each in _selections(gatherer, where)]
        searches = {each.vertex: Search(each, names, now_ms) for each in selections}
        # How many are meant, where the vertices' own groups say it.
        groups = [_whole_groups(gatherer, selection) for selection in selections]
        known = None if None in groups else sum(group.count for some in groups for group in some or ())
        listing = records.listed(gatherer, searches, limit, known, newest=newest)
    total = sum(int(view.stats.get("dead_letters", 0)) for view in views if view.is_up)
    if not listing.records:
        records.warn_of_killed(views)
    if asking.as_json:
        items = [record_facts(record.vertex, record.info, names) for record in listing.records]
        facts = {"items": items, "found": listing.count, "examined": listing.examined, "total": total}
        print_json({**facts, "is_all": listing.is_all})
    else:
        records.print_listing(printing_console(), listing, names, now_ms, total, wide=wide)


@app.command()
@asking_letters
def show(keys: Keys, *, asking: Asking) -> None:
    """Show everything that is known of dead letters: record, attempts, traceback."""
    from ftlayer.monitor.rules.facts import record_facts

    wanted = records.parsed_keys(keys)
    with asking.gatherer(only_there=True) as gatherer:
        names = gatherer.names()
        several = len(records.keepers(gatherer)) > 1
        found = list(records.found_by_keys(gatherer, wanted))
    if asking.as_json:
        print_json([record_facts(record.vertex, record.info, names) for record in found])
    else:
        for record in found:
            records.print_record(printing_console(), record, names, several=several)
    missing = set(wanted) - {record.info.key for record in found}
    for key in wanted:
        if key in missing:
            warn(f"there is no dead letter {key.hex()}")
    if missing:
        raise typer.Exit(EXIT_ERROR)


# ---------------------------------------------------------------- changing


@app.command()
@asking_letters
def requeue(
    keys: SomeKeys = None,
    where: records.WhereText = "",
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    asking: Asking,
) -> None:
    """Give dead letters their attempts back; their job gets them again at once. Asks, unless keys are named."""
    with asking.gatherer(only_there=True) as gatherer:
        _change(asking, gatherer, "requeue", keys, where, everything, dry_run=dry_run, ask=not (keys or yes))


@app.command()
@asking_letters
def purge(
    keys: SomeKeys = None,
    where: records.WhereText = "",
    everything: Everything = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    *,
    asking: Asking,
) -> None:
    """Delete dead letters permanently."""
    with asking.gatherer(only_there=True) as gatherer:
        _change(asking, gatherer, "purge", keys, where, everything, dry_run=dry_run, ask=not yes)


@app.command()
@asking_letters
def edit(
    keys: SomeKeys = None,
    values: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="COLUMN=VALUE", help="Give a column this value; repeatable."),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--from", help="File with the record as JSON, every column of it.")
    ] = None,
    function: Annotated[
        str,
        typer.Option(
            "--with",
            metavar="MODULE:FUNCTION",
            help="Edit all letters that are named, or that --where finds, by a function of a record as a dict: it "
            "returns the new one, or None to leave the letter. Asks, behind the first ten changes.",
        ),
    ] = "",
    where: records.WhereText = "",
    everything: Everything = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would change; change nothing.")
    ] = False,
    yes: Yes = False,
    *,
    asking: Asking,
) -> None:
    """Change a dead letter's record and give it its attempts back. Opens $EDITOR, unless an option says how."""
    from ftlayer.cli.exporting import edited_row
    from ftlayer.monitor.rules.plans import BACK_FROM_FILES, check_way_back
    from ftlayer.monitor.rules.row_json import differences, json_of_row
    from ftlayer.monitor.sources import user_name
    from ftlayer.vertex.calls import Edit, EditAndRequeue

    if function:
        if values or file is not None:
            raise ConfigError("--with, --set, --from: give one of them")
        with asking.gatherer(only_there=True) as gatherer:
            _edit_all(asking, gatherer, function, keys, where, everything, dry_run=dry_run, ask=not yes)
        return
    if where or everything or keys is None or len(keys) != 1:
        raise ConfigError("name one letter by its key; many are edited by a function, --with module:function")
    (key,) = keys
    (wanted,) = records.parsed_keys([key])
    with asking.gatherer(only_there=True) as gatherer:
        found = list(records.found_by_keys(gatherer, (wanted,)))
        if not found:
            warn(f"there is no dead letter {key}")
            raise typer.Exit(EXIT_ERROR)
        _check_keys([(record.vertex, wanted) for record in found], (wanted,))
        (view,) = (each for each in gatherer.views() if each.vertex == found[0].vertex)
        check_way_back(view, found[0].info, edited=True)
        row = edited_row(found[0].info, values or [], file)
        if not asking.as_json:
            changes = differences(json_of_row(found[0].info.payload), json_of_row(row))
            print_differences(printing_console(), changes)
        elif dry_run:
            print_json(json_of_row(row))
        if dry_run:
            return
        reply = gatherer.client(found[0].vertex).call(EditAndRequeue((Edit(wanted, row),), user_name()))
    if asking.as_json:
        print_json({"action": "edit", "asked": 1, "changed": reply.count})
    else:
        back = f"; {BACK_FROM_FILES}" if reply.count and view.is_stored else ""
        typer.echo(f"edited and requeued {reply.count} of 1{back}")
    if not reply.count:
        warn(f"the dead letter {key} has gone meanwhile")
        raise typer.Exit(EXIT_ERROR)


@app.command()
@asking_letters
def export(
    output: Annotated[
        Path | None,
        typer.Option(help="A new file, .jsonl or .parquet; without it, JSON lines go to standard output."),
    ] = None,
    where: records.WhereText = "",
    everything: Annotated[
        bool, typer.Option("--all", help="All dead letters there are: as without --where.")
    ] = False,
    format: Annotated[ExportFormat | None, typer.Option(help="Else the ending of the file says it.")] = None,
    dry_run: DryRun = False,
    *,
    asking: Asking,
) -> None:
    """Write dead letters to a file, records with all of their attempts; they stay where they are."""
    from ftlayer.cli.exporting import export_letters, format_for

    if where and everything:
        raise ConfigError("name the dead letters by --where, or say --all: one of the two")
    wanted = format_for(output, format)
    with asking.gatherer(only_there=True) as gatherer:
        selections = _selections(gatherer, where)
        if dry_run:
            _print_groups(asking, _grouped(gatherer, selections), gatherer.names())
            return
        count = export_letters(gatherer, selections, output, wanted)
    if output is not None:
        if asking.as_json:
            print_json({"exported": count, "output": str(output)})
        else:
            typer.echo(printable(f"exported {count:,} to {output}"))


def _change(
    asking: Asking,
    gatherer: Gatherer,
    action: str,
    keys: list[str] | None,
    where: str,
    everything: bool,
    *,
    dry_run: bool,
    ask: bool,
) -> None:
    """Count, ask, and change; exit code 1 if keys that were named are of none."""
    from ftlayer.monitor.rules.plans import Carrying, Change, check_streams
    from ftlayer.monitor.sources import user_name

    wanted, names, selections = _meant(gatherer, keys, where, everything)
    if dry_run:
        _print_groups(asking, _grouped(gatherer, selections), names)
        return
    letters = _letters(gatherer, selections)
    _check_keys(letters.keys, wanted)
    count = len(letters.keys)
    is_said = ask or not asking.as_json
    groups = _grouped(gatherer, selections) if count and (is_said or action == "requeue") else []
    if action == "requeue":
        for view in gatherer.views():
            check_streams(view, {group.stream for group in groups if group.vertex == view.vertex})
    if ask and count and not asking.as_json:
        _print_groups(asking, groups, names)
    if count and is_said:
        confirm(_question(action, count, groups, names), ask=ask)
    changed = _changed(gatherer, Carrying(Change(action), letters, user_name()))
    asked = len(wanted) or count
    if asking.as_json:
        print_json({"action": action, "asked": asked, "changed": changed})
    else:
        _print_changed(gatherer, action, changed, asked, letters)
    _check_missing(len(wanted) - changed if wanted else 0)


def _edit_all(
    asking: Asking,
    gatherer: Gatherer,
    function: str,
    keys: list[str] | None,
    where: str,
    everything: bool,
    *,
    dry_run: bool,
    ask: bool,
) -> None:
    """Show what a function makes of letters, ask, and change them; exit code 1 if it failed for some."""
    from ftlayer.monitor.rules.plans import Carrying, Change, Editing, Letters, Search, edit_function
    from ftlayer.monitor.sources import user_name

    sys.path.append(os.getcwd())  # where Python's own commands look first; last, so that it hides nothing
    wanted, names, selections = _meant(gatherer, keys, where, everything)
    editing = Editing(edit_function(function, "--with"))
    views, now_ms = {view.vertex: view for view in gatherer.views()}, system_now().wall_ms
    if wanted:
        for each in records.found_by_keys(gatherer, wanted):
            editing.take(views[each.vertex], [each.info])
    for selection in () if wanted else selections:
        search = Search(selection, names, now_ms)
        while (call := search.next_call()) is not None:
            letters = search.take(gatherer.client(selection.vertex).call(call))
            editing.take(views[selection.vertex], letters)
    _check_keys(editing.found, wanted)
    edited = Letters(tuple(editing.payloads), 0, now_ms)
    count = len(edited.keys)
    if not asking.as_json:
        _print_edits(editing, names, now_ms)
    if dry_run:
        if asking.as_json:
            print_json({"action": "edit", "asked": len(editing.found), "edited": count, **editing.facts()})
        if editing.left:
            raise typer.Exit(EXIT_ERROR)
        return
    if count and (ask or not asking.as_json):
        confirm(_question("edit", count, editing.groups, names), ask=ask)
    changed = _changed(gatherer, Carrying(Change.EDIT, edited, user_name(), editing.payloads))
    if asking.as_json:
        facts = {"action": "edit", "asked": len(editing.found), "changed": changed}
        print_json({**facts, **{name: editing.facts()[name] for name in ("unchanged", "left")}})
    else:
        _print_changed(gatherer, "edit", changed, count, edited)
    _check_missing(count - changed + (len(wanted) - len(editing.found) if wanted else 0))
    if editing.left:
        raise typer.Exit(EXIT_ERROR)


def _print_edits(editing: Editing, names: JobNames, now_ms: int) -> None:
    console = printing_console()
    for vertex, info, changes in editing.first:
        records.print_head(console, records.FoundRecords(vertex, info), names, now_ms, several=False)
        print_differences(console, changes)
    count, shown = len(editing.payloads), len(editing.first)
    first = f", the first {shown} as above" if count > shown else ""
    said = f"{count:,} of {len(editing.found):,} dead letters would change{first}"
    stay = "stays as it is" if editing.unchanged == 1 else "stay as they are"
    typer.echo(f"{said}; {editing.unchanged:,} {stay}" if editing.unchanged else said)
    left: defaultdict[str, list[bytes]] = defaultdict(list)
    for (_, key), why in editing.left.items():
        left[why].append(key)
    for why, keys in list(left.items())[:_SAID]:
        are = "is left as it is" if len(keys) == 1 else f"and {len(keys) - 1:,} more are left as they are"
        warn(f"{keys[0].hex()} {are}: {why}")
    if len(left) > _SAID:
        more = sum(map(len, list(left.values())[_SAID:]))
        warn(f"{more:,} more are left as they are: --json has all of them")


def _meant(
    gatherer: Gatherer, keys: list[str] | None, where: str, everything: bool
) -> tuple[tuple[bytes, ...], JobNames, list[Selection]]:
    """Return the keys that were named, and where the letters of a change are. Raises `ConfigError`."""
    if sum(map(bool, (keys, where, everything))) != 1:
        raise ConfigError("name the dead letters by their keys or by --where, or say --all: one of the three")
    wanted, names = records.parsed_keys(keys) if keys else (), gatherer.names()
    selections = _selections(gatherer, where, wanted)
    return wanted, names, selections if wanted else _of_one(gatherer, selections, names)


def _print_changed(gatherer: Gatherer, action: str, changed: int, asked: int, letters: Letters) -> None:
    from ftlayer.monitor.rules.plans import BACK_FROM_FILES

    is_in_files = any(view.is_stored for view in gatherer.views() if view.vertex in dict(letters.keys))
    back = f"; {BACK_FROM_FILES}" if changed and is_in_files and action != "purge" else ""
    typer.echo(f"{_DONE[action]} {changed:,} of {asked:,}{back}")


def _check_missing(missing: int) -> None:
    if missing:
        are = "is" if missing == 1 else "are"
        warn(
            f"{missing} of the keys {are} of no dead letter (now): `ftlayer dead list` shows those there are"
        )
        raise typer.Exit(EXIT_ERROR)


def _of_one(gatherer: Gatherer, selections: list[Selection], names: JobNames) -> list[Selection]:
    """Return the selection of the one vertex that a change is for: the only one, or that of the streams in the filter.

    Raises `ConfigError` where several may be meant.
    """
    stream = selections[0].where.pushed(0).stream
    named = {vertex for vertex, _ in names.streams(stream)} if stream else set()
    meant = [selection for selection in selections if selection.vertex in named] or selections
    if stream and not named:
        names.find(stream)  # It says what there is.
    if named and not any(selection.vertex in named for selection in selections):
        places = " and ".join(map(names.place, sorted(named)))
        raise ConfigError(
            f"stream = {stream!r} is of {places}, which gives no answer: while its program does not run, name its "
            "store by --store"
        )
    if len(meant) > 1:
        counts = {view.vertex: int(view.stats.get("dead_letters", 0)) for view in gatherer.views()}
        there = "; ".join(f"{names.place(each.vertex)} has {counts[each.vertex]:,}" for each in meant)
        raise ConfigError(
            f"{len(meant)} vertices are meant, and letters are changed on one: say which by --vertex, or name the job "
            f"by --where 'stream = NAME'. {there}"
        )
    return meant


def _question(action: str, count: int, groups: list[LetterGroup], names: JobNames) -> str:
    from ftlayer.monitor.rules.names import enumerated

    streams = sorted({names.stream(group.vertex, group.stream) for group in groups})
    if len(streams) > _NAMED:
        streams[_NAMED:] = [f"{len(streams) - _NAMED} other streams"]
    of = f" of {enumerated(streams)}" if streams else ""
    where = enumerated([names.place(vertex) for vertex in sorted({group.vertex for group in groups})])
    letters = "letter" if count == 1 else "letters"
    return _QUESTIONS[action].format(f"{count:,} dead {letters}{of} in {where}")


_NAMED, _SAID = 3, 20
_QUESTIONS = {"purge": "Delete {} permanently?", "requeue": "Requeue {}?", "edit": "Edit and requeue {}?"}
_DONE = {"purge": "purged", "requeue": "requeued", "edit": "edited and requeued"}


def _check_keys(letters: Collection[tuple[str, bytes]], wanted: tuple[bytes, ...]) -> None:
    """Refuse keys that two vertices have: which letter is meant cannot be known."""
    for key in wanted:
        vertices = [vertex for vertex, found in letters if found == key]
        if len(vertices) > 1:
            raise ConfigError(
                f"--vertex: {' and '.join(vertices)} each have a dead letter {key.hex()}: say which"
            )


def _selections(gatherer: Gatherer, where: str, keys: tuple[bytes, ...] = ()) -> list[Selection]:
    from ftlayer.monitor.rules.plans import Selection
    from ftlayer.monitor.rules.where import parse_where

    filter_ = parse_where(where)
    return [Selection(vertex, where=filter_, keys=keys) for vertex in records.keepers(gatherer)]


def _letters(gatherer: Gatherer, selections: list[Selection]) -> Letters:
    from ftlayer.monitor.rules.plans import Counting, PlanScope, first_pages

    names, now_ms = gatherer.names(), system_now().wall_ms
    scopes = [
        PlanScope(each.vertex, call) for each in selections for call in first_pages(each, names, now_ms)
    ]
    counting = Counting(scopes, selections[0].where, names, now_ms)
    while (asked := counting.next_call()) is not None:
        vertex, call = asked
        counting.take(gatherer.client(vertex).call(call))
    return counting.letters


def _grouped(gatherer: Gatherer, selections: list[Selection]) -> list[LetterGroup]:
    """Count the letters that are meant by group: by the vertex's own groups where these say it, else one by one."""
    from ftlayer.monitor.rules.plans import LetterGroups, Search

    names, now_ms = gatherer.names(), system_now().wall_ms
    found = []
    for selection in selections:
        vertex = selection.vertex
        groups = _whole_groups(gatherer, selection)
        if groups is None:
            counted, search = LetterGroups(), Search(selection, names, now_ms)
            while (call := search.next_call()) is not None:
                for info in search.take(gatherer.client(vertex).call(call)):
                    counted.add(vertex, info)
            groups = counted.groups()
        found += groups
    return sorted(found, key=lambda group: -group.count)


def _whole_groups(gatherer: Gatherer, selection: Selection) -> list[LetterGroup] | None:
    """Return the vertex's own groups that are meant; None where these do not say it, or do not have all letters."""
    from ftlayer.monitor.rules.plans import whole_groups
    from ftlayer.vertex.calls import DeadGroups

    reply = gatherer.client(selection.vertex).call(DeadGroups())
    if reply.indexed < 1 or reply.left_out:
        return None
    return whole_groups(selection, gatherer.names(), system_now().wall_ms, reply.groups)


def _changed(gatherer: Gatherer, carrying: Carrying) -> int:
    try:
        while (asked := carrying.next_call()) is not None:
            vertex, call = asked
            carrying.take(gatherer.client(vertex).call(call))
    except FTLayerError:
        if carrying.changed:
            warn(f"{carrying.changed:,} of {carrying.total:,} letters were changed before this:")
        raise
    return carrying.changed


def _print_groups(asking: Asking, groups: list[LetterGroup], names: JobNames, *, wide: bool = False) -> None:
    from ftlayer.monitor.rules.facts import letter_group_facts

    total = sum(group.count for group in groups)
    if asking.as_json:
        print_json({"items": [letter_group_facts(group, names) for group in groups], "total": total})
        return
    console = printing_console()
    if groups:
        print_table(console, records.table_of_groups(groups, names, system_now().wall_ms), wide=wide)
    letters, kinds = "letter" if total == 1 else "letters", "group" if len(groups) == 1 else "groups"
    console.print(f"{total:,} dead {letters} in {len(groups):,} {kinds}" if groups else "none")
