"""Stores and records as tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftlayer.cli.offline import ShardReport
from ftlayer.cli.printing import time_text
from ftlayer.cli.records import LONGEST_PAYLOAD, payload_text
from ftlayer.printable import printable
from ftlayer.store.kv import TABLES
from ftlayer.vertex.calls import Explained, RecordInfo

MIB = 1 << 20


def print_shards(console: Console, path: Path, shards: list[ShardReport]) -> None:
    """Print what the store of a vertex holds, a column a shard."""
    table = Table(
        title=Text(printable(f"store {path}")), title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    table.add_column("")
    for shard in shards:
        table.add_column(shard.store.path.name, justify="right")
    rows = {
        "records waiting": [f"{shard.waiting:,}" for shard in shards],
        "records on their way": [f"{shard.delivery:,}" for shard in shards],
        "dead letters": [f"{shard.dead:,}" for shard in shards],
        "used": [_share(shard) for shard in shards],
        "file": [f"{shard.store.file_bytes / MIB:,.1f} MiB" for shard in shards],
        "held by process": [_holder(shard.store.holder) for shard in shards],
        "incarnation": [str(shard.store.incarnation) for shard in shards],
        "format": [str(shard.store.format_version) for shard in shards],
    }
    for name, values in rows.items():
        table.add_row(name, *values)
    for name in TABLES:
        reports = [shard.store.tables[name] for shard in shards]
        values = [f"{report.entries:,} entries, {report.value_bytes:,} B" for report in reports]
        table.add_row(f"table {name}", *values, style="dim")
    console.print(table)
    if any(shard.store.holder is not None for shard in shards):
        console.print("A vertex has this store open; what it has in flight is counted as waiting.")


def print_records(console: Console, records: Iterator[RecordInfo], title: str, limit: int) -> None:
    """Print up to ``limit`` records, two or three lines each, and how many there are."""
    count = 0
    for record in islice(records, limit):
        if not count:
            console.print(title, style="bold")
        count += 1
        head = f"{record.key.hex()}  {_stream(record)}  attempt {record.attempt}"
        if record.not_before_ms:
            head += f"  not before {time_text(record.not_before_ms)}"
        console.print(head, style="cyan", soft_wrap=True)
        if record.reason:
            where = f"  (in {record.operator})" if record.operator else ""
            console.print(f"  {record.reason}{where}", soft_wrap=True)
        console.print(f"  {payload_text(record, LONGEST_PAYLOAD)}", soft_wrap=True)
    if not count:
        console.print(f"{title}: none")
    elif next(records, None) is None:
        console.print(f"{count:,} listed")
    else:
        there = count + 1 + sum(1 for _ in records)
        console.print(f"{count:,} listed of {there:,}; --limit shows more")


def _stream(record: RecordInfo) -> str:
    """Return a record's stream as people call it."""
    return f"{record.title}/{record.source}" if record.title else record.stream


def print_explained(console: Console, root: int, explained: Explained) -> None:
    """Print what a root waits for, a line an id."""
    name = f"root {root:016x}"
    if not explained.known:
        console.print(f"{name} is not pending: it is done, has failed, or was never registered")
        return
    console.print(f"{name} is pending, its XOR is {explained.value:016x}", style="bold")
    if not explained.registered:
        console.print("Its registration is missing: only later events have come, and are held.")
    if not explained.ids_known:
        console.print("Some of its events came without ids: what follows is not all.")
    if not explained.owed:
        return
    table = Table(
        "missing id", "operator", "what is missing", title_justify="left", box=None, padding=(0, 2, 0, 0)
    )
    for owed in explained.owed:
        missing = "its acknowledgement" if owed.emitted else "the event that emitted it"
        table.add_row(f"{owed.record_id:016x}", Text(printable(owed.operator or "unknown")), missing)
    console.print(table)


def _share(shard: ShardReport) -> str:
    store = shard.store
    return f"{store.used_bytes / MIB:,.1f} of {store.max_bytes / MIB:,.0f} MiB ({store.used_share:.1%})"


def _holder(holder: int | None) -> str:
    return "none" if holder is None else str(holder or "unknown")
