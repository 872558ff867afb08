"""The command ``ftlayer top``: queries, topologies and vertices as they are now, over and over."""

from __future__ import annotations

import json
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ftlayer.cli.connection import Asking, asking
from ftlayer.cli.jobs import COUNTS, job_parts, jobs_of, overview_parts
from ftlayer.cli.printing import Part, PrintedLine, fitting, rate_text, time_text
from ftlayer.common.clock import system_now
from ftlayer.common.printable import printable, printing_console
from ftlayer.errors import FTLayerError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from ftlayer.monitor.gather import Gatherer
    from ftlayer.monitor.rules.names import JobKey


class Key(StrEnum):
    UP = "up"
    DOWN = "down"
    ENTER = "enter"
    BACK = "back"
    QUIT = "quit"


_SENT = {
    Key.UP: (b"\x1b[A", b"\x1bOA", b"k"),
    Key.DOWN: (b"\x1b[B", b"\x1bOB", b"j"),
    Key.ENTER: (b"\r", b"\n", b"\x1b[C"),
    Key.BACK: (b"\x1b", b"\x7f", b"\x1b[D"),
    Key.QUIT: (b"q",),
}
_KEYS = {sent: key for key, all_sent in _SENT.items() for sent in all_sent}
_READ = 64


@contextmanager
def pressed_keys() -> Iterator[int | None]:
    """Give the terminal to read keys from by `next_key`; None where standard input is none. Put it back at the end."""
    if not sys.stdin.isatty():
        yield None
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield terminal
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def next_key(terminal: int, timeout_s: float) -> Key | None:
    readable, _, _ = select.select([terminal], [], [], max(timeout_s, 0))
    return key_of(os.read(terminal, _READ)) if readable else None


def key_of(sent: bytes) -> Key | None:
    """Return which key a terminal has sent, None for one that means nothing; of several pressed at once, the first."""
    if sent in _KEYS or sent.startswith(b"\x1b"):
        return _KEYS.get(sent) or _KEYS.get(sent[:3])
    return _KEYS.get(sent[:1])


HELP = "up, down: choose a job; enter: all of it; esc: back; q: quit"


@dataclass(frozen=True, slots=True)
class Position:
    """Where somebody is: at the job at the place ``selected`` of the list, or in all of ``opened``."""

    selected: int = 0
    opened: JobKey | None = None


def moved(position: Position, key: Key, jobs: list[JobKey]) -> Position | None:
    """Return where a key leads to, None out of it; ``jobs`` are those in the list."""
    last = max(len(jobs) - 1, 0)
    selected = min(position.selected, last)
    if key is Key.QUIT or (key is Key.BACK and position.opened is None):
        return None
    if key is Key.BACK:
        return replace(position, opened=None)
    if position.opened is not None:
        return position
    if key is Key.ENTER:
        return Position(selected, jobs[selected] if jobs else None)
    step = -1 if key is Key.UP else 1
    return Position(min(max(selected + step, 0), last))


@asking
def top(
    interval: Annotated[str, typer.Option(help="How often all are asked.")] = "1s",
    count: Annotated[
        int, typer.Option(min=0, help="How many times; 0: until it is ended. For pipes and --json.")
    ] = 0,
    *,
    asking: Asking,
) -> None:
    """Show queries, topologies and vertices live. Without a terminal, a line a job; with --json, a line a look."""
    from ftlayer.common.checks import duration_ms

    interval_s = duration_ms(interval, "--interval", least=100) / 1_000
    console = printing_console()
    with asking.gatherer(follow=True, shows_killed=True) as gatherer:
        if asking.as_json or not console.is_terminal:
            _print_looks(gatherer, _as_json if asking.as_json else _as_lines, interval_s, count)
        else:
            _show(console, gatherer, interval_s)


# ---------------------------------------------------------------- lines


def _print_looks(
    gatherer: Gatherer, lines: Callable[[Gatherer], Iterator[str]], interval_s: float, count: int
) -> None:
    looks = 0
    while True:
        for line in lines(gatherer):
            typer.echo(line)
        looks += 1
        if looks == count:
            return
        time.sleep(interval_s)
        gatherer.gather()


def _as_json(gatherer: Gatherer) -> Iterator[str]:
    from ftlayer.monitor.rules.facts import overview_facts

    yield json.dumps(overview_facts(gatherer.views(), gatherer.names()))


def _as_lines(gatherer: Gatherer) -> Iterator[str]:
    from ftlayer.monitor.rules.health import job_health
    from ftlayer.monitor.rules.names import pace_of, state_of

    views, names, at = gatherer.views(), gatherer.names(), time_text(system_now().wall_ms)
    for view in views:
        known = [(view.stats[name], word) for name, word in COUNTS.items() if name in view.stats]
        counts = ", ".join(f"{int(count):,} {word}" for count, word in known)
        yield printable(f"{at}  vertex {view.vertex}: {view.state}{f', {counts}' if counts else ''}")
    for view, announced in jobs_of(views):
        job = announced.job
        judged = job_health(view, announced)
        why = f": {judged.findings[0].text}" if judged.findings else ""
        rate = rate_text(pace_of(view, announced))
        pace = f", {rate} records/s" if rate else ""
        state = state_of(view, announced)
        yield printable(f"{at}  {names.label(view.vertex, job.owner)}: {state}{pace}, {judged.health}{why}")


# ---------------------------------------------------------------- a terminal


def _show(console: Console, gatherer: Gatherer, interval_s: float) -> None:
    from rich.live import Live

    from ftlayer.monitor.rules.names import JobKey

    with pressed_keys() as terminal, Live(console=console, screen=True, auto_refresh=False) as live:
        position: Position | None = Position()
        due = time.monotonic() + interval_s
        while position is not None:
            live.update(_drawn(console, gatherer, position), refresh=True)
            if terminal is None:
                time.sleep(max(due - time.monotonic(), 0))
            elif (key := next_key(terminal, due - time.monotonic())) is not None:
                listed = jobs_of(gatherer.views())
                position = moved(
                    position, key, [JobKey(view.vertex, each.job.owner) for view, each in listed]
                )
            if time.monotonic() >= due:
                gatherer.gather()
                due = time.monotonic() + interval_s


def _drawn(console: Console, gatherer: Gatherer, position: Position) -> RenderableType:
    from rich.console import Group
    from rich.styled import Styled

    # A text, and not rich's Text: the console makes it printable.
    return Group(
        *(
            Styled(part.text, part.style) if isinstance(part, PrintedLine) else fitting(console, part)
            for part in (*_parts(gatherer, position), PrintedLine(""), PrintedLine(HELP, "dim"))
        )
    )


def _parts(gatherer: Gatherer, position: Position) -> Iterable[Part]:
    views, names = gatherer.views(), gatherer.names()
    if position.opened is None:
        selected = min(position.selected, max(len(jobs_of(views)) - 1, 0))
        return overview_parts(views, names, selected)
    key = position.opened
    try:
        job = gatherer.job(key.vertex, key.owner)
    except FTLayerError as error:
        return [PrintedLine(names.label(key.vertex, key.owner), "bold"), PrintedLine(str(error), "red")]
    view = next(view for view in views if view.vertex == key.vertex)
    return job_parts(view, job, names, None)
