"""The end of the demo: the ledger as a table with the verdict in words, and as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ftlayer.demo.choices import Kind
from ftlayer.demo.layout import RunDirectory
from ftlayer.demo.ledger import Ledger
from ftlayer.demo.tally import Tally
from ftlayer.demo.wording import ACCOUNTS, BALANCED, BY_HAND, DEAD, faults

KIB = 1 << 10
MOST_CHECKPOINTS = 20
"""So many of the last ones are listed."""

Checkpoints = list[dict[str, Any]]
"""As `ftlayer.demo.checkpointed` writes them down, the latest last."""


@dataclass(frozen=True)
class RunOutcome:
    """The results of a run. ``checkpoints`` are those of its last driver."""

    kind: Kind
    ledger: Ledger
    tally: Tally
    seconds: float
    checkpoints: Checkpoints


def print_outcome(console: Console, outcome: RunOutcome) -> None:
    """Print the ledger and what it says, and the list of checkpoints."""
    if outcome.kind is Kind.CHECKPOINTED:
        console.print(_checkpoint_table(outcome.checkpoints))
        restores = outcome.tally.values().get("restores", 0)
        console.print(
            f"{len(outcome.checkpoints)} checkpoints of the last driver; the state was restored from one {restores} "
            "times in all.",
            soft_wrap=True,
        )
        console.print()
    console.print(_ledger_table(outcome.kind, outcome.ledger))
    words = f" with {outcome.ledger.words:,} different words" if outcome.ledger.words else ""
    console.print(
        f"{outcome.ledger.rows_out:,} rows in the sink{words}; {outcome.tally.summary()}; "
        f"{outcome.seconds:.0f} s in all",
        soft_wrap=True,
    )
    for recovery in outcome.tally.recoveries:
        console.print(
            f"{recovery.victim} killed {recovery.when}: running again after {recovery.back_s:.1f} s, "
            f"next output committed after {recovery.went_on_s:.1f} s",
            soft_wrap=True,
        )
    console.print()
    purged = ", or was purged" if outcome.ledger.purged else ""
    if outcome.ledger.balanced:
        console.print(
            f"The ledger balances: {BALANCED[outcome.kind].format(purged=purged)}",
            style="bold green",
            soft_wrap=True,
        )
    else:
        console.print("THE LEDGER DOES NOT BALANCE: see the lines in red above.", style="bold red")


def _ledger_table(kind: Kind, ledger: Ledger) -> Table:
    table = Table(title="The ledger", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{ledger.records_in:,}", "records in", style="bold")
    for account, meaning in ACCOUNTS[kind].items():
        table.add_row(f"{getattr(ledger, account):,}", meaning)
    for account, meaning in BY_HAND.items():
        if count := getattr(ledger, account):
            table.add_row(f"{count:,}", meaning)
    table.add_row(f"{ledger.dead:,}", DEAD)
    for reason, count in ledger.dead_by_reason.most_common():
        table.add_row("", f"{count:,}  {reason}")
    for fault, meaning in faults(kind).items():
        wrong = getattr(ledger, fault)
        table.add_row(f"{wrong:,}", f"{fault}: {meaning}", style="bold red" if wrong else None)
        for line in ledger.examples.get(fault, []):
            table.add_row("", f"  {line}")
    return table


def _checkpoint_table(checkpoints: Checkpoints) -> Table:
    """Return a table of the last checkpoints, in their order."""
    table = Table(
        title="Checkpoints (times in ms, sizes in KiB)", title_justify="left", box=None, padding=(0, 1)
    )
    for heading in ("id", "took", "aligned", "sync", "async", "state", "written", "kind", "outcome"):
        table.add_column(heading, justify="left" if heading in ("kind", "outcome") else "right")
    left_out = len(checkpoints) - MOST_CHECKPOINTS
    if left_out > 0:
        table.add_row("…", f"{left_out} more")
    for row in checkpoints[-MOST_CHECKPOINTS:]:
        table.add_row(
            str(row["checkpoint"]),
            f"{row['duration_ms']:,}",
            f"{row['alignment_ms']:,}",
            f"{row['sync_ms']:,.1f}",
            f"{row['async_ms']:,.1f}",
            f"{row['state_bytes'] / KIB:,.1f}",
            f"{row['written_bytes'] / KIB:,.1f}",
            row["kind"],
            f"{row['outcome']}{': ' if row['failure'] else ''}{row['failure']}",
            style="red" if row["failure"] else None,
        )
    return table


def print_next(console: Console, kind: Kind, directory: RunDirectory, *, kept: bool) -> None:
    """Say where the run is, and what to look at."""
    dead = "ftlayer inspect {store} --list dead", "the dead letters, as the vertex stores them"
    in_files = "{root}/dead-letters", "the dead letters, in files"
    places = [
        in_files if kind is Kind.CHECKPOINTED else dead,
        (
            "{root}/output",
            "the rows that were written, " + ("a directory a batch" if kind is Kind.QUERY else "in files"),
        ),
        ("{root}/driver.log", "what Spark had to say"),
    ]
    if not kept:
        console.print(
            "The run's directory is gone; with --keep (or --dir PATH) it stays, to be looked at with:\n"
            f"  {places[0][0].format(root='PATH', store='PATH/ft')}",
        )
        return
    console.print(f"The run is kept in {directory.root}:", soft_wrap=True)
    for place, what in places:
        console.print(
            f"  {place.format(root=directory.root, store=directory.store)}     {what}", soft_wrap=True
        )


def as_json(outcome: RunOutcome, directory: Path | None) -> dict[str, Any]:
    """Return ledger and figures as plain values."""
    ledger, tally = outcome.ledger, outcome.tally
    values: dict[str, Any] = {
        "kind": outcome.kind,
        "balanced": ledger.balanced,
        "records_in": ledger.records_in,
        **{f"done_{count}": getattr(ledger, count) for count in ACCOUNTS[outcome.kind]},
        **{count: getattr(ledger, count) for count in BY_HAND},
        "dead_letters": dict(ledger.dead_by_reason),
        **{fault: getattr(ledger, fault) for fault in faults(outcome.kind)},
        "examples": ledger.examples,
        "rows_out": ledger.rows_out,
        **tally.values(),
        "seconds": round(outcome.seconds, 1),
        "recoveries": [dataclasses.asdict(recovery) for recovery in tally.recoveries],
        "directory": None if directory is None else str(directory),
    }
    if outcome.kind is Kind.CHECKPOINTED:
        values |= {"words": ledger.words, "last_checkpoints": outcome.checkpoints}
    return values
