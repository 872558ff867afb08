"""What commands print: tables, JSON, sizes and times. Fit for 80 columns and for pipes."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Union

import typer

from ftlayer.common.printable import printable, printable_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from ftlayer.monitor.rules.row_json import Difference

WIDEST = 100_000
"""Columns of a terminal that no row fills."""

LEAST_BROKEN = 10
"""Columns whose cells are broken keep so many characters; else a table has a line a cell."""

Wide = Annotated[
    bool, typer.Option("--wide", help="Print a row a line; a terminal has them cut or broken otherwise.")
]


@dataclass(frozen=True, slots=True)
class PrintedLine:
    """A line of text; on a terminal in a ``style``."""

    text: str
    style: str = ""


Part = Union["PrintedLine", "Table"]
"""A line or a table of what a command prints."""


def is_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def print_json(facts: Any) -> None:
    """Print ``facts`` as JSON, with nothing in it that a terminal would obey."""
    typer.echo(printable_json(facts))


def new_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """Return a table without lines; columns of ``numbers`` are to the right.

    A terminal too narrow for it has the cells of the others broken.
    """
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in columns:
        is_number = column in numbers
        table.add_column(column, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    return table


def print_table(console: Console, table: Table, *, wide: bool = False) -> None:
    """Print a table: on a terminal as wide as that is, else a row a line however long, for what reads it.

    With ``wide`` it is a row a line on a terminal too.
    """
    if console.is_terminal and not wide:
        console.print(fitting(console, table))
    else:
        print_long(console, table)


def fitting(console: Console, table: Table) -> Table:
    """Return a table as it fits a terminal: as it is, with cells broken, or a line a cell."""
    from rich.measure import Measurement

    unlimited = console.options.update(max_width=WIDEST)

    def width_of(shown: Any) -> int:
        return Measurement.get(console, unlimited, shown).maximum

    too_wide = width_of(table) - console.width
    if too_wide <= 0:
        return table
    broken = [(column.header, *column.cells) for column in table.columns if not column.no_wrap]
    spare = sum(max(max(map(width_of, cells)) - LEAST_BROKEN, 0) for cells in broken)
    return table if spare >= too_wide else _a_line_a_cell(table)


def _a_line_a_cell(table: Table) -> Table:
    from rich.table import Table as RichTable

    lines = RichTable(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    cells = [list(column.cells) for column in table.columns]
    for number, row in enumerate(table.rows):
        if number:
            lines.add_row()
        for column, of_column in zip(table.columns, cells, strict=True):
            if of_column[number]:
                lines.add_row(column.header, of_column[number], style=row.style)
    return lines


def print_long(console: Console, table: Table) -> None:
    """Print a row a line, however long: broken by us, a path could not be copied."""
    width, console.width = console.width, WIDEST
    console.print(table)
    console.width = width


def print_parts(console: Console, parts: Iterable[Part]) -> None:
    for part in parts:
        if isinstance(part, PrintedLine):
            console.print(part.text, style=part.style, soft_wrap=True)
        else:
            print_table(console, part)


def print_differences(console: Console, found: Iterable[Difference]) -> None:
    """Print where two records differ: a line with the place, and ``-`` and ``+``; on a terminal with colours."""
    from rich.text import Text

    for difference in found:
        console.print(f"  {difference.place}", soft_wrap=True)
        for sign, stretches, colour in zip("-+", difference.shown(), ("red", "green"), strict=True):
            line = Text(f"  {sign} ", style=colour)
            for text, is_changed in stretches:
                line.append(printable(text), "reverse" if is_changed and not console.no_color else "")
            if stretches:
                console.print(line, soft_wrap=True)


def size_text(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def print_line(console: Console, text: str, *, style: str = "", wide: bool = False) -> None:
    """Print a text: on a terminal its first line, cut to the width of that; elsewhere and with ``wide`` all of it."""
    if console.is_terminal and not wide:
        first, _, more = text.partition("\n")
        console.print(f"{first} …" if more else first, style=style, no_wrap=True, overflow="ellipsis")
    else:
        console.print(text, style=style, soft_wrap=True)


def time_text(wall_ms: int) -> str:
    """Return a time as this machine's clock shows it, with its offset from UTC: ``Z`` for none."""
    at = datetime.fromtimestamp(wall_ms / 1000).astimezone().isoformat(sep=" ", timespec="seconds")
    return at.replace("+00:00", "Z")


def rate_text(per_second: float | None) -> str:
    return "" if per_second is None else f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:,.1f}"
