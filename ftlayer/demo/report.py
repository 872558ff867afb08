"""The end of the demo: the ledger as a table with the verdict in words, and as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ftlayer.demo.layout import MAX_ATTEMPTS, RunDirectory
from ftlayer.demo.ledger import Ledger
from ftlayer.demo.tally import Tally

FAULTS = {
    "lost": "neither in the sink nor a dead letter",
    "duplicated": "there more than once",
    "altered": "other rows, or another reason, than the recount has",
    "misplaced": "in the sink instead of a dead letter, the other way round, or both",
    "unknown": "never in the input",
}
"""What must be 0, and what it would mean."""


def print_ledger(console: Console, ledger: Ledger, tally: Tally, seconds: float) -> None:
    """Print the ledger and what it says."""
    table = Table(title="The ledger", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="right")
    table.add_column()
    table.add_row(f"{ledger.records_in:,}", "records in", style="bold")
    table.add_row(f"{ledger.first_try:,}", "done at the first try")
    table.add_row(f"{ledger.after_replay:,}", "done after a replay: failed at first, passed later")
    table.add_row(f"{ledger.dead:,}", f"dead letters, after {MAX_ATTEMPTS} attempts each:")
    for reason, count in ledger.dead_by_reason.most_common():
        table.add_row("", f"{count:,}  {reason}")
    for fault, meaning in FAULTS.items():
        count = getattr(ledger, fault)
        table.add_row(f"{count:,}", f"{fault}: {meaning}", style="bold red" if count else None)
        for line in ledger.examples.get(fault, []):
            table.add_row("", f"  {line}")
    console.print(table)
    console.print(
        f"{ledger.rows_out:,} rows in the sink; {tally.lines_per_second:,.0f} lines/s, "
        f"{tally.p50_batch_s:.2f} s a batch (median); {seconds:.0f} s in all",
    )
    for recovery in tally.recoveries:
        console.print(
            f"{recovery.victim} killed in batch {recovery.batch}: running again after {recovery.back_s:.1f} s, "
            f"next batch through after {recovery.went_on_s:.1f} s",
        )
    console.print()
    if ledger.balanced:
        console.print(
            "The ledger balances: every line is in the sink exactly once, or is a dead letter exactly once.",
            style="bold green",
        )
    else:
        console.print("THE LEDGER DOES NOT BALANCE: see the lines in red above.", style="bold red")


def print_next(console: Console, directory: RunDirectory, *, kept: bool) -> None:
    """Say where the run is, and what to look at."""
    if not kept:
        console.print(
            "The run's directory is gone; with --keep (or --dir PATH) it stays, to be looked at with:\n"
            "  ftlayer inspect PATH/ft --list dead",
        )
        return
    console.print(
        f"The run is kept in {directory.root}:\n"
        f"  ftlayer inspect {directory.store} --list dead     the dead letters, as the vertex stores them\n"
        f"  {directory.output}     the rows that were written, a directory a batch\n"
        f"  {directory.log}     what Spark had to say",
        soft_wrap=True,
    )


def as_json(ledger: Ledger, tally: Tally, seconds: float, directory: Path | None) -> dict[str, Any]:
    """Return ledger and figures as plain values."""
    return {
        "balanced": ledger.balanced,
        "records_in": ledger.records_in,
        "done_first_try": ledger.first_try,
        "done_after_replay": ledger.after_replay,
        "dead_letters": dict(ledger.dead_by_reason),
        **{fault: getattr(ledger, fault) for fault in FAULTS},
        "examples": ledger.examples,
        "rows_out": ledger.rows_out,
        "lines_per_s": round(tally.lines_per_second, 1),
        "p50_batch_s": round(tally.p50_batch_s, 3),
        "batches": tally.batches,
        "seconds": round(seconds, 1),
        "recoveries": [dataclasses.asdict(recovery) for recovery in tally.recoveries],
        "directory": None if directory is None else str(directory),
    }
