"""Stores and records as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftlayer.cli.offline import ShardReport, StoreReport
from ftlayer.cli.printing import new_table, print_table
from ftlayer.cli.records import FoundRecords, RecordListing, print_listing, table_of_groups
from ftlayer.common.clock import system_now
from ftlayer.common.printable import printable
from ftlayer.monitor.rules.facts import Facts, letter_group_facts, record_facts
from ftlayer.monitor.rules.names import JobNames, VertexView
from ftlayer.records.ids import Explanation
from ftlayer.vertex.calls import RecordInfo
from ftlayer.vertex.store.key_value import TABLES

MIB = 1 << 20


def print_shards(console: Console, path: Path, shards: list[ShardReport], *, tables: bool) -> None:
    """Print what the store of a vertex holds, a column a shard, and its records by stream and group.

    With ``tables`` the entries of LMDB's tables too.
    """
    table = Table(
        title=Text(printable(f"store {path}")), title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("")
    for shard in shards:
        table.add_column(shard.store.path.name, justify="right")
    stores = [shard.store for shard in shards]
    rows = {
        "records waiting": [f"{shard.waiting:,}" for shard in shards],
        "records on their way": [f"{shard.delivery:,}" for shard in shards],
        "dead letters": [f"{shard.dead:,}" for shard in shards],
        "used": [_share(store) for store in stores],
        "file": [f"{store.file_bytes / MIB:,.1f} MiB" for store in stores],
        "held by process": [
            "none" if (by := each.holder) is None else str(by or "unknown") for each in stores
        ],
        "incarnation": [str(store.incarnation) for store in stores],
        "format": [str(store.format_version) for store in stores],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    for name in TABLES if tables else ():
        reports = [store.tables[name] for store in stores]
        values = [f"{report.entries:,} entries, {report.value_bytes:,} B" for report in reports]
        table.add_row(f"table {name}", *values, style="dim")
    console.print(table)
    names = names_in(path, shards)
    _print_streams(console, path, shards, names)
    groups = sorted((group for shard in shards for group in shard.groups), key=lambda group: -group.count)
    if groups:
        print_table(console, table_of_groups(groups, names, system_now().wall_ms))
    if any(shard.store.holder is not None for shard in shards):
        console.print("A vertex has this store open; what it has in flight is counted as waiting.")
    elif any(shard.dead for shard in shards):
        lists = f"ftlayer dead list --store {path} lists its dead letters"
        console.print(f"{lists}; requeue, edit, purge, export do it too", soft_wrap=True)


def names_in(path: Path, shards: list[ShardReport]) -> JobNames:
    streams = tuple(stream for shard in shards for stream in shard.streams)
    return JobNames([VertexView(path.name, "", str(path), streams=streams)])


def _print_streams(console: Console, path: Path, shards: list[ShardReport], names: JobNames) -> None:
    numbers = ("waiting", "on their way", "dead")
    table = new_table("stream", *numbers, numbers=numbers)
    for shard in shards:
        for stream in shard.streams:
            counts = (stream.waiting, stream.in_delivery, stream.dead)
            table.add_row(names.stream(path.name, stream.stream), *(f"{count:,}" for count in counts))
    if table.row_count:
        print_table(console, table)


def shard_facts(path: Path, shards: list[ShardReport]) -> Facts:
    names = names_in(path, shards)
    groups = [letter_group_facts(group, names) for shard in shards for group in shard.groups]
    return {"path": str(path), "shards": [_shard_facts(shard) for shard in shards], "groups": groups}


def _shard_facts(shard: ShardReport) -> Facts:
    store = shard.store
    return {
        "path": str(store.path),
        "waiting": shard.waiting,
        "in_delivery": shard.delivery,
        "dead": shard.dead,
        "used_bytes": store.used_bytes,
        "max_bytes": store.max_bytes,
        "file_bytes": store.file_bytes,
        "holder_pid": store.holder,
        "incarnation": store.incarnation,
        "format": store.format_version,
        "tables": {
            name: {"entries": table.entries, "value_bytes": table.value_bytes}
            for name, table in store.tables.items()
        },
    }


def listed_facts(path: Path, records: Iterator[RecordInfo], limit: int) -> Facts:
    """Return up to ``limit`` records as JSON has them, and how many there are."""
    names = JobNames([])
    items = [record_facts(path.name, record, names) for record in islice(records, limit)]
    return {"items": items, "total": len(items) + sum(1 for _ in records)}


def print_records(
    console: Console, path: Path, records: Iterator[RecordInfo], title: str, limit: int
) -> None:
    found = tuple(FoundRecords(path.name, record) for record in islice(records, limit))
    count = len(found) + sum(1 for _ in records)
    if not found:
        console.print(f"{title}: none")
        return
    console.print(title, style="bold")
    listing = RecordListing(found, count, count, is_all=True)
    print_listing(console, listing, JobNames([]), system_now().wall_ms, count)


def print_explained(console: Console, root: int, explained: Explanation | None) -> None:
    name = f"root {root:016x}"
    if explained is None:
        console.print(f"{name} is not pending: it is done, has failed, or was never registered")
        return
    console.print(f"{name} is pending, its XOR is {explained.value:016x}", style="bold")
    if not explained.registered:
        console.print("Its registration is missing: only later events have come, and are held.")
    if not explained.ids_known:
        console.print("Some of its events came without ids: what follows is not all.")
    if not explained.owed:
        return
    table = new_table("missing id", "operator", "what is missing")
    for owed in explained.owed:
        missing = "its acknowledgement" if owed.emitted else "the event that emitted it"
        table.add_row(f"{owed.record_id:016x}", Text(printable(owed.operator or "unknown")), missing)
    console.print(table)


def _share(store: StoreReport) -> str:
    return f"{store.used_bytes / MIB:,.1f} of {store.max_bytes / MIB:,.0f} MiB ({store.used_share:.1%})"
